"""The benchmark's tables for the terminal, from the rows of its record. A leaf: imports rich, never torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

__all__ = ["bench_tables"]

Row = Mapping[str, Any]


def bench_tables(rows: Iterable[Row]) -> list[Table]:
    """One table for each part that the rows have: speed, share, memory, vlm."""
    rows = list(rows)
    makers = {"speed": _speed, "share": _share, "memory": _memory, "vlm": _vlm}
    parts = {part: [row for row in rows if row["part"] == part] for part in makers}
    return [makers[part](found) for part, found in parts.items() if found]


def _table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", min_width=6)  # in a narrow terminal in several lines, but not cut off
    table.add_column("target", min_width=7)
    return table


def _ms(row: Row) -> str:
    """Median and quartiles; tenths of a millisecond where they say something."""
    values = (row["ms"], *row["ms_quartiles"])
    mid, low, high = (f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in values)
    return f"{mid} [{low}, {high}]"


def _verdict(row: Row, sign: str, form: str) -> str:
    """ "0.95 met", "0.95 missed", with "unsure" where another run may say otherwise; nothing where no target is set."""
    if row["target"] is None:
        return ""
    word = "[green]met[/]" if row["met"] else "[red]missed[/]"
    return f"{sign}{row['target']:{form}} {word}{'' if row.get('sure', True) else ', unsure'}"


def _gained(row: Row) -> str:
    """The efficiency, and where its median lies as far as the rounds can say; older records do not."""
    value, found = row.get("gained_of_possible"), row.get("gained_interval")
    return "" if value is None else f"{value:.3f}" + (f" [{found[0]:.2f}, {found[1]:.2f}]" if found else "")


def _group(table: Table, rows: list[Row], keys: tuple[str, ...], cells: Any) -> Table:
    """Add rows with a line where one of `keys` changes."""
    for index, row in enumerate(rows):
        end = index + 1 == len(rows) or any(rows[index + 1][key] != row[key] for key in keys)
        table.add_row(*cells(row), end_section=end)
    return table


def _speed(rows: list[Row]) -> Table:
    where = " ".join(word for word in (rows[0].get("engine", "torch"), rows[0].get("quantize")) if word)
    against = "the faster of stock and sdpa (keep-all's target: against stock)" if where == "torch" else "stock"
    table = _table(
        f"Speed in {where}, interleaved. speed-up: against {against}; efficiency: speed-up / MAC ratio",
        ("model", "batch", "method", "keep"),
        ("tokens", "GMACs", r"ms \[quartiles]", "speed-up", "MAC ratio", r"efficiency \[95 %]"),
    )

    def cells(row: Row) -> list[str]:
        return [
            row["model"], str(row["batch"]), row["method"], str(row["keep"]), str(row["tokens_per_layer"][-1]),
            f"{row['macs'] / 1e9:.2f}", _ms(row), f"{row['speedup']:.3f}",
            f"{row['possible']:.3f}", _gained(row),
            _verdict(row, ">= ", ".2f"),
        ]  # fmt: skip

    return _group(table, rows, ("model", "batch"), cells)


def _share(rows: list[Row]) -> Table:
    table = _table(
        "Selection's share of the time of twelve blocks, and of the block it works in (ViT-B width, random weights)",
        ("patches", "batch", "method", "cuts", "keep"),
        ("block ms", "selection ms", "of the block", "share"),
    )

    def cells(row: Row) -> list[str]:
        return [
            str(row["patches"]), str(row["batch"]), row["method"], str(row["cuts"]), f"{row['keep']:.3f}",
            f"{row['block_ms']:.2f}", f"{row['selection_ms']:.3f}", f"{row['block_share']:.1%}", f"{row['share']:.1%}",
            _verdict(row, "< ", ".0%"),
        ]  # fmt: skip

    return _group(table, rows, ("patches",), cells)


def _memory(rows: list[Row]) -> Table:
    table = _table(
        "Peak memory, the middle of three processes",
        ("model", "batch", "method", "keep"),
        ("untouched MiB", "reduced MiB", "ratio"),
    )

    def cells(row: Row) -> list[str]:
        return [
            row["model"], str(row["batch"]), row["method"], str(row["keep"]), f"{row['stock_bytes'] / 2**20:.1f}",
            f"{row['reduced_bytes'] / 2**20:.1f}", f"{row['ratio']:.3f}", _verdict(row, "<= ", ".2f"),
        ]  # fmt: skip

    return _group(table, rows, ("model", "batch"), cells)


def _vlm(rows: list[Row]) -> Table:
    table = _table(
        "A LLaVA with random weights against the untouched one: prefill (with the tower), its possible speed-up and "
        "the efficiency, the method's own time; decoding a token; the cache. vision: tokens on layer average",
        ("batch", "method", "keep"),
        (
            "vision",
            r"ms \[quartiles]",
            "speed-up",
            "MAC ratio",
            r"efficiency \[95 %]",
            "own ms",
            "decode ms",
            "speed-up",
            "KV MiB",
        ),
    )

    def cells(row: Row) -> list[str]:
        own = "" if row["overhead_ms"] is None else f"{row['overhead_ms']:.2f}"
        return [
            str(row["batch"]), row["method"], str(row["keep"]), f"{row['vision_tokens_average']:.0f}",
            _ms(row), f"{row['speedup']:.3f}", f"{row['possible']:.3f}",
            _gained(row), own, f"{row['decode_ms']:.2f}", f"{row['decode_speedup']:.3f}",
            f"{row['kv_bytes'] / 2**20:.2f}{'' if row['kv_exact'] else ' [red]not as planned[/]'}",
            _verdict(row, ">= ", ".2f"),
        ]  # fmt: skip

    return _group(table, rows, ("model", "batch"), cells)
