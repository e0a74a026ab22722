"""Our own method. Imports core only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensieve.core import merge
from tokensieve.core.reduction import Reduction
from tokensieve.core.score import cosine
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method

__all__ = ["SieveMethod"]


@dataclass(kw_only=True)
class SieveMethod(Method):
    """Merge near-duplicates into their nearest more important token."""

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        n = view.n
        if keep == n:
            return Reduction(keep=torch.arange(n, device=view.tokens.device).expand(view.batch, -1))
        scores = self.distance(view)
        return merge.fold(top(scores, keep), view.keys, scores)

    def distance(self, view: TokenView) -> Tensor:
        weight = view.importance()
        similar = cosine(view.keys, view.keys)
        better = weight.unsqueeze(1) > weight.unsqueeze(2)
        return 1.0 - similar.masked_fill(~better, -1.0).amax(dim=-1)
