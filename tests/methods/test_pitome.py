"""PiToMe against a loop: energy, the 2r candidates, alternate dealing, nearest partner."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.method_views import cos, draw_view, keys_of, one_of
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method


def naive_energy(keys, margin, slope):
    total = []
    for a in keys:
        likes = [cos(a, b) for b in keys]
        total.append(sum(c if c >= margin else slope * (math.exp(c - margin) - 1) for c in likes) / len(keys))
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("margin", "slope", "depth"), [(0.9, 1.0, 0.0), (0.9, 1.0, 0.5), (0.4, 2.0, 0.0), (0, 0, 0)])
@pytest.mark.parametrize(("prefix", "heads"), [(0, 1), (1, 3), (5, 2)])
def test_the_redundant_merge(seed, margin, slope, depth, prefix, heads):
    view = draw_view(seed, prefix=prefix, heads=heads, depth=depth)
    method = make_method("pitome", margin=margin, slope=slope)
    for r in (1, 3, 4):
        got = method.reduce(view, 9 - r)
        for b in range(3):
            keys = keys_of(view, b)
            energy = naive_energy(keys, margin * (1 - depth), slope)
            assert method.energy(view)[b].tolist() == pytest.approx(energy, abs=1e-5)
            order = sorted(range(9), key=lambda i: -energy[i])[: 2 * r]
            source, target = order[0::2], order[1::2]
            goal = {i: max(target, key=lambda j: cos(keys[i], keys[j])) for i in source}
            kept = [i for i in range(9) if i not in source]
            assert got.keep[b].tolist() == kept
            assert len(got.drop[b]) == r
            assert {i: kept[s] for i, s in zip(got.drop[b].tolist(), got.into[b].tolist(), strict=True)} == goal
        _, size = got.apply(view.tokens, prefix, 0, view.size)
        torch.testing.assert_close(size.sum(1), view.size.sum(1))


def test_near_duplicates_merge_and_the_lone_are_protected():
    g = torch.Generator().manual_seed(0)
    crowd = torch.tensor([1.0, 0, 0, 0, 0]) + 0.01 * torch.randn(4, 5, generator=g)
    x = torch.cat([torch.zeros(1, 5), torch.eye(5)[1:], crowd]).unsqueeze(0)
    got = make_method("pitome").reduce(TokenView.of(x), 6)
    assert set(got.drop[0].tolist()) < {4, 5, 6, 7}
    assert got.keep[0].tolist()[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_floor_is_reached_and_not_passed(n):
    view, method = draw_view(0, n=n), make_method("pitome")
    floor = method.floor(n, 1)
    assert floor == math.ceil(n / 2)
    assert method.reduce(view, floor).keep.shape == (3, floor)
    with pytest.raises(BudgetError, match=f"one reduction can leave {floor} to {n}"):
        method.reduce(view, floor - 1)


def test_keep_all_is_the_identity():
    view = draw_view(0)
    out, size = make_method("pitome").reduce(view, 9).apply(view.tokens, 1)
    assert torch.equal(out, view.tokens)
    assert size is None


def test_a_batch_equals_its_singles():
    view = draw_view(1)
    whole = make_method("pitome").reduce(view, 6)
    for b in range(3):
        single = make_method("pitome").reduce(one_of(view, b), 6)
        assert torch.equal(whole.keep[b], single.keep[0])
        assert torch.equal(whole.into[b], single.into[0])


@pytest.mark.parametrize(("option", "value"), [("margin", -0.1), ("margin", 1.5), ("slope", -1.0)])
def test_wrong_options_are_named(option, value):
    with pytest.raises(OptionError, match=f"^{option}={value}"):
        make_method("pitome", **{option: value})
