"""k-reciprocal re-ranking (Zhong et al., 1701.08398) on sparse neighbourhoods, blocked.

Two images are close when they have each other's neighbours in common. Only the nearest k1 + 1 of each image and
the few weights between them are held, never the (Q + G)^2 matrix, so that a large gallery fits in memory.

May import: numpy, scipy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import sparse

from tokensieve.errors import OptionError
from tokensieve.tasks.reid.distance import Floats, Ints, distance_blocks, normalised

__all__ = ["reranked_blocks"]


def reranked_blocks(
    queries: Floats, gallery: Floats, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Iterator[tuple[int, Floats]]:
    """(first row, (rows, G) distances): Jaccard * (1 - weight) + scaled original * weight.

    The original is the squared Euclidean distance of normalised features, divided by the largest of its row over
    queries and gallery. k1: neighbours that can be reciprocal. k2: neighbours whose weights are averaged.
    """
    if k1 < 1 or k2 < 1 or not 0 <= weight <= 1:
        raise OptionError(f"re-ranking with k1={k1}, k2={k2}, weight={weight}: 1 or more, and a weight in [0, 1]")
    images = normalised(np.concatenate([queries, gallery]))
    nearest, furthest = _neighbours(images, max(k1 + 1, k2))
    weights = _weights(images, nearest, furthest, k1)
    if k2 > 1:
        weights = _averaged(weights, nearest[:, :k2])
    standing_for = weights[len(queries) :].tocsc()  # column: an image; its rows: gallery images that weigh it
    for start, block in distance_blocks(queries, gallery):
        block /= furthest[start : start + len(block), None]
        for row, distances in enumerate(block):
            shared = _shared(weights, start + row, standing_for)
            distances *= weight
            distances += (1 - weight) * (1 - shared / (2 - shared))
        yield start, block


def _neighbours(images: Floats, count: int) -> tuple[Ints, Floats]:
    """For each image the indices (N, K) of the nearest, itself among them, and its largest distance (N,)."""
    total = len(images)
    count = min(count, total)
    nearest = np.empty((total, count), dtype=np.int64)
    furthest = np.empty(total, dtype=np.float32)
    for start, block in distance_blocks(images, images):
        rows = slice(start, start + len(block))
        furthest[rows] = np.maximum(block.max(axis=1), np.finfo(np.float32).tiny)
        some = np.argpartition(block, count - 1, axis=1)[:, :count]
        order = np.argsort(np.take_along_axis(block, some, axis=1), axis=1, kind="stable")
        nearest[rows] = np.take_along_axis(some, order, axis=1)
    return nearest, furthest


def _reciprocal(nearest: Ints, image: int, k: int) -> Ints:
    """Of the k + 1 nearest of an image, those that have it among their own k + 1."""
    forward = nearest[image, : k + 1]
    return forward[(nearest[forward, : k + 1] == image).any(axis=1)]


def _weights(images: Floats, nearest: Ints, furthest: Floats, k1: int) -> sparse.csr_matrix:
    """(N, N) sparse: how much each expanded reciprocal neighbour stands for an image; rows sum to 1.

    A neighbour's own reciprocal neighbours (of half k1) join where more than two thirds of them are neighbours already.
    """
    half = round(k1 / 2)
    halves = [_reciprocal(nearest, image, half) for image in range(len(images))]
    columns: list[Ints] = []
    values: list[Floats] = []
    for image in range(len(images)):
        own = _reciprocal(nearest, image, k1)
        joined = [halves[j] for j in own if np.isin(halves[j], own).sum() > 2 / 3 * len(halves[j])]
        index = np.unique(np.concatenate([own, *joined]))
        distances = np.square(images[index] - images[image]).sum(axis=1)
        close = np.exp(-distances / furthest[image])
        columns.append(index)
        values.append(close / close.sum())
    ends = np.cumsum([0, *map(len, columns)])
    shape = (len(images), len(images))
    return sparse.csr_matrix((np.concatenate(values), np.concatenate(columns), ends), shape=shape)


def _averaged(weights: sparse.csr_matrix, neighbours: Ints) -> sparse.csr_matrix:
    """Each row becomes the mean of its k2 nearest images' rows."""
    total, k2 = neighbours.shape
    ends = np.arange(0, total * k2 + 1, k2)
    share = np.full(total * k2, 1 / k2, dtype=np.float32)
    return sparse.csr_matrix((share, neighbours.ravel(), ends), shape=(total, total)) @ weights


def _shared(weights: sparse.csr_matrix, image: int, standing_for: sparse.csc_matrix) -> Floats:
    """(G,): the weight that a query has in common with each gallery image, the sum of the smaller of both."""
    shared = np.zeros(standing_for.shape[0], dtype=np.float32)
    own = slice(weights.indptr[image], weights.indptr[image + 1])
    for column, value in zip(weights.indices[own], weights.data[own], strict=True):
        theirs = slice(standing_for.indptr[column], standing_for.indptr[column + 1])
        shared[standing_for.indices[theirs]] += np.minimum(value, standing_for.data[theirs])
    return shared
