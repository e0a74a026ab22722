"""Ranking by distance, and what it is worth: mAP, CMC, mINP. Blocked, so that a gallery of 100,000 fits.

    metrics = evaluate(q, pids_q, cams_q, g, pids_g, cams_g)           # camera filter
    metrics = evaluate(q, pids_q, scenes_q, g, pids_g, scenes_g)       # scene filter: pass scenes for cameras

A gallery image of the query's own identity *and* camera is dropped; the same camera's images of others stay.

May import: numpy; distances and re-ranking beside it; never torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokensieve.errors import DataError
from tokensieve.tasks.reid.distance import Floats, Ints, distance_blocks
from tokensieve.tasks.reid.rerank import reranked_blocks

__all__ = ["Metrics", "Ranked", "Ranking", "evaluate", "mean_and_deviation", "rank"]


@dataclass(frozen=True)
class Metrics:
    """Shares of 1. queries: those that count; unmatched: those without a match in the gallery, which do not."""

    map: float
    cmc1: float
    cmc5: float
    cmc10: float
    minp: float
    queries: int
    unmatched: int = 0

    def named(self) -> dict[str, float]:
        """As reports name them."""
        return {"mAP": self.map, "R1": self.cmc1, "R5": self.cmc5, "R10": self.cmc10, "mINP": self.minp}


@dataclass(frozen=True)
class Ranked:
    """The best of the gallery for one query: indices, distances and whether each is of the query's identity."""

    gallery: list[int]
    distances: list[float]
    right: list[bool]


@dataclass(frozen=True)
class Ranking:
    """What each query got. precision, first, inp: (Q,), NaN for a query without a match. lists: one for each query.

    precision: average precision. first: rank of the first match. inp: matches over the rank of the hardest.
    """

    precision: NDArray[np.float64]
    first: NDArray[np.float64]
    inp: NDArray[np.float64]
    lists: list[Ranked]

    @property
    def metrics(self) -> Metrics:
        """Means over the queries that have a match. None with one is an error."""
        known = ~np.isnan(self.precision)
        if not known.any():
            raise DataError("no query has a match in the gallery from another camera or scene: nothing to evaluate")
        r1, r5, r10 = (float((self.first[known] <= k).mean()) for k in (1, 5, 10))
        ap, inp = float(self.precision[known].mean()), float(self.inp[known].mean())
        return Metrics(ap, r1, r5, r10, inp, int(known.sum()), int((~known).sum()))


def evaluate(
    features_q: ArrayLike,
    pids_q: ArrayLike,
    cams_q: ArrayLike,
    features_g: ArrayLike,
    pids_g: ArrayLike,
    cams_g: ArrayLike,
    **options: Any,
) -> Metrics:
    """Rank the gallery for each query by the distance of L2-normalised features, and score it.

    features: (Q, D) and (G, D), any length; zero vectors stay zero. pids, cams: (Q,) and (G,). Give scenes in place of
    cameras for sets that filter by scene. Equal distances keep the gallery's order. options: those of `rank`.
    """
    return rank(features_q, pids_q, cams_q, features_g, pids_g, cams_g, **options).metrics


def rank(
    features_q: ArrayLike,
    pids_q: ArrayLike,
    cams_q: ArrayLike,
    features_g: ArrayLike,
    pids_g: ArrayLike,
    cams_g: ArrayLike,
    *,
    top: int = 0,
    rerank: bool = False,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
) -> Ranking:
    """As `evaluate`, query by query. top: how many of the gallery to list. rerank: by k-reciprocal neighbours, with k1,
    k2 and `weight` of the original distance."""
    sides = {"features_q": features_q, "pids_q": pids_q, "cams_q": cams_q}
    sides |= {"features_g": features_g, "pids_g": pids_g, "cams_g": cams_g}
    found = _checked(sides)
    queries, gallery = found["features_q"], found["features_g"]
    if rerank:
        blocks = reranked_blocks(queries, gallery, k1=k1, k2=k2, weight=weight)
    else:
        blocks = distance_blocks(queries, gallery)
    scores, lists = [], []
    for order, distances, hits in _rankings(blocks, **{k: v for k, v in found.items() if "features" not in k}):
        scores.append(_score(hits))
        best = order[:top]
        lists.append(Ranked(best.tolist(), distances[best].tolist(), hits[:top].tolist()))
    precision, first, inp = np.array(scores, dtype=np.float64).T
    return Ranking(precision, first, inp, lists)


def _rankings(
    blocks: Iterable[tuple[int, Floats]], pids_q: Ints, cams_q: Ints, pids_g: Ints, cams_g: Ints
) -> Iterator[tuple[Ints, Floats, NDArray[np.bool_]]]:
    """For each query: the gallery by rising distance, all distances, and the hits in that order."""
    for start, block in blocks:
        for query, distances in enumerate(block, start):
            kept = np.flatnonzero((pids_g != pids_q[query]) | (cams_g != cams_q[query]))
            order = kept[np.argsort(distances[kept], kind="stable")]
            yield order, distances, pids_g[order] == pids_q[query]


def _score(hits: NDArray[np.bool_]) -> tuple[float, float, float]:
    """(average precision, rank of the first hit, hits over the rank of the hardest); NaN without a hit."""
    ranks = np.flatnonzero(hits) + 1
    if not len(ranks):
        return math.nan, math.nan, math.nan
    found = np.arange(1, len(ranks) + 1)
    return float((found / ranks).mean()), float(ranks[0]), float(len(ranks) / ranks[-1])


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as arrays that fit each other."""
    found = dict(given)
    for side, word in (("q", "query"), ("g", "gallery")):
        features = np.asarray(given[f"features_{side}"], dtype=np.float32)
        if features.ndim != 2 or not len(features):
            raise DataError(f"{word} features of shape {features.shape}: (images, width) is needed, at least one image")
        if not np.isfinite(features).all():
            bad = int(np.flatnonzero(~np.isfinite(features).all(axis=1))[0])
            raise DataError(f"{word} features of image {bad} are not finite")
        found[f"features_{side}"] = features
        for name in ("pids", "cams"):
            labels = np.asarray(given[f"{name}_{side}"], dtype=np.int64)
            if labels.shape != (len(features),):
                raise DataError(f"{len(features)} {word} features, but {name} of shape {labels.shape}")
            found[f"{name}_{side}"] = labels
    widths = found["features_q"].shape[1], found["features_g"].shape[1]
    if widths[0] != widths[1]:
        raise DataError(f"query features are {widths[0]} wide, gallery features {widths[1]}")
    return found


def mean_and_deviation(runs: Sequence[Metrics]) -> tuple[dict[str, float], dict[str, float]]:
    """Over seeds: the mean of each measure by name, and its sample deviation (n - 1); NaN for a single run."""
    if not runs:
        raise DataError("no runs to average")
    values = {name: np.array([run.named()[name] for run in runs]) for name in runs[0].named()}
    deviations = {name: float(v.std(ddof=1)) if len(v) > 1 else math.nan for name, v in values.items()}
    return {name: float(v.mean()) for name, v in values.items()}, deviations
