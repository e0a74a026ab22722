"""Folding and bipartite matching against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokensieve.core.merge import bipartite, fold, slot_of
from tokensieve.core.reduction import take_tokens
from tokensieve.core.score import cosine

SEEDS = pytest.mark.parametrize("seed", range(4))


def draw(seed, batch=3, n=9, width=5):
    return torch.randn(batch, n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cos(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def matched(metric, source, target, r):
    return bipartite(cosine(take_tokens(metric, source), take_tokens(metric, target)), source, target, 9, r)


@SEEDS
def test_fold_goes_to_the_nearest_kept(seed):
    metric = draw(seed)
    g = torch.Generator().manual_seed(seed)
    keep = torch.stack([torch.randperm(9, generator=g)[:4].sort().values for _ in range(3)])
    scores = torch.randn(3, 9)
    got = fold(keep, metric, scores)
    assert got.scores is scores
    assert got.keep is keep
    for b, m in enumerate(metric.numpy()):
        kept = keep[b].tolist()
        gone = [i for i in range(9) if i not in kept]
        assert got.drop[b].tolist() == gone
        assert got.into[b].tolist() == [max(range(4), key=lambda s: cos(m[i], m[kept[s]])) for i in gone]


@SEEDS
@pytest.mark.parametrize("r", [1, 3, 5])
def test_bipartite_merges_the_r_most_similar(seed, r):
    metric = draw(seed)
    g = torch.Generator().manual_seed(10 + seed)
    order = torch.stack([torch.randperm(9, generator=g) for _ in range(3)])
    source, target = order[:, :5], order[:, 5:8]  # the ninth patch is not a candidate
    got = matched(metric, source, target, r)
    for b, m in enumerate(metric.numpy()):
        best = {}
        for i in source[b].tolist():
            goal = max(target[b].tolist(), key=lambda j: cos(m[i], m[j]))
            best[i] = (cos(m[i], m[goal]), goal)
        gone = sorted(best, key=lambda i: -best[i][0])[:r]
        kept = [i for i in range(9) if i not in gone]
        assert got.keep[b].tolist() == kept
        assert got.drop[b].tolist() == gone
        assert [kept[s] for s in got.into[b].tolist()] == [best[i][1] for i in gone]
        expected = [-best[i][0] if i in best else 1.0 for i in range(9)]
        assert got.scores[b].tolist() == pytest.approx(expected)


def test_bipartite_sizes_sum_to_n():
    metric = draw(0)
    every = torch.arange(9).expand(3, -1)
    _, size = matched(metric, every[:, 0::2], every[:, 1::2], 5).apply(metric)
    assert size.sum(1).tolist() == [9.0] * 3


def test_bipartite_cannot_merge_more_than_its_sources():
    every = torch.arange(9).expand(3, -1)
    with pytest.raises(RuntimeError, match="out of range"):
        matched(draw(0), every[:, 0::2], every[:, 1::2], 6)


def test_slot_of():
    keep = torch.tensor([[1, 4, 6], [0, 2, 3]])
    assert slot_of(keep, torch.tensor([[6, 1, 6], [3, 2, 0]]), 8).tolist() == [[2, 0, 2], [2, 1, 0]]
