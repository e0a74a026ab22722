"""An optimiser for small transformers on a small budget: orthogonal steps for matrices, AdamW for the rest.

A matrix's momentum is replaced by the nearest matrix whose singular values are all about 1, so that rare directions
move as far as common ones; the rest of the parameters takes AdamW's step. After "Muon" (Jordan et al. 2024), scaled so
that a step is as large as AdamW's at the same rate (2502.16982). Computed in float32. Imports torch alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Muon", "orthogonal"]

_QUINTIC = (3.4445, -4.7750, 2.0315)  # a x + b x^3 + c x^5 drives singular values of 0..1 to about 1 in five rounds
_SCALE = 0.2  # root mean square of AdamW's steps, of its rate


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """(N, rows, columns) -> the same singular vectors, singular values of roughly 0.7 to 1.2 each."""
    a, b, c = _QUINTIC
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """One optimiser of two groups, so that one learning-rate schedule and one loss drive both.

    matrices: two-dimensional weights inside the network. rest: embeddings, convolutions, norms, biases; of these, only
    what has two or more dimensions decays.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], rest: Iterable[nn.Parameter], lr: float, rest_lr: float,
        weight_decay: float = 0.02, momentum: float = 0.95, betas: tuple[float, float] = (0.9, 0.98),
    ) -> None:  # fmt: skip
        rest = list(rest)
        groups: list[dict[str, Any]] = [
            {"params": list(matrices), "lr": lr, "orthogonal": True, "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim > 1], "lr": rest_lr, "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "lr": rest_lr, "weight_decay": 0.0},
        ]
        super().__init__(groups, {"orthogonal": False, "momentum": momentum, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient. A closure is not called: gradients must be there."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            for p in moved:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            (self._orthogonal if group["orthogonal"] else self._adam)(moved, group)

    def _orthogonal(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        alike: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in moved:
            alike[tuple(p.shape)].append(p)
        for shape, some in alike.items():  # one batched product for all of a shape
            steps = orthogonal(torch.stack([self._momentum(p, group["momentum"]) for p in some]))
            for p, step in zip(some, steps, strict=True):
                p.add_(step, alpha=-group["lr"] * _SCALE * max(shape) ** 0.5)

    def _momentum(self, p: nn.Parameter, momentum: float) -> Tensor:
        """The running mean of the gradients, one gradient ahead (Nesterov)."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["mean"] = torch.zeros_like(p)
        state["mean"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["mean"], momentum)

    def _adam(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        for p in moved:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p), count=0)
            state["count"] += 1
            state["mean"].lerp_(p.grad, 1 - first)
            state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            size = (state["square"] / (1 - second ** state["count"])).sqrt_().add_(1e-8)
            p.addcdiv_(state["mean"], size, value=-group["lr"] / (1 - first ** state["count"]))
