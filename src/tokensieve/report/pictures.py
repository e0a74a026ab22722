"""Pictures of a selection: the photo with dropped patches dimmed, and scores as a heat map over it.

A leaf: imports numpy, PIL, errors and utils, never torch.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tokensieve.utils.images import read_image

__all__ = [
    "COLOURS",
    "Panel",
    "Selection",
    "draw_kept",
    "draw_photo",
    "draw_scores",
    "jpeg_uri",
    "png_bytes",
    "read_photo",
    "score_range",
    "sheet",
]

SIDE = 448  # pixels of a panel's longer side, about: a panel is a whole number of pixels for each patch

# low to high; evenly spaced stops of a scale whose lightness rises steadily, so it reads in grey too
COLOURS = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")

_INK, _FAINT, _PAPER = (28, 32, 36), (104, 112, 120), (255, 255, 255)
_GONE = (128, 132, 136)  # where a patch had left before, so has no score


@dataclass(frozen=True)
class Selection:
    """What one method keeps of one photo at one block.

    kept: (rows, columns), True where the patch remains. scores: the same shape, higher = rather kept, NaN where the
    patch had left before; None for a method that has none.
    """

    label: str
    block: int
    kept: NDArray[np.bool_]
    scores: NDArray[np.float64] | None = None

    @property
    def grid(self) -> tuple[int, int]:
        return _grid(self.kept)

    @property
    def count(self) -> str:
        return f"{int(self.kept.sum())} of {self.kept.size}"

    @property
    def some_left_before(self) -> bool:
        return self.scores is not None and bool(np.isnan(self.scores).any())


@dataclass(frozen=True)
class Panel:
    """A picture of a sheet, and its label. bar: the ends of the colour scale, for a heat map."""

    label: str
    image: Image.Image
    bar: tuple[float, float] | None = None


def read_photo(path: str | Path) -> Image.Image:
    """A photo as RGB, turned as its camera says. What cannot be read as one is an error that names it."""
    return read_image(path, upright=True)


def draw_photo(photo: Image.Image, grid: tuple[int, int]) -> Image.Image:
    """The photo at a panel's size: that many pixels for each patch of `grid` (rows, columns)."""
    rows, columns = grid
    cell = max(1, round(SIDE / max(rows, columns)))
    return photo.convert("RGB").resize((columns * cell, rows * cell), Image.Resampling.LANCZOS)


def draw_kept(photo: Image.Image, kept: NDArray[np.bool_]) -> Image.Image:
    """The photo with kept patches as they are, and the others grey and faint."""
    shown = np.asarray(draw_photo(photo, _grid(kept)), dtype=np.float64)
    grey = shown.mean(axis=2, keepdims=True)
    faint = np.broadcast_to(0.22 * grey + 0.78 * 236, shown.shape)
    return _image(np.where(_over(kept, shown)[..., None], shown, faint))


def draw_scores(photo: Image.Image, scores: NDArray[np.float64]) -> Image.Image:
    """Scores as colours over the photo in grey, linear between the ends of `score_range`; grey where there is none."""
    shown = np.asarray(draw_photo(photo, _grid(scores)), dtype=np.float64)
    grey = shown.mean(axis=2, keepdims=True)
    low, high = score_range(scores)
    share = np.clip((np.nan_to_num(scores, nan=low) - low) / ((high - low) or 1.0), 0.0, 1.0)
    colours = np.where(np.isnan(scores)[..., None], np.array(_GONE, dtype=np.float64), _colour(share))
    return _image(0.3 * grey + 0.7 * _over(colours, shown))


def score_range(scores: NDArray[np.float64]) -> tuple[float, float]:
    """The ends of the colour scale: the 5th and 95th percentile, so that a few peaks do not darken all else."""
    known = scores[np.isfinite(scores)]
    if not known.size:
        return 0.0, 0.0
    low, high = np.percentile(known, (5, 95))
    return float(low), float(high)


def sheet(rows: Sequence[Sequence[Panel | None]], title: str = "") -> Image.Image:
    """Panels side by side with their labels above, row under row, a title over all. None leaves a place empty."""
    gap, head, foot = 20, 34, 26
    filled = [[panel for panel in row if panel] for row in rows]
    cell = max(p.image.width for row in filled for p in row)
    heights = [max(p.image.height for p in row) + head + (foot if any(p.bar for p in row) else 0) for row in filled]
    top = gap + (40 if title else 0)
    columns = max(map(len, rows))
    size = (gap + columns * (cell + gap), top + sum(heights) + gap * len(rows))
    page = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(page)
    if title:
        _text(draw, (gap, gap), title, 22, _INK, size[0] - 2 * gap)
    for row, height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            if panel is None:
                continue
            left = gap + column * (cell + gap)
            _text(draw, (left, top + 4), panel.label, 18, _INK, cell)
            page.paste(panel.image, (left, top + head))
            if panel.bar:
                _colour_bar(page, (left, top + head + panel.image.height + 8), panel.image.width, panel.bar)
        top += height + gap
    return page


def png_bytes(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def jpeg_uri(image: Image.Image, quality: int = 82) -> str:
    """A data URI, small enough for a page with dozens of them."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _grid(cells: NDArray[Any]) -> tuple[int, int]:
    rows, columns = cells.shape[:2]
    return rows, columns


def _over(cells: NDArray[Any], shown: NDArray[np.float64]) -> NDArray[Any]:
    """One value for each patch -> one for each pixel."""
    cell = shown.shape[0] // cells.shape[0]
    return cells.repeat(cell, axis=0).repeat(cell, axis=1)


def _colour(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """(...) in [0, 1] -> (..., 3) on the colour scale."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS], dtype=np.float64)
    places = np.linspace(0.0, 1.0, len(stops))
    return np.stack([np.interp(share, places, stops[:, i]) for i in range(3)], axis=-1)


def _image(values: NDArray[np.float64]) -> Image.Image:
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))


def _colour_bar(page: Image.Image, place: tuple[int, int], width: int, ends: tuple[float, float]) -> None:
    """A thin bar with the scale's ends written beside it."""
    draw = ImageDraw.Draw(page)
    low, high = (f"{end:.3g}" for end in ends)
    font = _font(15)
    left = place[0] + math.ceil(draw.textlength(low, font)) + 10
    right = place[0] + width - math.ceil(draw.textlength(high, font)) - 10
    draw.text(place, low, _FAINT, font)
    draw.text((right + 10, place[1]), high, _FAINT, font)
    if right > left:
        colours = _colour(np.linspace(0.0, 1.0, right - left))[None].repeat(10, axis=0)
        page.paste(_image(colours), (left, place[1] + 5))


def _text(
    draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int, ink: tuple[int, int, int], width: int
) -> None:
    """One line, cut with an ellipsis where it is wider than `width`."""
    font = _font(size)
    if draw.textlength(text, font) > width:
        while text and draw.textlength(text + "\u2026", font) > width:
            text = text[:-1]
        text = text.rstrip() + "\u2026"
    draw.text(place, text, ink, font)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
