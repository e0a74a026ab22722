"""CDPruner against greedy maximisation of the determinant itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.method_views import cos, draw_view, one_of, patches_of
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method


def naive_relevance(view, b, sign):
    x = patches_of(view, b)[:, :3]
    text = (view.text if view.text.dim() == 2 else view.text[b]).double().numpy()
    raw = [sign * sum(cos(p, t) for t in text) / len(text) for p in x]
    return [(v - min(raw)) / (max(raw) - min(raw)) + 1e-6 for v in raw]


def naive_dpp(x, r, k):
    n = len(x)
    kernel = np.array([[r[i] * cos(x[i], x[j]) * r[j] for j in range(n)] for i in range(n)])
    chosen = []
    while len(chosen) < k:
        rest = [i for i in range(n) if i not in chosen]
        chosen.append(max(rest, key=lambda i: np.linalg.det(kernel[np.ix_([*chosen, i], [*chosen, i])])))
    return sorted(chosen)


def with_text(seed, shared=True, **rest):
    text = torch.randn(*((2, 3) if shared else (3, 2, 3)), generator=torch.Generator().manual_seed(90 + seed))
    return draw_view(seed, text=text, project=lambda x: x[..., :3], **rest)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "sign"), [("plain", 1), ("released", -1)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("prefix", "heads"), [(0, 2), (1, 3), (5, 2)])
def test_relevant_and_diverse(seed, name, sign, shared, prefix, heads):
    view = with_text(seed, shared, prefix=prefix, heads=heads)
    for keep in (1, 3, 5):
        got = make_method("cdpruner", relevance=name).reduce(view, keep)
        for b in range(3):
            r = naive_relevance(view, b, sign)
            assert got.scores[b].tolist() == pytest.approx(r, abs=1e-5)
            assert got.keep[b].tolist() == naive_dpp(patches_of(view, b), r, keep)


@pytest.mark.parametrize("seed", range(4))
def test_without_a_text_by_diversity_alone(seed):
    view = draw_view(seed)
    got = make_method("cdpruner").reduce(view, 4)
    assert torch.equal(got.scores, torch.ones(3, 9))
    for b in range(3):
        x = patches_of(view, b)
        chosen = [min(range(9), key=lambda i: sum(cos(x[i], y) ** 2 for y in x))]  # every single determinant is 1
        while len(chosen) < 4:
            rest = [i for i in range(9) if i not in chosen]
            volume = {i: np.linalg.det([[cos(x[p], x[q]) for q in [*chosen, i]] for p in [*chosen, i]]) for i in rest}
            chosen.append(max(volume, key=volume.get))
        assert got.keep[b].tolist() == sorted(chosen)


def test_before_a_language_model_tokens_are_compared_after_the_projector():
    view = with_text(0, stage="projector")
    got = make_method("cdpruner").reduce(view, 3).keep.tolist()
    r = [naive_relevance(view, b, 1) for b in range(3)]
    assert got == [naive_dpp(view.joint[b].double().numpy(), r[b], 3) for b in range(3)]
    assert got != [naive_dpp(patches_of(view, b), r[b], 3) for b in range(3)]


def test_plain_prefers_what_the_text_is_about_and_released_the_opposite():
    x = torch.cat([torch.zeros(1, 8), torch.eye(8)[:6] + 0.1 * torch.eye(8)[7]]).unsqueeze(0)
    view = TokenView.of(x, text=torch.eye(8)[2:3])
    assert make_method("cdpruner").reduce(view, 1).keep.tolist() == [[2]]
    assert make_method("cdpruner", relevance="released").reduce(view, 1).keep.tolist() != [[2]]
    assert 2 not in make_method("cdpruner", relevance="released").reduce(view, 5).keep.tolist()[0]


def test_a_batch_equals_its_singles():
    """Relevance is scaled in each image, not over the batch."""
    view = with_text(1)
    alone = [one_of(view, b) for b in range(3)]
    for single in alone:
        single._project = view._project
    whole = make_method("cdpruner").reduce(view, 4)
    for b, single in enumerate(alone):
        got = make_method("cdpruner").reduce(single, 4)
        assert torch.equal(whole.keep[b], got.keep[0])
        torch.testing.assert_close(whole.scores[b], got.scores[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    got = make_method("cdpruner").reduce(with_text(0, dtype=dtype), 9)
    assert got.keep.tolist() == [list(range(9))] * 3
    assert torch.isfinite(got.scores).all()


def test_wrong_inputs():
    with pytest.raises(OptionError, match=r"^relevance='negative'"):
        make_method("cdpruner", relevance="negative")
    with pytest.raises(BudgetError, match="keep=10 of 9"):
        make_method("cdpruner").reduce(draw_view(0), 10)
