"""From a count, a ratio or a schedule to one integer for each block. No torch: used by the command line too."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral, Real

from tokensieve.errors import BudgetError, OptionError, nearest

__all__ = [
    "SCHEDULES",
    "Keep",
    "average_of",
    "check_schedule",
    "counts_for",
    "counts_for_average",
    "parse_keep",
    "share_out",
    "target_count",
]

Keep = int | float | Sequence[int | float]
SCHEDULES = ("constant", "linear", "geometric", "early")


def parse_keep(text: str) -> int | float | list[int | float]:
    """A budget as typed: "60" is a count, "0.4" a ratio, "1" one patch and "1.0" all of them, "0.7,0.5,40" a list."""

    def one(part: str) -> int | float:
        part = part.strip()
        try:
            return float(part) if any(c in part for c in ".eE") else int(part)
        except ValueError:
            raise BudgetError(f"keep: {part!r} is not a number; give a count (60) or a ratio (0.4)") from None

    parts = [one(p) for p in text.split(",")]
    return parts if len(parts) > 1 else parts[0]


def target_count(n: int, keep: int | float, name: str = "keep") -> int:
    """How many of n patches `keep` asks for: an int is a count (never more than n), a float a ratio in (0, 1].

    name: the argument that errors speak of.
    """
    if isinstance(keep, bool) or not isinstance(keep, Real) or not math.isfinite(keep):
        raise BudgetError(f"{name}={keep!r}: give a count (60) or a ratio (0.4)")
    if isinstance(keep, Integral):  # numpy's integers are counts too
        if keep < 1:
            raise BudgetError(f"{name}={keep}: at least one patch must remain")
        return min(int(keep), n)
    if keep > 1.0:
        raise BudgetError(f"{name}={keep}: a ratio lies in (0, 1]; for a count give a whole number, {round(keep)}")
    if keep <= 0.0:
        raise BudgetError(f"{name}={keep}: a ratio lies in (0, 1], and at least one patch must remain")
    return max(1, round(keep * n))


def check_schedule(schedule: str) -> None:
    """Raise where there is no schedule of this name; the message has the nearest."""
    if schedule not in SCHEDULES:
        raise OptionError(f"unknown schedule {schedule!r}.{nearest(str(schedule), SCHEDULES)}")


def counts_for(
    n: int,
    blocks: int,
    keep: Keep,
    schedule: str = "constant",
    floor: Callable[[int], int] | None = None,
) -> list[int]:
    """Patches remaining after each of `blocks` reducing blocks, non-increasing, the last one what `keep` asks for.

    schedule: "constant" removes equally many at each block (rounding carried on), "linear" removes most at the first
    and linearly fewer at each later one, "geometric" removes the same share at each, "early" larger shares first (the
    exponent of geometric grows with the 0.8th power of the depth: for deep cuts). Ignored where `keep` is a list.
    floor: the fewest patches that one reduction of n can leave. Where a schedule would ask for more at one block than
    that, the excess moves to other blocks; where no schedule can do it, BudgetError gives the floor.
    """
    check_schedule(schedule)
    floor = floor or (lambda _: 1)
    if isinstance(keep, Sequence) and not isinstance(keep, str):
        counts = _listed(n, blocks, keep)
    else:
        end = target_count(n, keep)
        lowest = n
        for _ in range(blocks):
            lowest = max(1, floor(lowest))
        if end < lowest:
            cure = "" if floor(lowest) >= lowest else ", or reduce at more blocks"
            raise BudgetError(
                f"keep={keep} asks for {end} of {n} patches, but with {blocks} reducing block(s) this method cannot go "
                f"under {lowest}: keep at least {lowest}{cure}"
            )
        counts = _spread(n, blocks, end, schedule)
        before = n
        for i in range(blocks - 1):
            counts[i] = before = max(counts[i], floor(before))
        for i in range(blocks - 1, 0, -1):
            while max(1, floor(counts[i - 1])) > counts[i]:
                counts[i - 1] -= 1
    before = n
    for i, count in enumerate(counts):
        if count < max(1, floor(before)):
            raise BudgetError(
                f"from {before} to {count} patches at reducing block {i}: this method cannot go under "
                f"{max(1, floor(before))} in one step"
            )
        before = count
    return counts


def _spread(n: int, blocks: int, end: int, schedule: str) -> list[int]:
    gone = n - end
    if schedule == "constant":
        return [n - gone * (i + 1) // blocks for i in range(blocks)]
    if schedule == "linear":
        total, sofar, counts = blocks * (blocks + 1) // 2, 0, []
        for i in range(blocks):
            sofar += blocks - i
            counts.append(n - gone * sofar // total)
        return counts
    power = 0.8 if schedule == "early" else 1.0
    return [round(n * (end / n) ** (((i + 1) / blocks) ** power)) for i in range(blocks)]


def _listed(n: int, blocks: int, keep: Sequence[int | float]) -> list[int]:
    if len(keep) != blocks:
        raise BudgetError(f"keep lists {len(keep)} budgets for {blocks} reducing block(s): give one for each")
    counts = [target_count(n, k) for k in keep]
    for a, b in pairwise(counts):
        if b > a:
            raise BudgetError(f"keep={list(keep)} grows from {a} to {b} patches: a later block cannot bring any back")
    return counts


def average_of(n: int, at: Sequence[int], counts: Sequence[int], depth: int) -> float:
    """Patches leaving a block, averaged over all `depth` blocks."""
    after = dict(zip(at, counts, strict=True))
    total, current = 0, n
    for block in range(depth):
        current = after.get(block, current)
        total += current
    return total / depth


def counts_for_average(
    n: int,
    at: Sequence[int],
    depth: int,
    keep_average: int | float,
    schedule: str = "constant",
    floor: Callable[[int], int] | None = None,
) -> list[int]:
    """The counts whose layer average comes nearest to `keep_average` (a count, or a ratio of n).

    The average cannot fall under what the blocks before the first cut and the method's own floor leave of it:
    BudgetError prints that figure.
    """
    target = target_count(n, keep_average, "keep_average")

    def reachable(end: int) -> bool:
        try:
            counts_for(n, len(at), end, schedule, floor)
        except BudgetError:
            return False
        return True

    def average(end: int) -> float:
        return average_of(n, at, counts_for(n, len(at), end, schedule, floor), depth)

    # the average grows with the end, so a few of n are tried and not all: this runs in every forward
    least = 1 + bisect_left(range(1, n), True, key=reachable)
    lowest = average(least)
    if target < lowest - 0.5:
        raise BudgetError(
            f"keep_average={keep_average} asks for {target} of {n} patches on average over {depth} blocks, but "
            f"reducing at block(s) {', '.join(map(str, at))} cannot go under {lowest:.1f} ({lowest / n:.3f})"
        )
    above = least + bisect_left(range(least, n), float(target), key=average)
    best = min(range(max(least, above - 1), above + 1), key=lambda end: abs(average(end) - target))
    return counts_for(n, len(at), best, schedule, floor)


def share_out(cap: int, wanted: Sequence[int], weights: Sequence[float] | None = None) -> list[int]:
    """What each of several images may keep of `wanted` tokens so that all together keep at most `cap`.

    In proportion to the weights (None: to what is wanted), one token at least and never more than wanted.
    """
    if sum(wanted) <= cap:
        return list(wanted)
    if cap < len(wanted):
        raise BudgetError(f"max_tokens={cap}: a prompt has {len(wanted)} images, and each keeps one token at least")
    weights = wanted if weights is None else weights
    shares, room, left = [1] * len(wanted), cap - len(wanted), list(range(len(wanted)))
    while room and left:
        total = sum(weights[i] for i in left)
        exact = {i: room * (weights[i] / total if total else 1.0 / len(left)) for i in left}
        given = {i: min(int(exact[i]), wanted[i] - shares[i]) for i in left}
        if not any(given.values()):  # less than one each: to the largest remainders
            for i in sorted(left, key=lambda i: -exact[i])[:room]:
                given[i] = 1
        for i, more in given.items():
            shares[i] += more
        room -= sum(given.values())
        left = [i for i in left if shares[i] < wanted[i]]
    return shares
