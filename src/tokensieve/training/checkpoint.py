"""Checkpoints by step: one safetensors file each, written whole, its plain data as JSON in the header."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from tokensieve.errors import MissingMaterialError, RecordError
from tokensieve.utils.tensor_files import read_facts, read_tensors, save_tensors

__all__ = ["CHECKPOINTS", "checkpoints_in", "latest", "load_checkpoint", "prune", "save_checkpoint"]

FORMAT = "tokensieve-checkpoint-1"
CHECKPOINTS = "checkpoints"  # their folder in that of a run
_NAME = re.compile(r"step-(\d{8})\.safetensors")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write nested dicts, lists, tuples, numbers, texts and tensors. A file of that name is always whole."""
    tensors: dict[str, Tensor] = {}
    plain = _pack(state, "", tensors)
    path = folder / f"step-{step:08d}.safetensors"
    save_tensors(path, tensors, {"format": FORMAT, "state": json.dumps(plain)})
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read one back. A file that is missing, cut short or something else is an error that names it."""
    try:
        tensors, about = read_tensors(path, "checkpoint", format=FORMAT)
    except RecordError as error:
        raise RecordError(f"{error}: delete it to go on from the one before it") from None
    plain = read_facts(about, "state", f"checkpoint {path}")
    try:
        state: dict[str, Any] = _unpack(plain, tensors)
    except (KeyError, TypeError, ValueError):
        raise RecordError(f"checkpoint {path}: its header does not match its tensors") from None
    return state


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoint files by step, ascending. Files that were being written when a run was killed are not among them."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def latest(folder: Path) -> Path:
    """The checkpoint of the highest step."""
    found = checkpoints_in(folder)
    if not found:
        raise MissingMaterialError(f"{folder}: there is no checkpoint to go on from; leave --resume out to start anew")
    return found[-1]


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the last `keep`, and what killed runs left half-written."""
    for path in checkpoints_in(folder)[:-keep]:
        path.unlink()
    for path in folder.glob(".step-*.part"):
        path.unlink()


# -- nested state as tensors and JSON ----------------------------------------------------------------------------------


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # a copy: two names of one storage (tied weights) are refused by safetensors
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__} (at {name})")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_unpack(item, tensors) for item in value["tuple"])
    return {key: _unpack(item, tensors) for key, item in value["dict"]}
