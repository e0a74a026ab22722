"""Anchor selection: importance to, and diversity from, what CLS attends to most. Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.reduction import take_tokens
from tokensieve.core.score import diversity, minmax
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError
from tokensieve.methods.base import Selector, check

__all__ = ["Anchor"]


@dataclass(kw_only=True)
class Anchor(Selector):
    """Keep k anchors and the best of the others by `alpha * importance + (1 - alpha) * diversity`.

    1. Anchors: the k patches with the highest CLS attention (mean attention received where there is no CLS).
    2. Importance of i: mean over the anchors j of the layer's attention from i to j. The softmax runs over all keys;
       k columns and the fused kernel's log-sum-exp give it exactly, without an N x N map.
    3. Diversity of i: 1 - its largest cosine to an anchor, in the residual stream at the cut.
    4. Both are scaled to [0, 1] in each image over all patches, anchors included (`normalize="minmax"`), so that alpha
       means what it says: raw importance is about 1/N and would drown. `normalize=None` is the literal formula.

    A spread budget cuts at every third block (every one with `fold`).

    k, m: with no budget given, one cut at half depth to k + m patches. With one, k anchors stay and m is what is left.
    """

    summary: ClassVar[str] = "k anchors by CLS attention, then importance to them and diversity from them"
    budget_options: ClassVar[tuple[str, ...]] = ("k", "m")
    k: int = 10
    m: int = 50
    alpha: float = 0.5
    normalize: str | None = "minmax"
    needs_log_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(isinstance(self.k, int) and self.k >= 1, "k", self.k, "the number of anchors is at least 1")
        check(isinstance(self.m, int) and self.m >= 0, "m", self.m, "the number of other patches is at least 0")
        number = isinstance(self.alpha, int | float)
        check(number and 0.0 <= self.alpha <= 1.0, "alpha", self.alpha, "the weight of importance lies in [0, 1]")
        check(self.normalize in ("minmax", None), "normalize", self.normalize, 'give "minmax" or None')

    def spacing(self) -> int:
        return 1 if self.fold else 3  # measured: dropping loses nothing by it, folding does

    def own_keep(self) -> int:
        return self.k + self.m

    def floor(self, n: int, prefix: int) -> int:
        return min(n, self.k)

    def anchors(self, view: TokenView, keep: int) -> Tensor:
        """(B, k) indices of the anchors, ascending."""
        self._check(view, keep)
        return top(view.importance(), min(self.k, view.n))

    def _check(self, view: TokenView, keep: int) -> None:
        if keep < min(self.k, view.n):
            raise BudgetError(f"keep={keep} is under the {self.k} anchors: lower k, or keep at least {self.k}")

    def score(self, view: TokenView, keep: int) -> Tensor:
        return self._scores(view, self.anchors(view, keep))

    def _scores(self, view: TokenView, chosen: Tensor) -> Tensor:
        importance = view.mean_attention_to(chosen)
        diverse = diversity(view.x, take_tokens(view.tokens, chosen + view.prefix)).to(importance.dtype)
        return self.weigh(importance, diverse)

    def weigh(self, importance: Tensor, diverse: Tensor) -> Tensor:
        """(B, N) scores of both."""
        if self.normalize == "minmax":
            importance, diverse = minmax(torch.stack([importance, diverse])).unbind(0)
        return torch.lerp(diverse, importance, float(self.alpha))

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, Tensor]:
        chosen = self.anchors(view, keep)
        scores = self._scores(view, chosen)
        return self.choose(scores, chosen, keep), scores

    def choose(self, scores: Tensor, chosen: Tensor, keep: int) -> Tensor:
        """(B, keep) ascending: the anchors (B, k), then the best others by scores (B, N)."""
        # anchors rank above every other patch: both terms lie in [0, 2]
        return top(scores.scatter_add(1, chosen, scores.new_full(chosen.shape, 4.0)), keep)
