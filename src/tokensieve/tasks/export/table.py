"""The tables of `tokensieve export`, from what `run_export` gives. Imports rich, never torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from tokensieve.tasks.export.run import Exported

__all__ = ["export_tables"]


def export_tables(exported: Exported) -> list[Table]:
    """What the file is and how far it is from torch; how fast it is."""
    tables = [_facts(exported)]
    if exported.speed:
        tables.append(_speed(exported.speed, exported.engine.threads))
    return tables


def _facts(exported: Exported) -> Table:
    about, parity = exported.engine.about, exported.engine.parity
    table = Table(title=f"Exported for {exported.engine.name}", title_justify="left", show_header=False)
    rows = {"model": about.model, "method": _method(exported), "images": f"(B, 3, {about.size[0]}, {about.size[1]})"}
    if about.tokens_per_layer:
        rows["tokens per layer"] = " ".join(map(str, about.tokens_per_layer))
    for file in exported.files:
        rows[file.name] = f"{file.stat().st_size / 2**20:.1f} MiB"
    if parity is not None:
        rows[f"against torch, {parity.photos} photos"] = (
            f"largest difference {parity.difference:.1e} of the largest feature; lowest cosine {parity.cosine:.6f}, "
            f"mean {parity.mean_cosine:.6f}"
        )
    if about.quantize is not None:
        if parity is not None:
            rows["same nearest photo"] = f"{parity.top1:.1%} of {parity.photos}"
        rows["kept in float"] = ", ".join(about.float_ops) or "nothing: int8 agrees without"
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _method(exported: Exported) -> str:
    about = exported.engine.about
    said = [about.method or "untouched"]
    said += [
        f"{name} {about.settings[name]}" for name in ("keep", "keep_average") if about.settings.get(name) is not None
    ]
    return ", ".join([*said, *([about.quantize] if about.quantize else [])])


def _speed(rows: list[dict[str, Any]], threads: int | None) -> Table:
    title = f"Speed in {rows[0]['engine']}, interleaved{f', {threads} threads' if threads else ''}"
    table = Table(title=title, title_justify="left")
    for name in ("batch", "untouched ms", "reduced ms", r"speed-up \[95 %]", "MAC ratio", "efficiency"):
        table.add_column(name, justify="right")
    for row in rows:
        found = row.get("speedup_interval")
        table.add_row(
            str(row["batch"]), _number(row.get("full_ms"), ".1f"), _number(row["reduced_ms"], ".1f"),
            _number(row.get("speedup"), ".2f") + (rf" \[{found[0]:.2f}, {found[1]:.2f}]" if found else ""),
            _number(row.get("mac_ratio"), ".2f"), _number(row.get("efficiency"), ".2f"),
        )  # fmt: skip
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
