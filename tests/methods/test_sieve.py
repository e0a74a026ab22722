"""sieve against a loop over images and patches, written from its docstring."""

import pytest
import torch

import tokensieve
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError
from tokensieve.methods.sieve import SieveMethod, unit_keys
from tokensieve.testing.models import tiny_model


def _view(seed, n=14, heads=4, prefix=1, size=None, stage="encoder"):
    g = torch.Generator().manual_seed(seed)
    length, d = prefix + n, 4
    q, k = (torch.randn(2, heads, length, d, generator=g) for _ in range(2))
    x = torch.randn(2, length, heads * d, generator=g)
    matrix = torch.randn(heads * d, 5, generator=g)
    return TokenView(
        x, q, k, scale=d**-0.5, prefix=prefix, has_cls=prefix > 0, size=size, stage=stage, project=lambda t: t @ matrix
    )


def _naive(view, b, keep, weight, parts):
    """Indices kept, and where each dropped patch goes, by plain loops."""
    n, p, heads = view.n, view.prefix, view.k.shape[1]
    importance = view.importance()[b].tolist()
    mean = sum(importance) / n

    def alike(i, j):
        if view.stage == "projector":
            return torch.cosine_similarity(view.joint[b, i], view.joint[b, j], dim=0).item()
        cosines = []
        for g in range(parts):
            group = range(g * heads // parts, (g + 1) * heads // parts)
            one, two = (sum(view.k[b, h, p + t] for h in group) for t in (i, j))
            cosines.append(torch.cosine_similarity(one, two, dim=0).item())
        return sum(cosines) / parts

    r = n - keep
    ranked = sorted(range(n), key=lambda i: -importance[i])
    price = {}
    for i in ranked[1:]:
        better = [j for j in range(n) if importance[j] > importance[i]]
        price[i] = (1 - max(alike(i, j) for j in better)) * (importance[i] / mean) ** weight
    gone = sorted(price, key=lambda i: price[i])[:r]
    stay = [i for i in range(n) if i not in gone]
    better = {i: [j for j in stay if importance[j] > importance[i]] for i in gone}
    return stay, {i: max(better[i], key=lambda j: alike(i, j)) for i in gone}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", [13, 10, 5, 1])
@pytest.mark.parametrize(("weight", "parts"), [(0.0, 2), (0.35, 1), (0.35, 4), (1.0, 2)])
@pytest.mark.parametrize("stage", ["encoder", "projector"])
def test_against_loops(seed, keep, weight, parts, stage):
    view = _view(seed, prefix=seed % 3, stage=stage)
    result = SieveMethod(weight=weight, parts=parts).reduce(view, keep)
    for b in range(2):
        stay, target = _naive(view, b, keep, weight, parts)
        assert result.keep[b].tolist() == stay
        found = {i: stay[s] for i, s in zip(result.drop[b].tolist(), result.into[b].tolist(), strict=True)}
        assert found == target


def test_all_kept_is_the_identity():
    view = _view(0)
    result = SieveMethod().reduce(view, view.n)
    assert result.keep.tolist() == [list(range(view.n))] * 2
    assert result.into is None


def test_scores_rank_the_dropped_last():
    view = _view(1)
    result = SieveMethod().reduce(view, 9)
    for b in range(2):
        gone = result.scores[b, result.drop[b]]
        stay = result.scores[b, result.keep[b]]
        assert gone.max() <= stay.min()
        assert torch.isfinite(result.scores[b]).all()


def test_parts_that_do_not_divide_the_heads_are_lowered():
    view = _view(3)
    three, two = (SieveMethod(parts=parts).reduce(view, 7) for parts in (3, 2))
    assert torch.equal(three.keep, two.keep)
    with pytest.raises(OptionError, match="parts=0"):
        SieveMethod(parts=0)


def test_the_weight_matters_and_is_checked():
    view = _view(2, n=40)
    chosen = {w: tuple(SieveMethod(weight=w).reduce(view, 20).keep[0].tolist()) for w in (0.0, 0.35, 2.0)}
    assert len(set(chosen.values())) == 3
    with pytest.raises(OptionError, match="weight=-1"):
        SieveMethod(weight=-1.0)


def test_gradients_reach_the_keys():
    keys = torch.randn(1, 4, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: unit_keys(k, 2), keys)


def test_it_cuts_at_every_second_block():
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "sieve", keep=0.5) as handle:
        tiny.feature(tiny.model, tiny.images(1))
        assert sorted(handle.kept) == [0, 2]
        assert handle.tokens_per_layer[0] == handle.tokens_per_layer[1]
