"""A reduction whose kept tokens take in dropped ones with weights of their own, not by size. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokensieve.core.reduction import Reduction, take_tokens

__all__ = ["WeightedReduction", "cluster_sums"]


def cluster_sums(values: Tensor, goal: Tensor, slots: int) -> Tensor:
    """Sum values (B, R) by the slot they go to, goal (B, R): (B, slots)."""
    empty = torch.zeros(values.shape[0], slots, dtype=values.dtype, device=values.device)
    return empty.scatter_add(1, goal, values)


@dataclass(frozen=True)
class WeightedReduction(Reduction):
    """Kept token k becomes own[k] * x[k] + the sum of weight[j] * x[j] over the dropped j that go to it.

    drop: (B, R) tokens that go somewhere; goal: (B, R) the slots 0..K-1 they go to; weight: (B, R); own: (B, K). What
    is in neither keep nor drop is gone. For methods whose mean is not weighted by size (VisionZip adds, PruMerge weighs
    by attention, SparseVLM recycles only some); `into` stays None, and sizes are not kept.
    """

    goal: Tensor | None = None
    weight: Tensor | None = None
    own: Tensor | None = None

    def apply(
        self, x: Tensor, prefix: int = 0, made: int = 0, size: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, new_size = super().apply(x, prefix, made, size)
        if self.drop is None or self.goal is None or self.weight is None or self.own is None:
            return out, new_size
        batch, _, width = out.shape
        k = self.keep.shape[1]
        share = take_tokens(x, self.drop + prefix) * self.weight.unsqueeze(-1)  # float32 where x is half
        rows = self.goal + torch.arange(batch, device=x.device).unsqueeze(1) * k
        mixed = (out[:, prefix : prefix + k] * self.own.unsqueeze(-1)).to(share.dtype).reshape(-1, width)
        mixed = mixed.index_add(0, rows.flatten(), share.reshape(-1, width)).view(batch, k, width).to(x.dtype)
        return torch.cat([out[:, :prefix], mixed, out[:, prefix + k :]], dim=1), new_size

    def slots(self, n: int) -> Tensor:
        slot = super().slots(n)
        if self.drop is not None and self.goal is not None:
            slot = slot.scatter(1, self.drop, self.goal)
        return slot
