"""DivPrune: Diversity-based Visual Token Pruning (arXiv 2503.02175). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core.select import max_min
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector, check

__all__ = ["DivPrune"]


@dataclass(kw_only=True)
class DivPrune(Selector):
    """Keep the patches that are farthest from each other: greedy max-min of 1 - cosine.

    space: "tokens" (residual stream, as in the paper) or "keys". One cut by default, as in the paper: the greedy steps
    are sequential, and spread over the depth they cost more than they save on a small model.
    """

    space: str = "tokens"
    one_cut: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.space in ("tokens", "keys"), "space", self.space, 'give "tokens" or "keys"')

    def score(self, view: TokenView, keep: int) -> Tensor:
        raise TypeError("divprune chooses a set, it has no scores")

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, None]:
        x = view.x if self.space == "tokens" else view.keys
        return max_min(x, keep), None
