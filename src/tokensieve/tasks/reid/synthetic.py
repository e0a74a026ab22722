"""A seeded set of synthetic people in the layout of a real set.

    write_synthetic(Path("data/people"), SyntheticConfig(layout="rgbnt201", identities=60))

The same configuration gives the same bytes. Each picture is drawn from (seed, person, camera, number) alone: asking for
more cameras or more pictures adds to a set and changes none of it (more people change the wardrobes).

May import: numpy, PIL; people and scenery beside it.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tokensieve.errors import OptionError, RecordError
from tokensieve.tasks.reid.layouts import layout_named
from tokensieve.tasks.reid.people import MODALITIES, make_person, make_wardrobes
from tokensieve.tasks.reid.scenery import make_camera, photograph

__all__ = ["SyntheticConfig", "write_synthetic"]

_FOLDERS = {
    "rgbnt201": dict(zip(MODALITIES, ("RGB", "NI", "TI"), strict=True)),
    "msvr310": dict(zip(MODALITIES, ("vis", "ni", "th"), strict=True)),
    "folder": {modality: modality for modality in MODALITIES},
}
_WARDROBES, _PERSON, _CAMERA, _PICTURE = range(4)  # what is drawn, so that no two draw the same numbers


@dataclass(frozen=True)
class SyntheticConfig:
    """images: of each identity by each camera. test_share: of the identities, the rest are for training.

    modalities: all three but for the plain folder, which may have some of them.
    """

    layout: str = "rgbnt201"
    identities: int = 60
    cameras: int = 4
    images: int = 4
    seed: int = 0
    test_share: float = 0.4
    modalities: tuple[str, ...] = MODALITIES

    def __post_init__(self) -> None:
        layout_named(self.layout)
        if self.identities < 4:
            raise OptionError(f"--identities {self.identities}: at least 4, two for training and two for testing")
        if not 2 <= self.cameras <= 99:
            raise OptionError(f"--cameras {self.cameras}: 2 to 99, since matches come from other cameras")
        if not 2 <= self.images <= 999:
            raise OptionError(f"--images {self.images}: 2 to 999 of each identity by each camera")
        if self.seed < 0:
            raise OptionError(f"--seed {self.seed}: 0 or more")
        if not 0 < self.test_share < 1:
            raise OptionError(f"--test_share {self.test_share}: between 0 and 1, both excluded")
        if not self.modalities or set(self.modalities) - set(MODALITIES):
            raise OptionError(f"--modalities {' '.join(self.modalities)}: some of {', '.join(MODALITIES)}")
        if len(set(self.modalities)) < len(self.modalities):
            raise OptionError(f"--modalities {' '.join(self.modalities)}: give each of them once")
        if self.layout != "folder" and set(self.modalities) != set(MODALITIES):
            raise OptionError(f"layout {self.layout} has all of {', '.join(MODALITIES)}; --modalities is for folder")

    @property
    def test_identities(self) -> int:
        return min(max(2, round(self.test_share * self.identities)), self.identities - 2)

    @property
    def pictures(self) -> int:
        return self.identities * self.cameras * self.images


def write_synthetic(output: Path, config: SyntheticConfig, tick: Callable[[], None] = lambda: None) -> None:
    """Write the set whole or not at all. A folder that is there and not empty is an error. tick: after each picture."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RecordError(f"cannot write {output}: it is there already and not an empty folder")
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        for path, data in _files(config, tick):
            place = part / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        part.replace(output)
    except OSError as error:
        raise RecordError(f"cannot write {output}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _files(config: SyntheticConfig, tick: Callable[[], None]) -> Iterator[tuple[str, bytes]]:
    """(path inside the set, bytes) of every file."""
    size = layout_named(config.layout).size
    wardrobes = make_wardrobes(_rng(config, _WARDROBES), config.identities)
    cameras = [make_camera(_rng(config, _CAMERA, number)) for number in range(config.cameras)]
    for number in range(config.identities):
        person = make_person(_rng(config, _PERSON, number), wardrobes)
        train = number < config.identities - config.test_identities
        for c, camera in enumerate(cameras):
            for k in range(config.images):
                frames = photograph(_rng(config, _PICTURE, number, c, k), person, camera, size)
                yield from _named(config, frames, "train" if train else "query" if k == 0 else "gallery", number, c, k)
                tick()


def _named(
    config: SyntheticConfig, frames: dict[str, Image.Image], split: str, number: int, camera: int, k: int
) -> Iterator[tuple[str, bytes]]:
    """The files of one moment. Cameras are scenes in msvr310, and its views turn with the pictures."""
    folder = layout_named(config.layout).splits[split]
    pid = number + 1
    if config.layout == "rgbnt100":
        yield f"rgbir/{folder}/{pid:04d}_c{camera + 1}_{k:04d}.jpg", _jpeg(_strip([frames[m] for m in MODALITIES]))
        return
    for modality in config.modalities:
        place = _FOLDERS[config.layout][modality]
        if config.layout == "rgbnt201":
            yield f"{folder}/{place}/{pid:06d}_cam{camera + 1}_0_{k:02d}.jpg", _jpeg(frames[modality])
        elif config.layout == "msvr310":
            name = f"{pid:04d}_s{camera + 1:03d}_v{(camera + k) % 8}_{k:03d}.jpg"
            yield f"{folder}/{pid:04d}/{place}/{name}", _jpeg(frames[modality])
        else:
            yield f"{folder}/{place}/{pid:04d}_c{camera}_{k:03d}.jpg", _jpeg(frames[modality])


def _strip(frames: list[Image.Image]) -> Image.Image:
    width, height = frames[0].size
    strip = Image.new("RGB", (width * len(frames), height))
    for k, frame in enumerate(frames):
        strip.paste(frame, (k * width, 0))
    return strip


def _jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


def _rng(config: SyntheticConfig, *key: int) -> np.random.Generator:
    return np.random.default_rng((config.seed, *key))
