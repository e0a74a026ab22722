"""EViT: Expediting Vision Transformers via Token Reorganizations (arXiv 2202.07800). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["EViT"]


@dataclass(kw_only=True)
class EViT(Selector):
    """Keep the patches that CLS attends to most; fuse the others into one extra token, weighted by that attention.

    The extra token of an earlier cut goes into the new one with its own attention. fuse=False only drops.
    A spread budget cuts at every third block.
    """

    fuse: bool = True
    differentiable: ClassVar[bool] = True
    stages: ClassVar[tuple[str, ...]] = ("encoder",)  # a made token has no place in a prompt

    def spacing(self) -> int:
        return 3  # as the paper does; measured better than every block

    def makes(self) -> int:
        return int(self.fuse and not self.fold)

    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.importance()

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        if not self.fuse or self.fold or keep == view.n:
            return super().reduce(view, keep)
        index, scores = self.select(view, keep)
        weight = view.importance(made=True).scatter(1, index, 0.0)
        weight = weight / weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        return Reduction(keep=index, extra=weight.unsqueeze(1), scores=scores)
