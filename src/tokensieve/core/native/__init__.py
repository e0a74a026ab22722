"""The cut of a single image in machine code, where numba is installed (`pip install 'tokensieve[native]'`).

A cut is 20 to 50 small operations. In a batch their overhead does not show; beside the blocks of one image, which have
just swept the caches, it is up to a tenth of the whole time. Compiled, a cut is two or three calls. They say what the
operations in torch say, up to rounding, and up to which of equals is taken. Those operations are the definition, and
what everything else goes by: batches, gradients, other precisions and devices, torch.compile, export, and every machine
without numba.

Imports reduction and score, and kernels when first used. Figures: benchmarks/speed.md.
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

from tokensieve.core.reduction import Reduction
from tokensieve.core.score import GROUPS, MIX, PLACE, cosine, noise_start
from tokensieve.errors import one_line

if TYPE_CHECKING:
    from tokensieve.core.view import TokenView

__all__ = [
    "SWITCH",
    "anchor",
    "applies",
    "cls_row",
    "evit",
    "fits",
    "max_min",
    "noise",
    "plain",
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
_NO_WEIGHTS = np.empty((1, 0, 0), np.float32)


@cache
def _kernels() -> ModuleType | None:
    """The compiled functions, if there are any. Each is made, or read from the disk, at its first call."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        if importlib.util.find_spec("numba") is None:
            return None
        from tokensieve.core.native import kernels
    except Exception as error:  # whatever a numba of another time says to this numpy or this Python
        warnings.warn(f"numba cannot be used, single images are cut without it: {one_line(error)}", stacklevel=2)
        return None
    return kernels if kernels.COMPILES else None  # else it would be Python's own loops


def version() -> str | None:
    """Of numba, where single images are cut by it."""
    kernels = _kernels()
    return None if kernels is None else str(kernels.numba.__version__)


def fits(x: Tensor) -> bool:
    """Whether x (B, L, D) is one image of not too many tokens, in float32 on a CPU, and there is code for it.

    To be asked where `core.eager` holds.
    """
    return x.shape[0] == 1 and x.shape[1] <= _MOST and plain(x) and _kernels() is not None


def plain(x: Tensor) -> bool:
    """Whether a kernel can read these numbers: float32 on a CPU, no gradient, no class of tensor of somebody's own."""
    return x.dtype == torch.float32 and x.is_cpu and not x.requires_grad and type(x) is Tensor


def tome(view: TokenView, keep: int) -> Reduction:
    """The choice of `methods.tome`."""
    return _merging("tome", view.k, view.prefix, view.n, view.n - keep)


def sieve(view: TokenView, keep: int, parts: int, weight: float) -> Reduction:
    """The choice of `methods.sieve`. parts: a divisor of the number of heads."""
    n, bias = view.n, _numbers(view.bias)
    return _merging("sieve", view.q, view.k, bias, view.scale, view.prefix, n, parts, weight, n - keep)


def anchor(view: TokenView, keep: int, anchors: int, alpha: float, scaled: bool) -> tuple[Tensor, Tensor]:
    """(1, keep) the choice of `methods.anchor`, and the scores (1, N)."""
    chosen, scores = _call(
        "anchor", view.q, view.k, _numbers(view.bias), view.log_sum, view.tokens, view.scale, view.prefix, view.n,
        anchors, alpha, scaled, keep,
    )  # fmt: skip
    return chosen, scores


def cls_row(view: TokenView) -> Tensor:
    """(1, N+M) attention that CLS pays to every token after the prefix, mean over heads."""
    n = view.tokens.shape[1] - view.prefix
    return _call("cls_row", view.q, view.k, _numbers(view.bias), view.scale, view.prefix, n)[0]


def noise(view: TokenView, seed: int) -> Tensor:
    """(1, N) the scores of `methods.random`."""
    return _call("noise", view.tokens, view.origin, noise_start(seed), MIX, PLACE, GROUPS)[0]


def top(scores: Tensor, k: int) -> Tensor:
    """The k highest of (1, N), ascending."""
    return _call("top", scores, k)[0]


def max_min(x: Tensor, k: int) -> Tensor:
    """`core.select.max_min` of (1, N, D)."""
    return _call("max_min", cosine(x, x), k)[0]


def evit(view: TokenView, keep: int) -> Reduction:
    """The choice of `methods.evit`."""
    chosen, extra, scores = _call("evit", view.q, view.k, _numbers(view.bias), view.scale, view.prefix, view.n, keep)
    return Reduction(keep=chosen, extra=extra, scores=scores)


def shrink(
    reduction: Reduction, x: Tensor, prefix: int, made: int, size: Tensor | None, weight: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`reduction.apply`, and what is added to the logits of later attention: `weight` * log of the new sizes.

    (1, P+N+M, D) -> (1, P+K+E, D), sizes (1, K+E) and bias (1, P+K+E), 0 for the prefix. The bias is None where there
    are no sizes, or no weight.
    """
    merges = reduction.into is not None
    gone, goal = (index if merges and index is not None else _NO_PLACES for index in (reduction.drop, reduction.into))
    extra = _NO_WEIGHTS if reduction.extra is None else reduction.extra
    out, total, bias = _call(
        "shrink", x, reduction.keep, gone, goal, extra, _numbers(size), merges, weight, prefix, made
    )
    sized = merges or size is not None
    return out, total if sized else None, bias if sized and weight else None


def applies(reduction: Reduction, x: Tensor) -> bool:
    """Whether `shrink` can do to x what this says; what is wrong with it is left to torch to say."""
    extra, merges = reduction.extra, reduction.into is not None
    places = (reduction.keep, reduction.drop, reduction.into) if merges else (reduction.keep,)
    return (
        type(reduction) is Reduction
        and plain(x)
        and all(p is not None and p.dtype == torch.int64 and p.dim() == 2 and p.shape[0] == 1 for p in places)
        and (extra is None or (plain(extra) and extra.dim() == 3 and extra.shape[0] == 1 and extra.shape[1] > 0))
    )


def _merging(name: str, *args: Tensor | np.ndarray[Any, Any] | float) -> Reduction:
    keep, drop, into, scores = _call(name, *args)
    return Reduction(keep=keep, drop=drop, into=into, scores=scores)


def _numbers(x: Tensor | None) -> Tensor | np.ndarray[Any, Any]:
    return _NO_NUMBERS if x is None else x


def _call(name: str, *args: Tensor | np.ndarray[Any, Any] | float) -> list[Tensor]:
    """What a kernel makes of these. Tensors are passed as they lie in memory; those not in order are copied first."""
    given = [a.contiguous().numpy() if isinstance(a, Tensor) else a for a in args]
    kernels = _kernels()
    try:
        found = getattr(kernels, name)(*given)
    except OSError as error:  # a full disk, on which it cannot be kept
        assert kernels is not None
        warnings.warn(f"machine code for single images is not kept for the next time: {one_line(error)}", stacklevel=2)
        kernels.keep_nothing()
        found = getattr(kernels, name)(*given)
    return [torch.from_numpy(array) for array in found]
