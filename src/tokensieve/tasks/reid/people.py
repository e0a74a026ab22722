"""Synthetic people: who they are, and how red-green-blue, near and thermal infrared cameras see them.

A person is a build, an outfit in each modality, and a bag or none. Outfits come from short wardrobes, drawn apart for
each modality: several people look alike in one modality and differ in another. A picture is a map of body parts,
coloured three times: by dye (rgb), by how the fabric reflects near infrared (nir), by how warm it gets (tir).

May import: numpy, PIL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

__all__ = ["BACKGROUND", "MODALITIES", "PARTS", "Person", "Pose", "Wardrobes", "draw_parts", "looks", "make_person",
           "make_wardrobes"]  # fmt: skip

MODALITIES = ("rgb", "nir", "tir")
BACKGROUND = 0
PARTS = ("background", "face", "hair", "upper", "print", "forearm", "hand", "thigh", "shin", "shoe", "bag", "strap")
_CODE = {name: code for code, name in enumerate(PARTS)}

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Wardrobes:
    """What can be worn, by modality: rows of (upper, print, lower, shoe, bag) in 0..1; rgb has three channels.

    prints: kind of print for each rgb outfit, 0 none, 1 stripes across, 2 a patch, 3 lower half. Thermal rows are
    followed by where the torso is warmest: (across, along, strength).
    """

    rgb: Floats
    prints: NDArray[np.int64]
    nir: Floats
    tir: Floats
    spots: Floats


@dataclass(frozen=True)
class Person:
    """height, shoulders, hips, legs, head: factors around 1. swing: how far a stride goes, in radians."""

    height: float
    shoulders: float
    hips: float
    legs: float
    head: float
    swing: float
    skin: Floats
    hair: Floats
    rgb: Floats
    print_kind: int
    nir: Floats
    tir: Floats
    spot: Floats
    short_sleeves: bool
    shorts: bool
    long_hair: bool
    bag: int  # 0 none, 1 backpack, 2 handbag


@dataclass(frozen=True)
class Pose:
    """turn: 0 towards the camera, pi away from it. phase: of the stride. place: middle of the feet, as shares of the
    frame (across, down). scale: height of a person of factor 1, as a share of the frame's height."""

    turn: float
    phase: float
    place: tuple[float, float]
    scale: float


def make_wardrobes(draw: np.random.Generator, people: int) -> Wardrobes:
    """About one outfit for three people in each modality, so that one modality alone leaves people confused."""
    count = max(2, math.ceil(people / 3))
    hues = _colours(draw, count * 5).reshape(count, 5, 3)
    spots = np.stack(
        [draw.uniform(-0.6, 0.6, count), draw.uniform(0.1, 0.9, count), draw.uniform(0.15, 0.45, count)], 1
    )
    return Wardrobes(
        rgb=hues,
        prints=draw.integers(0, 4, count),
        nir=draw.uniform(0.12, 0.95, (count, 5)),
        tir=draw.uniform(0.3, 0.85, (count, 5)) * np.array([1, 1, 1, 0.8, 0.55]),
        spots=spots,
    )


def _colours(draw: np.random.Generator, count: int) -> Floats:
    """Dyes people wear: many greys and dark tones, some strong ones."""
    grey = draw.uniform(0.08, 0.9, (count, 1)) + draw.normal(0, 0.03, (count, 3))
    strong = draw.uniform(0.05, 0.85, (count, 3))
    return np.where(draw.random((count, 1)) < 0.35, grey, strong).clip(0.03, 0.95)


def make_person(draw: np.random.Generator, wardrobes: Wardrobes) -> Person:
    """One person: a build of their own, and one outfit of each wardrobe."""
    tone = draw.uniform(0.3, 0.9)
    outfit, near, warm = (int(draw.integers(len(rows))) for rows in (wardrobes.rgb, wardrobes.nir, wardrobes.tir))
    return Person(
        height=draw.uniform(0.86, 1.06),
        shoulders=draw.uniform(0.8, 1.28),
        hips=draw.uniform(0.8, 1.25),
        legs=draw.uniform(0.93, 1.07),
        head=draw.uniform(0.92, 1.12),
        swing=draw.uniform(0.2, 0.6),
        skin=np.array([1.0, 0.78, 0.64]) * tone,
        hair=np.array([1.0, 0.8, 0.6]) * draw.choice([0.08, 0.16, 0.35, 0.7]),
        rgb=(wardrobes.rgb[outfit] + draw.normal(0, 0.02, (5, 3))).clip(0.02, 0.98),
        print_kind=int(wardrobes.prints[outfit]),
        nir=(wardrobes.nir[near] + draw.normal(0, 0.02, 5)).clip(0.05, 1),
        tir=(wardrobes.tir[warm] + draw.normal(0, 0.015, 5)).clip(0.1, 1),
        spot=wardrobes.spots[warm],
        short_sleeves=bool(draw.random() < 0.4),
        shorts=bool(draw.random() < 0.25),
        long_hair=bool(draw.random() < 0.4),
        bag=int(draw.choice([0, 0, 1, 2])),
    )


