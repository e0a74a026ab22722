"""Random selection: a draw for each image, from its tokens and the seed alone."""

from __future__ import annotations

import pytest
import torch

from helpers.method_views import draw_view, keys_of, nearest_kept, one_of
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, UnknownNameError
from tokensieve.methods import make_method


def test_a_batch_equals_its_singles():
    view = draw_view(0, n=20, batch=8)
    kept = make_method("random").reduce(view, 7).keep
    for b in range(8):
        assert torch.equal(kept[b : b + 1], make_method("random").reduce(one_of(view, b), 7).keep)


def test_images_differ_and_seeds_differ():
    view = draw_view(1, n=20, batch=8)
    draws = [make_method("random", seed=s).reduce(view, 7).keep for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert len({tuple(row) for row in draws[0].tolist()}) == 8
    assert all(not torch.equal(a, b) for a, b in zip(draws[0], draws[2], strict=True))


def test_every_patch_is_kept_about_equally_often():
    view = TokenView.of(torch.randn(600, 1 + 10, 16, generator=torch.Generator().manual_seed(2)))
    kept = make_method("random").reduce(view, 4).keep
    share = torch.bincount(kept.flatten(), minlength=10) / 600
    assert (share - 0.4).abs().max() < 0.08  # four standard deviations
    together = torch.stack([((kept == i).any(1) & (kept == j).any(1)).float().mean() for i, j in [(0, 1), (3, 8)]])
    assert (together - 4 * 3 / (10 * 9)).abs().max() < 0.06


@pytest.mark.parametrize("keep", [1, 5, 9])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_exact_budget_in_order(keep, prefix):
    kept = make_method("random").reduce(draw_view(3, prefix=prefix), keep).keep
    for row in kept.tolist():
        assert len(row) == keep
        assert row == sorted(set(row))


def test_the_draw_goes_with_the_place_in_the_grid():
    """At a later cut a patch's number depends on where it came from, so that patches are not reshuffled by an index."""
    origin = torch.tensor([[0, 2, 3, 5, 7, 8, 10, 11, 13]]).expand(3, -1)
    plain, placed = draw_view(4), draw_view(4, origin=origin)
    method = make_method("random")
    moved, whole = method.score(placed, 4), method.score(draw_view(4, origin=torch.arange(14).expand(3, -1)), 4)
    assert torch.equal(moved, whole.gather(1, origin))
    assert not torch.equal(moved, method.score(plain, 4))


def test_fold_averages_into_the_nearest_kept():
    view = draw_view(5)
    got = make_method("random", fold=True).reduce(view, 4)
    for b in range(3):
        gone, into = nearest_kept(keys_of(view, b), got.keep[b].tolist())
        assert got.drop[b].tolist() == gone
        assert got.into[b].tolist() == into


def test_wrong_inputs():
    with pytest.raises(BudgetError, match="keep=10 of 9"):
        make_method("random").reduce(draw_view(0), 10)
    with pytest.raises(UnknownNameError, match='Did you mean "seed"'):
        make_method("random", sed=1)
