"""The table of `tokensieve eval reid` for the terminal. A leaf: imports rich, never torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

__all__ = ["reid_table", "row_name"]


def reid_table(result: Mapping[str, Any]) -> Table:
    """One row for each set of missing modalities and kind of ranking, in per cent, with the deviation over seeds."""
    rows = result["rows"]
    several = max(row["checkpoints"] for row in rows)
    over = f", mean and deviation over {several} checkpoints" if several > 1 else ""
    unmatched = f", {result['unmatched']} without a match left out" if result["unmatched"] else ""
    title = f"{result['dataset']}, {result['method']}: {result['queries']} queries{unmatched}, per cent{over}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("missing", no_wrap=True)
    table.add_column("ranking", no_wrap=True)
    for name in rows[0]["metrics"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [_percent(value, row["deviation"].get(name)) for name, value in row["metrics"].items()]
        table.add_row(escape(row_name(row)), "re-ranked" if row["reranked"] else "by distance", *cells)
    return table


def row_name(row: Mapping[str, Any]) -> str:
    """ "none", or the modalities that are missing."""
    return " + ".join(row["missing"]) or "none"


def _percent(value: float, deviation: float | None) -> str:
    return f"{100 * value:.1f}" + (f" \u00b1 {100 * deviation:.1f}" if deviation is not None else "")
