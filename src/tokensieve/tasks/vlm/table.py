"""The tables of `tokensieve eval vlm` for the terminal. A leaf: imports rich, never torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.markup import escape
from rich.table import Table

__all__ = ["COSTS", "vlm_tables", "written"]

# key of a result and of its baseline, what it is called, how it is written
COSTS = (
    ("tokens_average", "vision tokens, layer average", "{:.1f}"),
    ("tokens_per_layer", "layers of that many vision tokens", "{}"),
    ("gmacs", "GMACs, language model", "{:.4g}"),
    ("gmacs_with_tower", "GMACs with vision tower", "{:.4g}"),
    ("gmacs_own", "GMACs of the method's networks, in both", "{:.4g}"),
    ("kv_bytes", "KV bytes of a prompt", "{:,}"),
    ("first_token_ms", "ms to the first token of a batch", "{:.1f}"),
    ("decode_tokens_per_second", "tokens / s, decoding", "{:.0f}"),
    ("overhead_ms", "ms of the method itself", "{:.2f}"),
)


def vlm_tables(result: Mapping[str, Any]) -> list[Table]:
    """Answers by type of question, and costs; the untouched model beside the reduced one where there is one."""
    return [_answers(result), _costs(result)]


def _answers(result: Mapping[str, Any]) -> Table:
    reduced = result["method"] != "none"
    budget = next((f" {k} {result[k]}" for k in ("keep", "keep_average") if result[k] is not None), "")
    what = f"{result['dataset']}, {result['model']}, {result['method']}{budget}"
    table = Table(title=escape(f"{what}: {result['questions']} questions, per cent"), title_justify="left")
    table.add_column("type", no_wrap=True)
    heads = ["questions", "untouched", *(["reduced", "change", "loyalty"] if reduced else [])]
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    every = {"type": "all", "questions": result["questions"], **result["metrics"]}
    for row in (*result["rows"], every):
        own, base = row["accuracy"], row["accuracy_baseline"]
        cells = [str(row["questions"]), f"{100 * base:.1f}"]
        if reduced:
            cells += [f"{100 * own:.1f}", f"{100 * (own - base):+.1f}", f"{100 * row['loyalty']:.1f}"]
        table.add_row(escape(row["type"]), *cells, end_section=row is result["rows"][-1])
    if reduced:
        ends = (100 * result[f"accuracy_change_{end}"] for end in ("low", "high"))
        table.caption = "95 % interval of the change: {:+.1f} to {:+.1f} points".format(*ends)
        table.caption_justify = "left"
    return table


def _costs(result: Mapping[str, Any]) -> Table:
    reduced = result["method"] != "none"
    base = result["baseline"]
    table = Table(title="Cost; figures of a prompt are means over the questions", title_justify="left")
    table.add_column("")
    for name in ["untouched", *(["reduced", "saved"] if reduced else [])]:
        table.add_column(name, justify="right")
    for key, title, form in COSTS:
        own = result[key]
        cells = [written(base[key], form)]
        if reduced:
            cells += [written(own, form), "" if key == "decode_tokens_per_second" else _saved(own, base[key])]
        if any(cell not in ("-", "0", "") for cell in cells):
            table.add_row(title, *cells)
    if reduced and result["speedup"] is not None:
        table.caption = (
            f"To the first token {result['speedup']:.2f} times as fast; the MACs make {result['possible']:.2f} possible"
        )
        table.caption_justify = "left"
    return table


def written(value: Any, form: str) -> str:
    """A figure; the tokens of all layers ("144 144 36 36") as runs of the same: "2 of 144, 2 of 36"."""
    if isinstance(value, str):
        return ", ".join(f"{len(list(same))} of {count}" for count, same in groupby(value.split()))
    return "-" if value is None else form.format(value)


def _saved(own: Any, base: Any) -> str:
    """The share that is gone; nothing where there is no number to compare with."""
    numbers = isinstance(own, int | float) and isinstance(base, int | float)
    return f"{100 * (1 - own / base):.1f} %" if numbers and base else ""
