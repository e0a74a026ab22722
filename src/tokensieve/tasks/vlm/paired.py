"""How sure a difference between two models on the same questions is. Imports numpy alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

__all__ = ["paired_interval"]

_Z = 1.959964


def paired_interval(
    scores: Sequence[float], others: Sequence[float], images: Sequence[Hashable]
) -> tuple[float, float, float]:
    """Mean of scores - others over the questions, and the ends of its 95 % interval.

    Questions about one image are not independent, so images are what is drawn: the interval is that of a ratio of sums
    over images (normal approximation, 1 / (n - 1)). With one image nothing is known: -inf to inf.
    """
    difference = np.asarray(scores, dtype=np.float64) - np.asarray(others, dtype=np.float64)
    mean = float(difference.mean())
    _, which = np.unique(np.asarray([hash(image) for image in images]), return_inverse=True)
    count = int(which.max()) + 1
    if count < 2:
        return mean, -np.inf, np.inf
    rest = np.bincount(which, weights=difference - mean)  # sum over an image's questions
    half = _Z * float(np.sqrt((rest**2).sum() * count / (count - 1))) / len(difference)
    return mean, mean - half, mean + half
