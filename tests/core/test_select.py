"""Selections against greedy loops that recompute everything at every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokensieve.core.select import dpp, max_min, strided, top
from tokensieve.errors import BudgetError

SEEDS = pytest.mark.parametrize("seed", range(4))


def draw(seed, batch=3, n=8, width=5):
    return torch.randn(batch, n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_cosines(x):
    return [[float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for b in x] for a in x]


def naive_max_min(x, k):
    like = naive_cosines(x)
    n = len(like)
    alone = [min((1 - like[i][j] for j in range(n) if j != i), default=0.0) for i in range(n)]
    equal = [i for i in range(n) if alone[i] >= max(alone) - 1e-9]
    chosen = [min(equal, key=lambda i: sum(like[i]))]
    while len(chosen) < k:
        rest = [i for i in range(n) if i not in chosen]
        chosen.append(max(rest, key=lambda i: min(1 - like[i][s] for s in chosen)))
    return sorted(chosen)


def naive_dpp(kernel, k):
    chosen = []
    while len(chosen) < k:
        rest = [i for i in range(len(kernel)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: np.linalg.det(kernel[np.ix_([*chosen, i], [*chosen, i])])))
    return sorted(chosen)


@SEEDS
@pytest.mark.parametrize("k", [1, 3, 8])
def test_top(seed, k):
    scores = draw(seed)[:, :, 0]
    expected = [sorted(sorted(range(8), key=lambda i: -row[i])[:k]) for row in scores.tolist()]
    assert top(scores, k).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_strided_takes_the_middle_of_each_share(n):
    for k in range(1, n + 1):
        got = strided(n, k, batch=2)
        assert got.shape == (2, k)
        assert got[0].tolist() == got[1].tolist() == [int((i + 0.5) * n / k) for i in range(k)]
        assert len(set(got[0].tolist())) == k


@SEEDS
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_max_min(seed, k):
    x = draw(seed)
    assert max_min(x, k).tolist() == [naive_max_min(row, k) for row in x.numpy()]


@SEEDS
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_dpp_maximises_the_determinant_at_each_step(seed, k):
    factor = draw(seed, width=8)
    kernel = factor @ factor.transpose(1, 2)
    assert dpp(kernel, k).tolist() == [naive_dpp(row, k) for row in kernel.numpy()]


def test_dpp_beyond_the_rank_stays_distinct():
    factor = draw(0, width=2).float()
    got = dpp(factor @ factor.transpose(1, 2), 8)
    assert got.tolist() == [list(range(8))] * 3


def cosine_dpp(x, k):
    x = x / x.norm(dim=-1, keepdim=True)
    return dpp(x @ x.transpose(1, 2), k)


def test_max_min_starts_with_the_farther_of_two_mutual_neighbours():
    x = draw(0, batch=40, n=6)
    assert max_min(x, 1).tolist() == [naive_max_min(row, 1) for row in x.numpy()]


@pytest.mark.parametrize("select", [max_min, cosine_dpp])
def test_order_and_company_do_not_change_the_choice(select):
    """Where the first pick ties by nature, neither the place of a patch nor rounding decides."""
    x = draw(0, batch=64, n=10, width=12).float()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    kept = select(x, 4)
    assert torch.equal(order[select(x[:, order], 4)].sort(dim=1).values, kept)
    assert torch.equal(torch.cat([select(x[i : i + 1], 4) for i in range(64)]), kept)


@pytest.mark.parametrize("select", [max_min, cosine_dpp])
def test_copies_are_chosen_last(select):
    x = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 2, 1, 3]].unsqueeze(0)
    picked = x[0, select(x, 4)[0]]
    assert torch.equal(picked.sum(0), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("k", [0, 9])
@pytest.mark.parametrize(
    "select",
    [
        lambda x, k: top(x[:, :, 0], k),
        lambda x, k: strided(8, k, 3),
        max_min,
        lambda x, k: dpp(x @ x.transpose(1, 2), k),
    ],
)
def test_more_than_there_are_or_none_is_an_error(select, k):
    with pytest.raises(BudgetError, match=f"keep={k} of 8 patches"):
        select(draw(0), k)
