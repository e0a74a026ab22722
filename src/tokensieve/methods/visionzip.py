"""VisionZip: Longer is Better but Not Necessary in Vision Language Models (arXiv 2412.04467). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.merge import slot_of
from tokensieve.core.reduction import Reduction, WeightedReduction, cluster_sums, complement, take_tokens
from tokensieve.core.score import cosine
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method, check

__all__ = ["VisionZip"]


@dataclass(kw_only=True)
class VisionZip(Method):
    """Keep the dominant tokens by CLS attention, and make contextual ones of the others.

    Between the vision tower and the projector, by the attention and keys (head mean) of the layer that the language
    model's features come from. `contextual` of the budget are evenly spaced targets among the others; every other token
    goes to the target most like it by keys. merge="add" (released code): target + mean of what goes to it; "mean": the
    mean of both. The paper's 54 + 10 of 64 tokens is contextual=10/64.
    """

    contextual: float = 10 / 64
    merge: str = "add"

    stages: ClassVar[tuple[str, ...]] = ("projector",)
    uses_positions: ClassVar[bool] = True  # the targets are spaced by position
    one_cut: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(0.0 <= self.contextual <= 1.0, "contextual", self.contextual, "a share in [0, 1]")
        check(self.merge in ("add", "mean"), "merge", self.merge, 'give "add" or "mean"')

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        scores = view.importance()
        targets = round(self.contextual * keep)
        if keep == view.n or targets == 0:
            return Reduction(keep=top(scores, keep), scores=scores)
        best = top(scores, keep - targets) if targets < keep else self._none(view)
        rest = complement(best, view.n)
        step = max(1, rest.shape[1] // targets)
        place = torch.arange(targets, device=rest.device) * step
        target = rest[:, place]  # (B, C), ascending
        others = rest.gather(1, complement(place.expand(view.batch, -1), rest.shape[1]))
        index = torch.cat([best, target], dim=1).sort(dim=1).values
        like = cosine(take_tokens(view.keys, others), take_tokens(view.keys, target))
        goal = slot_of(index, target, view.n).gather(1, like.argmax(dim=-1))
        count = cluster_sums(torch.ones_like(goal, dtype=torch.float32), goal, keep)
        extra = 0.0 if self.merge == "add" else 1.0
        weight = 1.0 / (count + extra).gather(1, goal)
        own = torch.ones_like(count) if self.merge == "add" else 1.0 / (count + 1.0)
        return WeightedReduction(keep=index, drop=others, goal=goal, weight=weight, own=own, scores=scores)

    @staticmethod
    def _none(view: TokenView) -> Tensor:
        return torch.empty(view.batch, 0, dtype=torch.int64, device=view.tokens.device)
