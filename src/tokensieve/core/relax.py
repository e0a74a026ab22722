"""Differentiable keep decisions: hard in the forward, relaxed in the backward. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["existence_bias", "fold_masses", "keep_gate", "keep_probability"]


def keep_probability(score: Tensor, hard: Tensor, tau: float) -> Tensor:
    """(B, N) float32: a per-token relaxed Bernoulli around the k-th score, p = sigmoid((score - threshold) / tau).

    The threshold lies half way between the lowest score that stays and the highest that goes. It follows the scores so
    that the sum of p, the budget, stays: what all tokens want alike cancels, only what one wants more than the others
    counts. Gradients are largest at the threshold, and reach kept and dropped tokens alike. score: (B, N), finite.
    hard: (B, N) bool, the scores' top k, neither none nor all of them.
    """
    score = score.float()
    last = score.masked_fill(~hard, torch.inf).amin(dim=1, keepdim=True)
    first = score.masked_fill(hard, -torch.inf).amax(dim=1, keepdim=True)
    threshold = ((last + first) / 2).detach()
    slope = ((score.detach() - threshold) / tau).sigmoid()
    slope = slope * (1.0 - slope)
    mean = (slope * score).sum(dim=1, keepdim=True) / slope.sum(dim=1, keepdim=True).clamp_min(1e-30)
    return ((score - (threshold + mean - mean.detach())) / tau).sigmoid()


def keep_gate(score: Tensor, hard: Tensor, tau: float) -> Tensor:
    """(B, N) float32: exactly 1 where hard, 0 elsewhere, with the gradient of `keep_probability`."""
    p = keep_probability(score, hard, tau)
    return hard + (p - p.detach())


def existence_bias(exists: Tensor, eps: float = 1e-8) -> Tensor:
    """What to add to a key's logits so that it counts `exists` times, 0 to 1: the log of it.

    Added to eps, not held above it: at 0 the gradient is then the one of a weighted softmax, what the key would change
    if it were there. (log(max(exists, eps)) has none there, and a dropped token could never ask to come back.)
    """
    return (exists + eps).log()


def fold_masses(x: Tensor, size: Tensor, source: Tensor, mass: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Average `mass` (B, S) of each source token (B, S, D) into the token `into` (B, S) of x (B, K, D).

    size: (B, K) what x weighs before. Returns the means and the new sizes. A mass of 0 changes nothing, but has a
    gradient: what merging the token would do.
    """
    total = size.scatter_add(1, into, mass)
    index = into.unsqueeze(-1).expand_as(source)
    means = (x * size.unsqueeze(-1)).scatter_add(1, index, source * mass.unsqueeze(-1)) / total.unsqueeze(-1)
    return means.to(x.dtype), total
