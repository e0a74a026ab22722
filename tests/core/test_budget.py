"""The budget: exact end, no block asked for more than it can give, every error with its figure."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokensieve.core.budget import SCHEDULES, average_of, counts_for, counts_for_average, parse_keep, target_count
from tokensieve.errors import BudgetError, OptionError

FLOORS = {
    "none": None,
    "half": lambda n: n - n // 2,
    "tenth": lambda n: -(-9 * n // 10),
    "seven": lambda n: min(n, 7),
}
schedules = st.sampled_from(SCHEDULES)
floors = st.sampled_from(list(FLOORS))


def lowest_of(n, blocks, floor):
    for _ in range(blocks):
        n = max(1, floor(n)) if floor else 1
    return n


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("60", 60),
        ("0.4", 0.4),
        ("1", 1),
        ("1.0", 1.0),
        (" 12 ", 12),
        ("1e-1", 0.1),
        ("0.7,0.5,40", [0.7, 0.5, 40]),
        ("3,1.0", [3, 1.0]),
    ],
)
def test_parse_keep(text, value):
    got = parse_keep(text)
    assert got == value
    kinds = [type(v) for v in got] if isinstance(got, list) else type(got)
    assert kinds == ([type(v) for v in value] if isinstance(value, list) else type(value))


@pytest.mark.parametrize("text", ["", "half", "0.5,", "nan", "1.2.3", "40%"])
def test_parse_keep_refuses_what_is_no_number(text):
    with pytest.raises(BudgetError, match="is not a number"):
        parse_keep(text)


def test_one_is_a_patch_and_one_point_zero_all_of_them():
    assert target_count(50, parse_keep("1")) == 1
    assert target_count(50, parse_keep("1.0")) == 50


@given(n=st.integers(1, 600), keep=st.integers(1, 700))
def test_an_integer_is_a_count(n, keep):
    assert target_count(n, keep) == min(n, keep)
    assert target_count(n, np.int64(keep)) == min(n, keep)


@given(n=st.integers(1, 600), keep=st.floats(0.001, 1.0))
def test_a_float_is_a_ratio(n, keep):
    got = target_count(n, keep)
    assert 1 <= got <= n
    assert got == 1 or abs(Fraction(got) - Fraction(keep) * n) <= Fraction(1, 2) + Fraction(1, 10**9)


@pytest.mark.parametrize("keep", [0, -3, 0.0, -0.5, 1.5, 60.0, True, float("nan"), float("inf"), "0.4"])
def test_impossible_keeps_name_the_value(keep):
    with pytest.raises(BudgetError, match=f"keep={keep!r}"):
        counts_for(50, 3, keep)


def test_a_ratio_that_is_a_count_by_its_look_says_so():
    with pytest.raises(BudgetError, match="a whole number, 60"):
        target_count(100, 60.0)


@settings(max_examples=300)
@given(
    n=st.integers(1, 300),
    blocks=st.integers(1, 24),
    schedule=schedules,
    floor=floors,
    share=st.floats(0.0, 1.0),
    ratio=st.booleans(),
)
def test_counts_end_exactly_never_grow_and_respect_every_step(n, blocks, schedule, floor, share, ratio):
    step = FLOORS[floor]
    low = lowest_of(n, blocks, step)
    end = low + round(share * (n - low))
    counts = counts_for(n, blocks, end / n if ratio else end, schedule, step)
    assert len(counts) == blocks
    assert counts[-1] == end
    before = n
    for count in counts:
        assert (max(1, step(before)) if step else 1) <= count <= before
        before = count


@settings(max_examples=200)
@given(n=st.integers(2, 300), blocks=st.integers(1, 6), schedule=schedules, floor=floors, share=st.floats(0.0, 0.999))
def test_a_budget_under_the_floor_prints_it(n, blocks, schedule, floor, share):
    step = FLOORS[floor]
    low = lowest_of(n, blocks, step)
    if low == 1:
        return
    end = 1 + int(share * (low - 1))
    with pytest.raises(BudgetError, match=f"cannot go under {low}: keep at least {low}"):
        counts_for(n, blocks, end, schedule, step)


@given(n=st.integers(1, 400), blocks=st.integers(1, 24), share=st.floats(0.0, 1.0))
def test_constant_carries_its_rounding_on(n, blocks, share):
    end = 1 + round(share * (n - 1))
    each, owed, left, expected = Fraction(n - end, blocks), Fraction(0), n, []
    for _ in range(blocks):
        owed += each
        now = owed.numerator // owed.denominator
        owed -= now
        left -= now
        expected.append(left)
    assert counts_for(n, blocks, end, "constant") == expected
    removed = [a - b for a, b in zip([n, *expected], expected, strict=False)]
    assert max(removed) - min(removed) <= 1


@given(n=st.integers(1, 400), blocks=st.integers(1, 24), share=st.floats(0.0, 1.0))
def test_linear_removes_in_proportion_to_the_blocks_left(n, blocks, share):
    end = 1 + round(share * (n - 1))
    unit = Fraction(n - end, sum(range(1, blocks + 1)))
    exact = Fraction(n)
    for i, count in enumerate(counts_for(n, blocks, end, "linear")):
        exact -= unit * (blocks - i)
        assert 0 <= count - exact < 1


@given(n=st.integers(1, 400), blocks=st.integers(1, 24), share=st.floats(0.0, 1.0))
def test_geometric_keeps_the_same_share_at_each_block(n, blocks, share):
    end = 1 + round(share * (n - 1))
    factor, exact = (end / n) ** (1 / blocks), float(n)
    for count in counts_for(n, blocks, end, "geometric"):
        exact *= factor
        assert abs(count - exact) <= 0.5 + 1e-6


def test_the_schedules_by_hand():
    assert counts_for(100, 4, 20, "constant") == [80, 60, 40, 20]
    assert counts_for(100, 4, 20, "linear") == [68, 44, 28, 20]
    assert counts_for(256, 4, 16, "geometric") == [128, 64, 32, 16]


def test_excess_moves_to_other_blocks():
    half = FLOORS["half"]
    assert counts_for(100, 3, 13, "constant", half) == [52, 26, 13]
    assert counts_for(100, 2, 81, "linear", FLOORS["tenth"]) == [90, 81]


def test_a_list_is_what_remains_after_each_block():
    assert counts_for(100, 3, [0.9, 50, 50]) == [90, 50, 50]
    assert counts_for(100, 2, (1.0, 1)) == [100, 1]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([0.5, 0.4], "2 budgets for 3"),
        ([50, 60, 40], "grows from 50 to 60"),
        ([60, 20, 10], "from 60 to 20 patches at reducing block 1: this method cannot go under 30"),
    ],
)
def test_impossible_lists(keep, message):
    with pytest.raises(BudgetError, match=message):
        counts_for(100, 3, keep, floor=FLOORS["half"])


def test_unknown_schedule_is_told_the_nearest():
    with pytest.raises(OptionError, match='Did you mean "linear"'):
        counts_for(100, 3, 0.5, "liner")


def naive_average(n, at, counts, depth):
    tokens = []
    for block in range(depth):
        passed = [c for a, c in zip(at, counts, strict=True) if a <= block]
        tokens.append(passed[-1] if passed else n)
    return sum(tokens) / depth


@given(n=st.integers(1, 100), depth=st.integers(1, 12), data=st.data())
def test_average_of(n, depth, data):
    at = sorted(data.draw(st.sets(st.integers(0, depth - 1), min_size=1)))
    counts = sorted(data.draw(st.lists(st.integers(1, n), min_size=len(at), max_size=len(at))), reverse=True)
    assert average_of(n, at, counts, depth) == pytest.approx(naive_average(n, at, counts, depth))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 60),
    depth=st.integers(1, 8),
    schedule=schedules,
    floor=floors,
    target=st.integers(1, 60),
    data=st.data(),
)
def test_keep_average_is_the_nearest_there_is(n, depth, schedule, floor, target, data):
    at = sorted(data.draw(st.sets(st.integers(0, depth - 1), min_size=1)))
    step = FLOORS[floor]
    target = min(target, n)
    reachable = {}
    for end in range(lowest_of(n, len(at), step), n + 1):
        reachable[end] = naive_average(n, at, counts_for(n, len(at), end, schedule, step), depth)
    low = min(reachable.values())
    if target < low - 0.5:
        with pytest.raises(BudgetError, match=f"cannot go under {low:.1f}"):
            counts_for_average(n, at, depth, target, schedule, step)
        return
    counts = counts_for_average(n, at, depth, target, schedule, step)
    best = min(abs(a - target) for a in reachable.values())
    assert abs(naive_average(n, at, counts, depth) - target) == pytest.approx(best)
    assert counts == counts_for(n, len(at), counts[-1], schedule, step)


def test_keep_average_takes_a_ratio_too():
    assert counts_for_average(100, [5], 12, 0.6) == counts_for_average(100, [5], 12, 60)
    assert counts_for_average(100, [5], 12, 0.6) == [31]  # (5 * 100 + 7 * 31) / 12 = 59.75


def test_the_shape_of_early() -> None:
    """Between geometric and a cut at once: the share that leaves is larger at each earlier block."""
    counts = counts_for(196, 4, 49, "early")
    assert counts == [124, 88, 65, 49]  # 196 * 0.25 ** (quarter ** 0.8), worked out by hand
    left = [196, *counts]
    shares = [after / before for before, after in pairwise(left)]
    assert shares == sorted(shares)
    assert shares[0] < 0.25**0.25 < shares[-1]
    assert all(early < even for early, even in zip(counts[:-1], counts_for(196, 4, 49, "geometric"), strict=False))
