"""The cut of a single image in machine code, where numba is installed (`pip install 'tokensieve[native]'`).

A cut is 20 to 50 small operations. In a batch their overhead does not show; beside the blocks of one image, which have
just swept the caches, it is a tenth of the whole time. Compiled, a cut is two calls. The functions here say what those
in torch say, up to rounding: these are the definition, and what everything else goes by - batches, gradients, other
precisions and devices, torch.compile, export, and every machine without numba.

Imports torch, and kernels when first used. Figures: benchmarks/speed.md.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokensieve.core.view import TokenView

__all__ = [
    "SWITCH",
    "anchor",
    "cls_row",
    "fits",
    "log_sizes",
    "noise",
    "sees",
    "shrink",
    "sieve",
    "tome",
    "top",
    "version",
]

SWITCH = "TOKENSIEVE_NATIVE"  # 0 in the environment: as if there were no numba
_MOST = 640  # tokens; with more the operations of torch, on all cores, are as fast
_NO_NUMBERS = np.empty((1, 0), np.float32)
_NO_PLACES = np.empty((1, 0), np.int64)


@cache
def _kernels() -> ModuleType | None:
    """The compiled functions, if there are any. Each is made, or read from the disk, at its first call."""
    if os.environ.get(SWITCH, "1") == "0" or importlib.util.find_spec("numba") is None:
        return None
    try:
        from tokensieve.core.native import kernels
    except ImportError as error:
        warnings.warn(f"numba cannot be used, single images are cut without it: {error}", stacklevel=2)
        return None
    return kernels


def version() -> str | None:
    """Of numba, where single images are cut by it."""
    kernels = _kernels()
    return None if kernels is None else str(kernels.numba.__version__)


def fits(*tensors: Tensor | None) -> bool:
    """Whether these are of one image, as plain numbers: float32 on a CPU, no gradient, nothing traced or counted."""
    for x in tensors:
        if x is not None and (
            x.shape[0] != 1
            or x.dtype != torch.float32
            or x.device.type != "cpu"
            or x.requires_grad
            or type(x) is not Tensor
        ):
            return False
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()  # a mode that records or counts operations
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap and its like
        and _kernels() is not None
    )


def sees(view: TokenView) -> bool:
    """Whether this is one image in a vision tower, of not too many tokens."""
    tokens = view.tokens
    if tokens.shape[0] != 1 or tokens.shape[1] > _MOST or view.stage != "encoder":
        return False
    return view.q.shape == view.k.shape and fits(tokens, view.q, view.k, view.bias)


def tome(view: TokenView, keep: int) -> list[Tensor]:
    """keep, drop, into and scores as `methods.tome` has them."""
    return _call("tome", view.k, view.prefix, view.n, view.n - keep)


def sieve(view: TokenView, keep: int, parts: int, weight: float) -> list[Tensor]:
    """keep, drop, into and scores as `methods.sieve` has them. parts: a divisor of the number of heads."""
    n, bias = view.n, _numbers(view.bias)
    return _call("sieve", view.q, view.k, bias, view.scale, view.prefix, n, parts, weight, n - keep)


def anchor(view: TokenView, keep: int, anchors: int, alpha: float, scaled: bool) -> list[Tensor]:
    """keep and scores as `methods.anchor` has them."""
    return _call(
        "anchor", view.q, view.k, _numbers(view.bias), view.log_sum, view.tokens, view.scale, view.prefix, view.n,
        anchors, alpha, scaled, keep,
    )  # fmt: skip


def cls_row(view: TokenView) -> Tensor:
    """(1, N+M) attention that CLS pays to every token after the prefix, mean over heads."""
    n = view.tokens.shape[1] - view.prefix
    return _call("cls_row", view.q, view.k, _numbers(view.bias), view.scale, view.prefix, n)[0]


def noise(tokens: Tensor, position: Tensor, start: int, mix: int, groups: int) -> Tensor:
    """(1, N) numbers in [0, 1) from the image's hash and each position (1, N): `core.score.image_noise`."""
    return _call("noise", tokens, position, start, mix, groups)[0]


def top(scores: Tensor, k: int) -> Tensor:
    """The k highest of (1, N), ascending."""
    return _call("top", scores, k)[0]


def log_sizes(size: Tensor, weight: float, prefix: int) -> Tensor:
    """(1, prefix + N) 0 for the prefix, then weight * log of the sizes (1, N)."""
    return _call("log_sizes", size, weight, prefix)[0]


def shrink(
    x: Tensor, keep: Tensor, drop: Tensor | None, into: Tensor | None, size: Tensor | None, prefix: int, made: int
) -> tuple[Tensor, Tensor | None]:
    """`Reduction.apply` where no token is made."""
    gone, goal = (_NO_PLACES if index is None else index for index in (drop, into))
    out, total = _call("shrink", x, keep, gone, goal, _numbers(size), prefix, made)
    return out, None if size is None and into is None else total


def _numbers(x: Tensor | None) -> Tensor | np.ndarray[Any, Any]:
    return _NO_NUMBERS if x is None else x


def _call(name: str, *args: Tensor | np.ndarray[Any, Any] | float) -> list[Tensor]:
    """What a kernel makes of these. Tensors are passed as they lie in memory; those not in order are copied first."""
    given = [a.contiguous().numpy() if isinstance(a, Tensor) else a for a in args]
    return [torch.from_numpy(array) for array in getattr(_kernels(), name)(*given)]
