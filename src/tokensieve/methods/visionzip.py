"""VisionZip: Longer is Better but Not Necessary in Vision Language Models (arXiv 2412.04467). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core.reduction import MixedReduction, Reduction, complement, take_tokens
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
    goes to the target most like it by keys. The paper's 54 + 10 of 64 tokens is contextual=10/64.

    merge: "add" (released): target + mean of what goes to it; "mean": the mean of both.
    cls: the CLS token goes along, first and as one of the budget (released): a patch less is dominant.
    behind: contextual tokens stand behind the dominant ones (released); False: all in the order of the image.

    Departs: tokens have the positions of the `keep` places they stand in, not numbers of their own; `attach` with
    positions="renumber" is the released way.
    """

    summary: ClassVar[str] = "dominant by CLS attention, the rest into contextual tokens"
    paper: ClassVar[str] = "2412.04467"
    contextual: float = 10 / 64
    merge: str = "add"
    cls: bool = True
    behind: bool = True

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
        if keep == view.n:
            return Reduction(keep=top(scores, keep), scores=scores)
        cls = int(self.cls and view.has_cls and targets + 1 < keep)
        best = scores.topk(keep - targets - cls, dim=1).indices.sort(dim=1).values
        rest = complement(best, view.n)
        place = torch.arange(targets, device=rest.device) * max(1, rest.shape[1] // max(1, targets))
        target = rest[:, place]  # (B, C), ascending
        rows = [F.one_hot(best, view.n).float(), self._contextual(view, rest, place)]
        index = torch.cat([best, target], dim=1)
        if cls:  # the best of the others lends its place
            free = complement(index.sort(dim=1).values, view.n)
            lent = free.gather(1, scores.gather(1, free).argmax(dim=1, keepdim=True))
            rows, index = [rows[0].new_zeros(view.batch, 1, view.n), *rows], torch.cat([lent, index], dim=1)
        mix = F.pad(torch.cat(rows, dim=1), (view.prefix, 0))
        if cls:
            mix[:, 0, 0] = 1.0
        index, order = index.sort(dim=1)
        return MixedReduction(keep=index, mix=mix if self.behind else take_tokens(mix, order), scores=scores)

    def _contextual(self, view: TokenView, rest: Tensor, place: Tensor) -> Tensor:
        """(B, C, N) weights of the tokens around the targets, which are at `place` (C,) of the others `rest` (B, R)."""
        target = rest[:, place]
        if not target.shape[1]:
            return view.tokens.new_zeros(view.batch, 0, view.n, dtype=torch.float32)
        others = rest.gather(1, complement(place.expand(view.batch, -1), rest.shape[1]))
        goal = cosine(take_tokens(view.keys, others), take_tokens(view.keys, target)).argmax(dim=-1)
        goes = F.one_hot(goal, target.shape[1]).float().transpose(1, 2)  # (B, C, R - C)
        count = goes.sum(dim=2, keepdim=True)
        own = F.one_hot(target, view.n).float()
        goes = torch.zeros_like(own).scatter(2, others.unsqueeze(1).expand_as(goes), goes)
        return own + goes / count.clamp_min(1.0) if self.merge == "add" else (own + goes) / (count + 1.0)
