"""Pictures of 224 x 224 made of photos: one photo, four in a square, or a few on a background, some with a sign.

Every picture is a function of its seed alone. Imports numpy and pillow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tokensieve.errors import OptionError
from tokensieve.tasks.vlm.smol.photos import CLASSES, Photos

__all__ = [
    "BACKDROP", "COLOURS", "COMBINATIONS", "LAYOUTS", "PATCHES", "PLACES", "SIDE", "SIGN", "TEXTS", "UNSEEN",
    "Picture", "Sign", "Thing", "make_picture",
]  # fmt: skip

SIDE, PATCHES = 224, 16
LAYOUTS = ("photo", "mosaic", "collage")
COMBINATIONS = ("seen", "unseen", "all")
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
CORNERS = (0, 2, 6, 8)
TEXTS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "stop", "exit", "open", "sale", "taxi", "menu", "park", "shop",
)  # fmt: skip
DIGITS = 10  # the first of TEXTS are printed as digits
COLOURS = ("red", "green", "blue", "yellow", "white", "black")
_RGB = ((205, 35, 35), (30, 140, 50), (35, 70, 200), (240, 210, 40), (245, 245, 245), (20, 20, 20))
BACKDROP, SIGN = -1, len(CLASSES)  # beside the classes, what a patch can show

# class at place that training never shows, in mosaics and collages
UNSEEN = frozenset({(3, 0), (8, 2), (5, 6), (9, 8), (0, 6), (7, 0), (10, 2), (13, 8), (6, 4), (1, 1)})


@dataclass(frozen=True)
class Thing:
    """label: index into CLASSES. place: index into PLACES, or -1 when it fills the picture. box: left, top, side."""

    label: int
    place: int
    box: tuple[int, int, int]


@dataclass(frozen=True)
class Sign:
    """text, colour: indices into TEXTS and COLOURS."""

    text: int
    colour: int
    place: int


@dataclass
class Picture:
    """pixels: (224, 224, 3) uint8. patches: (16, 16) int64, the class that the middle of each patch shows, SIGN or
    BACKDROP."""

    layout: str
    pixels: np.ndarray
    patches: np.ndarray
    things: list[Thing] = field(default_factory=list)
    sign: Sign | None = None

    def paste(self, thing: Thing, photo: np.ndarray) -> None:
        left, top, side = thing.box
        self.pixels[top : top + side, left : left + side] = photo
        self._mark(left, top, side, side, thing.label)
        self.things.append(thing)

    def post(self, sign: Sign, left: int, top: int, width: int, height: int) -> None:
        self.pixels[top : top + height, left : left + width] = _sign_pixels(sign, width, height)
        self._mark(left, top, width, height, SIGN)
        self.sign = sign

    def where(self, thing: Thing) -> np.ndarray:
        """(16, 16) bool: the patches whose middle lies in its box."""
        left, top, side = thing.box
        return _inside(left, top, side, side)

    def _mark(self, left: int, top: int, width: int, height: int, what: int) -> None:
        self.patches[_inside(left, top, width, height)] = what


def _inside(left: int, top: int, width: int, height: int) -> np.ndarray:
    step = SIDE // PATCHES
    middle = np.arange(PATCHES) * step + step / 2
    rows, columns = (middle >= top) & (middle < top + height), (middle >= left) & (middle < left + width)
    return rows[:, None] & columns


def make_picture(
    photos: Photos, rng: np.random.Generator, layout: str | None = None, combinations: str = "seen"
) -> Picture:
    """One picture. layout: of LAYOUTS, or None for one at random.

    combinations: which pairs of class and place may be in mosaics and collages: "seen", those not in UNSEEN; "all";
    "unseen": at least one is of UNSEEN, and there is no single photo.
    """
    if combinations not in COMBINATIONS:
        raise OptionError(f"combinations={combinations!r}: one of {', '.join(COMBINATIONS)}")
    choices = LAYOUTS[1:] if combinations == "unseen" else LAYOUTS
    layout = layout or choices[rng.integers(len(choices))]
    if layout not in choices:
        raise OptionError(f"layout={layout!r}: one of {', '.join(choices)} for {combinations} combinations")
    picture = Picture(layout, _backdrop(rng), np.full((PATCHES, PATCHES), BACKDROP, dtype=np.int64))
    if layout == "photo":
        _photo(picture, photos, rng)
    else:
        (_mosaic if layout == "mosaic" else _collage)(picture, photos, rng, combinations)
    return picture


def _photo(picture: Picture, photos: Photos, rng: np.random.Generator) -> None:
    label = int(rng.integers(len(CLASSES)))
    picture.paste(Thing(label, -1, (0, 0, SIDE)), photos.draw(rng, label, SIDE))
    if rng.random() < 0.3:
        place = CORNERS[rng.integers(4)]
        picture.post(_draw_sign(rng, place), 112 * (place % 3 // 2), 168 * (place // 6), 112, 56)


def _mosaic(picture: Picture, photos: Photos, rng: np.random.Generator, combinations: str) -> None:
    sign = CORNERS[rng.integers(4)] if rng.random() < 0.4 else -1
    places = [place for place in CORNERS if place != sign]
    for place, label in zip(places, _labels(rng, places, combinations), strict=True):
        box = (112 * (place % 3 // 2), 112 * (place // 6), 112)
        picture.paste(Thing(label, place, box), photos.draw(rng, label, 112))
    if sign >= 0:
        picture.post(_draw_sign(rng, sign), 112 * (sign % 3 // 2), 112 * (sign // 6) + 28, 112, 56)


def _collage(picture: Picture, photos: Photos, rng: np.random.Generator, combinations: str) -> None:
    chosen = [int(p) for p in rng.permutation(9)]
    sign = chosen.pop() if rng.random() < 0.4 else -1
    count = int(rng.integers(2, 6))
    if combinations == "unseen" and not any(place in _UNSEEN_AT for place in chosen[:count]):
        chosen = [0, *[p for p in chosen if p != 0]] if sign != 0 else [2, *[p for p in chosen if p != 2]]
    places = chosen[:count]
    for place, label in zip(places, _labels(rng, places, combinations), strict=True):
        side = int(rng.integers(60, 75))
        left, top = (int(75 * at + rng.integers(0, 75 - side)) for at in (place % 3, place // 3))
        left, top = min(left, SIDE - side), min(top, SIDE - side)
        picture.paste(Thing(label, place, (left, top, side)), photos.draw(rng, label, side))
    if sign >= 0:
        picture.post(_draw_sign(rng, sign), min(75 * (sign % 3), 152), min(75 * (sign // 3) + 16, 182), 72, 42)


_UNSEEN_AT = {place: label for label, place in sorted(UNSEEN)}


def _labels(rng: np.random.Generator, places: list[int], combinations: str) -> list[int]:
    """A class for each place. In half of the pictures some class comes more than once."""
    pool = [int(c) for c in rng.permutation(len(CLASSES))]
    if rng.random() < 0.5:
        pool = pool[: max(1, len(places) // 2)]
    labels = []
    for place in places:
        free = [label for label in pool if combinations != "seen" or (label, place) not in UNSEEN]
        free = free or [label for label in range(len(CLASSES)) if (label, place) not in UNSEEN]
        labels.append(free[rng.integers(len(free))])
    if combinations == "unseen" and not any(pair in UNSEEN for pair in zip(labels, places, strict=True)):
        at = [index for index, place in enumerate(places) if place in _UNSEEN_AT]
        index = at[rng.integers(len(at))]
        held = [label for label, place in sorted(UNSEEN) if place == places[index]]
        labels[index] = held[rng.integers(len(held))]
    return labels


# -- what lies behind, and signs ---------------------------------------------------------------------------------------


def _backdrop(rng: np.random.Generator) -> np.ndarray:
    """(224, 224, 3) uint8: clouds of colour, in a third of the cases with stripes."""
    cells = int(rng.integers(2, 7))
    clouds = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
    pixels = np.array(clouds.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.float32)
    if rng.random() < 1 / 3:
        angle, wave = rng.uniform(0, np.pi), rng.uniform(6, 30)
        y, x = np.mgrid[:SIDE, :SIDE]
        pixels += 40 * np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / wave)[..., None]
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _draw_sign(rng: np.random.Generator, place: int) -> Sign:
    texts = DIGITS if rng.random() < 0.5 else len(TEXTS)
    text = int(rng.integers(DIGITS) if texts == DIGITS else rng.integers(DIGITS, len(TEXTS)))
    return Sign(text, int(rng.integers(len(COLOURS))), place)


def _sign_pixels(sign: Sign, width: int, height: int) -> np.ndarray:
    text = str(sign.text) if sign.text < DIGITS else TEXTS[sign.text].upper()
    image = Image.new("RGB", (width, height), _RGB[sign.colour])
    ink = (10, 10, 10) if sum(_RGB[sign.colour]) > 400 else (250, 250, 250)
    draw = ImageDraw.Draw(image)
    size = height
    while True:  # the largest type that fits
        font = ImageFont.load_default(size)
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font, stroke_width=1)
        if right - left <= width - 6 and bottom - top <= height - 6:
            break
        size -= 2
    at = ((width - left - right) / 2, (height - top - bottom) / 2)
    draw.text(at, text, fill=ink, font=font, stroke_width=1, stroke_fill=ink)
    return np.array(image)
