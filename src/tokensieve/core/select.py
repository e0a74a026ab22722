"""Which tokens stay: pure functions that return ascending indices. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from tokensieve.core.score import cosine
from tokensieve.errors import BudgetError

__all__ = ["dpp", "max_min", "strided", "top"]


def _check(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise BudgetError(f"keep={k} of {n} patches: give a number from 1 to {n}")


def _first(value: Tensor, apart: Tensor) -> Tensor:
    """(B,) the highest of value (B, N); of equals the one with the highest `apart`, not the one that rounding prefers.

    The first pick of both greedy selections ties by nature: two mutual nearest neighbours, or a kernel of cosines.
    """
    equal = value >= value.amax(dim=-1, keepdim=True) - 1e-5
    return apart.masked_fill(~equal, float("-inf")).argmax(dim=-1)


def top(scores: Tensor, k: int) -> Tensor:
    """The k highest of each row of (B, N) -> (B, k), ascending."""
    _check(k, scores.shape[1])
    return scores.topk(k, dim=1, sorted=False).indices.sort(dim=1).values


def strided(n: int, k: int, batch: int, device: torch.device | None = None) -> Tensor:
    """k of n positions, evenly spaced, the same for every image: (B, k)."""
    _check(k, n)
    index = (torch.arange(k, device=device) * 2 + 1) * n // (2 * k)
    return index.expand(batch, -1)


def max_min(x: Tensor, k: int) -> Tensor:
    """Greedy max-min of 1 - cos over (B, N, D) -> (B, k), ascending.

    Starts with the token farthest from its nearest neighbour (of two that are each other's, the one farther from all),
    then adds the one farthest from all chosen. k steps of O(N), over the whole batch at once; an N x N matrix is held.
    """
    _check(k, x.shape[1])
    distance = cosine(x, x).neg_().add_(1.0)
    batch = distance.shape[0]
    apart = distance.mean(dim=-1)
    distance = _with_diagonal(distance, float("inf"))
    chosen = [_first(distance.amin(dim=-1), apart)]
    # what is chosen is so near to itself that it is never chosen again
    distance = _with_diagonal(distance, float("-inf"))
    row = torch.arange(batch, device=x.device)
    nearest = distance[row, chosen[0]]
    for _ in range(k - 1):
        chosen.append(nearest.argmax(dim=-1))
        nearest = torch.minimum(nearest, distance[row, chosen[-1]])
    return torch.stack(chosen, dim=1).sort(dim=1).values


def _with_diagonal(matrix: Tensor, value: float) -> Tensor:
    """(B, N, N) with this number on its diagonals. In place: a second one could be the peak of the whole model."""
    if torch.compiler.is_exporting():  # ONNX has no views to write to
        return matrix.masked_fill(torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device), value)
    matrix.diagonal(dim1=1, dim2=2).fill_(value)
    return matrix


def dpp(kernel: Tensor, k: int) -> Tensor:
    """Greedy MAP of a determinantal point process with kernel (B, N, N) -> (B, k), ascending.

    Each step takes the token with the largest conditional variance d and updates it by one row of the Cholesky factor.
    Of equals at the first step, as in a kernel of plain cosines, it takes the one least correlated with the others.
    Where the kernel's rank is spent, the remaining picks follow the (clamped) d and stay distinct.
    """
    batch, n, _ = kernel.shape
    _check(k, n)
    row = torch.arange(batch, device=kernel.device)
    d = kernel.diagonal(dim1=1, dim2=2).clone()
    open_ = torch.zeros_like(d)
    factor = torch.zeros(batch, k, n, dtype=kernel.dtype, device=kernel.device)
    chosen = []
    for step in range(k):
        pick = (d + open_).argmax(dim=-1) if step else _first(d, -kernel.square().sum(dim=-1))
        chosen.append(pick)
        done = factor[:, :step]  # (B, step, N)
        dot = torch.einsum("bs,bsn->bn", done[row, :, pick], done)
        e = (kernel[row, pick] - dot) / d[row, pick].clamp_min(1e-12).sqrt().unsqueeze(1)
        factor[:, step] = e
        d = (d - e * e).clamp_min(0.0)
        open_ = open_.scatter(1, pick.unsqueeze(1), float("-inf"))
    return torch.stack(chosen, dim=1).sort(dim=1).values
