"""PyramidDrop: Accelerating LVLMs via Pyramid Visual Redundancy Reduction (arXiv 2410.17247). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["PyramidDrop"]


@dataclass(kw_only=True)
class PyramidDrop(Selector):
    """Cut at a quarter, a half and three quarters of the language model, by the same share each time.

    The paper's 8 / 16 / 24 of 32 layers keep 50 / 25 / 12.5 %: keep=0.125. Scored by the attention of the prompt's last
    token, mean over heads, computed with the queries and keys of the layer that comes next (the first that runs on
    fewer tokens) from the hidden states at the cut: one row more than the model computes, and that layer's keys twice.

    Departs: the tokens that stay keep their positions; the released code numbers them anew.
    Departs: the share is what the budget asks for, the same at each cut.
    """

    summary: ClassVar[str] = "top by the last token's attention, in steps"
    paper: ClassVar[str] = "2410.17247"
    schedule: ClassVar[str] = "geometric"
    stages: ClassVar[tuple[str, ...]] = ("decoder",)
    reads_attention: ClassVar[bool] = True

    @property
    def reads_next_layer(self) -> bool:
        return True

    def layers(self, depth: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, depth * quarter // 4) for quarter in (1, 2, 3)} & set(range(1, depth))))

    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.attention_from_last()
