"""Records of searches: one JSON file with all trials of a study, and what came of them. A leaf, no torch, no Optuna."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from tokensieve.errors import RecordError
from tokensieve.records import read_json
from tokensieve.report.results import STUDY_FORMAT, check_types, read_eval, result_files, write_eval

__all__ = ["STUDY_FORMAT", "read_results", "read_study", "short_names", "study_table", "value_text", "write_study"]

_KEYS = ("name", "objectives", "space", "trials", "best")
_TYPES = {"name": str, "objectives": list, "space": dict, "trials": list, "best": list}
_STATES = {"complete": "", "pruned": "ended early", "failed": "failed", "interrupted": "interrupted, run again",
           "void": "asked for no figure of a run"}  # fmt: skip


def write_study(record: Mapping[str, Any], path: str | Path) -> None:
    """Whole or not at all; numbers that JSON lacks become null."""
    write_eval(record, path)


def read_study(path: str | Path) -> dict[str, Any]:
    """A record back. A file that is missing, cut short or something else is an error that names it."""
    data = read_json(path, "record of a search")
    if not isinstance(data, dict) or data.get("format") != STUDY_FORMAT:
        raise RecordError(f"{path} is not a record of a search (no format {STUDY_FORMAT!r} in it)")
    missing = [key for key in _KEYS if key not in data]
    if missing:
        raise RecordError(f"{path} is not a whole record of a search: {', '.join(missing)} missing")
    check_types(path, data, _TYPES)
    for key in ("objectives", "trials"):
        if not all(isinstance(item, dict) for item in data[key]):
            raise RecordError(f"{path}: {key} is not a list of tables")
    return data


def read_results(
    places: Iterable[str | Path], problems: list[str] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(results of `tokensieve eval`, records of searches) in these files and folders.

    problems: what is wrong with files that cannot be read is added here, and the others are read; None: it is an error.
    """
    runs, studies = [], []
    for path in result_files(places):
        try:
            data = read_json(path, "result")
            if isinstance(data, dict) and data.get("format") == STUDY_FORMAT:
                studies.append(read_study(path))
            else:
                runs.append(read_eval(path))
        except RecordError as error:
            if problems is None:
                raise
            problems.append(str(error))
    return runs, studies


def value_text(value: Any) -> str:
    """A parameter's value or a figure, shortly: four digits of a number."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value))
    return "-" if value is None else str(value)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names by as few of their last parts as tell them apart: a.token_merger.lr -> token_merger.lr, or lr."""
    every = list(names)
    found: dict[str, str] = {}
    for name in every:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            found[name] = ".".join(parts[-count:])
            if sum(("." + other).endswith("." + found[name]) for other in every) == 1:
                break
    return found


def study_table(record: Mapping[str, Any], most: int = 30) -> Table:
    """The trials, best first: the front or the best marked, then by the first objective. At most `most` of them."""
    objectives: Sequence[Mapping[str, Any]] = record["objectives"]
    best = set(record["best"])
    names = [name for name in record["space"] if any(name in trial["params"] for trial in record["trials"])]
    mark = "best" if len(objectives) == 1 else "front"
    table = Table(title=f"{record['name']}: {len(record['trials'])} trials", title_justify="left")
    table.add_column("trial", justify="right")
    for objective in objectives:
        table.add_column(objective["metric"], justify="right")
    for short in short_names(names).values():
        table.add_column(short, overflow="fold")
    table.add_column("")
    order = sorted(record["trials"], key=lambda trial: _order(trial, objectives[0], best))
    for trial in order[:most]:
        values = trial["values"] or [None] * len(objectives)
        cells = [value_text(value) for value in values]
        cells += [value_text(trial["params"].get(name)) for name in names]
        note = _STATES.get(trial["state"], trial["state"])
        note = trial.get("error") or note
        note = note or ("as trial {twin_of}".format(**trial) if trial.get("twin_of") is not None else "")
        cells.append(mark if trial["number"] in best else note)
        table.add_row(str(trial["number"]), *map(escape, cells))
    if len(order) > most:
        table.caption = f"and {len(order) - most} more in the record"
    return table


def _order(trial: Mapping[str, Any], objective: Mapping[str, Any], best: set[int]) -> tuple[Any, ...]:
    sign = -1 if objective["direction"] == "maximize" else 1
    values = trial["values"]
    ended = trial["state"] == "complete" and values
    value = sign * values[0] if ended else 0.0
    return (trial["number"] not in best, not ended, value, trial["number"])
