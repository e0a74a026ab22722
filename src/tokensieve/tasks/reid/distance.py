"""Distances of L2-normalised features, block by block. May import: numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Floats", "Ints", "distance_blocks", "normalised"]

BLOCK_BYTES = 64 << 20  # of one block of distances

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def normalised(features: ArrayLike) -> Floats:
    """(N, D) with rows of length 1; zero rows stay zero. Always a copy."""
    found = np.array(features, dtype=np.float32)
    found /= _divisors(_lengths(found))[:, None]
    return found


def distance_blocks(queries: Floats, gallery: Floats) -> Iterator[tuple[int, Floats]]:
    """(first row, (rows, G) squared Euclidean distances of the normalised features), all queries in order.

    The gallery is not copied: its lengths are divided out of the products. A block takes about 64 MiB and is the
    caller's to change. Squared distances order as cosine similarities do, the other way round.
    """
    lengths_q, lengths_g = _lengths(queries), _lengths(gallery)
    squares_g = (lengths_g > 0).astype(np.float32)  # a zero row is at distance 1 from unit rows, 0 from zero rows
    divisors = _divisors(lengths_g)
    rows = max(1, BLOCK_BYTES // (4 * max(1, len(gallery))))
    for start in range(0, len(queries), rows):
        block = normalised(queries[start : start + rows]) @ gallery.T
        block /= divisors
        block *= -2
        block += (lengths_q[start : start + rows, None] > 0).astype(np.float32)
        block += squares_g
        yield start, np.maximum(block, 0, out=block)


def _lengths(features: Floats) -> Floats:
    return np.sqrt(np.einsum("ij,ij->i", features, features))


def _divisors(lengths: Floats) -> Floats:
    return np.where(lengths > 0, lengths, np.float32(1))
