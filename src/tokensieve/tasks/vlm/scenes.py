"""Generated scenes: 2 to 5 small coloured shapes, at times a digit, on a cluttered image of 12 x 12 patches.

The image is 3 x 3 places of 4 x 4 patches; a place holds one thing at most, somewhere inside it, one or two patches
wide. Around them: a gradient, a texture, noise and grey strokes, none of which anyone asks about. Which colour and
shape may stand where is split (`HELD_OUT`): a training image never shows a held-out combination, a test image shows at
least one. Imports numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokensieve.errors import OptionError

__all__ = [
    "COLOURS",
    "DIGITS",
    "GRID",
    "HELD_OUT",
    "HELD_OUT_DIGITS",
    "PATCH",
    "PLACES",
    "SHAPES",
    "SIDE",
    "SPLITS",
    "Scenes",
    "make_scenes",
    "patch_labels",
]

SPLITS = ("train", "test")
GRID = 12  # patches a side
PATCH = 8  # pixels
SIDE = GRID * PATCH
ROOM = SIDE // 3  # pixels of a place's side
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = tuple(str(d) for d in range(10))
PLACES = (
    "top-left", "top", "top-right", "left", "centre", "right", "bottom-left", "bottom", "bottom-right",
)  # fmt: skip
_RGB = np.array(
    [[235, 50, 50], [50, 200, 70], [60, 90, 250], [240, 215, 50], [190, 60, 215], [60, 215, 230]], dtype=np.float32
)
_NOTHING, _OBJECT, _DIGIT = 0, 1, 2
_COVERED = 0.12  # share of a patch that a thing must cover to be its label

# one place for each colour and shape, so that every colour, shape and place is seen in training, not all together
HELD_OUT = np.array(
    [[[(c + 2 * s + p) % 9 == 0 for p in range(9)] for s in range(len(SHAPES))] for c in range(len(COLOURS))]
)
HELD_OUT_DIGITS = np.array([[d == p for p in range(9)] for d in range(10)])

_FONT = (  # 5 x 7
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
_GLYPHS = np.array([[[c == "1" for c in row] for row in glyph.split()] for glyph in _FONT])  # (10, 7, 5)


@dataclass(frozen=True)
class Scenes:
    """B scenes and their images.

    images: (B, 96, 96, 3) uint8. The rest is (B, 9), by place in reading order: is_object, is_digit bool; colour,
    shape, digit index their lists, -1 where there is none; x, y the thing's middle in pixels, radius half its height.
    cover: (B, 9, 32, 32) float32, how much of each pixel of the place the thing covers.
    """

    images: np.ndarray
    is_object: np.ndarray
    is_digit: np.ndarray
    colour: np.ndarray
    shape: np.ndarray
    digit: np.ndarray
    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray
    cover: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def held_out(self) -> np.ndarray:
        """(B, 9) bool: things whose combination of looks and place no training image shows."""
        place = np.arange(9)[None]
        objects = self.is_object & HELD_OUT[self.colour, self.shape, place]
        return objects | (self.is_digit & HELD_OUT_DIGITS[self.digit, place])


def make_scenes(count: int, seed: int | Sequence[int], split: str = "train", crowded: bool = False) -> Scenes:
    """Draw `count` scenes; the same arguments give the same bytes, and the splits share no seed.

    split: "train", or "test" with a held-out combination in each. crowded: a thing at every place, digits as often as
    shapes; for teaching a vision tower what each patch shows.
    """
    if split not in SPLITS:
        raise OptionError(f"split {split!r}: one of {', '.join(SPLITS)}")
    if count < 1:
        raise OptionError(f"{count} scenes: at least 1")
    seeds = [seed] if isinstance(seed, int) else list(seed)
    rng = np.random.default_rng([*seeds, SPLITS.index(split), int(crowded)])
    kind = _kinds(rng, count, crowded)
    colour, shape, digit = _looks(rng, kind, split)
    radius = rng.uniform(5.0, 8.0, kind.shape)
    radius = np.where(kind == _DIGIT, np.maximum(radius, 6.0), radius).astype(np.float32)
    room = ROOM - 2 * (radius + 1)
    x = (radius + 1 + rng.uniform(0, 1, kind.shape) * room).astype(np.float32)
    y = (radius + 1 + rng.uniform(0, 1, kind.shape) * room).astype(np.float32)
    cover = _cover(kind, shape, digit, x, y, radius)
    images = _paint(rng, kind, colour, cover)
    place = np.arange(9)
    there = kind != _NOTHING
    return Scenes(
        images=images, is_object=kind == _OBJECT, is_digit=kind == _DIGIT, colour=colour, shape=shape, digit=digit,
        x=np.where(there, x + ROOM * (place % 3), -1.0), y=np.where(there, y + ROOM * (place // 3), -1.0),
        radius=np.where(there, radius, 0.0), cover=cover,
    )  # fmt: skip


def _kinds(rng: np.random.Generator, count: int, crowded: bool) -> np.ndarray:
    """(B, 9) of what stands where."""
    if crowded:
        return np.where(rng.random((count, 9)) < 0.5, _OBJECT, _DIGIT)
    objects = rng.integers(2, 6, (count, 1))
    digits = rng.random((count, 1)) < 0.6
    order = rng.random((count, 9)).argsort(1).argsort(1)  # a random rank for each place
    return np.where(order < objects, _OBJECT, np.where((order == objects) & digits, _DIGIT, _NOTHING))


def _looks(rng: np.random.Generator, kind: np.ndarray, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Colour, shape and digit of each thing, -1 where it has none, true to the split."""
    colour = rng.integers(0, len(COLOURS), kind.shape)
    shape = rng.integers(0, len(SHAPES), kind.shape)
    digit = rng.integers(0, 10, kind.shape)
    place = np.broadcast_to(np.arange(9), kind.shape)
    if split == "train":
        # one step on in colour or digit leaves the held-out combination: each (shape, place) has at most one or two
        for _ in range(len(COLOURS)):
            colour = np.where(HELD_OUT[colour, shape, place], (colour + 1) % len(COLOURS), colour)
        digit = np.where(HELD_OUT_DIGITS[digit, place], (digit + 1 + rng.integers(0, 9, kind.shape)) % 10, digit)
    else:
        _force_held_out(rng, kind, colour, shape)
    return (
        np.where(kind == _OBJECT, colour, -1),
        np.where(kind == _OBJECT, shape, -1),
        np.where(kind == _DIGIT, digit, -1),
    )


