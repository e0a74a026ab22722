"""OTPrune: Distribution-Aligned Visual Token Pruning via Optimal Transport (arXiv 2602.20205). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.score import unit
from tokensieve.core.select import dpp
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Selector, check

__all__ = ["OTPrune"]


@dataclass(kw_only=True)
class OTPrune(Selector):
    """Keep a set whose distribution is near to that of all tokens, by the 2-Wasserstein distance.

    As Gaussians without a mean, of covariances V and V_S of all and of the kept tokens (of length 1), that distance
    falls as the trace of (V^1/2 V_S V^1/2)^1/2 grows; log det(I + strength * V^1/2 V_S V^1/2) takes the trace's place.
    It equals the log det of I + strength / K * G^2 / N over the kept tokens, G their inner products: a greedy choice
    as of a determinantal point process, with a kernel that prefers what many tokens have in common. One cut. Between a
    vision tower and a language model, tokens are compared after the projector.

    Departs: written from the paper's idea; strength, and tokens of length 1, are not taken from the released code.
    """

    strength: float = 100.0

    summary: ClassVar[str] = "a set distributed as all tokens are, by a log det, one cut"
    paper: ClassVar[str] = "2602.20205"
    one_cut: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.strength > 0.0, "strength", self.strength, "a positive number")

    def score(self, view: TokenView, keep: int) -> Tensor:
        raise TypeError("otprune chooses a set, it has no scores")

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, None]:
        x = unit((view.joint if view.stage == "projector" else view.x).float())
        gram = x @ x.transpose(1, 2)
        kernel = gram @ gram * (self.strength / (keep * view.n))
        return dpp(kernel + torch.eye(view.n, device=kernel.device), keep), None
