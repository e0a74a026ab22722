"""LLaVA-PruMerge: Adaptive Token Reduction for Large Multimodal Models (arXiv 2403.15388). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.reduction import Reduction, WeightedReduction, cluster_sums, complement, take_tokens
from tokensieve.core.score import cosine
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method, check

__all__ = ["PruMerge"]


@dataclass(kw_only=True)
class PruMerge(Method):
    """Keep the tokens whose CLS attention is an outlier, and merge every other one into the kept one nearest by key.

    Outliers: above the third quartile by 1.5 interquartile ranges. A merged token is the mean of its cluster, weighted
    by attention. The budget is exact, so that a batch stays rectangular: too many outliers, the highest stay; too few,
    fill="uniform" (the paper's PruMerge+) adds evenly spread tokens, fill="attention" the next by attention.
    """

    fill: str = "uniform"

    stages: ClassVar[tuple[str, ...]] = ("projector",)
    uses_positions: ClassVar[bool] = True
    one_cut: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.fill in ("uniform", "attention"), "fill", self.fill, 'give "uniform" or "attention"')

    def score(self, view: TokenView) -> Tensor:
        """(B, N): outliers, by attention, above 1; the others under 1 in the order they are filled in."""
        attention = view.importance().float()
        low, high = (attention.quantile(q, dim=1, keepdim=True) for q in (0.25, 0.75))
        outlier = attention > high + 1.5 * (high - low)
        top_value = attention.amax(dim=1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
        if self.fill == "attention":
            return attention / top_value + outlier
        spread = _spread(view.n, attention.device).expand(view.batch, -1)
        return torch.where(outlier, 1.0 + attention / top_value, spread)

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        scores = self.score(view)
        index = top(scores, keep)
        if keep == view.n:
            return Reduction(keep=index, scores=scores)
        drop = complement(index, view.n)
        goal = cosine(take_tokens(view.keys, drop), take_tokens(view.keys, index)).argmax(dim=-1)
        attention = view.importance().float().clamp_min(torch.finfo(torch.float32).tiny)
        own, other = attention.gather(1, index), attention.gather(1, drop)
        total = own + cluster_sums(other, goal, keep)
        weight = other / total.gather(1, goal)
        return WeightedReduction(keep=index, drop=drop, goal=goal, weight=weight, own=own / total, scores=scores)


def _spread(n: int, device: torch.device) -> Tensor:
    """(n,) in [0, 1), distinct: the m highest are evenly spread over the positions, for every m.

    The binary digits of the position's number read backwards (van der Corput): halves first, then quarters.
    """
    number = torch.arange(n, device=device)
    out = torch.zeros(n, device=device)
    for bit in range(max(1, (n - 1).bit_length())):
        out = out + ((number >> bit) & 1) * 0.5 ** (bit + 1)
    return (1.0 - out) / 2.0