def _force_held_out(rng: np.random.Generator, kind: np.ndarray, colour: np.ndarray, shape: np.ndarray) -> None:
    """Make one object of each scene a held-out combination, in place; every place has some."""
    rows = np.arange(len(kind))
    chosen = np.where(kind == _OBJECT, rng.random(kind.shape), -1.0).argmax(1)
    allowed = HELD_OUT.reshape(-1, 9).T[chosen]  # (B, 24)
    pick = np.where(allowed, rng.random(allowed.shape), -1.0).argmax(1)
    colour[rows, chosen], shape[rows, chosen] = pick // len(SHAPES), pick % len(SHAPES)


def _cover(
    kind: np.ndarray, shape: np.ndarray, digit: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray
) -> np.ndarray:
    """(B, 9, 32, 32): the share of each pixel that the thing covers, edges softened over one pixel."""
    at = np.arange(ROOM, dtype=np.float32) + 0.5
    u = at[None, None, None, :] - x[..., None, None]  # (B, 9, 1, 32) and (B, 9, 32, 1), in pixels from the middle
    v = at[None, None, :, None] - y[..., None, None]
    r = radius[..., None, None]
    cover = np.zeros((*kind.shape, ROOM, ROOM), dtype=np.float32)
    for index, inside in enumerate((_circle, _square, _triangle, _cross)):
        where = (kind == _OBJECT) & (shape == index)
        cover[where] = np.clip(0.5 - inside(u[where], v[where], r[where]), 0, 1)
    where = kind == _DIGIT
    cover[where] = _glyph(u[where], v[where], r[where], digit[where])
    return cover


# signed distances to the outline in pixels, negative inside; u, v: from the middle, r: half the extent


