"""Linear layers of a reduced model on a CPU, by the fastest way that torch ships. Imports torch and core.eager.

torch gives a product in float32 to MKL. That costs a reduced model time in two ways:

- A product of few rows and a large matrix is cut up badly between two threads: the fewer tokens, the further the time
  falls behind the MACs, which takes back a part of what a reduction gained. Given as a batch of products, one for each
  part of the outputs, every thread packs and reads its own part of the weights.
- On AMD's processors MKL leaves AVX-512 aside, from Zen 5 on half of what they can do. oneDNN, which torch ships as
  well, uses it, for many rows and for few. It makes code for each number of rows, so it is for encoders, whose blocks
  meet the same numbers again and again.

Neither needs a copy of the weights. Figures: benchmarks/speed.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve._machine import cpu_family, cpu_vendor
from tokensieve.core.eager import eager

__all__ = [
    "PARTS",
    "ByParts",
    "FastLinear",
    "Way",
    "Whole",
    "by_parts",
    "is_large",
    "is_plain",
    "linear",
    "parts_here",
    "plain_linear",
    "takes_rows",
    "wants_fast",
    "way_here",
]

PARTS = 4  # of a layer's outputs, or hidden units; with two threads halves were measured 1 to 4 % slower
_LEAST, _MOST = 16, 320  # rows; under these it is a matrix times a few vectors, above the usual product is as fast
_SMALL = 2**18  # weights; up to these putting the parts together costs what they gain
_ZEN_5 = 26  # AMD's number for the family
_plain: ContextVar[bool] = ContextVar("_plain", default=False)


class Way(Enum):
    """How a linear layer goes, where it does not go by F.linear."""

    PARTS = "parts"  # to MKL, a product for each part of the outputs
    ONEDNN = "onednn"


@contextmanager
def plain_linear() -> Iterator[None]:
    """In here every linear layer is F.linear, bit for bit: for comparisons."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def way_here() -> Way | None:
    """The way for whole blocks now, for layers and rows that it suits. None: F.linear."""
    if not eager() or _plain.get():  # first: a compiler is not to see what follows
        return None
    if _mkl_is_narrow() and torch.backends.mkldnn.enabled:
        return Way.ONEDNN
    return Way.PARTS if parts_here() else None


def parts_here() -> bool:
    """Whether now is a time for parts: two to four threads, and numbers are all that is wanted."""
    return eager() and 1 < torch.get_num_threads() <= PARTS and torch.backends.mkl.is_available() and not _plain.get()


@cache
def _mkl_is_narrow() -> bool:
    """Whether MKL leaves half of this processor aside, and oneDNN does not: AMD's, with AVX-512 in one step."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and cpu_vendor() == "AuthenticAMD"
        and cpu_family() >= _ZEN_5  # Zen 4 has AVX-512 too, in two steps
    )


def takes_rows(way: Way, x: Tensor) -> bool:
    """Whether the rows of x (..., D) suit this way, whatever the layer: float32 on a CPU, and as many as it is for."""
    rows = x.numel() // x.shape[-1]
    if rows < _LEAST or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return way is Way.ONEDNN or rows <= _MOST


def is_plain(weight: Tensor) -> bool:
    """Whether numbers can be read where they lie: dense, float32, on a CPU, no tensor class of somebody's own."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.layout is torch.strided
    )


def is_large(weight: Tensor) -> bool:
    """Whether a layer's weight (O, D) is worth taking by parts."""
    return weight.numel() > _SMALL


def by_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether x (..., D) times `weight` (O, D) is a case for parts: few rows, large weights."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():  # a graph for any number of rows must not ask for them
        return False
    # the cheapest first: every layer asks, at every token
    return takes_rows(Way.PARTS, x) and parts_here() and is_large(weight) and is_plain(weight)


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


class Whole(NamedTuple):
    """A linear layer by oneDNN: its weights as they are."""

    weight: Tensor  # (O, D)
    bias: Tensor | None  # (O,)

    def __call__(self, rows: Tensor) -> Tensor:
        """(rows, D) -> (rows, O)."""
        return self._product(rows, "none", "")

    def gelu(self, rows: Tensor, approximate: str) -> Tensor:
        """GELU of that in the same pass. approximate: "none" or "tanh", as of nn.GELU."""
        return self._product(rows, "gelu", approximate)

    def _product(self, rows: Tensor, then: str, algorithm: str) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self.weight, self.bias, then, [], algorithm)
        return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, by parts where that is faster; results differ by rounding. (..., D), (O, D) -> (..., O).

    Never by oneDNN: prompts have any number of tokens, and it would make code for each.
    """
    if not by_parts(x, weight) or weight.shape[0] % PARTS:
        return F.linear(x, weight, bias)
    out = ByParts.of(weight, bias)(x.reshape(-1, x.shape[-1]))
    return out.transpose(0, 1).reshape(*x.shape[:-1], -1)


class FastLinear:
    """Mixin of an nn.Linear that goes through `linear`."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def wants_fast(module: nn.Module) -> bool:
    """Whether this is a plain linear layer. Subclasses with a forward of their own are left alone."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
