"""The table of `tokensieve eval` and `tokensieve sweep` for the terminal. A leaf: imports rich, never torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from tokensieve.report.results import main_metric

__all__ = ["eval_table"]

_LEFT = ("dataset", "model", "method", "keep")
_RIGHT = ("accuracy", "img/s", "speed-up", "MAC ratio", "efficiency", "tokens", "GMACs")


def eval_table(results: Iterable[Mapping[str, Any]]) -> Table:
    """One row a result, a line where dataset or model changes."""
    rows = list(results)
    metrics = {main_metric(row)[0] for row in rows}
    accuracy = metrics.pop() if len(metrics) == 1 else "accuracy"
    title = "Speed-up: against the untouched model in the same run"
    table = Table(title=title, title_justify="left")
    for name in _LEFT:
        table.add_column(name, no_wrap=True)
    for name in _RIGHT:
        table.add_column(accuracy if name == "accuracy" else name, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        group = (row["dataset"], row["model"], row["pretrained"])
        following = rows[index + 1] if index + 1 < len(rows) else None
        ends = following is None or group != (following["dataset"], following["model"], following["pretrained"])
        table.add_row(*map(escape, _cells(row)), end_section=ends)
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["dataset"], row["model"], _method(row), _keep(row), _number(main_metric(row)[1], ".4f"),
        _number(row["images_per_second"], ".1f"), _number(row["speedup"], ".2f"),
        _number(row["possible"], ".2f"),
        _number(row["gained"], ".2f"), _number(row["tokens_average"], ".1f"), _number(row["gmacs"], ".2f"),
    ]  # fmt: skip


def _method(row: Mapping[str, Any]) -> str:
    """The method's name, with a word where it removed nothing."""
    name: str = row["method"]
    if name == "none" or row["reduced"]:
        return name
    return f"{name} ({row['mode']})" if row["mode"] != "prune" else f"{name} (nothing reduced)"


def _keep(row: Mapping[str, Any]) -> str:
    if row["keep_average"] is not None:
        return f"average {row['keep_average']}"
    return "" if row["keep"] is None else str(row["keep"])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
