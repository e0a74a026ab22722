"""Evenly spaced selection."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from helpers.method_views import draw_view
from tokensieve.errors import BudgetError
from tokensieve.methods import make_method


@pytest.mark.parametrize("n", [1, 6, 9, 16])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_gaps_differ_by_at_most_one(n, prefix):
    view = draw_view(0, n=n, prefix=prefix)
    for keep in range(1, n + 1):
        kept = make_method("grid").reduce(view, keep).keep
        assert torch.equal(kept, kept[:1].expand(3, -1))
        row = kept[0].tolist()
        assert len(set(row)) == keep
        gaps = {b - a for a, b in pairwise(row)}
        assert gaps <= {n // keep, -(-n // keep)}
        assert row[0] == pytest.approx(n - 1 - row[-1], abs=1)


def test_by_hand():
    assert make_method("grid").reduce(draw_view(0, n=16), 4).keep[0].tolist() == [2, 6, 10, 14]


def test_it_looks_at_nothing():
    one, other = (make_method("grid").reduce(draw_view(seed), 4).keep for seed in (0, 1))
    assert torch.equal(one, other)


@pytest.mark.parametrize("keep", [0, 10])
def test_wrong_inputs(keep):
    with pytest.raises(BudgetError, match=f"keep={keep} of 9"):
        make_method("grid").reduce(draw_view(0), keep)
