"""VisPruner: Beyond Text-Visual Attention (arXiv 2412.01818). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.reduction import take_tokens
from tokensieve.core.score import unit
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector, check

__all__ = ["VisPruner"]

_ROUND = 8  # at most this many are dropped before the others are compared anew


@dataclass(kw_only=True)
class VisPruner(Selector):
    """Keep the first important * keep patches by CLS attention, and of the others those that repeat each other least.

    The others, in order of attention, are split even / odd, and of the evens the 8 most like an odd are dropped;
    repeated until the rest of the budget remains, the last round dropping what is left to drop. After a round come the
    evens that stay, the most repeated first, then the odds. Patches are compared by the cosine of the features as they
    are, before any projector.

    Departs: where fewer than 8 evens are left, all of them go; the released code does not get there.
    """

    summary: ClassVar[str] = "important by CLS attention, then duplicates removed"
    paper: ClassVar[str] = "2412.01818"
    important: float = 0.5

    def __post_init__(self) -> None:
        check(0.0 <= self.important <= 1.0, "important", self.important, "a share in [0, 1]")

    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.importance()

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, Tensor]:
        self.check_keep(view, keep)
        scores = self.score(view, keep)
        order = scores.argsort(dim=1, descending=True)
        first = int(self.important * keep)
        chosen, rest = order[:, :first], order[:, first:]
        x = unit(view.x)
        while rest.shape[1] > keep - first:
            rest = self._drop_repeats(x, rest, min(_ROUND, rest.shape[1] - (keep - first)))
        return torch.cat([chosen, rest], dim=1).sort(dim=1).values, scores

    @staticmethod
    def _drop_repeats(x: Tensor, rest: Tensor, count: int) -> Tensor:
        """One round on indices (B, M) into unit vectors (B, N, D): drop `count` of the evens, or all of them."""
        evens, odds = rest[:, 0::2], rest[:, 1::2]
        if not odds.shape[1]:
            return rest[:, :0]
        like = (take_tokens(x, evens) @ take_tokens(x, odds).transpose(1, 2)).amax(dim=-1)
        stay = like.argsort(dim=1, descending=True)[:, count:]
        return torch.cat([evens.gather(1, stay), odds], dim=1)
