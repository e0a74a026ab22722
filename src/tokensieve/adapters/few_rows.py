"""Linear layers for few tokens on a CPU. Imports torch only.

A product of few rows and a large matrix is cut up badly between two threads: the fewer tokens, the further the time
falls behind the MACs, which takes back a part of what a reduction gained. Given as a batch of products, one for each
part of the outputs, every thread packs and reads its own part of the weights. That needs no copy of them. Figures:
benchmarks/speed.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FewRows", "few_rows", "linear", "plain_linear", "to_heads", "wants_few_rows"]

_PARTS = 4  # of a layer's outputs; measured with two threads, where 2 to 8 are about equal
_LEAST, _MOST = 16, 320  # rows; under these it is a matrix times a few vectors, above the usual product is as fast
_SMALL = 2**18  # weights; up to these putting the parts together costs what they gain
_plain: ContextVar[bool] = ContextVar("_plain", default=False)


@contextmanager
def plain_linear() -> Iterator[None]:
    """In here every linear layer is F.linear, bit for bit: for comparisons."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` (..., D) times `weight` (O, D) is a case for the functions below: float32 on two to four threads of a
    CPU, few rows, no gradient, nothing traced."""
    return (
        not torch.compiler.is_compiling()  # first: a graph for any number of images must not ask for rows
        and not torch.jit.is_tracing()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and _LEAST <= x.numel() // x.shape[-1] <= _MOST
        and weight.numel() > _SMALL
        and not torch.is_grad_enabled()
        and 1 < torch.get_num_threads() <= _PARTS
        and type(weight) in (Tensor, nn.Parameter)
        and torch.backends.mkl.is_available()
        and not torch.is_autocast_enabled("cpu")
        and not _plain.get()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, by parts where that is faster; results differ by rounding. (..., D), (O, D) -> (..., O)."""
    if not few_rows(x, weight) or weight.shape[0] % _PARTS:
        return F.linear(x, weight, bias)
    return _by_parts(x, weight, bias, _PARTS).transpose(0, 1).reshape(*x.shape[:-1], -1)


def to_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """(B, L, D), (H * d, D) -> (B, H, L, d): a projection, seen by heads. By parts each head lies in one piece."""
    batch, length, _ = x.shape
    if few_rows(x, weight):
        return _by_parts(x, weight, bias, heads).view(heads, batch, length, -1).transpose(0, 1)
    return F.linear(x, weight, bias).view(batch, length, heads, -1).transpose(1, 2)


def _by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """(parts, rows, O / parts)."""
    rows = x.reshape(1, -1, x.shape[-1]).expand(parts, -1, -1)
    columns = weight.view(parts, -1, weight.shape[1]).transpose(1, 2)
    return torch.bmm(rows, columns) if bias is None else torch.baddbmm(bias.view(parts, 1, -1), rows, columns)


class FewRows:
    """Mixin of an nn.Linear that goes through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        layer = cast(nn.Linear, self)
        return linear(x, layer.weight, layer.bias)


def wants_few_rows(module: nn.Module) -> bool:
    """Whether this is a plain linear layer. Subclasses with a forward of their own are left alone."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