def draw_parts(person: Person, pose: Pose, size: tuple[int, int]) -> tuple[NDArray[np.uint8], tuple[float, ...]]:
    """The map of body parts for a frame of `size` (height, width), and the torso's box (left, top, right, bottom)."""
    height, width = size
    page = Image.new("L", (width, height), BACKGROUND)
    pen = ImageDraw.Draw(page)
    tall = pose.scale * person.height * height
    foot_x, foot_y = pose.place[0] * width, pose.place[1] * height
    leg = 0.47 * person.legs * tall
    hip_y, neck_y = foot_y - leg, foot_y - 0.83 * tall
    side = abs(math.sin(pose.turn))  # 1 seen from the side: narrower, and the stride shows
    half_top = 0.125 * person.shoulders * tall * (1 - 0.38 * side)
    half_low = 0.095 * person.hips * tall * (1 - 0.25 * side)
    away = math.cos(pose.turn) < -0.3
    stride = person.swing * math.sin(pose.phase)
    if person.bag == 1 and not away:
        _backpack(pen, person, foot_x, neck_y, hip_y, half_top, pose)
    for sign in (1, -1):  # the far leg and arm first
        _arm(pen, person, foot_x, neck_y, half_top, tall, -sign * stride, sign, side)
        _leg(pen, person, foot_x, hip_y, half_low, leg, sign * stride, sign, side, tall)
    shoulder_y, belt_y, belt = neck_y + 0.02 * tall, hip_y + 0.03 * tall, 1.05 * half_low
    torso = [(foot_x - half_top, shoulder_y), (foot_x + half_top, shoulder_y), (foot_x + belt, belt_y),
             (foot_x - belt, belt_y)]  # fmt: skip
    pen.polygon(torso, fill=_CODE["upper"])
    box = (foot_x - half_top, neck_y, foot_x + half_top, hip_y)
    if not away or person.print_kind != 2:
        _print(pen, person, box)
    _arm(pen, person, foot_x, neck_y, half_top, tall, stride, -1, side)
    _head(pen, person, foot_x, neck_y, tall, pose)
    if person.bag == 1 and away:
        _backpack(pen, person, foot_x, neck_y, hip_y, half_top, pose)
    elif person.bag == 2:
        _handbag(pen, foot_x, neck_y, hip_y, half_top, tall)
    return np.asarray(page).copy(), box


def _limb(pen: ImageDraw.ImageDraw, a: tuple[float, float], b: tuple[float, float], thick: float, code: int) -> None:
    wide = max(2, round(thick))
    pen.line([a, b], fill=code, width=wide)
    for x, y in (a, b):
        pen.ellipse((x - wide / 2, y - wide / 2, x + wide / 2, y + wide / 2), fill=code)


def _leg(
    pen: ImageDraw.ImageDraw, person: Person, x: float, hip: float, half: float, leg: float, swing: float, sign: int,
    side: float, tall: float,
) -> None:  # fmt: skip
    thick = 0.085 * person.hips * tall
    top = (x + sign * half * 0.5 * (1 - side), hip)
    angle = swing * (0.35 + 0.65 * side)
    knee = (top[0] + math.sin(angle) * leg * 0.5, hip + leg * 0.48)
    bend = angle - max(0.0, -swing) * 0.5 * side
    foot = (knee[0] + math.sin(bend) * leg * 0.5, hip + leg * (0.95 - 0.06 * max(0.0, -swing)))
    _limb(pen, knee, foot, thick * 0.72, _CODE["shin"])
    _limb(pen, top, knee, thick, _CODE["thigh"])
    reach = 0.03 * tall * (0.6 + 0.8 * side)
    pen.ellipse((foot[0] - 0.6 * reach, foot[1] - 0.012 * tall, foot[0] + reach, foot[1] + 0.022 * tall),
                fill=_CODE["shoe"])  # fmt: skip


def _arm(
    pen: ImageDraw.ImageDraw, person: Person, x: float, neck: float, half: float, tall: float, swing: float, sign: int,
    side: float,
) -> None:  # fmt: skip
    thick = 0.06 * person.shoulders * tall
    shoulder = (x + sign * half * 0.92, neck + 0.045 * tall)
    angle = swing * (0.3 + 0.7 * side) + sign * 0.1 * (1 - side)
    elbow = (shoulder[0] + math.sin(angle) * 0.17 * tall, shoulder[1] + 0.165 * tall)
    hand = (elbow[0] + math.sin(angle + 0.25 * side) * 0.15 * tall, elbow[1] + 0.145 * tall)
    _limb(pen, elbow, hand, thick * 0.78, _CODE["forearm"])
    _limb(pen, shoulder, elbow, thick, _CODE["upper"])
    reach = 0.02 * tall
    pen.ellipse((hand[0] - reach, hand[1] - reach, hand[0] + reach, hand[1] + reach), fill=_CODE["hand"])


