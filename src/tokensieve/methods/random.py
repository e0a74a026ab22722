"""Random selection: the control. Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core.score import image_hash, unit_noise
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["Random"]


@dataclass(kw_only=True)
class Random(Selector):
    """Keep patches at random.

    Drawn for each image from (seed, hash of its tokens), without a generator: a batch equals its singles, images
    differ, and the same seed gives the same result. Not a joke: on LLaVA-1.5 at -67 % tokens random selection beats six
    of eight published methods (UniPruneBench). A spread budget cuts at every third block.
    """

    summary: ClassVar[str] = "random patches, a draw for each image: the control every method must beat"
    seed: int = 0
    uses_positions: ClassVar[bool] = True
    reads_importance: ClassVar[bool] = False

    def spacing(self) -> int:
        return 3  # measured: as good as every block

    def score(self, view: TokenView, keep: int) -> Tensor:
        return unit_noise(image_hash(view.tokens), view.origin, self.seed)
