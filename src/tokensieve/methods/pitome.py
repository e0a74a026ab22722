"""PiToMe: Accelerating Transformers with Spectrum-Preserving Token Merging (arXiv 2405.16148). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
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

    Energy of a token: the mean over all tokens of elu(cosine of keys - margin). The margin falls with depth, from
    `margin` at the first block towards 0 behind the last (the authors start at 0.95 for CLIP and 0.75 for DeiT). In
    order of energy, candidates are dealt alternately to A and B, and the r of A that are most like one of B are
    averaged into it. In the first half of the depth all tokens are candidates, in the second the 2r of highest energy.
    The same share goes at every block.

    proportional=0, the default, as released: later attention does not know how many patches a token stands for.
    proportional=1 is better where it was measured (benchmarks/sieve.md).

    Departs: averages are weighted by size, and how many go is what the budget asks for.
    """

    summary: ClassVar[str] = "merge where the energy of redundancy is high, protect the rest"
    paper: ClassVar[str] = "2405.16148"
    margin: float = 0.95
    proportional: float = 0.0
    schedule: ClassVar[str] = "geometric"

    def __post_init__(self) -> None:
        check(0.0 <= self.margin <= 1.0, "margin", self.margin, "a cosine in [0, 1]")

    def floor(self, n: int, prefix: int) -> int:
        return n - n // 2

    def energy(self, view: TokenView) -> Tensor:
        """(B, N), high = redundant."""
        margin = self.margin * (1.0 - view.depth)
        return F.elu(cosine(view.keys, view.keys) - margin).mean(dim=-1)

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        r = view.n - keep
        if r == 0:
            return Reduction(keep=torch.arange(view.n, device=view.tokens.device).expand(view.batch, -1))
        candidates = view.n if view.depth < 0.5 else 2 * r
        order = self.energy(view).topk(candidates, dim=1).indices
        source, target = order[:, 0::2], order[:, 1::2]
        like = cosine(take_tokens(view.keys, source), take_tokens(view.keys, target))
        return bipartite(like, source, target, view.n, r)
