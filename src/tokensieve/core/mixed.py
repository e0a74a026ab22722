"""A reduction whose kept tokens are means of all tokens, each with weights of its own. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensieve.core.reduction import Reduction

__all__ = ["MixedReduction"]


@dataclass(frozen=True)
class MixedReduction(Reduction):
    """Kept token k becomes the sum over all N tokens of mix[k, j] * x[j].

    mix: (B, K, N), rows sum to 1; gradients flow through it. `into` stays None.
    share: (B, K, N), columns sum to 1: how far each of the N belongs to each kept one, whatever its part in the mean.
        Sizes follow it, with gradients. None: sizes are not kept.
    """

    mix: Tensor | None = None
    share: Tensor | None = None

    def apply(
        self, x: Tensor, prefix: int = 0, made: int = 0, size: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, new_size = super().apply(x, prefix, made, size)
        if self.mix is None:
            return out, new_size
        k, n = self.mix.shape[1:]
        mixed = torch.bmm(self.mix.to(x.dtype), x[:, prefix : prefix + n])
        if self.share is not None:
            stands = self.share.sum(dim=-1) if size is None else torch.einsum("bkn,bn->bk", self.share, size[:, :n])
            new_size = stands if new_size is None else torch.cat([stands, new_size[:, k:]], dim=1)
        return torch.cat([out[:, :prefix], mixed, out[:, prefix + k :]], dim=1), new_size

    def slots(self, n: int) -> Tensor:
        """As ever, with each dropped token in the slot that takes most of it."""
        slot = super().slots(n)
        if self.mix is None:
            return slot
        return torch.where(slot >= 0, slot, self.mix.argmax(dim=1))
