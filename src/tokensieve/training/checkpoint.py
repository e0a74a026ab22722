"""Checkpoints by step: one safetensors file each, written whole, its plain data as JSON in the header."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from tokensieve.errors import MissingMaterialError, RecordError

__all__ = ["checkpoints_in", "latest", "load_checkpoint", "prune", "save_checkpoint", "save_tensors"]

FORMAT = "tokensieve-checkpoint-1"
_NAME = re.compile(r"step-(\d{8})\.safetensors")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write nested dicts, lists, tuples, numbers, texts and tensors. A file of that name is always whole."""
    tensors: dict[str, Tensor] = {}
    plain = _pack(state, "", tensors)
    path = folder / f"step-{step:08d}.safetensors"
    save_tensors(path, tensors, {"format": FORMAT, "state": json.dumps(plain)})
    return path


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """A safetensors file, whole or not at all: under another name first, on the disk, then renamed."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata=about)
        part.chmod(0o644)  # the writer makes it private
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read one back. A file that is missing, cut short or something else is an error that names it."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise MissingMaterialError(f"checkpoint {path}: there is no such file")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RecordError(
            f"checkpoint {path} is not whole ({error}): delete it to go on from the one before it"
        ) from None
    if about.get("format") != FORMAT:
        raise RecordError(f"{path} is no checkpoint of a training run (no format {FORMAT!r} in it)")
    state: dict[str, Any] = _unpack(json.loads(about["state"]), tensors)
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
