"""Tells hidden states of the unpruned model from those of the pruned one; training only. Imports torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Discriminator"]


class Discriminator(nn.Module):
    """(A, D) hidden states -> (A,) logits, above 0 for "unpruned". The states are normed: size alone says nothing."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(
            nn.Linear(width, inner), nn.LeakyReLU(0.2), nn.Linear(inner, inner), nn.LeakyReLU(0.2), nn.Linear(inner, 1)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layers(F.layer_norm(hidden.float(), (self.width,))).squeeze(-1)
        return out

    @torch.no_grad()
    def start_anew(self, optimiser: Optimizer, seed: int) -> None:
        """New weights, and an optimiser that remembers nothing: one that has won gives no direction any more."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
        optimiser.state.clear()
