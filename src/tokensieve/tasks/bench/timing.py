"""Interleaved measuring: candidates take turns within a round, so that a slow minute hits all of them alike."""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

__all__ = ["check_target", "heap_kept", "interleave", "interval", "quartiles", "ratio", "ratios", "settle"]

Times = dict[str, list[float]]
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of glibc's mallopt
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}  # glibc's, after large tensors


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    tick: Callable[[], None] = lambda: None,
) -> Times:
    """Seconds of each candidate in each round, in round order; one round of warm-up before is not counted.

    A round runs every candidate once, in an order drawn for that round (always the same ones): what a candidate leaves
    in the caches and in the heap then falls on each of the others alike. Runs in inference mode; `tick` is called after
    each round. Freed memory stays with the process meanwhile.
    """
    names = list(candidates)
    times: Times = {name: [] for name in names}
    draw = random.Random(3)
    with torch.inference_mode(), heap_kept():
        for turn in range(-1, rounds):
            for name in draw.sample(names, len(names)):
                seconds = _timed(candidates[name], device)
                if turn >= 0:
                    times[name].append(seconds)
            tick()
    return times


@contextmanager
def heap_kept() -> Iterator[bool]:
    """In here freed memory is not given back to the system; False where the C library is not asked (not glibc).

    Otherwise a candidate pays for the pages that the one before it gave back: up to a third of the time of a batch, by
    chance, and mostly on the untouched model, whose tensors are the largest.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield False
        return
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield True
    finally:
        for what, value in _USUAL.items():
            libc.mallopt(what, value)
        libc.malloc_trim(0)


def _timed(call: Callable[[], object], device: str) -> float:
    settle(device)
    start = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - start


def settle(device: str) -> None:
    """Wait for a device that works on its own."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, mid, high


def ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """How many times faster `other` was, round by round."""
    return [b / o for b, o in zip(base, other, strict=True)]


def ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """How many times faster `other` is: the median of the per-round ratios, so that drift between rounds cancels."""
    return statistics.median(ratios(base, other))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the median lies with a probability of at least 95 %, whatever the distribution; None of fewer than six
    values, which cannot say.

    It is below the k-th smallest of n values only if fewer than k of n coins fall heads.
    """
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 1  # of the 2 ** n ways in which n coins fall
    while 40 * outside <= 2**n:
        rank += 1
        outside += math.comb(n, rank)
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


def check_target(target: float | None, values: Sequence[float]) -> dict[str, float | bool | None]:
    """A row's `target`, whether the median of `values` has `met` it, and whether that is `sure`: whether the interval
    lies on one side of the target. All None where none is set."""
    if target is None:
        return {"target": None, "met": None, "sure": None}
    found = interval(values)
    sure = found is not None and not found[0] < target <= found[1]
    return {"target": target, "met": statistics.median(values) >= target, "sure": sure}
