"""Two stages: one method between vision tower and projector, one inside the language model. Imports core only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tokensieve.core.budget import Keep, target_count
from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError
from tokensieve.methods.base import Method
from tokensieve.methods.registry import make_method
from tokensieve.methods.trained.pruner import Pruner

__all__ = ["TwoStage"]


@dataclass(kw_only=True)
class TwoStage(Method):
    """Reduce twice: `first` leaves `merge_keep` of an image's tokens to the projector, `second` goes on in the layers.

    first, second: methods, or names whose options are in first_options and second_options. merge_keep: a count or a
    ratio of the image's tokens after stage 1. `keep` of attach is what remains at the end, a ratio of all of them.
    adapter: what `tokensieve train vlm` wrote: both stages learned, merge_keep and keep as trained unless given; where
    only `keep_average` is given, stage 1 leaves more or less in the same proportion.
    """

    summary: ClassVar[str] = "one method before the language model and one inside it"
    budget_options: ClassVar[tuple[str, ...]] = ("adapter",)
    first: str | Method = "visionzip"
    second: str | Method = "pyramiddrop"
    merge_keep: int | float | None = None
    adapter: str | Path = ""
    first_options: dict[str, Any] = field(default_factory=dict)
    second_options: dict[str, Any] = field(default_factory=dict)

    stages: ClassVar[tuple[str, ...]] = ("projector", "decoder")

    def __post_init__(self) -> None:
        if self.adapter:
            if (self.first, self.second) != ("visionzip", "pyramiddrop") or self.first_options or self.second_options:
                raise OptionError("adapter= makes both stages: give it, or first and second")
            self.first, self.first_options = "merger", {"adapter": self.adapter}
            self.second, self.second_options = "pruner", {"adapter": self.adapter}
        self.first = _made(self.first, self.first_options, "projector", "first")
        self.second = _made(self.second, self.second_options, "decoder", "second")
        self.keep_first: int | float = _single(self.first) if self.merge_keep is None else self.merge_keep
        target_count(576, self.keep_first)  # raises where it is not a budget

    @property
    def parts(self) -> tuple[Method, Method]:
        """The methods of the two stages."""
        assert isinstance(self.first, Method)
        assert isinstance(self.second, Method)
        return self.first, self.second

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.parts[1].layers(depth)

    def own_keep(self) -> Keep | None:
        """What learned pruners were trained to leave of what stage 1 leaves them."""
        second = self.parts[1]
        if not isinstance(second, Pruner):
            return None
        return second.network.counts(target_count(second.network.patches, self.keep_first))

    def first_keep(self, average: int | float | None) -> int | float:
        """What stage 1 leaves where that many tokens are asked for on layer average. Learned stages keep the proportion
        that they were trained with."""
        second = self.parts[1]
        if average is None or self.merge_keep is not None or not isinstance(second, Pruner):
            return self.keep_first
        network = second.network
        enters = target_count(network.patches, self.keep_first)
        left = [enters, *network.counts(enters)]
        trained = sum(left[sum(at <= i for at in network.layers)] for i in range(network.depth)) / network.depth
        return max(1, min(network.patches, round(enters * target_count(network.patches, average) / trained)))

    def check_decoder(self, depth: int, width: int, vision_width: int) -> None:
        for part in self.parts:
            part.check_decoder(depth, width, vision_width)

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        raise TypeError("two_stage reduces nothing itself: its parts do, each at its stage")


def _single(first: Method) -> int | float:
    """What a method leaves at stage 1 where nothing is said: what it was trained for, else half."""
    own = first.own_keep()
    return own if isinstance(own, float) else 0.5


def _made(method: str | Method, options: dict[str, Any], stage: str, name: str) -> Method:
    if isinstance(method, str):
        method = make_method(method, **options)
    elif options:
        raise OptionError(f"{name}_options go with a method's name; this one is made already")
    if stage not in method.stages:
        raise OptionError(f"{name}={type(method).__name__}: it works at {' and '.join(method.stages)}, not {stage}")
    return method
