"""Result files of `tokensieve eval`: clip_benchmark's JSON keys and ours beside them, flat. Read, write, make a CSV.

A leaf: imports the standard library, errors and the run record, never torch.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.errors import RecordError
from tokensieve.records import FORMAT, read_json, write_whole

__all__ = ["EVAL_FORMAT", "STUDY_FORMAT", "check_types", "folders_of_results", "is_bench", "main_metric", "read_eval",
           "read_evals", "read_foreign", "result_files", "some_of", "write_csv", "write_eval"]  # fmt: skip

EVAL_FORMAT = "tokensieve-eval-1"
STUDY_FORMAT = "tokensieve-search-1"  # of a search
_LARGE = 64 * 2**20  # bytes
_THEIRS = ("dataset", "model", "pretrained", "task", "metrics")
_FIRST = ("dataset", "model_fullname", "model", "pretrained", "task", "language", "method", "mode", "keep")
_NESTED = ("metrics", "config", "rows", "runs", "lists", "samples", "baseline")  # no columns of a table
_NUMBER = (int, float)
_TYPES: dict[str, Any] = {  # of the fields that a table or a page is made of
    **dict.fromkeys(("dataset", "model", "pretrained", "task", "language", "method", "mode", "schedule", "device",
                     "cpu", "date", "command", "config", "layout", "data"), str),
    **dict.fromkeys(("images_per_second", "images_per_second_low", "images_per_second_high", "speedup", "speedup_low",
                     "speedup_high", "gained", "possible", "gmacs", "gmacs_full", "gmacs_with_tower", "images",
                     "patches", "tokens_average", "keep_average", "seconds", "batch_size", "threads", "cores",
                     "kv_bytes", "first_token_ms", "decode_tokens_per_second", "overhead_ms"), _NUMBER),
    "seed": (int, float, str),  # of several runs: "0, 1, 2"
    "keep": (int, float, str, list), "at": (str, list), "tokens_per_layer": (str, list), "metrics": dict,
    "reduced": bool, "rows": list, "lists": list, "samples": list, "baseline": dict,
}  # fmt: skip
_MAIN = ("acc1", "mean_average_precision", "lp_acc1", "image_retrieval_recall@5", "acc", "CIDEr")


def write_eval(result: Mapping[str, Any], path: str | Path) -> None:
    """Write one result whole or not at all; numbers that JSON lacks (NaN, inf) become null."""
    text = json.dumps(_finite(result), indent=2, allow_nan=False, ensure_ascii=False)
    write_whole(path, (text + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_eval(path: str | Path) -> dict[str, Any]:
    """One result of `tokensieve eval`. A file that is missing, cut short or something else is an error naming it."""
    data = read_foreign(path)
    if data.get("format") != EVAL_FORMAT:
        raise RecordError(f"{path} is not a result of tokensieve eval (no format {EVAL_FORMAT!r} in it)")
    check_types(path, data, _TYPES)
    return data


def check_types(path: str | Path, data: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise where a field that is there, and not null, is of another type than `types` has for it."""
    for name, kind in types.items():
        value = data.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise RecordError(f"{path}: {name} is of the wrong type: {str(value)[:60]!r}")


def read_foreign(path: str | Path) -> dict[str, Any]:
    """One result of `tokensieve eval` or of clip_benchmark itself."""
    data = read_json(path, "result")
    missing = [key for key in _THEIRS if not isinstance(data, dict) or key not in data]
    if missing:
        raise RecordError(f"{path} is not a result of eval: {', '.join(missing)} missing")
    if not isinstance(data["metrics"], dict):
        raise RecordError(f"{path} is not a result of eval: its metrics are not a table")
    found: dict[str, Any] = data
    return found


def result_files(places: Iterable[str | Path]) -> list[Path]:
    """Files as they are, folders as the .json files in them, by name. A folder without any is an error.

    Records of `tokensieve bench` in a folder are passed over: they are not results.
    """
    files: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(path for path in place.glob("*.json") if not path.name.startswith("."))
            inside = [path for path in inside if not is_bench(path)]
            if not inside:
                deeper = folders_of_results(place)
                more = f"; there are some in {some_of(deeper)}" if deeper else ""
                raise RecordError(f"no results in {place}: there is no .json file of `tokensieve eval`{more}")
            files += inside
        else:
            files.append(place)
    return files


def folders_of_results(place: Path) -> list[Path]:
    """Folders right under `place` that have results of evaluations or searches in them."""
    inside = (path for path in place.glob("*/*.json") if not path.name.startswith("."))
    return sorted({path.parent for path in inside if _head(path).get("format") in (EVAL_FORMAT, STUDY_FORMAT)})


def is_bench(path: Path) -> bool:
    """Whether this is a record of `tokensieve bench`. What cannot be read is left to whoever reads it."""
    head = _head(path)
    return head.get("format") == FORMAT and head.get("kind") == "bench"


def _head(path: Path) -> Mapping[str, Any]:
    """What a file says of itself; nothing of one that is no JSON of ours, or too large to be."""
    with contextlib.suppress(RecordError, OSError):
        data = read_json(path, "result") if path.stat().st_size < _LARGE else None
        return data if isinstance(data, dict) else {}
    return {}


def some_of(paths: Sequence[Path], most: int = 5) -> str:
    """A list for people, not too long."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(map(str, paths[:most])) + more


def read_evals(places: Iterable[str | Path]) -> list[dict[str, Any]]:
    """All results in these files and folders."""
    return [read_eval(path) for path in result_files(places)]


def main_metric(result: Mapping[str, Any]) -> tuple[str, float | None]:
    """The metric that sums up a result: its name, and its value."""
    metrics: Mapping[str, Any] = result["metrics"]
    for name in (*_MAIN, *metrics):
        if name in metrics:
            return name, metrics[name]
    return "none", None


def write_csv(places: Iterable[str | Path], path: str | Path) -> int:
    """A CSV of these results, one row each, metrics and settings as columns of their own. Returns the rows."""
    rows = [_row(read_foreign(file)) for file in result_files(places)]
    columns = list(dict.fromkeys([*_FIRST, *(name for row in rows for name in row)]))
    columns = [name for name in columns if any(name in row for row in rows)]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
    return len(rows)


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in result.items() if name not in _NESTED}
    row = _flat({"model_fullname": f"{result['model']} {result['pretrained']}", **result["metrics"], **rest})
    return {name: "" if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def _flat(data: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    """Nested tables as columns "outer.inner", lists as their items joined by "; "."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{lead}{name}.")
        else:
            flat[f"{lead}{name}"] = "; ".join(map(str, value)) if isinstance(value, list) else value
    return flat
