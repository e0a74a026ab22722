"""Which token is averaged into which: pure functions. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core.reduction import Reduction, complement, take_tokens
from tokensieve.core.score import cosine

__all__ = ["bipartite", "fold", "slot_of"]


def slot_of(keep: Tensor, index: Tensor, n: int) -> Tensor:
    """The slots 0..K-1 that the tokens `index` (B, R), all of them in keep (B, K), have there; keep is ascending."""
    if not torch.compiler.is_exporting():  # ONNX has no such operator
        return torch.searchsorted(keep, index.contiguous())
    slots = torch.zeros(keep.shape[0], n, dtype=torch.int64, device=keep.device)
    slots = slots.scatter(1, keep, torch.arange(keep.shape[1], device=keep.device).expand_as(keep))
    return slots.gather(1, index)


def fold(keep: Tensor, metric: Tensor, scores: Tensor | None = None) -> Reduction:
    """Each dropped token goes into its nearest kept one by cosine of `metric` (B, N, d). keep: (B, K), ascending."""
    drop = complement(keep, metric.shape[1])
    into = cosine(take_tokens(metric, drop), take_tokens(metric, keep)).argmax(dim=-1)
    return Reduction(keep=keep, drop=drop, into=into, scores=scores)


def bipartite(like: Tensor, source: Tensor, target: Tensor, n: int, r: int) -> Reduction:
    """The r of `source` (B, A) that are most like one of `target` (B, T) are averaged into it; all other of n stay.

    like: (B, A, T) how alike they are; source and target are disjoint index sets. Scores: minus the similarity to the
    best target, +1 for tokens that were never candidates, so that higher means rather kept.
    """
    best = like.max(dim=-1)
    order = best.values.topk(r, dim=1).indices
    drop = source.gather(1, order)
    goal = target.gather(1, best.indices.gather(1, order))
    keep = complement(drop, n)
    scores = like.new_ones(like.shape[0], n).scatter(1, source, -best.values)
    return Reduction(keep=keep, drop=drop, into=slot_of(keep, goal, n), scores=scores)
