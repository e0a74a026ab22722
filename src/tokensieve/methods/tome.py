"""ToMe: Token Merging: Your ViT But Faster (arXiv 2210.09461). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tokensieve.core.merge import bipartite
from tokensieve.core.reduction import Reduction
from tokensieve.core.score import unit
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method

__all__ = ["ToMe"]


@dataclass(kw_only=True)
class ToMe(Method):
    """Split the tokens alternately into A and B; merge the r of A that are most like one of B into it.

    Similarity is the cosine of the keys, averaged over heads; averages are weighted by size. The prefix counts as the
    first positions (so CLS falls into A) and never merges. At most the patches of A can go in one step. As many go at
    every block, and log(size) is added to the logits of later attention.

    Departs: registers and other prefix tokens never merge either.
    """

    summary: ClassVar[str] = "merge the most similar pairs of two alternating sets"
    paper: ClassVar[str] = "2210.09461"
    uses_positions: ClassVar[bool] = True

    def floor(self, n: int, prefix: int) -> int:
        if n < 2:
            return n
        return n - len(range(prefix % 2, n, 2))

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        n, device = view.n, view.tokens.device
        if keep == n:
            return Reduction(keep=torch.arange(n, device=device).expand(view.batch, -1))
        first = view.prefix % 2  # patch i stands at position prefix + i; A holds the even positions
        keys = unit(view.keys)
        like = keys[:, first::2] @ keys[:, 1 - first :: 2].transpose(1, 2)
        source, target = (torch.arange(i, n, 2, device=device).expand(view.batch, -1) for i in (first, 1 - first))
        return bipartite(like, source, target, n, n - keep)
