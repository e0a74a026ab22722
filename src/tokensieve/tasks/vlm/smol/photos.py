"""The photos that pictures are put together from: CIFAR-10 and fruit, with no photo in two splits. Imports zoo."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

from tokensieve.errors import OptionError
from tokensieve.zoo.cifar10 import load_cifar10
from tokensieve.zoo.groceries import load_groceries

__all__ = ["CLASSES", "PLURALS", "SPLITS", "Photos", "load_photos"]

SPLITS = ("train", "val", "test")
CLASSES = (
    "airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    "apple", "melon", "watermelon", "orange", "pear", "satsuma",
)  # fmt: skip
PLURALS = (
    "airplanes", "cars", "birds", "cats", "deer", "dogs", "frogs", "horses", "ships", "trucks",
    "apples", "melons", "watermelons", "oranges", "pears", "satsumas",
)  # fmt: skip
_COARSE = (10, 10, 10, 10, 10, 11, 11, 11, 12, 13, 14, 14, 14, 15)  # zoo.groceries.FRUITS -> CLASSES
_VALIDATION = 2000  # the last of CIFAR-10's training photos


class Photos:
    """The photos of one split, by class."""

    def __init__(
        self, small: np.ndarray, small_labels: np.ndarray, large: np.ndarray, large_labels: np.ndarray
    ) -> None:
        """small: (N, 32, 32, 3), labels below 10. large: (M, S, S, 3), labels from 10. All uint8 and int64."""
        self._small, self._large = small, large
        self._of = [
            np.flatnonzero((small_labels if label < 10 else large_labels) == label) for label in range(len(CLASSES))
        ]

    def count(self, label: int) -> int:
        """Photos of a class."""
        return len(self._of[label])

    def draw(self, rng: np.random.Generator, label: int, size: int) -> np.ndarray:
        """(size, size, 3) uint8: some photo of a class, in half of the cases mirrored."""
        found = self._of[label]
        photo = (self._small if label < 10 else self._large)[found[rng.integers(len(found))]]
        if rng.random() < 0.5:
            photo = photo[:, ::-1]
        scaled = Image.fromarray(np.ascontiguousarray(photo)).resize((size, size), Image.Resampling.BICUBIC)
        return np.array(scaled)


@cache
def load_photos(split: str) -> Photos:
    """train: 48,000 and 675 photos; val: 2,000 and 57; test: 10,000 and 661."""
    if split not in SPLITS:
        raise OptionError(f"split {split!r}: one of {', '.join(SPLITS)}")
    small, labels = load_cifar10("test" if split == "test" else "train")
    if split != "test":
        part = slice(-_VALIDATION, None) if split == "val" else slice(None, -_VALIDATION)
        small, labels = small[part], labels[part]
    large, fine = load_groceries(split)
    return Photos(small, labels, large, np.asarray(_COARSE)[fine])
