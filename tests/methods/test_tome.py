"""ToMe against a loop over positions, CLS the first of them."""

from __future__ import annotations

import pytest
import torch

from helpers.method_views import cos, draw_view, keys_of, one_of
from tokensieve.core.budget import counts_for
from tokensieve.errors import BudgetError
from tokensieve.methods import make_method

PREFIX = pytest.mark.parametrize("prefix", [0, 1, 2, 5])


def naive_tome(view, b, r):
    """{merged patch: the patch it goes into} and the similarity of every candidate."""
    keys, p = keys_of(view, b), view.prefix
    even = [pos - p for pos in range(p + view.n) if pos % 2 == 0 and pos >= p]
    odd = [pos - p for pos in range(p + view.n) if pos % 2 == 1 and pos >= p]
    pairs = {}
    for i in even:
        goal = max(odd, key=lambda j: cos(keys[i], keys[j]))
        pairs[i] = (cos(keys[i], keys[goal]), goal)
    merged = sorted(pairs, key=lambda i: -pairs[i][0])[:r]
    return {i: pairs[i][1] for i in merged}, {i: s for i, (s, _) in pairs.items()}


@PREFIX
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heads", [1, 3])
def test_the_most_similar_pairs_merge_weighted_by_size(seed, prefix, heads):
    view = draw_view(seed, prefix=prefix, heads=heads)
    for r in (1, 3, 4):
        got = make_method("tome").reduce(view, 9 - r)
        out, size = got.apply(view.tokens, prefix, 0, view.size)
        for b in range(3):
            merged, like = naive_tome(view, b, r)
            kept = [i for i in range(9) if i not in merged]
            assert got.keep[b].tolist() == kept
            assert torch.equal(out[b, :prefix], view.tokens[b, :prefix])
            for slot, i in enumerate(kept):
                group = [i] + [m for m, goal in merged.items() if goal == i]
                total = sum(view.size[b, m].item() for m in group)
                mean = sum(view.size[b, m].item() * view.tokens[b, prefix + m] for m in group) / total
                torch.testing.assert_close(out[b, prefix + slot], mean, atol=1e-5, rtol=1e-5)
                assert size[b, slot].item() == total
            expected = [-like[i] if i in like else 1.0 for i in range(9)]
            assert got.scores[b].tolist() == pytest.approx(expected, abs=1e-5)
        torch.testing.assert_close(size.sum(1), view.size.sum(1))


@PREFIX
@pytest.mark.parametrize("n", [1, 2, 3, 8, 9])
def test_the_floor_is_reached_and_not_passed(n, prefix):
    view, method = draw_view(0, n=n, prefix=prefix), make_method("tome")
    patches_of_a = sum(1 for pos in range(prefix, prefix + n) if pos % 2 == 0)
    floor = method.floor(n, prefix)
    assert floor == (n if n == 1 else n - patches_of_a)
    assert method.reduce(view, floor).keep.shape == (3, floor)
    for keep in (floor - 1, n + 1):
        with pytest.raises(BudgetError, match=f"keep={keep} of {n} patches: one reduction can leave {floor} to {n}"):
            method.reduce(view, keep)


def test_cls_stands_at_position_zero():
    """With a CLS the first patch is odd, a target; without one it is even, a candidate."""
    scores = [make_method("tome").reduce(draw_view(0, prefix=p), 8).scores for p in (1, 0)]
    assert (scores[0] == 1).nonzero()[:, 1].view(3, -1).tolist() == [[0, 2, 4, 6, 8]] * 3
    assert (scores[1] == 1).nonzero()[:, 1].view(3, -1).tolist() == [[1, 3, 5, 7]] * 3


@PREFIX
def test_a_schedule_never_asks_for_more_than_a_step_gives(prefix):
    method = make_method("tome")
    for n in range(2, 60):
        low = n
        for _ in range(3):
            low = method.floor(low, prefix)
        before = n
        for keep in counts_for(n, 3, low, floor=lambda m: method.floor(m, prefix)):
            assert method.floor(before, prefix) <= keep <= before
            before = keep


def test_keep_all_is_the_identity():
    view = draw_view(0)
    out, size = make_method("tome").reduce(view, 9).apply(view.tokens, 1)
    assert torch.equal(out, view.tokens)
    assert size is None


def test_a_batch_equals_its_singles():
    view = draw_view(1)
    whole = make_method("tome").reduce(view, 6)
    for b in range(3):
        single = make_method("tome").reduce(one_of(view, b), 6)
        assert torch.equal(whole.keep[b], single.keep[0])
        assert torch.equal(whole.into[b], single.into[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    view = draw_view(0, dtype=dtype)
    out, size = make_method("tome").reduce(view, 6).apply(view.tokens, 1, 0, view.size)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    torch.testing.assert_close(size.sum(1), view.size.sum(1))
