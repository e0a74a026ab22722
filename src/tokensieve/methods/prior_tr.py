"""Accelerating Multimodal Large Language Models with Prior-Corrected Token Reduction (arXiv 2606.24156).

Imports core only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector

__all__ = ["PriorTR"]

_LEAST = 1e-10  # of a share of attention, so that its logarithm is a number


@dataclass(kw_only=True)
class PriorTR(Selector):
    """Keep the vision tokens that the question makes the model look at, beyond what it would look at anyway.

    One cut inside the language model, before layer 2. P: the attention of the prompt's last token to the vision tokens;
    Q: that of the token right behind the image, which sees no question; both mean over heads and scaled to sum to 1.
    The score is P * log(P / Q).

    Departs: how many stay is what the budget asks for.
    Departs: where the question follows the image without a word between, Q is of the question's first word.
    """

    summary: ClassVar[str] = "top by the last token's attention against that of a token before the question"
    paper: ClassVar[str] = "2606.24156"
    one_cut: ClassVar[bool] = True
    stages: ClassVar[tuple[str, ...]] = ("decoder",)
    reads_attention: ClassVar[bool] = True
    uses_positions: ClassVar[bool] = True

    def score(self, view: TokenView, keep: int) -> Tensor:
        """(B, N), higher = more of the question's doing; may be negative."""
        told = view.attention_from_last().float()
        assert view.sentence is not None
        behind = torch.minimum(view.sentence.vision.amax(dim=1) + 1, view.sentence.last)
        prior = view.sentence.attention(behind.unsqueeze(1)).squeeze(1).float()
        told, prior = (part / part.sum(dim=1, keepdim=True).clamp_min(_LEAST) for part in (told, prior))
        return told * ((told + _LEAST) / (prior + _LEAST)).log()
