"""Two stages: one method between vision tower and projector, one inside the language model. Imports core only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tokensieve.core.budget import target_count
from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError
from tokensieve.methods.base import Method
from tokensieve.methods.registry import make_method

__all__ = ["TwoStage"]


@dataclass(kw_only=True)
class TwoStage(Method):
    """Reduce twice: `first` leaves `merge_keep` of an image's tokens to the projector, `second` goes on in the layers.

    first, second: methods, or names whose options are in first_options and second_options. merge_keep: a count or a
    ratio of the image's tokens after stage 1. `keep` of attach is what remains at the end, a ratio of all of them.
    """

    first: str | Method = "visionzip"
    second: str | Method = "pyramiddrop"
    merge_keep: int | float = 0.5
    first_options: dict[str, Any] = field(default_factory=dict)
    second_options: dict[str, Any] = field(default_factory=dict)

    stages: ClassVar[tuple[str, ...]] = ("projector", "decoder")

    def __post_init__(self) -> None:
        self.first = _made(self.first, self.first_options, "projector", "first")
        self.second = _made(self.second, self.second_options, "decoder", "second")
        target_count(576, self.merge_keep)  # raises where it is no budget

    @property
    def parts(self) -> tuple[Method, Method]:
        """The methods of the two stages."""
        assert isinstance(self.first, Method)
        assert isinstance(self.second, Method)
        return self.first, self.second

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.parts[1].layers(depth)

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        raise TypeError("two_stage reduces nothing itself: its parts do, each at its stage")


def _made(method: str | Method, options: dict[str, Any], stage: str, name: str) -> Method:
    if isinstance(method, str):
        method = make_method(method, **options)
    elif options:
        raise OptionError(f"{name}_options go with a method's name; this one is made already")
    if stage not in method.stages:
        raise OptionError(f"{name}={type(method).__name__}: it works at {' and '.join(method.stages)}, not {stage}")
    return method
