"""The anchor method against its five steps, written out."""

from __future__ import annotations

import pytest
import torch

from helpers.method_views import (
    attention_of,
    best,
    cos,
    draw_view,
    importance_of,
    keys_of,
    nearest_kept,
    one_of,
    patches_of,
)
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method

SEEDS = pytest.mark.parametrize("seed", range(3))


def scaled(values):
    low, high = min(values), max(values)
    return [(v - low) / (high - low) for v in values]


def naive_anchor(view, b, k, keep, alpha, normalize):
    """Anchors, scores and the kept patches of image b."""
    n, p = view.n, view.prefix
    full, x = attention_of(view, b), patches_of(view, b)
    anchors = best(importance_of(view, b)[:n], k)
    importance = [sum(full[p + i, p + j] for j in anchors) / len(anchors) for i in range(n)]
    diverse = [1 - max(cos(x[i], x[j]) for j in anchors) for i in range(n)]
    if normalize:
        importance, diverse = scaled(importance), scaled(diverse)
    scores = [alpha * a + (1 - alpha) * d for a, d in zip(importance, diverse, strict=True)]
    others = best(scores, keep - len(anchors), [i for i in range(n) if i not in anchors])
    return anchors, scores, sorted(anchors + others)


@SEEDS
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("normalize", ["minmax", None])
@pytest.mark.parametrize(("prefix", "made", "heads"), [(0, 0, 1), (1, 0, 3), (5, 2, 2)])
def test_the_five_steps(seed, alpha, normalize, prefix, made, heads):
    view = draw_view(seed, n=12, heads=heads, prefix=prefix, made=made)
    method = make_method("anchor", k=3, alpha=alpha, normalize=normalize)
    got = method.reduce(view, 7)
    for b in range(3):
        anchors, scores, kept = naive_anchor(view, b, 3, 7, alpha, normalize)
        assert method.anchors(view, 7)[b].tolist() == anchors
        assert got.keep[b].tolist() == kept
        assert got.scores[b].tolist() == pytest.approx(scores, abs=1e-5)
    assert torch.equal(method.score(view, 7), got.scores)


@pytest.mark.parametrize("normalize", ["minmax", None])
def test_alpha_changes_the_selection(normalize):
    view = draw_view(0, n=24, batch=8)
    picks = [make_method("anchor", k=3, alpha=a, normalize=normalize).reduce(view, 9).keep for a in (0.0, 0.5, 1.0)]
    assert not torch.equal(picks[0], picks[2])
    assert not torch.equal(picks[1], picks[2])
    if normalize:  # raw importance is about 1/N and drowns next to diversity
        assert not torch.equal(picks[0], picks[1])


def test_importance_is_no_constant():
    """A softmax over the anchors alone would give every patch 1/k."""
    scores = make_method("anchor", k=3, alpha=1.0, normalize=None).reduce(draw_view(0), 5).scores
    assert (scores.amax(1) - scores.amin(1)).min() > 0.02
    assert (scores - 1 / 3).abs().min() > 1e-4


@SEEDS
def test_a_given_log_sum_is_used(seed):
    view = draw_view(seed, prefix=1)
    same = draw_view(seed, prefix=1, log_sum=view.log_sum.clone())
    method = make_method("anchor", k=3, alpha=1.0, normalize=None)
    torch.testing.assert_close(method.score(view, 5), method.score(same, 5))
    halved = draw_view(seed, prefix=1, log_sum=view.log_sum + torch.log(torch.tensor(2.0)))
    torch.testing.assert_close(method.score(halved, 5), method.score(view, 5) / 2)


@SEEDS
def test_anchors_stay_however_low_their_score(seed):
    """With alpha=0 an anchor's diversity is 0, the lowest there is."""
    view = draw_view(seed)
    method = make_method("anchor", k=4, alpha=0.0)
    assert torch.equal(method.reduce(view, 4).keep, method.anchors(view, 4))


@SEEDS
def test_fold(seed):
    view = draw_view(seed)
    got = make_method("anchor", k=2, fold=True).reduce(view, 5)
    for b in range(3):
        gone, into = nearest_kept(keys_of(view, b), got.keep[b].tolist())
        assert (got.drop[b].tolist(), got.into[b].tolist()) == (gone, into)
    _, size = got.apply(view.tokens, view.prefix, 0, view.size)
    torch.testing.assert_close(size.sum(1), view.size.sum(1))


def test_more_anchors_than_patches_keeps_all():
    view = draw_view(0)
    assert make_method("anchor", k=20).reduce(view, 9).keep.tolist() == [list(range(9))] * 3
    assert make_method("anchor", k=20).floor(9, 1) == 9
    assert make_method("anchor", k=4).floor(9, 1) == 4


def test_a_batch_equals_its_singles():
    view = draw_view(1, n=12)
    method = make_method("anchor", k=3)
    kept = method.reduce(view, 6).keep
    assert torch.equal(kept, torch.cat([method.reduce(one_of(view, b), 6).keep for b in range(3)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    got = make_method("anchor", k=3).reduce(draw_view(0, dtype=dtype), 5)
    assert torch.isfinite(got.scores).all()
    assert got.keep.shape == (3, 5)


def test_own_budget_is_k_plus_m():
    assert make_method("anchor").own_keep() == 60
    assert make_method("anchor", k=15, m=0).own_keep() == 15


def test_a_budget_under_the_anchors_is_an_error():
    with pytest.raises(BudgetError, match="keep=3 is under the 4 anchors"):
        make_method("anchor", k=4).reduce(draw_view(0), 3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("k", 0),
        ("k", 2.5),
        ("m", -1),
        ("m", "many"),
        ("alpha", -0.1),
        ("alpha", 1.1),
        ("alpha", float("nan")),
        ("alpha", "half"),
        ("normalize", "softmax"),
    ],
)
def test_wrong_options_are_named(option, value):
    with pytest.raises(OptionError, match=f"^{option}="):
        make_method("anchor", **{option: value})