def _circle(u: np.ndarray, v: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.sqrt(u * u + v * v) - r


def _square(u: np.ndarray, v: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(u), np.abs(v)) - 0.88 * r


def _triangle(u: np.ndarray, v: np.ndarray, r: np.ndarray) -> np.ndarray:
    slanted = (2 * np.abs(u) - (v + r)) / np.float32(np.sqrt(5.0))  # apex up, as wide as high
    return np.maximum(slanted, v - r)


def _cross(u: np.ndarray, v: np.ndarray, r: np.ndarray) -> np.ndarray:
    arm = 0.32 * r
    return np.minimum(
        np.maximum(np.abs(u) - r, np.abs(v) - arm), np.maximum(np.abs(u) - arm, np.abs(v) - r)
    )  # fmt: skip


def _glyph(u: np.ndarray, v: np.ndarray, r: np.ndarray, digit: np.ndarray) -> np.ndarray:
    """The 5 x 7 glyph scaled to height 2 r, 1 inside and 0 outside."""
    cell = 2 * r / 7
    column = np.floor(u / cell + 2.5).astype(np.int64)
    row = np.floor(v / cell + 3.5).astype(np.int64)
    inside = (column >= 0) & (column < 5) & (row >= 0) & (row < 7)
    on = _GLYPHS[digit[:, None, None], np.clip(row, 0, 6), np.clip(column, 0, 4)]
    return (on & inside).astype(np.float32)


def _paint(rng: np.random.Generator, kind: np.ndarray, colour: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Things over clutter -> (B, 96, 96, 3) uint8. Each thing has its own tint of its colour; digits are white."""
    count = len(kind)
    tint = _RGB[colour] + rng.normal(0, 12, (count, 9, 3))
    white = rng.uniform(225, 255, (count, 9, 1))
    tint = np.where((kind == _DIGIT)[..., None], white, tint).astype(np.float32)
    canvas = _clutter(rng, count).reshape(count, 3, ROOM, 3, ROOM, 3)  # row of places, y, column, x, channel
    cover = cover.reshape(count, 3, 3, ROOM, ROOM).transpose(0, 1, 3, 2, 4)[..., None]
    tint = tint.reshape(count, 3, 1, 3, 1, 3)
    canvas += cover * (tint - canvas)
    canvas = canvas.reshape(count, SIDE, SIDE, 3)
    canvas += rng.standard_normal(canvas.shape, dtype=np.float32) * rng.uniform(3, 9, (count, 1, 1, 1)).astype("f4")
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _clutter(rng: np.random.Generator, count: int) -> np.ndarray:
    """(B, 96, 96, 3) float32: a gradient between two dark colours, a blotchy texture, grey strokes."""
    ends = (rng.uniform(30, 90, (2, count, 1, 1, 1)) + rng.uniform(-15, 15, (2, count, 1, 1, 3))).astype(np.float32)
    angle = rng.uniform(0, 2 * np.pi, (count, 1, 1)).astype(np.float32)
    line = np.linspace(-0.5, 0.5, SIDE, dtype=np.float32)
    along = np.cos(angle) * line[None, None, :] + (np.sin(angle) * line[None, :, None] + 0.5)
    canvas = along[..., None] * (ends[1] - ends[0]) + ends[0]
    blotches = rng.uniform(-18, 18, (count, GRID * 2, 1, GRID * 2, 1, 1)).astype(np.float32)
    cells = canvas.reshape(count, GRID * 2, 4, GRID * 2, 4, 3)
    cells += blotches
    _strokes(rng, canvas)
    return canvas


def _strokes(rng: np.random.Generator, canvas: np.ndarray) -> None:
    """Draw six grey straight strokes into each image, in place; soft, one to two pixels wide, 8 to 30 long."""
    for image in canvas:
        for x, y, angle, length, grey in rng.uniform((0, 0, 0, 8, 0), (SIDE, SIDE, 2 * np.pi, 30, 150), (6, 5)):
            cos, sin = np.cos(angle), np.sin(angle)
            left, right = sorted((x, x + length * cos))
            top, bottom = sorted((y, y + length * sin))
            box = np.s_[max(0, int(top) - 1) : int(bottom) + 2, max(0, int(left) - 1) : int(right) + 2]
            part = image[box]  # the stroke alone, not the whole image
            dy = np.arange(part.shape[0], dtype=np.float32)[:, None] + (box[0].start + 0.5 - y)
            dx = np.arange(part.shape[1], dtype=np.float32)[None, :] + (box[1].start + 0.5 - x)
            along, off = dx * cos + dy * sin, np.abs(dy * cos - dx * sin)
            inside = 0.8 * np.clip(1.3 - off, 0, 1) * ((along > 0) & (along < length))
            part += inside[..., None] * (grey - part)


def patch_labels(scenes: Scenes) -> dict[str, np.ndarray]:
    """What each patch shows, (B, 144) in raster order: colour, shape, digit, place; -1 where nothing covers it enough.

    middle: bool, the one patch of each thing that holds its middle. Digits have no colour and no shape.
    """
    count = len(scenes)
    share = scenes.cover.reshape(count, 3, 3, 4, PATCH, 4, PATCH).mean((4, 6))  # place row, column, patch row, column
    share = share.transpose(0, 1, 3, 2, 4).reshape(count, GRID, GRID)
    row, column = np.divmod(np.arange(GRID * GRID), GRID)
    place = row // 4 * 3 + column // 4  # (144,)
    covered = share.reshape(count, -1) > _COVERED
    labels = {
        name: np.where(covered, getattr(scenes, name)[:, place], -1) for name in ("colour", "shape", "digit")
    }  # fmt: skip
    there = scenes.is_object | scenes.is_digit
    labels["place"] = np.where(covered & there[:, place], place, -1)
    middle = (scenes.y.astype(int) // PATCH) * GRID + scenes.x.astype(int) // PATCH  # (B, 9)
    labels["middle"] = there[:, place] & (middle[:, place] == np.arange(GRID * GRID))
    return labels
