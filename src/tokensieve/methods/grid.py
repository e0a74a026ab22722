"""Evenly spaced selection. Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core.select import strided
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["Grid"]


@dataclass(kw_only=True)
class Grid(Selector):
    """Keep every (N/keep)-th of the patches that are left, in raster order. Looks at nothing."""

    summary: ClassVar[str] = "evenly spaced patches"
    uses_positions: ClassVar[bool] = True
    reads_importance: ClassVar[bool] = False

    def score(self, view: TokenView, keep: int) -> Tensor:
        raise TypeError("grid has no scores")

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, None]:
        return strided(view.n, keep, view.batch, view.tokens.device), None
