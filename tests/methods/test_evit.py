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
def test_top_stays_and_the_rest_is_fused(seed, heads, prefix, made):
    view = draw_view(seed, heads=heads, prefix=prefix, made=made)
    got = make_method("evit").reduce(view, 4)
    out, _ = got.apply(view.tokens, prefix, made)
    for b in range(3):
        weigh = importance_of(view, b)
        kept = best(weigh[:9], 4)
        assert got.keep[b].tolist() == kept
        assert got.scores[b].tolist() == pytest.approx(weigh[:9], abs=1e-6)
        rest = [i for i in range(9 + made) if i not in kept]
        token = sum(weigh[i] * view.tokens[b, prefix + i].double() for i in rest) / sum(weigh[i] for i in rest)
        torch.testing.assert_close(out[b, -1].double(), token, atol=1e-5, rtol=1e-4)
        assert torch.equal(out[b, :prefix], view.tokens[b, :prefix])
        assert torch.equal(out[b, prefix:-1], view.tokens[b, [prefix + i for i in kept]])


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


def test_sizes_sum_to_all():
    view = draw_view(0, made=1)
    size = torch.randint(1, 5, (3, 10)).float()
    _, new = make_method("evit").reduce(view, 4).apply(view.tokens, 1, 1, size)
    torch.testing.assert_close(new.sum(1), size.sum(1))


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
        torch.testing.assert_close(whole.extra[b], single.extra[0])


def test_gradients_reach_queries_and_keys_through_the_fused_token():
    """The slope of the fused token along a direction of q, against a finite difference."""
    view = draw_view(2, biased=False)
    step = torch.randn_like(view.q)

    def fused(q):
        asking = TokenView(view.tokens, q, view.k, scale=view.scale, prefix=1, has_cls=True)
        return make_method("evit").reduce(asking, 4).apply(view.tokens, 1, 0)[0][:, -1].sum()

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
