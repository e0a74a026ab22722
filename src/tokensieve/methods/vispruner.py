"""VisPruner: Beyond Text-Visual Attention (arXiv 2412.01818). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensieve.core.reduction import take_tokens
from tokensieve.core.score import cosine
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector, check

__all__ = ["VisPruner"]


@dataclass(kw_only=True)
class VisPruner(Selector):
    """Keep round(important * keep) patches by CLS attention, and from the others those that repeat each other least.

    The others, sorted by attention, are split even / odd; the evens most like an odd are dropped; repeated until the
    rest of the budget remains. Each round drops at most half.
    """

    important: float = 0.5

    def __post_init__(self) -> None:
        check(0.0 <= self.important <= 1.0, "important", self.important, "a share in [0, 1]")

    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.importance()

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, Tensor]:
        self.check_keep(view, keep)
        scores = self.score(view, keep)
        order = scores.argsort(dim=1, descending=True)
        first = round(self.important * keep)
        chosen, rest = order[:, :first], order[:, first:]
        while rest.shape[1] > keep - first:
            rest = self._drop_repeats(view, rest, rest.shape[1] - (keep - first))
        return torch.cat([chosen, rest], dim=1).sort(dim=1).values, scores

    @staticmethod
    def _drop_repeats(view: TokenView, rest: Tensor, excess: int) -> Tensor:
        """One round on indices (B, M), sorted by attention: drop up to `excess` of the evens. Order is kept."""
        m = rest.shape[1]
        if m == 1:
            return rest[:, :0]
        evens, odds = rest[:, 0::2], rest[:, 1::2]
        like = cosine(take_tokens(view.x, evens), take_tokens(view.x, odds)).amax(dim=-1)
        gone = like.topk(min(excess, evens.shape[1]), dim=1).indices * 2  # places of the dropped evens within `rest`
        place = torch.arange(m, device=rest.device).expand_as(rest)
        left = m - gone.shape[1]
        stay = place.scatter(1, gone, 2 * m).topk(left, dim=1, largest=False).indices.sort(dim=1).values
        return rest.gather(1, stay)