def _print(pen: ImageDraw.ImageDraw, person: Person, box: tuple[float, float, float, float]) -> None:
    left, top, right, bottom = box
    wide, tall = right - left, bottom - top
    if person.print_kind == 1:
        for k in range(3):
            y = top + tall * (0.25 + 0.25 * k)
            pen.rectangle((left + 0.08 * wide, y, right - 0.08 * wide, y + 0.09 * tall), fill=_CODE["print"])
    elif person.print_kind == 2:
        pen.rectangle((left + 0.3 * wide, top + 0.3 * tall, right - 0.3 * wide, top + 0.6 * tall), fill=_CODE["print"])
    elif person.print_kind == 3:
        pen.rectangle((left + 0.1 * wide, top + 0.55 * tall, right - 0.1 * wide, bottom), fill=_CODE["print"])


def _head(pen: ImageDraw.ImageDraw, person: Person, x: float, neck: float, tall: float, pose: Pose) -> None:
    wide, high = 0.058 * person.head * tall, 0.078 * person.head * tall
    y = neck - 0.075 * tall
    pen.rectangle((x - 0.4 * wide, y, x + 0.4 * wide, neck + 0.04 * tall), fill=_CODE["face"])
    if person.long_hair:
        pen.rectangle((x - wide, y - 0.2 * high, x + wide, neck + 0.035 * tall), fill=_CODE["hair"])
    pen.ellipse((x - wide, y - high, x + wide, y + high), fill=_CODE["hair"])
    facing = math.cos(pose.turn)
    if facing > -0.3:  # the face turns to one side, and away
        shift = 0.55 * wide * math.sin(pose.turn)
        pen.ellipse((x - 0.78 * wide + shift, y - 0.45 * high, x + 0.78 * wide + shift, y + 0.98 * high),
                    fill=_CODE["face"])  # fmt: skip


def _backpack(
    pen: ImageDraw.ImageDraw, person: Person, x: float, neck: float, hip: float, half: float, pose: Pose
) -> None:
    shift = -math.sin(pose.turn) * half * 1.3
    wide = half * (0.72 if math.cos(pose.turn) < -0.3 else 0.85)
    box = (x + shift - wide, neck + 0.08 * (hip - neck), x + shift + wide, neck + 0.78 * (hip - neck))
    pen.rounded_rectangle(box, radius=max(1, wide / 3), fill=_CODE["bag"])


def _handbag(pen: ImageDraw.ImageDraw, x: float, neck: float, hip: float, half: float, tall: float) -> None:
    place = x + half * 1.05
    pen.line([(x - half * 0.5, neck + 0.04 * tall), (place, hip)], fill=_CODE["strap"], width=max(1, round(tall / 60)))
    pen.rounded_rectangle((place - 0.05 * tall, hip - 0.02 * tall, place + 0.06 * tall, hip + 0.09 * tall), radius=2,
                          fill=_CODE["bag"])  # fmt: skip


def looks(person: Person) -> dict[str, Floats]:
    """Modality -> (parts, 3) colour, or (parts, 1) reflectance or warmth, of each body part; the background is 0.

    Warmth: skin 1, hair and thick clothes cooler, a bag and shoes coolest. Prints are dye: they show in rgb, hardly
    in nir, and not in tir.
    """
    upper, printed, lower, shoe, bag = range(5)
    rgb = {"face": person.skin, "hair": person.hair, "upper": person.rgb[upper], "print": person.rgb[printed],
           "forearm": person.skin if person.short_sleeves else person.rgb[upper], "hand": person.skin,
           "thigh": person.rgb[lower], "shin": person.skin if person.shorts else person.rgb[lower],
           "shoe": person.rgb[shoe], "bag": person.rgb[bag], "strap": person.rgb[bag] * 0.7}  # fmt: skip
    faint = 0.75 * person.nir[upper] + 0.25 * person.nir[printed]
    nir = {"face": 0.78, "hair": 0.3, "upper": person.nir[upper], "print": faint,
           "forearm": 0.78 if person.short_sleeves else person.nir[upper], "hand": 0.78, "thigh": person.nir[lower],
           "shin": 0.78 if person.shorts else person.nir[lower], "shoe": person.nir[shoe], "bag": person.nir[bag],
           "strap": 0.8 * person.nir[bag]}  # fmt: skip
    tir = {"face": 1.0, "hair": 0.62, "upper": person.tir[upper], "print": person.tir[upper],
           "forearm": 0.93 if person.short_sleeves else 0.95 * person.tir[upper], "hand": 0.88,
           "thigh": person.tir[lower], "shin": 0.9 if person.shorts else 0.9 * person.tir[lower],
           "shoe": person.tir[shoe], "bag": person.tir[bag], "strap": person.tir[bag]}  # fmt: skip
    tables = {"rgb": np.zeros((len(PARTS), 3)), "nir": np.zeros((len(PARTS), 1)), "tir": np.zeros((len(PARTS), 1))}
    for modality, values in (("rgb", rgb), ("nir", nir), ("tir", tir)):
        for part, value in values.items():
            tables[modality][_CODE[part]] = value
    return tables
