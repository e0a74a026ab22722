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

    space: "tokens" or "keys". Tokens between a vision tower and a language model are compared after the projector, as
    the released code does; elsewhere in the residual stream at the cut. One cut by default, as in the paper: the greedy
    steps are sequential, and spread over the depth they cost more than they save on a small model.

    Departs: of two that are each other's nearest, the first pick is the one farther from all, not the first in order.
    """

    summary: ClassVar[str] = "greedy max-min diversity, one cut"
    paper: ClassVar[str] = "2503.02175"
    space: str = "tokens"
    one_cut: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.space in ("tokens", "keys"), "space", self.space, 'give "tokens" or "keys"')

    def score(self, view: TokenView, keep: int) -> Tensor:
        raise TypeError("divprune chooses a set, it has no scores")

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, None]:
        if self.space == "keys":
            return max_min(view.keys, keep), None
        return max_min(view.joint if view.stage == "projector" else view.x, keep), None
