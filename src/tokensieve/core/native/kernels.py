"""Loops over the tokens of one image, compiled by numba. Imports numba; only `core.native` imports this.

Every array is of float32 and contiguous, with a first dimension of 1, the image: what a tensor of one image is seen as.
Indices are int64. Not a number in, anything out, but never a read outside of an array: comparisons with it are false;
and what a method of somebody's own says is checked before it is followed.

All in one file, though it is long: numba keeps what it compiled as long as the file of a function is the same, and does
not see that another file, of which that function calls something, has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

__all__ = [
    "COMPILES",
    "anchor",
    "cls_row",
    "evit",
    "keep_nothing",
    "max_min",
    "noise",
    "shrink",
    "sieve",
    "tome",
    "top",
]

COMPILES = not getattr(numba.config, "DISABLE_JIT", False)  # numba's own switch, set when it is imported
_F = TypeVar("_F", bound=Callable[..., Any])
Array = np.ndarray[Any, Any]

# sums in any order, so that they run eight numbers at a time; everything else as IEEE has it
_LOOSE = {"contract", "reassoc", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {"fastmath": _LOOSE, "error_model": "numpy", "nogil": True}
_LEAST = np.float32(1.2e-38)
_ONE = np.float32(1.0)


def compiled(function: _F) -> _F:
    """Machine code at the first call; kept on disk beside this file, or in the user's cache, for the next process."""
    try:
        return cast(_F, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no folder to write to
        return cast(_F, numba.njit(**_OPTIONS)(function))


def keep_nothing() -> None:
    """From now on nothing is written to the disk, or read from it."""
    for kernel in globals().values():
        if isinstance(kernel, Dispatcher):
            cast(Any, kernel)._cache = NullCache()


@compiled
def _dots(one: Array, rows: Array, count: int, out: Array) -> None:
    """out[:count] = the products of one (C,) with the first `count` of rows (N, C), four at a time."""
    width, whole = one.shape[0], count - count % 4
    for j in range(0, whole, 4):
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for c in range(width):
            a = one[c]
            s0 += a * rows[j, c]
            s1 += a * rows[j + 1, c]
            s2 += a * rows[j + 2, c]
            s3 += a * rows[j + 3, c]
        out[j], out[j + 1], out[j + 2], out[j + 3] = s0, s1, s2, s3
    for j in range(whole, count):
        s0 = np.float32(0.0)
        for c in range(width):
            s0 += one[c] * rows[j, c]
        out[j] = s0


@compiled
def _dots_of_two(one: Array, two: Array, rows: Array, count: int, out1: Array, out2: Array) -> None:
    """`_dots` of two vectors at once: what is read of the rows serves both."""
    width, whole = one.shape[0], count - count % 4
    for j in range(0, whole, 4):
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0.0)
        for c in range(width):
            a, b = one[c], two[c]
            k0, k1, k2, k3 = rows[j, c], rows[j + 1, c], rows[j + 2, c], rows[j + 3, c]
            s0 += a * k0
            s1 += a * k1
            s2 += a * k2
            s3 += a * k3
            t0 += b * k0
            t1 += b * k1
            t2 += b * k2
            t3 += b * k3
        out1[j], out1[j + 1], out1[j + 2], out1[j + 3] = s0, s1, s2, s3
        out2[j], out2[j + 1], out2[j + 2], out2[j + 3] = t0, t1, t2, t3
    _dots(one, rows[whole:], count - whole, out1[whole:])
    _dots(two, rows[whole:], count - whole, out2[whole:])


