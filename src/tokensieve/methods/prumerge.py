"""LLaVA-PruMerge: Adaptive Token Reduction for Large Multimodal Models (arXiv 2403.15388). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core.reduction import (
    MixedReduction,
    Reduction,
    WeightedReduction,
    cluster_sums,
    complement,
    take_tokens,
)
from tokensieve.core.score import cosine
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method, check

__all__ = ["PruMerge"]

_NEAREST = 32  # tokens that the released code adds to each one that is kept


@dataclass(kw_only=True)
class PruMerge(Method):
    """Keep the tokens whose CLS attention is an outlier, and merge the others into them by keys.

    Outliers: above the third quartile by 1.5 interquartile ranges.

    merge="mean", the default, is gentler than the released code: each dropped token goes into the kept one nearest by
    key (head mean), a cluster is its mean weighted by attention, all of the layer that the features come from.
    merge="released": attention and keys of the last layer, over its full width as if it had one head; a kept token plus
    the sum of its 32 nearest, kept or not, each times its attention, not divided, so that clusters overlap; and one
    more token, the same sum of all that are not kept, at the place of the best of them and counted in the budget.
    Where it was measured that is far worse (71 against 87 % of a LLaVA's answers, benchmarks/vlm.md).

    fill: where there are fewer outliers than the budget, "uniform" (the paper's PruMerge+) adds evenly spread tokens,
    "attention" the next by attention. Where there are more, the highest stay.

    Departs: the count is exact, so that a batch stays rectangular; in the released code it is that of the outliers.
    Departs: tokens keep the order of the image; in the released code they are sorted by attention.
    """

    summary: ClassVar[str] = "CLS-attention outliers, the rest merged into them by keys"
    paper: ClassVar[str] = "2403.15388"
    fill: str = "uniform"
    merge: str = "mean"

    stages: ClassVar[tuple[str, ...]] = ("projector",)
    uses_positions: ClassVar[bool] = True
    one_cut: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.fill in ("uniform", "attention"), "fill", self.fill, 'give "uniform" or "attention"')
        check(self.merge in ("mean", "released"), "merge", self.merge, 'give "mean" or "released"')

    @property
    def reads_next_layer(self) -> bool:
        return self.merge == "released"

    def attention(self, view: TokenView) -> Tensor:
        """(B, N) that of CLS, mean over heads or over the layer's full width."""
        if self.merge == "mean" or not view.has_cls:
            return view.importance().float()
        query, keys = view.q[:, :, 0].flatten(1), view.k.transpose(1, 2).flatten(2)
        logits = (keys @ query.unsqueeze(-1)).squeeze(-1).float() * query.shape[1] ** -0.5
        attention: Tensor = logits.softmax(dim=1)
        return attention[:, view.prefix : view.prefix + view.n]

    def score(self, view: TokenView) -> Tensor:
        """(B, N): outliers, by attention, above 1; the others under 1 in the order they are filled in."""
        attention = self.attention(view)
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
        if keep == view.n:
            return Reduction(keep=top(scores, keep), scores=scores)
        return (self._means if self.merge == "mean" else self._released)(view, keep, scores)

    def _means(self, view: TokenView, keep: int, scores: Tensor) -> Reduction:
        index = top(scores, keep)
        drop = complement(index, view.n)
        goal = cosine(take_tokens(view.keys, drop), take_tokens(view.keys, index)).argmax(dim=-1)
        attention = self.attention(view).clamp_min(torch.finfo(torch.float32).tiny)
        own, other = attention.gather(1, index), attention.gather(1, drop)
        total = own + cluster_sums(other, goal, keep)
        weight = other / total.gather(1, goal)
        return WeightedReduction(keep=index, drop=drop, goal=goal, weight=weight, own=own / total, scores=scores)

    def _released(self, view: TokenView, keep: int, scores: Tensor) -> Reduction:
        kept = scores.topk(keep - 1, dim=1).indices
        gone = torch.ones_like(scores).scatter(1, kept, 0.0)
        attention = self.attention(view)
        last = (attention * gone).argmax(dim=1, keepdim=True)  # its place goes to the sum of all that are not kept
        keys = view.k.transpose(1, 2).flatten(2)[:, view.prefix : view.prefix + view.n]
        like = cosine(take_tokens(keys, kept), keys).scatter(2, kept.unsqueeze(-1), -2.0)  # not to itself
        near = like.topk(min(_NEAREST, view.n - 1), dim=2).indices
        own = F.one_hot(kept, view.n).float()
        added = torch.zeros_like(own).scatter(2, near, 1.0) * attention.unsqueeze(1)
        mix = torch.cat([own + added, (attention * gone).unsqueeze(1)], dim=1)
        index, order = torch.cat([kept, last], dim=1).sort(dim=1)
        return MixedReduction(keep=index, mix=take_tokens(mix, order), scores=scores)


def _spread(n: int, device: torch.device) -> Tensor:
    """(n,) in [0, 1), distinct: the m highest are evenly spread over the positions, for every m.

    The binary digits of the position's number read backwards (van der Corput): halves first, then quarters.
    """
    number = torch.arange(n, device=device)
    out = torch.zeros(n, device=device)
    for bit in range(max(1, (n - 1).bit_length())):
        out = out + ((number >> bit) & 1) * 0.5 ** (bit + 1)
    return (1.0 - out) / 2.0
