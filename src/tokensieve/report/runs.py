"""Evaluation records as the report reads them: flat dicts in which anything may be missing. A leaf, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokensieve.report.results import main_metric

__all__ = [
    "Run",
    "accuracy_name",
    "budget",
    "grouped",
    "is_baseline",
    "method",
    "metric",
    "number",
    "reduced_nothing",
    "same_in_all",
    "speedup",
    "text",
    "tokens_per_layer",
    "where",
]

Run = Mapping[str, Any]

_GROUP = ("task", "dataset", "model", "pretrained", "language")


def number(run: Run, key: str) -> float | None:
    """A finite number, or None for anything else that may stand there."""
    return _number(run.get(key))


def metric(run: Run, name: str) -> float | None:
    metrics = run.get("metrics")
    return _number(metrics.get(name)) if isinstance(metrics, Mapping) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def text(value: Any) -> str:
    """A setting as it was typed; "-" where there is none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value))
    return str(value)


def method(run: Run) -> str:
    return str(run.get("method") or "none")


def is_baseline(run: Run) -> bool:
    return method(run) == "none"


def reduced_nothing(run: Run) -> bool:
    """A method was attached, and all tokens stayed."""
    return not is_baseline(run) and run.get("reduced") is False


def budget(run: Run) -> str:
    """ "keep 0.5", "average 0.5", or "-" for the baseline and for a budget that the options say."""
    if is_baseline(run):
        return "-"
    if run.get("keep") is not None:
        return f"keep {text(run['keep'])}"
    return f"average {text(run['keep_average'])}" if run.get("keep_average") is not None else "-"


def speedup(run: Run) -> float | None:
    """Measured; 1 for the baseline, which is what the others are measured against."""
    found = number(run, "speedup")
    return 1.0 if found is None and is_baseline(run) else found


def tokens_per_layer(run: Run) -> list[int]:
    found = run.get("tokens_per_layer")
    parts = found.split() if isinstance(found, str) else found if isinstance(found, list) else []
    try:
        return [int(part) for part in parts]
    except (TypeError, ValueError):
        return []


def accuracy_name(runs: Iterable[Run]) -> str | None:
    """The metric to compare these runs by: the main one of the first run that has any."""
    names = (main_metric(run)[0] for run in runs if isinstance(run.get("metrics"), Mapping) and run["metrics"])
    return next(names, None)


def where(run: Run) -> str:
    """What was evaluated: "cifar10, vit-s14-minilm, zeroshot_classification"."""
    model = " ".join(str(run[key]) for key in ("model", "pretrained") if run.get(key))
    parts = (run.get("dataset"), model, run.get("task"), run.get("language"))
    return ", ".join(str(part) for part in parts if part) or "unnamed"


def grouped(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that can be compared with each other: same task, dataset, model, weights and language. In order."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(text(run.get(key)) for key in _GROUP), []).append(run)
    return list(groups.values())


def same_in_all(runs: Sequence[Run], key: str) -> bool:
    return len({text(run.get(key)) for run in runs}) == 1


def is_reid(run: Run) -> bool:
    return run.get("task") == "reid"
