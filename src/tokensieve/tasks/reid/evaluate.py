"""Ranking by distance, and what it is worth: mAP, CMC, mINP. Blocked, so that a gallery of 100,000 fits.

    metrics = evaluate(q, pids_q, cams_q, g, pids_g, cams_g)           # camera filter
    metrics = evaluate(q, pids_q, scenes_q, g, pids_g, scenes_g)       # scene filter: pass scenes for cameras

A gallery image of the query's own identity *and* camera is dropped; the same camera's images of others stay.

May import: numpy; distances and re-ranking beside it; never torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tokensieve.errors import DataError
from tokensieve.tasks.reid.distance import Floats, Ints, distance_blocks
from tokensieve.tasks.reid.rerank import reranked_blocks

__all__ = ["Metrics", "Ranked", "evaluate", "mean_and_deviation", "ranked_lists"]


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

    query: int
    gallery: list[int]
    distances: list[float]
    right: list[bool]
    average_precision: float


def evaluate(
    features_q: ArrayLike,
    pids_q: ArrayLike,
    cams_q: ArrayLike,
    features_g: ArrayLike,
    pids_g: ArrayLike,
    cams_g: ArrayLike,
    *,
    rerank: bool = False,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
) -> Metrics:
    """Rank the gallery for each query by the distance of L2-normalised features.

    features: (Q, D) and (G, D), any length; zero vectors stay zero. pids, cams: (Q,) and (G,). Give scenes in place of
    cameras for sets that filter by scene. Equal distances keep the gallery's order. rerank: by k-reciprocal neighbours
    with k1, k2 and `weight` of the original distance.
    """
    scores = [_score(hits) for _, _, _, hits in _rankings(**_checked(locals()))]
    known = np.array([score for score in scores if score is not None], dtype=np.float64)
    if not len(known):
        raise DataError("no query has a match in the gallery from another camera or scene: nothing to evaluate")
    ap, first, inp = known.T
    r1, r5, r10 = (float((first <= k).mean()) for k in (1, 5, 10))
    return Metrics(float(ap.mean()), r1, r5, r10, float(inp.mean()), len(known), len(scores) - len(known))


def ranked_lists(
    features_q: ArrayLike,
    pids_q: ArrayLike,
    cams_q: ArrayLike,
    features_g: ArrayLike,
    pids_g: ArrayLike,
    cams_g: ArrayLike,
    *,
    queries: Sequence[int],
    top: int = 10,
    rerank: bool = False,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
) -> list[Ranked]:
    """The `top` best of the gallery for some of the queries, own camera's images of the identity left out."""
    wanted, lists = set(queries), {}
    options = {name: value for name, value in locals().items() if name not in ("queries", "top", "wanted", "lists")}
    for query, order, distances, hits in _rankings(**_checked(options)):
        if query in wanted:
            score = _score(hits)
            ap = float("nan") if score is None else score[0]
            best = order[:top]
            lists[query] = Ranked(query, best.tolist(), distances[best].tolist(), hits[:top].tolist(), ap)
    return [lists[query] for query in queries]


def _rankings(
    features_q: Floats, pids_q: Ints, cams_q: Ints, features_g: Floats, pids_g: Ints, cams_g: Ints, **rerank: Any
) -> Iterator[tuple[int, Ints, Floats, NDArray[np.bool_]]]:
    """For each query: its number, the gallery by rising distance, all distances, and the hits in that order."""
    if rerank.pop("rerank"):
        blocks = reranked_blocks(features_q, features_g, **rerank)
    else:
        blocks = distance_blocks(features_q, features_g)
    for start, block in blocks:
        for row, distances in enumerate(block):
            query = start + row
            kept = np.flatnonzero((pids_g != pids_q[query]) | (cams_g != cams_q[query]))
            order = kept[np.argsort(distances[kept], kind="stable")]
            yield query, order, distances, pids_g[order] == pids_q[query]


def _score(hits: NDArray[np.bool_]) -> tuple[float, int, float] | None:
    """(average precision, rank of the first hit, inverse negative penalty); None without a hit.

    The penalty: hits over the rank of the hardest one.
    """
    ranks = np.flatnonzero(hits) + 1
    if not len(ranks):
        return None
    found = np.arange(1, len(ranks) + 1)
    return float((found / ranks).mean()), int(ranks[0]), float(len(ranks) / ranks[-1])


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
    """Over seeds: the mean of each measure, and its sample deviation (n - 1); NaN for a single run."""
    if not runs:
        raise DataError("no runs to average")
    names = [name for name in asdict(runs[0]) if name not in ("queries", "unmatched")]
    values = {name: np.array([getattr(run, name) for run in runs]) for name in names}
    deviations = {name: float(v.std(ddof=1)) if len(v) > 1 else float("nan") for name, v in values.items()}
    return {name: float(v.mean()) for name, v in values.items()}, deviations
