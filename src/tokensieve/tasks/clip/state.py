"""The state of an interrupted run, in one file: of `train select` and `train align`. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tokensieve.errors import MissingMaterialError, OptionError, RecordError, one_line
from tokensieve.records import differences

__all__ = ["load_state", "refuse_other", "state_file"]


def state_file(output: Path) -> Path:
    """Where the state of a run lies that writes `output`."""
    return output.with_name(f"{output.name}.state")


def load_state(path: Path) -> dict[str, Any]:
    """Read one back. A file that is missing, cut short or something else is an error that names it."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MissingMaterialError(f"{path}: there is no run to go on with; leave --resume out to start anew") from None
    except Exception as error:  # a file that is something else can fail in any way
        raise RecordError(f"{path} is no whole state of a run: {one_line(error, 200)}") from None
    return found


def refuse_other(path: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise where a run had other settings, and name them."""
    if other := differences({name: was.get(name) for name in now}, now):
        raise OptionError(f"{path} is of a run with other settings: {'; '.join(other)}")