@compiled
def _exp(row: Array, bits: Array, powers: Array) -> None:
    """e to the numbers of a row, in place, eight at a time (the C library's takes one, and that is seen).

    bits: int32, powers: the same memory as float32, as long as the row. Right to 5e-7 of the value, from -87 to 87.
    """
    for j in range(row.shape[0]):
        row[j] = min(max(row[j], np.float32(-87.0)), np.float32(87.0))
        whole = np.floor(row[j] * np.float32(1.4426950408889634) + np.float32(0.5))
        y = row[j] - whole * np.float32(0.6931471805599453)  # within 0.35 of 0: eight terms are enough
        p = _ONE + y * np.float32(1 / 7)
        p = _ONE + y * np.float32(1 / 6) * p
        p = _ONE + y * np.float32(1 / 5) * p
        p = _ONE + y * np.float32(1 / 4) * p
        p = _ONE + y * np.float32(1 / 3) * p
        p = _ONE + y * np.float32(1 / 2) * p
        row[j] = _ONE + y * p
        bits[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for j in range(row.shape[0]):
        row[j] *= powers[j]


@compiled
def _cls_row(q: Array, k: Array, bias: Array, scale: float, prefix: int, n: int) -> Array:
    """(n,) attention of the first token to the patches, mean over heads. q, k: (1, H, L, d), bias: (1, L) or (1, 0)."""
    heads, length, d = k.shape[1], k.shape[2], k.shape[3]
    out = np.zeros(n, np.float32)
    query = np.empty(d, np.float32)
    row = np.empty(length, np.float32)
    bits = np.empty(length, np.int32)
    for h in range(heads):
        for c in range(d):
            query[c] = q[0, h, 0, c] * np.float32(scale)
        _dots(query, k[0, h], length, row)
        if bias.shape[1]:
            for i in range(length):
                row[i] += bias[0, i]
        high = row[0]
        for i in range(length):
            high = max(high, row[i])
        for i in range(length):
            row[i] -= high
        _exp(row, bits, bits.view(np.float32))
        total = np.float32(0.0)
        for i in range(length):
            total += row[i]
        share = _ONE / (total * np.float32(heads))
        for i in range(n):
            out[i] += row[prefix + i] * share
    return out


@compiled
def _unit_keys(k: Array, order: Array, prefix: int, parts: int) -> Array:
    """(N, parts * d) keys of the patches in this order: sums over groups of heads, each of length 1 / sqrt(parts)."""
    heads, d, n = k.shape[1], k.shape[3], order.shape[0]
    per = heads // parts
    out = np.empty((n, parts * d), np.float32)
    for i in range(n):
        row = prefix + order[i]
        for g in range(parts):
            group = out[i, g * d : (g + 1) * d]
            for c in range(d):
                group[c] = k[0, g * per, row, c]
            for h in range(g * per + 1, (g + 1) * per):
                for c in range(d):
                    group[c] += k[0, h, row, c]
            square = np.float32(0.0)
            for c in range(d):
                square += group[c] * group[c]
            by = _ONE / max(np.sqrt(square * np.float32(parts)), _LEAST)
            for c in range(d):
                group[c] *= by
    return out


@compiled
def _highest(row: Array, count: int) -> tuple[float, int]:
    """The highest of the first `count` > 0 of a row, and the first place where it stands."""
    high = row[0]
    for j in range(1, count):
        high = max(high, row[j])
    for j in range(count):
        if row[j] == high:
            return high, j
    return high, 0


@compiled
def _settle(stays: Array, goal: Array, r: int) -> tuple[Array, Array, Array]:
    """From flags (N,) and, for each that leaves, the patch that it goes into: keep, drop, into, each with its 1."""
    n = stays.shape[0]
    slot = np.zeros(n, np.int64)  # 0 where a number that is none has led to a patch that leaves
    keep = np.empty((1, n - r), np.int64)
    drop = np.empty((1, r), np.int64)
    into = np.empty((1, r), np.int64)
    kept = gone = 0
    for i in range(n):
        if stays[i]:
            slot[i] = kept
            keep[0, kept] = i
            kept += 1
        else:
            drop[0, gone] = i
            gone += 1
    for i in range(r):
        into[0, i] = slot[goal[drop[0, i]]]
    return keep, drop, into


@compiled
def cls_row(q: Array, k: Array, bias: Array, scale: float, prefix: int, n: int) -> tuple[Array]:
    """(1, n) attention of the first token to the patches (and what follows them), mean over heads."""
    return (_cls_row(q, k, bias, scale, prefix, n).reshape(1, n),)


@compiled
def top(scores: Array, keep: int) -> tuple[Array]:
    """(1, keep) the places of the highest of (1, N), ascending."""
    return (np.sort(np.argsort(-scores[0], kind="mergesort")[:keep]).reshape(1, keep),)


@compiled
def max_min(cosines: Array, keep: int) -> tuple[Array]:
    """(1, keep) what a greedy max-min of 1 - cosine chooses, ascending, from cosines (1, N, N)."""
    c, n = cosines[0], cosines.shape[1]
    nearest, apart = np.empty(n, np.float32), np.empty(n, np.float32)
    for i in range(n):
        likest, total = np.float32(-np.inf), np.float32(0.0)
        for j in range(n):
            total += _ONE - c[i, j]
            if j != i:
                likest = max(likest, c[i, j])
        nearest[i], apart[i] = _ONE - likest, total
    far, pick = np.max(nearest), 0
    most = np.float32(-np.inf)
    for i in range(n):  # of equals the one that is farthest from all
        if nearest[i] >= far - np.float32(1e-5) and apart[i] > most:
            most, pick = apart[i], i
    chosen = np.empty((1, keep), np.int64)
    nearest[:] = np.inf
    for step in range(keep):
        chosen[0, step] = pick
        nearest[pick] = -np.inf
        best = np.float32(-np.inf)
        row, pick = c[pick], 0
        for j in range(n):
            nearest[j] = min(nearest[j], _ONE - row[j])
            if nearest[j] > best:
                best, pick = nearest[j], j
    chosen[0].sort()
    return (chosen,)


@compiled
def _check(index: Array, n: int) -> None:
    for i in range(index.shape[1]):
        if index[0, i] < 0 or index[0, i] >= n:
            raise IndexError("a reduction's keep, drop or into is out of range")


@compiled
def shrink(
    x: Array, keep: Array, drop: Array, into: Array, extra: Array, size: Array, merges: bool, weight: float,
    prefix: int, made: int,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The rows of x (1, L, D) that stay, those that leave averaged into them by size; the new sizes; their bias.

    merges: whether those that leave are averaged, or gone for good; then drop and into are not looked at. extra: (1, E,
    N + M) weights of tokens that are made, and take the place of those made earlier; or (1, 0, 0). size: (1, N + M), or
    (1, 0) for one each. Sizes come back as (1, 0) as long as nothing was ever merged. bias: (1, P+K+M), 0 for the
    prefix, then `weight` * log of the sizes; (1, 0) where there is none.
    """
    length, width, k = x.shape[1], x.shape[2], keep.shape[1]
    n, fresh = length - prefix - made, extra.shape[1]
    stays = 0 if fresh else made
    _check(keep, n)
    if merges:
        _check(drop, n)
        _check(into, k)
        if drop.shape[1] != into.shape[1]:
            raise IndexError("a reduction's drop and into are not of the same length")
    if fresh and extra.shape[2] != n + made:
        raise IndexError("a reduction's extra is not of the number of tokens")
    if size.shape[1] and size.shape[1] != n + made:
        raise IndexError("a reduction was given sizes of another number of tokens")
    end = k + stays + fresh
    out = np.empty((1, prefix + end, width), np.float32)
    for i in range(prefix):
        for c in range(width):
            out[0, i, c] = x[0, i, c]
    for i in range(k):
        row = prefix + keep[0, i]
        for c in range(width):
            out[0, prefix + i, c] = x[0, row, c]
    for i in range(stays):
        for c in range(width):
            out[0, prefix + k + i, c] = x[0, prefix + n + i, c]
    for i in range(fresh):
        token = out[0, prefix + k + i]
        token[:] = 0.0
        for j in range(n + made):
            share = extra[0, i, j]
            if share != np.float32(0.0):
                for c in range(width):
                    token[c] += share * x[0, prefix + j, c]
    known = size.shape[1] > 0
    if not known and not merges:
        return out, np.empty((1, 0), np.float32), np.empty((1, 0), np.float32)
    total = np.ones((1, end), np.float32)
    if known:
        for i in range(k):
            total[0, i] = size[0, keep[0, i]]
        for i in range(stays):
            total[0, k + i] = size[0, n + i]
    for i in range(into.shape[1]):
        total[0, into[0, i]] += size[0, drop[0, i]] if known else _ONE
    for i in range(into.shape[1]):
        slot, row = into[0, i], prefix + drop[0, i]
        kept = prefix + keep[0, slot]
        share = (size[0, drop[0, i]] if known else _ONE) / total[0, slot]
        for c in range(width):
            out[0, prefix + slot, c] += (x[0, row, c] - x[0, kept, c]) * share
    if fresh:
        # made tokens stand for all that is in no kept one, in equal parts
        rest = size[0].sum() if known else np.float32(n + made)
        for i in range(k):
            rest -= total[0, i]
        for i in range(fresh):
            total[0, k + i] = rest / np.float32(fresh)
    if weight == 0.0:
        return out, total, np.empty((1, 0), np.float32)
    bias = np.zeros((1, prefix + end), np.float32)
    for i in range(end):
        if total[0, i] != _ONE:
            bias[0, prefix + i] = np.float32(weight) * np.log(total[0, i])
    return out, total, bias


@compiled
def evit(q: Array, k: Array, bias: Array, scale: float, prefix: int, n: int, keep: int) -> tuple[Array, Array, Array]:
    """EViT's choice: keep, extra (1, 1, N + M), scores. What was made earlier stands behind the patches."""
    row = _cls_row(q, k, bias, scale, prefix, k.shape[2] - prefix)
    scores = row[:n].copy().reshape(1, n)
    (chosen,) = top(scores, keep)
    for i in range(keep):
        row[chosen[0, i]] = 0.0
    total = np.float32(0.0)
    for i in range(row.shape[0]):
        total += row[i]
    for i in range(row.shape[0]):
        row[i] /= max(total, _LEAST)
    return chosen, row.reshape(1, 1, row.shape[0]), scores


@compiled
def tome(k: Array, prefix: int, n: int, r: int) -> tuple[Array, Array, Array, Array]:
    """ToMe's choice by the keys k (1, H, L, d): keep, drop, into, scores."""
    first = prefix % 2
    sources = (n - first + 1) // 2
    targets = n - sources
    order = np.empty(n, np.int64)  # targets first: their keys then lie together
    for i in range(targets):
        order[i] = 1 - first + 2 * i
    for i in range(sources):
        order[targets + i] = first + 2 * i
    keys = _unit_keys(k, order, prefix, 1)
    row = np.empty(targets, np.float32)
    far = np.empty(sources, np.float32)
    goal = np.empty(n, np.int64)
    scores = np.ones((1, n), np.float32)
    for i in range(sources):
        _dots(keys[targets + i], keys, targets, row)
        high, where = _highest(row, targets)
        far[i] = -high
        goal[first + 2 * i] = 1 - first + 2 * where
        scores[0, first + 2 * i] = -high
    stays = np.ones(n, np.bool_)
    for i in np.argsort(far, kind="mergesort")[:r]:
        stays[first + 2 * i] = False
    keep, drop, into = _settle(stays, goal, r)
    return keep, drop, into, scores


@compiled
def sieve(
    q: Array, k: Array, bias: Array, scale: float, prefix: int, n: int, parts: int, weight: float, r: int
) -> tuple[Array, Array, Array, Array]:
    """sieve's choice: keep, drop, into, scores."""
    importance = _cls_row(q, k, bias, scale, prefix, n)
    order = np.argsort(-importance, kind="mergesort")
    keys = _unit_keys(k, order, prefix, parts)
    alike = np.empty((n, n), np.float32)  # the lower triangle: to those that are more important
    price = np.empty(n, np.float32)
    scores = np.empty((1, n), np.float32)
    for i in range(n):
        distance = np.float32(2.0)
        if i > 0:
            if i % 2:
                after = min(i + 1, n - 1)
                _dots_of_two(keys[i], keys[after], keys, after, alike[i], alike[after])
            high, _ = _highest(alike[i], i)
            distance = np.float32(1.0 - max(high, -1.0))
        price[i] = distance * (importance[order[i]] * np.float32(n)) ** np.float32(weight)
        scores[0, order[i]] = price[i]
    price[0] = np.inf  # nobody is more important: it has nowhere to go
    cheapest = np.argsort(price, kind="mergesort")[:r]
    stays = np.ones(n, np.bool_)
    for i in cheapest:
        stays[order[i]] = False
    goal = np.zeros(n, np.int64)
    for i in cheapest:
        for j in range(i):
            if not stays[order[j]]:
                alike[i, j] = -np.inf
        _, where = _highest(alike[i], i)
        goal[order[i]] = order[where]
    keep, drop, into = _settle(stays, goal, r)
    return keep, drop, into, scores


@compiled
def _scale_to_one(row: Array) -> None:
    """To [0, 1] in place; 0.5 everywhere where a row is constant."""
    low, high = row[0], row[0]
    for j in range(row.shape[0]):
        low, high = min(low, row[j]), max(high, row[j])
    span = high - low
    flat = span <= np.float32(1e-6) * max(-low, high)
    for j in range(row.shape[0]):
        row[j] = np.float32(0.5) if flat else (row[j] - low) / span


@compiled
def anchor(
    q: Array, k: Array, bias: Array, log_sum: Array, x: Array, scale: float, prefix: int, n: int, anchors: int,
    alpha: float, scaled: bool, keep: int,
) -> tuple[Array, Array]:  # fmt: skip
    """anchor's choice: keep, scores. log_sum: (1, H, L) of each attention row, x: (1, L, D)."""
    heads, d, width = k.shape[1], k.shape[3], x.shape[2]
    cls = _cls_row(q, k, bias, scale, prefix, n)
    chosen = np.argsort(-cls, kind="mergesort")[:anchors]
    importance = np.zeros(n, np.float32)
    key = np.empty(d, np.float32)
    row = np.empty(n, np.float32)
    bits = np.empty(n, np.int32)
    for h in range(heads):
        for j in chosen:
            for c in range(d):
                key[c] = k[0, h, prefix + j, c] * np.float32(scale)
            _dots(key, q[0, h, prefix:], n, row)
            louder = bias[0, prefix + j] if bias.shape[1] else np.float32(0.0)
            for i in range(n):
                row[i] += louder - log_sum[0, h, prefix + i]
            _exp(row, bits, bits.view(np.float32))
            for i in range(n):
                importance[i] += row[i]
    for i in range(n):
        importance[i] *= _ONE / np.float32(heads * anchors)
    units = np.empty((anchors, width), np.float32)
    for a in range(anchors):
        square = np.float32(0.0)
        for c in range(width):
            units[a, c] = x[0, prefix + chosen[a], c]
            square += units[a, c] * units[a, c]
        by = _ONE / max(np.sqrt(square), np.float32(1e-12))
        for c in range(width):
            units[a, c] *= by
    diverse = np.empty(n, np.float32)
    near = np.empty(anchors, np.float32)
    for i in range(n):
        patch = x[0, prefix + i]
        _dots(patch, units, anchors, near)
        square = np.float32(0.0)
        for c in range(width):
            square += patch[c] * patch[c]
        diverse[i] = _ONE - _highest(near, anchors)[0] / max(np.sqrt(square), np.float32(1e-12))
    if scaled:
        _scale_to_one(importance)
        _scale_to_one(diverse)
    share = np.float32(alpha)
    scores = np.empty((1, n), np.float32)
    ranks = np.empty((1, n), np.float32)
    for i in range(n):
        span = importance[i] - diverse[i]  # from the nearer end, as torch.lerp does
        scores[0, i] = diverse[i] + share * span if share < 0.5 else importance[i] - (_ONE - share) * span
        ranks[0, i] = scores[0, i]
    for j in chosen:
        ranks[0, j] += np.float32(4.0)  # above every other patch: both terms lie in [0, 2]
    return top(ranks, keep)[0], scores


@compiled
def _scrambled(h: Any, mix: Any) -> Any:
    """`core.score._scramble` of one number."""
    h = (h ^ (h >> np.int64(30))) * mix
    return (h ^ (h >> np.int64(27))) * mix


@compiled
def noise(tokens: Array, position: Array, start: int, mix: int, place: int, groups: int) -> tuple[Array]:
    """(1, N) `core.score.unit_noise` of the hash of tokens (1, L, D). position: (1, N). Integers wrap, as there."""
    length, width = tokens.shape[1], tokens.shape[2]
    mean = np.zeros(width, np.float32)
    for i in range(length):
        for c in range(width):
            mean[c] += tokens[0, i, c]
    square = np.float32(0.0)
    for c in range(width):
        mean[c] /= np.float32(length)
        square += mean[c] * mean[c]
    by = np.float32(100.0) * np.sqrt(np.float32(width)) / max(np.sqrt(square), np.float32(1e-12))
    image = np.int64(0)
    for g in range(groups):
        low, high = g * width // groups, -((-(g + 1) * width) // groups)
        total = np.float32(0.0)
        for c in range(low, high):
            total += mean[c]
        step = np.int64(np.rint(total / np.float32(high - low) * by))
        image += _scrambled(step + np.int64(g) * np.int64(place), np.int64(mix))
    out = np.empty((1, position.shape[1]), np.float32)
    for i in range(position.shape[1]):
        h = (position[0, i] & np.int64(0xFFFFFFFF)) * np.int64(place) + np.int64(start) + image
        h = _scrambled(h, np.int64(mix))
        out[0, i] = np.float32((h >> np.int64(40)) & np.int64(0xFFFFFF)) / np.float32(1 << 24)
    return (out,)
