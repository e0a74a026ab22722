"""CDPruner: Beyond Attention or Similarity: Maximizing Conditional Diversity (arXiv 2506.10967). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.score import cosine, minmax, relevance
from tokensieve.core.select import dpp
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector, check

__all__ = ["CDPruner"]


@dataclass(kw_only=True)
class CDPruner(Selector):
    """Keep a set that is diverse and relevant to a text: greedy MAP of a determinantal point process.

    Kernel diag(r) S diag(r): S the cosines of the patches, r their mean cosine to the text features, scaled to [0, 1]
    in each image, + 1e-6. relevance="plain" takes that sign; "released" the negative, as the authors' code does,
    which is far worse where it was measured (84 against 96 % of a LLaVA's answers, benchmarks/vlm.md).
    Without a text every r is 1 and the choice is by diversity alone. One cut by default. In a vision-language model the
    text is the question, in the space of the language model's input, and patches between vision tower and projector are
    compared after the projector, as the released code does.

    Departs: the released code takes r from CLIP's text tower and joint space, and scales it over the batch.
    """

    summary: ClassVar[str] = "determinantal choice conditioned on a text, one cut"
    paper: ClassVar[str] = "2506.10967"
    relevance: str = "plain"
    one_cut: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.relevance in ("plain", "released"), "relevance", self.relevance, 'give "plain" or "released"')

    def score(self, view: TokenView, keep: int) -> Tensor:
        """(B, N) relevance to the text; ones without one."""
        if view.text is None:
            return torch.ones(view.batch, view.n, device=view.tokens.device)
        r = relevance(view.joint, view.text, view.text_valid).float()
        return minmax(-r if self.relevance == "released" else r) + 1e-6

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, Tensor]:
        r = self.score(view, keep)
        x = view.joint if view.stage == "projector" else view.x
        kernel = cosine(x, x).float() * r.unsqueeze(1) * r.unsqueeze(2)
        return dpp(kernel, keep), r
