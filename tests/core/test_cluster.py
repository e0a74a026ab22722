"""Density peaks against a loop, and on groups that anyone can see."""

from __future__ import annotations

import math

import torch

from tokensieve.core.density import density_peaks


def by_loop(x, clusters):
    m, width = x.shape
    d = [[float((x[i] - x[j]).double().norm()) / math.sqrt(width) for j in range(m)] for i in range(m)]
    density = []
    for i in range(m):
        near = sorted(d[i])[:clusters]  # itself among them
        density.append(math.exp(-sum(v * v for v in near) / clusters))
    apart, widest = [], max(map(max, d))
    if clusters == 1:  # all are as dense as a token is to itself: the one in the middle is the centre
        density = [1 - 1e-6 * sum(row) / m / widest for row in d]
    for i in range(m):
        denser = [d[i][j] for j in range(m) if density[j] > density[i]]
        apart.append(min(denser) if denser else widest)
    centres = sorted(range(m), key=lambda i: -density[i] * apart[i])[:clusters]
    return centres, [i if i in centres else min(centres, key=lambda c: d[i][c]) for i in range(m)]


def test_equals_the_loop() -> None:
    x = torch.randn(4, 17, 6, generator=torch.Generator().manual_seed(0))
    for clusters in (1, 3, 5, 17):
        centre, belongs = density_peaks(x, clusters)
        for b in range(4):
            wanted, goes = by_loop(x[b], clusters)
            assert sorted(centre[b].tolist()) == sorted(wanted)
            assert centre[b][belongs[b]].tolist() == goes


def test_finds_groups_that_lie_apart() -> None:
    g = torch.Generator().manual_seed(1)
    middle = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    label = torch.arange(30) % 3
    x = (middle[label] + torch.randn(30, 2, generator=g)).unsqueeze(0)
    _, belongs = density_peaks(x, 3)
    for group in range(3):
        assert belongs[0][label == group].unique().numel() == 1
    assert belongs[0].unique().numel() == 3


def test_one_token_is_its_own_cluster() -> None:
    centre, belongs = density_peaks(torch.ones(2, 1, 4), 1)
    assert centre.tolist() == belongs.tolist() == [[0], [0]]
