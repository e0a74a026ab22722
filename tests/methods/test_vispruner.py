"""VisPruner against a loop: the important first, then rounds of even / odd duplicates."""

from __future__ import annotations

import pytest
import torch

from helpers.method_views import cos, draw_view, importance_of, one_of, patches_of
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method


def naive_vispruner(view, b, keep, important, round_=8):
    x, weigh = patches_of(view, b), importance_of(view, b)
    order = sorted(range(view.n), key=lambda i: -weigh[i])
    first = int(important * keep)
    chosen, rest = order[:first], order[first:]
    while len(rest) > keep - first:
        evens, odds = rest[0::2], rest[1::2]
        if not odds:
            rest = []
            break
        like = {i: max(cos(x[i], x[j]) for j in odds) for i in evens}
        repeated = sorted(evens, key=lambda i: -like[i])
        rest = repeated[min(round_, len(rest) - (keep - first)) :] + odds
    return sorted(chosen + rest)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("important", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("prefix", "made", "heads"), [(0, 0, 1), (1, 0, 3), (5, 2, 2)])
def test_important_then_diverse(seed, important, prefix, made, heads):
    view = draw_view(seed, n=13, prefix=prefix, made=made, heads=heads)
    method = make_method("vispruner", important=important)
    for keep in (1, 3, 6, 12, 13):
        got = method.reduce(view, keep)
        assert got.keep.tolist() == [naive_vispruner(view, b, keep, important) for b in range(3)]
        assert got.scores[0].tolist() == pytest.approx(importance_of(view, 0)[:13], abs=1e-6)


def test_at_most_eight_go_in_a_round():
    """40 patches to 12: in rounds of 8 other ones stay than if half went at once."""
    view = draw_view(1, n=40, biased=False)
    got = make_method("vispruner").reduce(view, 12).keep.tolist()
    assert got == [naive_vispruner(view, b, 12, 0.5) for b in range(3)]
    assert all(kept != naive_vispruner(view, b, 12, 0.5, round_=40) for b, kept in enumerate(got))


def test_the_share_of_the_important_changes_the_choice():
    view = draw_view(0, n=20)
    picks = {tuple(make_method("vispruner", important=r).reduce(view, 8).keep[0].tolist()) for r in (0.0, 0.5, 1.0)}
    assert len(picks) == 3


def test_a_copy_goes_first():
    view = draw_view(0, n=8)
    order = view.importance()[0].argsort(descending=True)
    view.tokens[0, 1 + order[4]] = view.tokens[0, 1 + order[5]]
    kept = make_method("vispruner", important=0.0).reduce(view, 7).keep[0].tolist()
    assert kept == [i for i in range(8) if i != order[4]]


def test_a_batch_equals_its_singles():
    view = draw_view(1, n=13)
    method = make_method("vispruner")
    kept = method.reduce(view, 5).keep
    assert torch.equal(kept, torch.cat([method.reduce(one_of(view, b), 5).keep for b in range(3)]))


@pytest.mark.parametrize("important", [-0.1, 1.1])
def test_wrong_options_are_named(important):
    with pytest.raises(OptionError, match=f"^important={important}"):
        make_method("vispruner", important=important)


@pytest.mark.parametrize("keep", [0, 10])
def test_wrong_budgets(keep):
    with pytest.raises(BudgetError, match=f"keep={keep} of 9"):
        make_method("vispruner").reduce(draw_view(0), keep)
