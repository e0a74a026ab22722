"""PiToMe against a loop: energy, the 2r candidates, alternate dealing, nearest partner."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.method_views import cos, draw_view, keys_of, one_of
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method


def naive_energy(keys, margin):
    """elu: the cosine above the margin counts as it is, below it as exp - 1; nothing jumps where they meet."""
    total = []
    for a in keys:
        over = [cos(a, b) - margin for b in keys]
        total.append(sum(v if v > 0 else math.exp(v) - 1 for v in over) / len(keys))
    return total


def naive_merge(keys, energy, r, depth):
    """source -> target of the r pairs, as the released code takes them: early among all, late among 2r."""
    order = sorted(range(len(keys)), key=lambda i: -energy[i])
    order = order if depth < 0.5 else order[: 2 * r]
    source, target = order[0::2], order[1::2]
    goal = {i: max(target, key=lambda j: cos(keys[i], keys[j])) for i in source}
    sure = sorted(source, key=lambda i: -cos(keys[i], keys[goal[i]]))[:r]
    return {i: goal[i] for i in sure}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("margin", "depth"), [(0.95, 0.0), (0.95, 0.25), (0.95, 0.5), (0.4, 0.75), (0, 0)])
@pytest.mark.parametrize(("prefix", "heads"), [(0, 1), (1, 3), (5, 2)])
def test_the_redundant_merge(seed, margin, depth, prefix, heads):
    view = draw_view(seed, prefix=prefix, heads=heads, depth=depth)
    method = make_method("pitome", margin=margin)
    for r in (1, 3, 4):
        got = method.reduce(view, 9 - r)
        for b in range(3):
            keys = keys_of(view, b)
            energy = naive_energy(keys, margin * (1 - depth))
            assert method.energy(view)[b].tolist() == pytest.approx(energy, abs=1e-5)
            goal = naive_merge(keys, energy, r, depth)
            kept = [i for i in range(9) if i not in goal]
            assert got.keep[b].tolist() == kept
            assert {i: kept[s] for i, s in zip(got.drop[b].tolist(), got.into[b].tolist(), strict=True)} == goal
        _, size = got.apply(view.tokens, prefix, 0, view.size)
        torch.testing.assert_close(size.sum(1), view.size.sum(1))


def test_the_energy_has_no_jump_at_the_margin():
    """Three patches of mutual cosine 0.9, under the margin, against two twins: a jump would put the twins first."""
    basis = torch.eye(5)
    group = [0.9**0.5 * basis[0] + 0.1**0.5 * basis[i] for i in (1, 2, 3)]
    x = torch.stack([torch.zeros(5), *group, basis[4], basis[4]]).unsqueeze(0)
    method = make_method("pitome", margin=0.95)
    energy = method.energy(TokenView.of(x))[0]
    assert energy[:3].min() > energy[3:].max()
    jump = [sum(c if c >= 0.95 else math.exp(c - 0.95) - 1 for c in (cos(p, o) for o in x[0, 1:])) for p in x[0, 1:]]
    assert max(jump[:3]) < min(jump[3:])


def test_early_any_pair_may_merge_and_late_only_those_of_high_energy():
    kept = [make_method("pitome").reduce(draw_view(0, depth=depth), 6).keep for depth in (0.49, 0.5)]
    assert not torch.equal(*kept)


def test_the_same_share_at_every_block_and_no_proportional_attention():
    method = make_method("pitome")
    assert (method.schedule, method.spacing(), method.proportional) == ("geometric", 1, 0.0)
    assert make_method("pitome", proportional=1.0).proportional == 1.0


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


@pytest.mark.parametrize(("option", "value"), [("margin", -0.1), ("margin", 1.5)])
def test_wrong_options_are_named(option, value):
    with pytest.raises(OptionError, match=f"^{option}={value}"):
        make_method("pitome", **{option: value})
