"""The report's section on re-identification: figures with modalities missing, ranked lists, selected patches. No torch.

Pictures are read from the set's folder when the page is made. Where they are not there any more, names stand instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from tokensieve.errors import DataError
from tokensieve.report import runs as r
from tokensieve.report.page import render
from tokensieve.report.pictures import draw_kept, jpeg_uri, read_photo
from tokensieve.report.runs import Run, is_reid

__all__ = ["Reid"]

THUMB = 104  # pixels of the longer side of one image in a ranked list

# mAP / rank 1 as their papers print them, on the real sets
_PUBLISHED = {
    "rgbnt201": "DeMo (AAAI 2025) 79.0 / 82.3, Signal (AAAI 2026) 80.3 / 85.2",
    "rgbnt100": "DeMo (AAAI 2025) 86.2 / 97.6, Signal (AAAI 2026) 86.3 / 97.6",
    "msvr310": "DeMo (AAAI 2025) 49.2 / 59.8, Signal (AAAI 2026) 53.6 / 71.9",
}


@dataclass(frozen=True)
class Reid:
    """For each run: the figures with all modalities and with some missing, and some queries with what was found."""

    runs: Sequence[Run]
    name: str = "reid"
    heading: str = "Re-identification"

    def html(self) -> Markup:
        shown = [_run(run) for run in self.runs if is_reid(run)]
        return render("reid.html.j2", runs=shown) if shown else Markup()


def _run(run: Run) -> dict[str, Any]:
    rows = [
        row for row in run.get("rows") or [] if isinstance(row, Mapping) and isinstance(row.get("metrics"), Mapping)
    ]
    root = Path(str(run.get("data") or "."))
    lists = [_list(found, root) for found in run.get("lists") or [] if isinstance(found, Mapping)]
    layout = str(run.get("layout") or "")
    return {
        "where": r.where(run), "method": r.method(run), "budget": r.budget(run), "queries": r.number(run, "queries"),
        "measures": list(dict.fromkeys(name for row in rows for name in row["metrics"])),
        "rows": [_row(row) for row in rows], "lists": lists, "reranked": run.get("option_rerank") is True,
        "lost": sum(found["lost"] for found in lists), "data": str(root),
        "real": layout.upper() if layout in _PUBLISHED else "", "published": _PUBLISHED.get(layout, ""),
    }  # fmt: skip


def _row(row: Run) -> dict[str, Any]:
    spread = row.get("deviation") or {}
    cells = {}
    for name, value in row["metrics"].items():
        cells[name] = f"{100 * value:.1f}" if isinstance(value, int | float) else "-"
        if isinstance(spread.get(name), int | float):
            cells[name] += f" \u00b1 {100 * spread[name]:.1f}"
    missing = " + ".join(map(str, row.get("missing") or [])) or "none"
    return {"missing": missing, "ranking": "re-ranked" if row.get("reranked") else "by distance", "cells": cells}


def _list(found: Run, root: Path) -> dict[str, Any]:
    """One query: its picture, those of the gallery, and its selected patches by modality."""
    query = found.get("query") or {}
    entries = [query, *(found.get("gallery") or [])]
    photos = [_photos(entry, root) for entry in entries]
    shown = [_entry(entry, images) for entry, images in zip(entries, photos, strict=True)]
    precision = r.number(found, "average_precision")
    return {
        "query": shown[0], "gallery": shown[1:], "modalities": list(photos[0]),
        "precision": "-" if precision is None else f"{100 * precision:.0f} %",
        "kept": _kept(found, photos[0]),
        "lost": sum(not images for images in photos),
    }  # fmt: skip


def _entry(entry: Run, photos: Mapping[str, Image.Image]) -> dict[str, Any]:
    place = f"scene {entry['scene']}" if entry.get("scene") is not None else f"camera {r.text(entry.get('camera'))}"
    return {
        "name": r.text(entry.get("name")), "pid": r.text(entry.get("pid")), "place": place,
        "right": entry.get("right") is True, "uri": jpeg_uri(_stacked(photos)) if photos else "",
    }  # fmt: skip


def _photos(entry: Run, root: Path) -> dict[str, Image.Image]:
    """Modality -> image; none where a file is not there or cannot be read."""
    files, parts = entry.get("files") or {}, entry.get("parts") or {}
    found = {}
    for modality, file in files.items():
        try:
            photo = read_photo(root / str(file))
        except DataError:
            return {}
        if modality in parts:  # the k-th of n images side by side
            k, n = parts[modality]
            photo = photo.crop((k * photo.width // n, 0, (k + 1) * photo.width // n, photo.height))
        found[str(modality)] = photo
    return found


def _stacked(photos: Mapping[str, Image.Image]) -> Image.Image:
    """The modalities of one moment under each other, at the size of a thumbnail."""
    first = next(iter(photos.values()))
    scale = THUMB / max(first.size)
    width, height = (max(1, round(side * scale)) for side in first.size)
    page = Image.new("RGB", (width, height * len(photos)))
    for place, photo in enumerate(photos.values()):
        page.paste(photo.resize((width, height), Image.Resampling.LANCZOS), (0, place * height))
    return page


def _kept(found: Run, photos: Mapping[str, Image.Image]) -> list[dict[str, str]]:
    """The query with the patches that were selected, by modality; empty where nothing was or the pictures are gone."""
    selected, grid = found.get("selected") or {}, found.get("grid") or [0, 0]
    shown = []
    for modality, patches in selected.items():
        if modality in photos:
            mask = np.zeros(grid[0] * grid[1], dtype=np.bool_)
            mask[np.asarray(patches, dtype=np.int64)] = True
            picture = draw_kept(photos[modality], mask.reshape(grid[0], grid[1]))
            shown.append({"modality": str(modality), "uri": jpeg_uri(picture), "count": f"{mask.sum()} of {mask.size}"})
    return shown
