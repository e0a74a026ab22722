"""Linear layers for few tokens on a CPU. Imports torch and core.eager.

A product of few rows and a large matrix is cut up badly between two threads: the fewer tokens, the further the time
falls behind the MACs, which takes back a part of what a reduction gained. Given as a batch of products, one for each
part of the outputs, every thread packs and reads its own part of the weights. That needs no copy of them. Figures:
benchmarks/speed.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.eager import eager

__all__ = [
    "PARTS",
    "ByParts",
    "FewRows",
    "few_rows",
    "few_rows_here",
    "is_few",
    "is_large",
    "is_plain",
    "linear",
    "plain_linear",
    "wants_few_rows",
]

PARTS = 4  # of a layer's outputs, or hidden units; with two threads halves were measured 1 to 4 % slower
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


def few_rows_here() -> bool:
    """Whether now is a time for the functions below: two to four threads, and only numbers are wanted."""
    return eager() and 1 < torch.get_num_threads() <= PARTS and torch.backends.mkl.is_available() and not _plain.get()


def is_few(x: Tensor) -> bool:
    """Whether x (..., D) has few rows, in float32 on a CPU."""
    few = _LEAST <= x.numel() // x.shape[-1] <= _MOST
    return few and x.dtype == torch.float32 and x.device.type == "cpu"


def is_plain(weight: Tensor) -> bool:
    """Whether parts of a weight can be seen in memory: dense, float32, on a CPU, no tensor class of somebody's own."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.layout is torch.strided
    )


def is_large(weight: Tensor) -> bool:
    """Whether a layer's weight (O, D) is worth taking by parts, and can be."""
    return weight.numel() > _SMALL and is_plain(weight)


def few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` (..., D) times `weight` (O, D) is a case for parts: few rows, large weights."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():  # a graph for any number of rows must not ask for them
        return False
    return is_few(x) and few_rows_here() and is_large(weight)  # the cheapest first: every layer asks, at every token


class ByParts(NamedTuple):
    """A linear layer by parts: views of its weights."""

    bias: Tensor | None  # (parts, 1, O / parts)
    weight: Tensor  # (parts, D, O / parts)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, parts: int = PARTS) -> ByParts:
        """weight: (O, D), bias: (O,). O is a multiple of `parts`."""
        seen = weight.view(parts, -1, weight.shape[1]).transpose(1, 2)
        return cls(None if bias is None else bias.view(parts, 1, -1), seen)

    def __call__(self, rows: Tensor) -> Tensor:
        """(rows, D) -> (parts, rows, O / parts)."""
        many = rows.expand(self.weight.shape[0], -1, -1)
        return torch.bmm(many, self.weight) if self.bias is None else torch.baddbmm(self.bias, many, self.weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, by parts where that is faster; results differ by rounding. (..., D), (O, D) -> (..., O)."""
    if not few_rows(x, weight) or weight.shape[0] % PARTS:
        return F.linear(x, weight, bias)
    out = ByParts.of(weight, bias)(x.reshape(-1, x.shape[-1]))
    return out.transpose(0, 1).reshape(*x.shape[:-1], -1)


class FewRows:
    """Mixin of an nn.Linear that goes through `linear`."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def wants_few_rows(module: nn.Module) -> bool:
    """Whether this is a plain linear layer. Subclasses with a forward of their own are left alone."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
