"""PiToMe: Accelerating Transformers with Spectrum-Preserving Token Merging (arXiv 2405.16148). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensieve.core.merge import bipartite
from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.score import cosine
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method, check

__all__ = ["PiToMe"]


@dataclass(kw_only=True)
class PiToMe(Method):
    """Merge where tokens have many near neighbours, leave the others alone.

    Energy of a token: the mean over all tokens of f(cosine of keys), with f(c) = c above the margin and
    slope * (exp(c - margin) - 1) below it. The 2r patches of highest energy are candidates; in order of energy they are
    dealt alternately to A and B, and each A is averaged into the B most like it. The margin falls with depth, from
    `margin` at the first block towards 0 behind the last: deeper tokens are more alike.
    """

    margin: float = 0.9
    slope: float = 1.0

    def __post_init__(self) -> None:
        check(0.0 <= self.margin <= 1.0, "margin", self.margin, "a cosine in [0, 1]")
        check(self.slope >= 0.0, "slope", self.slope, "not negative")

    def floor(self, n: int, prefix: int) -> int:
        return n - n // 2

    def energy(self, view: TokenView) -> Tensor:
        """(B, N), high = redundant."""
        margin = self.margin * (1.0 - view.depth)
        c = cosine(view.keys, view.keys)
        return torch.where(c >= margin, c, self.slope * ((c - margin).exp() - 1.0)).mean(dim=-1)

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        r = view.n - keep
        if r == 0:
            return Reduction(keep=torch.arange(view.n, device=view.tokens.device).expand(view.batch, -1))
        order = self.energy(view).topk(2 * r, dim=1).indices
        source, target = order[:, 0::2], order[:, 1::2]
        like = cosine(take_tokens(view.keys, source), take_tokens(view.keys, target))
        return bipartite(like, source, target, view.n, r)
