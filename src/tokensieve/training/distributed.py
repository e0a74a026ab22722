"""Several processes, one batch: embeddings from all of them with gradient, gradients averaged. gloo and nccl alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["average_gradients", "gather_with_gradient", "own_rows", "rank", "world_size"]


def world_size() -> int:
    """Processes that train together; 1 where none were started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return own_rows(total)


def gather_with_gradient(x: Tensor) -> Tensor:
    """(B, ...) of each process -> (N * B, ...) of all of them, by rank; the same B everywhere. One process: x itself.

    The gradient of a row is the sum of those that all processes' losses give it. With the parameters' gradients
    averaged over processes, N processes of batch B then take the step of one of batch N * B: for a loss that each
    computes of all rows, and for the mean of losses that each computes of its own.
    """
    if world_size() == 1:
        return x
    gathered: Tensor = _Gather.apply(x)
    return gathered


def own_rows(gathered: Tensor) -> Tensor:
    """This process's rows of what was gathered."""
    size = gathered.shape[0] // world_size()
    return gathered[rank() * size : (rank() + 1) * size]


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its mean over the processes. One message for each type of number."""
    if world_size() == 1:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_type.setdefault(p.grad.dtype, []).append(p.grad)
    for grads in by_type.values():
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= world_size()
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))
