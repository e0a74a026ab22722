"""EViT: top by CLS attention, the rest one token."""

from __future__ import annotations

import pytest
import torch

import tokensieve
from helpers.method_views import best, draw_view, importance_of, keys_of, nearest_kept, one_of
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, UnknownNameError
from tokensieve.methods import make_method
from tokensieve.testing import tiny_model

CASES = pytest.mark.parametrize(
    ("seed", "heads", "prefix", "made"), [(0, 1, 0, 0), (1, 3, 1, 0), (2, 2, 5, 0), (3, 2, 1, 1), (4, 3, 5, 2)]
)


@CASES
def test_top_stays_and_the_rest_is_their_sum(seed, heads, prefix, made):
    """keep - 1 of the released code: the sum is not divided by the weights, and takes one place of the budget."""
    view = draw_view(seed, heads=heads, prefix=prefix, made=made)
    got = make_method("evit").reduce(view, 4)
    out, size = got.apply(view.tokens, prefix, made)
    assert size is None
    for b in range(3):
        weigh = importance_of(view, b)
        kept = best(weigh[:9], 3)
        rest = [i for i in range(9) if i not in kept]
        place = max(rest, key=lambda i: weigh[i])
        assert got.keep[b].tolist() == sorted([*kept, place])
        assert got.scores[b].tolist() == pytest.approx(weigh[:9], abs=1e-6)
        token = sum(weigh[i] * view.tokens[b, prefix + i].double() for i in rest)
        for slot, i in enumerate(got.keep[b].tolist()):
            wanted = token if i == place else view.tokens[b, prefix + i].double()
            torch.testing.assert_close(out[b, prefix + slot].double(), wanted, atol=1e-5, rtol=1e-4)
        assert sum(weigh[i] for i in rest) < 0.9  # so that dividing by it would be seen
        assert torch.equal(out[b, :prefix], view.tokens[b, :prefix])
        assert torch.equal(out[b, prefix + 4 :], view.tokens[b, prefix + 9 :])


def test_the_fused_token_competes_at_the_next_cut():
    """Two cuts written out; CLS looks at the fused token in one of the two runs, and it is kept there."""
    for looked_at in (True, False):
        view = draw_view(3, n=8, heads=1, biased=False, batch=1)
        first = make_method("evit").reduce(view, 5)
        tokens, _ = first.apply(view.tokens, 1)
        attention = importance_of(view, 0)
        fused = sorted(range(8), key=lambda i: -attention[i])[4]
        slot = first.keep[0].tolist().index(fused)
        k = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(5))
        k[0, 0, 1 + slot] = (3.0 if looked_at else -3.0) * view.q[0, 0, 0]
        later = TokenView(tokens, view.q[:, :, :6], k, scale=0.6, prefix=1, has_cls=True)
        again = make_method("evit").reduce(later, 3)
        weigh = importance_of(later, 0)
        kept = best(weigh, 2)
        assert (slot in kept) is looked_at
        out, _ = again.apply(tokens, 1)
        sums = sum(weigh[i] * tokens[0, 1 + i].double() for i in range(5) if i not in kept)
        wanted = [tokens[0, 1 + i].double() if i in kept else sums for i in again.keep[0].tolist()]
        torch.testing.assert_close(out[0, 1:].double(), torch.stack(wanted), atol=1e-5, rtol=1e-4)


def test_cuts_at_a_quarter_a_half_and_three_quarters_by_equal_shares():
    assert make_method("evit").blocks(12) == (3, 6, 9)
    assert make_method("evit").blocks(2) == (0, 1)
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", keep=0.25) as handle:
        assert handle.at == (1, 2, 3)
        assert [round(n / 36, 2) for n in handle.counts(36).values()] == [0.64, 0.39, 0.25]  # 0.63 at each


@CASES
def test_without_fusing_it_only_drops(seed, heads, prefix, made):
    view = draw_view(seed, heads=heads, prefix=prefix, made=made)
    got = make_method("evit", fuse=False).reduce(view, 4)
    assert got.extra is None
    assert got.into is None
    assert got.keep.tolist() == [best(importance_of(view, b)[:9], 4) for b in range(3)]


def test_fold_takes_the_place_of_fusing():
    view = draw_view(0)
    got = make_method("evit", fold=True).reduce(view, 4)
    assert got.extra is None
    for b in range(3):
        assert (got.drop[b].tolist(), got.into[b].tolist()) == nearest_kept(keys_of(view, b), got.keep[b].tolist())


@pytest.mark.parametrize("made", [0, 1])
def test_keep_all_leaves_everything_as_it_is(made):
    view = draw_view(0, made=made)
    out, size = make_method("evit").reduce(view, 9).apply(view.tokens, 1, made)
    assert torch.equal(out, view.tokens)
    assert size is None


def test_a_batch_equals_its_singles():
    view = draw_view(1)
    whole = make_method("evit").reduce(view, 4)
    for b in range(3):
        single = make_method("evit").reduce(one_of(view, b), 4)
        assert torch.equal(whole.keep[b], single.keep[0])
        torch.testing.assert_close(whole.weight[b], single.weight[0])


def test_gradients_reach_queries_and_keys_through_the_fused_token():
    """The slope of the fused token along a direction of q, against a finite difference."""
    view = draw_view(2, biased=False)
    step = torch.randn_like(view.q)

    def fused(q):
        asking = TokenView(view.tokens, q, view.k, scale=view.scale, prefix=1, has_cls=True)
        return make_method("evit").reduce(asking, 4).apply(view.tokens, 1, 0)[0].sum()

    q = view.q.clone().requires_grad_()
    (slope,) = torch.autograd.grad(fused(q), q)
    base, h = q.detach(), 1e-2
    numeric = (fused(base + h * step) - fused(base - h * step)) / (2 * h)
    assert (slope * step).sum().item() == pytest.approx(numeric.item(), rel=2e-2, abs=1e-3)
    assert slope[:, :, 0].abs().max() > 0
    assert slope[:, :, 1:].abs().max() == 0  # only CLS asks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    view = draw_view(0, dtype=dtype)
    out, _ = make_method("evit").reduce(view, 4).apply(view.tokens, 1)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()


def test_wrong_inputs():
    with pytest.raises(BudgetError, match="keep=0 of 9"):
        make_method("evit").reduce(draw_view(0), 0)
    with pytest.raises(UnknownNameError, match='Did you mean "fuse"'):
        make_method("evit", fused=True)


def test_what_was_folded_weighs_what_it_stands_for():
    tiny = tiny_model("openclip")
    with torch.inference_mode(), tokensieve.attach(tiny.model, "evit", keep=9, at=0, fold=True) as handle:
        tiny.feature(tiny.model, tiny.images(2))
        state = handle.blocks.last.states[1]
    assert state.size.max() > 1
    torch.testing.assert_close(state.bias[:, 1:], state.size.log())
