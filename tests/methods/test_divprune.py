"""DivPrune against a greedy max-min loop."""

from __future__ import annotations

import pytest
import torch

from helpers.method_views import cos, draw_view, keys_of, nearest_kept, one_of, patches_of
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method


def naive_max_min(x, k):
    n = len(x)
    away = [[1 - cos(x[i], x[j]) for j in range(n)] for i in range(n)]
    alone = [min(away[i][j] for j in range(n) if j != i) for i in range(n)]
    chosen = [max((i for i in range(n) if alone[i] >= max(alone) - 1e-9), key=lambda i: sum(away[i]))]
    while len(chosen) < k:
        chosen.append(max((i for i in range(n) if i not in chosen), key=lambda i: min(away[i][s] for s in chosen)))
    return sorted(chosen)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("space", "of"), [("tokens", patches_of), ("keys", keys_of)])
@pytest.mark.parametrize(("prefix", "made", "heads"), [(0, 0, 1), (1, 0, 3), (5, 2, 2)])
def test_greedy_max_min(seed, space, of, prefix, made, heads):
    view = draw_view(seed, prefix=prefix, made=made, heads=heads)
    for keep in (1, 4, 9):
        got = make_method("divprune", space=space).reduce(view, keep)
        assert got.keep.tolist() == [naive_max_min(of(view, b), keep) for b in range(3)]
        assert got.scores is None


def test_the_spaces_differ():
    view = draw_view(0, n=12)
    assert not torch.equal(*(make_method("divprune", space=s).reduce(view, 5).keep for s in ("tokens", "keys")))


def test_before_a_language_model_tokens_are_compared_after_the_projector():
    view = draw_view(0, n=12, stage="projector", project=lambda x: x[..., :3].square())
    got = make_method("divprune").reduce(view, 5).keep.tolist()
    assert got == [naive_max_min(view.joint[b].double().numpy(), 5) for b in range(3)]
    assert got != [naive_max_min(patches_of(view, b), 5) for b in range(3)]
    assert make_method("divprune").reduce(draw_view(0, n=12, project=view._project), 5).keep.tolist() == [
        naive_max_min(patches_of(view, b), 5) for b in range(3)
    ]


def test_fold():
    view = draw_view(0)
    got = make_method("divprune", fold=True).reduce(view, 4)
    for b in range(3):
        assert (got.drop[b].tolist(), got.into[b].tolist()) == nearest_kept(keys_of(view, b), got.keep[b].tolist())


def test_permuting_the_patches_permutes_the_selection():
    view = draw_view(2, prefix=1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    kept = make_method("divprune").reduce(view, 4).keep
    view.tokens = torch.cat([view.tokens[:, :1], view.tokens[:, 1:][:, order]], dim=1)
    moved = order[make_method("divprune").reduce(view, 4).keep]
    assert torch.equal(moved.sort(dim=1).values, kept)


def test_a_batch_equals_its_singles():
    view = draw_view(1)
    kept = make_method("divprune").reduce(view, 5).keep
    assert torch.equal(kept, torch.cat([make_method("divprune").reduce(one_of(view, b), 5).keep for b in range(3)]))


def test_wrong_inputs():
    with pytest.raises(OptionError, match=r"^space='queries'"):
        make_method("divprune", space="queries")
    with pytest.raises(BudgetError, match="keep=10 of 9"):
        make_method("divprune").reduce(draw_view(0), 10)
