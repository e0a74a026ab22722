"""Cameras and light around synthetic people: what each modality sees, and what it misses.

    day     all is well                        night   rgb is dark and noisy; nir lights the scene itself
    glare   a light burns out a part of rgb    heat    walls are as warm as people: tir loses contrast

May import: numpy, PIL; the people beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from tokensieve.tasks.reid.people import BACKGROUND, MODALITIES, Person, Pose, draw_parts, looks

__all__ = ["CONDITIONS", "Camera", "make_camera", "photograph"]

CONDITIONS = ("day", "night", "glare", "heat")
_MIX = np.array([0.42, 0.22, 0.14, 0.22])

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Camera:
    """turn: from where it sees people. cast, gain: colour and brightness. blur: in pixels of a frame 256 high."""

    turn: float
    scale: float
    drop: float
    cast: Floats
    gain: float
    near_gain: float
    warm_gain: float
    ambient: float
    blur: float
    mix: Floats
    wall: Floats
    floor: Floats


def make_camera(draw: np.random.Generator) -> Camera:
    return Camera(
        turn=draw.uniform(0, 2 * np.pi),
        scale=draw.uniform(0.78, 0.92),
        drop=draw.uniform(-0.01, 0.03),
        cast=draw.uniform(0.88, 1.12, 3),
        gain=draw.uniform(0.85, 1.15),
        near_gain=draw.uniform(0.7, 1.25),
        warm_gain=draw.uniform(0.75, 1.15),
        ambient=draw.uniform(0.12, 0.36),
        blur=draw.uniform(0.3, 1.4),
        mix=draw.dirichlet(6 * _MIX),
        wall=_muted(draw, 0.25, 0.75),
        floor=_muted(draw, 0.2, 0.6),
    )


def _muted(draw: np.random.Generator, low: float, high: float) -> Floats:
    """A colour of walls, streets and boxes: grey, with a tint."""
    return (draw.uniform(low, high) + draw.normal(0, 0.05, 3)).clip(0.02, 0.98)


def photograph(
    draw: np.random.Generator, person: Person, camera: Camera, size: tuple[int, int]
) -> dict[str, Image.Image]:
    """One moment: the three modalities of a frame of `size` (height, width), in register with each other."""
    condition = CONDITIONS[int(draw.choice(len(CONDITIONS), p=camera.mix))]
    wide = size[1] > size[0]
    pose = Pose(
        turn=camera.turn + draw.normal(0, 0.5),
        phase=draw.uniform(0, 2 * np.pi),
        place=(0.5 + draw.normal(0, 0.06), 0.95 + camera.drop + draw.normal(0, 0.02)),
        scale=camera.scale * draw.uniform(0.92, 1.06) * (0.98 if wide else 1.0),
    )
    parts, torso = draw_parts(person, pose, size)
    person_at = parts != BACKGROUND
    shade = _shading(parts, torso, draw.uniform(-1, 1))
    tables = looks(person)
    scenes = _scenes(draw, camera, size)
    frames = {m: np.where(person_at[..., None], tables[m][parts], scenes[m]) for m in MODALITIES}
    frames["rgb"] = frames["rgb"] * np.where(person_at, shade, 1.0)[..., None]
    frames["nir"] = frames["nir"] * np.where(person_at, 0.5 + 0.5 * shade, 1.0)[..., None]
    frames["tir"] = frames["tir"] + (_heat(person, torso, size) * person_at)[..., None]
    if draw.random() < 0.3:
        _occlude(draw, frames, size)
    return {m: _exposed(draw, m, frames[m], camera, condition, size) for m in MODALITIES}


def _shading(parts: NDArray[np.uint8], torso: tuple[float, ...], light: float) -> Floats:
    """Rounded bodies: darker towards the side away from the light."""
    left, _, right, _ = torso
    across = (np.arange(parts.shape[1]) - (left + right) / 2) / max(1.0, right - left)
    shade = 1 - 0.35 * np.clip(np.abs(across - 0.35 * light) * 1.2, 0, 1)
    return np.broadcast_to(shade, parts.shape)


def _heat(person: Person, torso: tuple[float, ...], size: tuple[int, int]) -> Floats:
    """Where the torso is warmest or, with a thick layer, coolest."""
    left, top, right, bottom = torso
    across, along, strength = person.spot
    x0 = (left + right) / 2 + across * (right - left) / 2
    y0 = top + along * (bottom - top)
    return strength * _bump(size, x0, y0, 0.28 * (bottom - top))


def _scenes(draw: np.random.Generator, camera: Camera, size: tuple[int, int]) -> dict[str, Floats]:
    """Wall, floor and things in the background, the same things in all modalities."""
    height, width = size
    horizon = int(height * draw.uniform(0.5, 0.75))
    rgb = np.empty((height, width, 3))
    rgb[:horizon], rgb[horizon:] = camera.wall, camera.floor
    nir = np.empty((height, width, 1))
    nir[:horizon], nir[horizon:] = camera.wall.mean() * 0.8 + 0.1, camera.floor.mean() * 0.7 + 0.1
    tir = np.full((height, width, 1), camera.ambient)
    tir[horizon:] += 0.05
    for _ in range(int(draw.integers(2, 6))):
        tall, broad = int(height * draw.uniform(0.08, 0.5)), int(width * draw.uniform(0.08, 0.4))
        top, left = int(draw.integers(0, height)), int(draw.integers(-broad // 2, width))
        area = slice(top, top + tall), slice(max(0, left), max(0, left + broad))
        rgb[area] = _muted(draw, 0.1, 0.85)
        nir[area] = draw.uniform(0.1, 0.9)
        tir[area] = camera.ambient + draw.choice([-0.06, 0.04, 0.1, 0.45], p=[0.4, 0.35, 0.17, 0.08])
    grain = draw.normal(0, 0.025, (height, width, 1))
    return {"rgb": rgb + grain, "nir": nir + grain, "tir": tir + 0.3 * grain}


def _occlude(draw: np.random.Generator, frames: dict[str, Floats], size: tuple[int, int]) -> None:
    """Something in front: a pole, or a thing that hides the legs or a side. Cool, and grey in the dark."""
    height, width = size
    if draw.random() < 0.4:
        left = int(width * draw.uniform(0.3, 0.7))
        area = slice(0, height), slice(left, left + max(2, width // 14))
    else:
        top = int(height * draw.uniform(0.55, 0.8))
        left = int(width * draw.uniform(-0.2, 0.6))
        area = slice(top, height), slice(max(0, left), max(0, left) + int(width * draw.uniform(0.3, 0.6)))
    frames["rgb"][area] = _muted(draw, 0.1, 0.7)
    frames["nir"][area] = draw.uniform(0.15, 0.7)
    frames["tir"][area] = draw.uniform(0.1, 0.3)


def _exposed(
    draw: np.random.Generator, modality: str, frame: Floats, camera: Camera, condition: str, size: tuple[int, int]
) -> Image.Image:
    """Light, lens, noise, and eight bits."""
    tall = size[0] / 256
    if modality == "rgb":
        frame = frame * camera.cast * camera.gain
        frame, noise = _lit(draw, frame, condition, size)
        blur = camera.blur
    elif modality == "nir":
        frame = frame * camera.near_gain * (0.85 if condition == "night" else 1.0)
        if condition == "glare":
            frame = frame + 0.45 * _glow(draw, size)
        noise, blur = 0.035, camera.blur + 0.4
    else:
        cooled = 0.55 + 0.3 * (frame - 0.7) if condition == "heat" else frame - 0.5 * camera.ambient
        frame = cooled * camera.warm_gain * draw.uniform(0.85, 1.15)  # automatic gain follows the warmest thing
        noise, blur = 0.03, 2.2
    soft = _blurred(frame, blur * tall)
    soft = soft + noise * draw.standard_normal(soft.shape, dtype=np.float32)
    pixels = (soft.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(np.broadcast_to(pixels, (*size, 3)).copy())


def _lit(draw: np.random.Generator, frame: Floats, condition: str, size: tuple[int, int]) -> tuple[Floats, float]:
    if condition == "night":  # little light, warm from a lamp on one side
        lamp = 0.12 + 0.38 * _glow(draw, size)
        return frame * lamp * np.array([1.1, 0.95, 0.75]), 0.035
    if condition == "glare":
        return 0.6 * frame + 0.95 * _glow(draw, size), 0.02
    return frame * draw.uniform(0.85, 1.15), 0.02


def _glow(draw: np.random.Generator, size: tuple[int, int]) -> Floats:
    """(H, W, 1): a light near the person, 1 at its middle."""
    height, width = size
    y0, x0 = height * draw.uniform(0.1, 0.7), width * draw.uniform(0.2, 0.8)
    return _bump(size, x0, y0, 0.25 * max(height, width) * draw.uniform(0.6, 1.2))[..., None]


def _bump(size: tuple[int, int], x0: float, y0: float, spread: float) -> Floats:
    """(H, W): a Gaussian of height 1, as the product of one across and one along."""
    y, x = ((np.arange(n) - middle) / spread for n, middle in zip(size, (y0, x0), strict=True))
    return np.outer(np.exp(-0.5 * y * y), np.exp(-0.5 * x * x))


def _blurred(frame: Floats, radius: float) -> Floats:
    """Blurred in eight bits, which a camera has too."""
    pixels = (frame.clip(0, 1) * 255).round().astype(np.uint8)
    image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])
    soft = np.asarray(image.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float64) / 255
    return soft if soft.ndim == 3 else soft[..., None]
