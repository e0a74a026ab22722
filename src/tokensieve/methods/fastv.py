"""FastV: An Image is Worth 1/2 Tokens After Layer 2 (arXiv 2403.06764). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["FastV"]


@dataclass(kw_only=True)
class FastV(Selector):
    """Keep the vision tokens that the prompt's last token attends to most: one cut, before decoder layer 2.

    The attention is that of the layer before the cut, mean over heads: one recomputed row. In the prefill only; the
    tokens that stay keep their positions.

    Departs: how many stay is what the budget asks for.
    """

    summary: ClassVar[str] = "top by the last token's attention, before layer 2"
    paper: ClassVar[str] = "2403.06764"
    one_cut: ClassVar[bool] = True
    stages: ClassVar[tuple[str, ...]] = ("decoder",)
    reads_attention: ClassVar[bool] = True

    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.attention_from_last()
