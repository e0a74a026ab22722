"""The report's section on vision-language models: answers by type, costs, questions with what was kept. No torch."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from tokensieve.errors import DataError
from tokensieve.report import runs as r
from tokensieve.report.page import render
from tokensieve.report.pictures import draw_kept, draw_photo, jpeg_uri
from tokensieve.report.runs import Run
from tokensieve.tasks.vlm.table import COSTS, written
from tokensieve.utils.images import read_image

__all__ = ["Vlm", "is_vlm", "with_baselines"]


def is_vlm(run: Run) -> bool:
    return run.get("task") == "vlm"


def with_baselines(runs: Sequence[Run]) -> list[Run]:
    """The runs, and the untouched model of each group of VLM runs, which every one of them has measured beside."""
    found: list[Run] = []
    for group in r.grouped(runs):
        first = next((run for run in group if is_vlm(run) and isinstance(run.get("baseline"), Mapping)), None)
        if first is not None and not any(r.is_baseline(run) for run in group):
            gone = (
                "keep", "keep_average", "at", "schedule", "positions", "mode", "speedup", "speedup_low", "speedup_high",
                "possible", "gained",
            )  # fmt: skip
            options = [key for key in first if key.startswith("option_")]
            plain = dict.fromkeys((*gone, *options, "samples", "rows", "command", "seconds"))
            found.append({**first, **plain, **first["baseline"], "method": "none", "reduced": False})
        found += group
    return found


@dataclass(frozen=True)
class Vlm:
    """For each run: accuracy and loyalty by type of question, costs beside the untouched model's, some questions."""

    runs: Sequence[Run]
    name: str = "vlm"
    heading: str = "Visual questions"

    def html(self) -> Markup:
        shown = [_run(run) for run in self.runs if is_vlm(run)]
        return render("vlm.html.j2", runs=shown) if shown else Markup()


def _run(run: Run) -> dict[str, Any]:
    rows = [row for row in run.get("rows") or [] if isinstance(row, Mapping)]
    if len(rows) > 1 and isinstance(run.get("metrics"), Mapping):
        rows.append({"type": "all", "questions": run.get("questions"), **run["metrics"]})
    base = run.get("baseline") if isinstance(run.get("baseline"), Mapping) else {}
    return {
        "where": r.where(run), "method": r.method(run), "budget": r.budget(run), "reduced": not r.is_baseline(run),
        "questions": r.number(run, "questions"), "rows": [_row(row) for row in rows], "costs": _costs(run, base or {}),
        "change": _change(run),
        "samples": [_sample(found) for found in run.get("samples") or [] if isinstance(found, Mapping)],
    }  # fmt: skip


def _change(run: Run) -> str:
    """The interval of the change of accuracy, in points."""
    low, high = (r.number(run, f"accuracy_change_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f"{100 * low:+.1f} to {100 * high:+.1f}"


def _row(row: Run) -> dict[str, str]:
    cells = {key: r.number(row, key) for key in ("accuracy_baseline", "accuracy", "loyalty")}
    count = r.number(row, "questions")
    return {
        "type": r.text(row.get("type")), "questions": "-" if count is None else f"{count:,.0f}",
        **{key: "-" if value is None else f"{100 * value:.1f}" for key, value in cells.items()},
    }  # fmt: skip


def _costs(run: Run, base: Run) -> list[tuple[str, str, str]]:
    """(what, untouched, with the method) of the figures that either has."""
    found = []
    for key, title, form in COSTS:
        words = tuple(written(where.get(key), form) for where in (base, run))
        if any(word not in ("-", "0") for word in words):
            found.append((title, words[0], words[1]))
    return found


def _sample(found: Run) -> dict[str, Any]:
    score, plain = r.number(found, "score"), r.number(found, "score_unpruned")
    photo = _photo(found.get("picture"))
    kept = _mask(found.get("kept"), found.get("grid"))
    shown = None
    if photo is not None:
        shown = draw_kept(photo, kept) if kept is not None else draw_photo(photo, (1, 1))
    return {
        "name": r.text(found.get("name")), "type": r.text(found.get("type")), "question": r.text(found.get("question")),
        "answers": ", ".join(dict.fromkeys(str(a) for a in found.get("answers") or [])),
        "given": r.text(found.get("given")), "unpruned": r.text(found.get("unpruned")),
        "right": bool(score), "right_unpruned": bool(plain),
        "photo": "" if photo is None else jpeg_uri(draw_photo(photo, kept.shape if kept is not None else (1, 1))),
        "kept": "" if shown is None or kept is None else jpeg_uri(shown),
        "count": "" if kept is None else f"{int(kept.sum())} of {kept.size} patches",
    }  # fmt: skip


def _photo(uri: Any) -> Image.Image | None:
    """A picture that a record carries; None for what is none."""
    head, _, data = str(uri or "").partition(";base64,")
    if head not in ("data:image/jpeg", "data:image/png"):
        return None
    try:
        return read_image(base64.b64decode(data, validate=True))
    except (DataError, binascii.Error):
        return None


def _mask(kept: Any, grid: Any) -> Any:
    """(rows, columns) bool; None where a record does not say."""
    if not isinstance(kept, list) or not isinstance(grid, list) or len(grid) != 2:
        return None
    mask = np.zeros(grid[0] * grid[1], dtype=np.bool_)
    mask[[n for n in kept if isinstance(n, int) and 0 <= n < mask.size]] = True
    return mask.reshape(grid[0], grid[1])
