"""The state of an interrupted run, in one file: of `train select` and `train align`. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tokensieve.errors import MissingMaterialError, OptionError, RecordError, one_line
from tokensieve.records import differences

__all__ = ["check_start", "load_state", "refuse_other", "state_file"]


def state_file(output: Path) -> Path:
    """Where the state of a run lies that writes `output`."""
    return output.with_name(f"{output.name}.state")


def check_start(output: Path, resume: bool) -> None:
    """Raise where there is nothing to resume, or where a new run would write over another one's state."""
    path = state_file(output)
    if resume and not path.is_file():
        raise MissingMaterialError(f"{path}: there is no run to resume; leave --resume out to start anew")
    if not resume and path.exists():
        raise OptionError(f"{output} is of a training run already: go on with --resume, or name another output")


def load_state(path: Path) -> dict[str, Any]:
    """Read one back. A file that is cut short or something else is an error that names it."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is something else can fail in any way
        raise RecordError(f"{path} is no whole state of a run: {one_line(error, 200)}") from None
    return found


def refuse_other(path: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise where a run had other settings, and name them."""
    if other := differences({name: was.get(name) for name in now}, now):
        raise OptionError(f"{path} is of a run with other settings: {'; '.join(other)}")
