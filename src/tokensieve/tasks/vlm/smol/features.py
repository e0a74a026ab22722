"""What the vision tower says of many pictures, computed once and kept on disk; a run that was killed goes on.

Imports torch, photos and pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensieve.errors import DataError
from tokensieve.records import write_whole
from tokensieve.tasks.vlm.smol.photos import SPLITS, load_photos
from tokensieve.tasks.vlm.smol.pictures import PATCHES, Picture, make_picture
from tokensieve.zoo.vit_s14 import MEAN, STD, WIDTH

__all__ = [
    "LAYERS", "TOKENS", "Features", "cached_features", "draw_picture", "image_tensor", "layout_of", "tower_features",
]  # fmt: skip

TOKENS = PATCHES * PATCHES
_CHUNK = 32
LAYERS = (8, 12)  # whose outputs the projector gets side by side; transformers counts the embeddings as 0
_MIX = ("photo", "mosaic", "collage", "mosaic", "photo", "mosaic", "collage", "photo", "mosaic", "collage")


def layout_of(number: int, combinations: str = "seen") -> str:
    """The layout of the n-th picture."""
    mix = _MIX if combinations != "unseen" else tuple(layout for layout in _MIX if layout != "photo")
    return mix[number % len(mix)]


def draw_picture(split: str, seed: int, number: int, combinations: str = "seen") -> Picture:
    """The n-th picture of a split; the same arguments, the same picture."""
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    return make_picture(load_photos(split), rng, layout_of(number, combinations), combinations)


def image_tensor(images: np.ndarray) -> Tensor:
    """(B, 224, 224, 3) uint8 -> (B, 3, 224, 224) float32, normalised as the processor does it."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(255)
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


@torch.no_grad()
def tower_features(tower: Any, pixels: Tensor) -> Tensor:
    """(B, 3, 224, 224) -> (B, 256, 768): what LLaVA's projector gets of each patch."""
    states = tower(pixels, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][:, 1:] for layer in LAYERS], -1)


class Features:
    """Features of `count` pictures of a split. features: (count, 256, 768) float16 on disk, read as needed."""

    def __init__(self, folder: Path, split: str, seed: int, count: int) -> None:
        self.split, self.seed, self.count = split, seed, count
        self.path, self._about = folder / f"{split}.npy", folder / f"{split}.json"
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"split": split, "seed": seed, "count": count, "layers": list(LAYERS), "mix": list(_MIX)}
        known = json.loads(self._about.read_text()) if self._about.is_file() else None
        if known is not None and known["facts"] != facts:
            raise DataError(f"{folder} has the features of other pictures ({known['facts']}): give another folder")
        self.done = int(known["done"]) if known else 0
        shape = (count, TOKENS, len(LAYERS) * WIDTH)
        mode: Any = "r+" if known else "w+"
        self._facts = facts
        self.table = np.lib.format.open_memmap(self.path, mode, np.float16, shape)

    def picture(self, number: int) -> Picture:
        return draw_picture(self.split, self.seed, number)

    def get(self, numbers: list[int]) -> Tensor:
        """(len(numbers), 256, 768) float32."""
        return torch.from_numpy(self.table[numbers].astype(np.float32))

    def put(self, start: int, values: Tensor) -> None:
        """Write some, and only then say that they are there."""
        self.table[start : start + len(values)] = values.to(torch.float16).numpy()
        self.table.flush()
        self.done = start + len(values)
        write_whole(self._about, json.dumps({"facts": self._facts, "done": self.done}).encode())


def cached_features(
    folder: Path, split: str, seed: int, count: int, tower: Any, tick: Callable[[int], None] = lambda done: None
) -> Features:
    """Features of the first `count` pictures, those computed that are not there yet.

    On a CPU in bfloat16 where torch says that is quick; the tower's own float32 differs by about 1 %.
    """
    found = Features(folder, split, seed, count)
    for start in range(found.done, count, _CHUNK):
        numbers = range(start, min(start + _CHUNK, count))
        pixels = image_tensor(np.stack([found.picture(number).pixels for number in numbers]))
        with torch.autocast("cpu", torch.bfloat16):
            values = torch.cat([tower_features(tower, part) for part in pixels.split(4)])
        found.put(start, values)
        tick(found.done)
    return found
