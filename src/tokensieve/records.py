"""The run record: one JSON file that says everything needed to repeat a run, and what came out of it.

A leaf: imports the standard library and errors, never torch. Whoever measures passes in what only torch knows.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokensieve._version import VERSION
from tokensieve.errors import RecordError
from tokensieve.utils.files import check_writable, read_text, write_whole
from tokensieve.utils.machine import cpu_model

__all__ = [
    "FORMAT",
    "Record",
    "check_writable",
    "cores",
    "differences",
    "hardware",
    "new_record",
    "read_json",
    "read_record",
    "versions",
    "write_record",
    "write_whole",
]

FORMAT = "tokensieve-record-1"
_PACKAGES = ("torch", "numpy", "open_clip_torch", "timm", "transformers", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Record:
    """One run. Everything in it is plain JSON: dicts with string keys, lists, strings, numbers, booleans, None.

    kind: what was run, such as "bench". config: the whole configuration, defaults included. seed: None where nothing
    was drawn. rows: one dict a measured thing. date: UTC, ISO 8601, when the record was made, that is at the end.
    """

    kind: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    seed: int | None
    versions: dict[str, str]
    hardware: dict[str, Any]
    date: str
    format: str = FORMAT


def new_record(
    kind: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    seed: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
) -> Record:
    """A record of a run that ended just now here. threads: of the tensor library, which is not asked from here."""
    return Record(
        kind=kind,
        config=dict(config),
        rows=[dict(row) for row in rows],
        seed=seed,
        versions=versions(),
        hardware=hardware(threads, device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def versions() -> dict[str, str]:
    """Python, tokensieve and the packages that results depend on; those not installed are left out."""
    found = {"python": platform.python_version(), "tokensieve": VERSION}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def hardware(threads: int | None, device: str) -> dict[str, Any]:
    """The processor, the cores this process may use, the threads it did use, and the device's name."""
    return {"cpu": cpu_model(), "cores": cores(), "threads": threads, "device": device, "system": sys.platform}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_record(record: Record, path: str | Path) -> None:
    """Write JSON whole or not at all. NaN, inf -> null."""
    text = json.dumps(_plain(asdict(record)), indent=2, allow_nan=False, ensure_ascii=False)
    write_whole(path, (text + "\n").encode())


def _plain(value: Any) -> Any:
    """The same with numbers that JSON lacks as None, tuples as lists and keys as strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def read_json(path: str | Path, what: str) -> Any:
    """The JSON in a file that should be a `what`. Missing, unreadable or cut short is an error that names the file."""
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise RecordError(f"{path} is not whole JSON: cut short, or no {what}") from None


def read_record(path: str | Path) -> Record:
    """Read a record back. A file that is missing, cut short or something else is an error that names it."""
    data = read_json(path, "run record")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordError(f"{path} is not a run record of this version (no format {FORMAT!r} in it)")
    fields = Record.__dataclass_fields__
    if set(data) != set(fields):
        odd = ", ".join(sorted(set(data) ^ set(fields)))
        raise RecordError(f"{path} is not a run record of this version: {odd} missing or unknown")
    return Record(**data)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """ "a.b was 1, is 2" for everything in which two sets of settings differ, sections within sections."""
    before, after = _flat(was), _flat(now)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} was {before.get(name)!r}, is {after.get(name)!r}" for name in names]


def _flat(data: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= _flat(value, f"{lead}{name}.") if isinstance(value, Mapping) else {f"{lead}{name}": value}
    return flat
