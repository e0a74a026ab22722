"""EViT: Expediting Vision Transformers via Token Reorganizations (arXiv 2202.07800). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tokensieve.core.merge import slot_of
from tokensieve.core.reduction import Reduction, WeightedReduction, complement
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["EViT"]


@dataclass(kw_only=True)
class EViT(Selector):
    """Keep the patches that CLS attends to most; fuse the others into one token, their sum weighted by that attention.

    Cuts at a quarter, a half and three quarters of the depth (blocks 3, 6 and 9 of 12), by the same share each time.
    The sum is not divided by the weights' sum, so the fused token is short, and at the next cut it competes for a place
    like any other. fuse=False only drops.

    Departs: the fused token is one of the `keep`, and stands where the best of the patches in it stood; the released
    code has it as one token more. With `keep` - 1 there the tokens are the same.
    Departs: where there is no CLS, attention is the mean attention received.
    """

    summary: ClassVar[str] = "top by CLS attention, the rest fused into one token"
    paper: ClassVar[str] = "2202.07800"
    fuse: bool = True
    schedule: ClassVar[str] = "geometric"
    differentiable: ClassVar[bool] = True
    stages: ClassVar[tuple[str, ...]] = ("encoder",)

    def blocks(self, depth: int) -> tuple[int, ...]:
        return tuple(sorted({depth * quarter // 4 for quarter in (1, 2, 3)}))

    def score(self, view: TokenView, keep: int) -> torch.Tensor:
        return view.importance()

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        if not self.fuse or self.fold or keep == view.n:
            return super().reduce(view, keep)
        self.check_keep(view, keep)
        scores = self.score(view, keep)
        best = scores.topk(keep, dim=1).indices  # falling: the last one's place goes to the fused token
        index, place = best.sort(dim=1).values, best[:, -1:]
        drop, slot = complement(index, view.n), slot_of(index, place, view.n)
        own = torch.ones_like(scores[:, :keep]).scatter(1, slot, scores.gather(1, place))
        goal = slot.expand(-1, drop.shape[1])
        return WeightedReduction(
            keep=index, drop=drop, goal=goal, weight=scores.gather(1, drop), own=own, scores=scores
        )
