"""Weighted merging: out = own * kept + weighted sum of what goes to it."""

from __future__ import annotations

import pytest
import torch

from tokensieve.core.reduction import WeightedReduction, cluster_sums


def draw(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1 + 6 + 1, 4, generator=g).to(dtype)  # prefix, six patches, one extra token
    keep = torch.tensor([[1, 4], [0, 5]])
    drop = torch.tensor([[0, 2, 5], [1, 2, 3]])  # 3 of the first image and 4 of the second are gone
    goal, own = torch.tensor([[0, 1, 1], [1, 1, 0]]), torch.tensor([[0.5, 2.0], [0.0, 1.0]])
    weight = torch.rand(2, 3, generator=g)
    return x, WeightedReduction(keep=keep, drop=drop, goal=goal, weight=weight, own=own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_apply_equals_a_loop(dtype) -> None:
    x, r = draw(dtype)
    out, size = r.apply(x, prefix=1, made=1)
    assert size is None
    assert out.dtype == dtype
    assert out.shape == (2, 4, 4)
    assert torch.equal(out[:, [0, 3]], x[:, [0, 7]])
    for b in range(2):
        for slot in range(2):
            wanted = r.own[b, slot] * x[b, 1 + r.keep[b, slot]].double()
            for j in range(3):
                if r.goal[b, j] == slot:
                    wanted = wanted + r.weight[b, j].double() * x[b, 1 + r.drop[b, j]].double()
            assert torch.allclose(out[b, 1 + slot].double(), wanted, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_gradients_reach_tokens_and_weights() -> None:
    x, r = draw()
    x.requires_grad_()
    weight = r.weight.clone().requires_grad_()
    WeightedReduction(keep=r.keep, drop=r.drop, goal=r.goal, weight=weight, own=r.own).apply(x, 1, 1)[
        0
    ].sum().backward()
    reached = x.grad.abs().sum(-1) > 0
    assert reached[0].tolist() == [True, True, True, True, False, True, True, True]
    assert (weight.grad != 0).all()


def test_slots_and_sums() -> None:
    _, r = draw()
    assert r.slots(6).tolist() == [[0, 0, 1, -1, 1, 1], [0, 1, 1, 0, -1, 1]]
    assert cluster_sums(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0, 2, 2]]), 3).tolist() == [[1.0, 0.0, 6.0]]
