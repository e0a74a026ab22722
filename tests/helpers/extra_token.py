"""A method that leaves one token more than the patches it keeps: the mean of the others, weighted by CLS attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector


@dataclass(kw_only=True)
class OneMore(Selector):
    """The token that an earlier cut made goes into the new one with its own attention."""

    stages: ClassVar[tuple[str, ...]] = ("encoder",)

    def spacing(self) -> int:
        return 3

    def extra_tokens(self) -> int:
        return 1

    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.importance()

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        if keep == view.n:
            return super().reduce(view, keep)
        index, scores = self.select(view, keep)
        weight = view.importance(made=True).scatter(1, index, 0.0)
        return Reduction(keep=index, extra=(weight / weight.sum(1, keepdim=True)).unsqueeze(1), scores=scores)
