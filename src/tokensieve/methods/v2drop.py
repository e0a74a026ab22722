"""V2Drop: Variation-aware Vision Token Dropping for Faster Large Vision-Language Models (arXiv 2509.01552).

Imports core only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["V2Drop"]


@dataclass(kw_only=True)
class V2Drop(Selector):
    """Drop the vision tokens whose hidden state changes least from layer to layer; no attention is looked at.

    Cuts before layers 3, 17 and 22 of 32, scaled to the depth. The score is the length of the difference between a
    token's state at the cut and its state one layer earlier.

    Departs: the counts are what the budget asks for, the same share at each cut; the released code keeps a half, then a
    half of that, and then one token.
    """

    summary: ClassVar[str] = "drop what changes least from layer to layer, in steps"
    paper: ClassVar[str] = "2509.01552"
    schedule: ClassVar[str] = "geometric"
    stages: ClassVar[tuple[str, ...]] = ("decoder",)
    reads_attention: ClassVar[bool] = True  # not that, but a layer before the cut

    def layers(self, depth: int) -> tuple[int, ...]:
        return tuple(sorted({min(depth - 1, max(1, round(depth * layer / 32))) for layer in (3, 17, 22)}))

    def score(self, view: TokenView, keep: int) -> Tensor:
        if view.sentence is None:
            raise TypeError("v2drop: these tokens stand in no language model's sequence")
        before = view.sentence.states_before(view.sentence.vision)
        change: Tensor = (view.x.float() - before.float()).norm(dim=-1)
        return change
