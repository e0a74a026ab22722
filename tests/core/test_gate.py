"""The relaxed keep decision against plain loops, and its gradients."""

import math

import pytest
import torch

from tokensieve.core.relax import existence_bias, fold_masses, keep_gate


def _scores(n=9, keep=4, dtype=torch.float32):
    score = torch.randn(2, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    hard = torch.zeros(2, n, dtype=torch.bool).scatter(1, score.topk(keep, dim=1).indices, True)
    return score, hard


def test_the_gate_is_hard_forward_and_a_bernoulli_backward():
    score, hard = _scores()
    score.requires_grad_()
    gate = keep_gate(score, hard, tau=0.5)
    assert torch.equal(gate, hard.float())
    weight = torch.arange(1.0, 19.0).view(2, 9)
    (gate * weight).sum().backward()
    for b in range(2):
        values = score[b].tolist()
        ranked = sorted(values, reverse=True)
        threshold = (ranked[3] + ranked[4]) / 2
        ps = [1 / (1 + math.exp(-(value - threshold) / 0.5)) for value in values]
        slopes = [p * (1 - p) / 0.5 for p in ps]
        # the threshold moves so that the sum of all p stays: what all want alike cancels
        common = sum(s * w for s, w in zip(slopes, weight[b].tolist(), strict=True)) / sum(slopes)
        for i, slope in enumerate(slopes):
            assert score.grad[b, i].item() == pytest.approx(slope * (weight[b, i].item() - common), rel=1e-3)
    assert (score.grad != 0).all()
    assert torch.allclose(score.grad.sum(dim=1), torch.zeros(2), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tau", [0.01, 0.5, 10.0])
def test_half_precision_is_finite(dtype, tau):
    score, hard = _scores(dtype=dtype)
    score.requires_grad_()
    keep_gate(score, hard, tau).sum().backward()
    assert score.grad.isfinite().all()


@pytest.mark.parametrize("hard", [True, False])
def test_all_or_none_kept_have_no_gradient(hard):
    score = torch.randn(2, 5, requires_grad=True)
    gate = keep_gate(score, torch.full((2, 5), hard), tau=0.5)
    assert torch.equal(gate, torch.full((2, 5), float(hard)))
    gate.sum().backward()
    assert torch.equal(score.grad, torch.zeros(2, 5))


def test_the_bias_makes_a_weighted_softmax_also_where_a_key_is_absent():
    logits, value = torch.randn(6), torch.randn(6)
    exists = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.0], requires_grad=True)
    out = ((logits + existence_bias(exists)).softmax(dim=0) * value).sum()
    (grad,) = torch.autograd.grad(out, exists)
    weights = [e * math.exp(x) for e, x in zip(exists.tolist(), logits.tolist(), strict=True)]
    total = sum(weights)
    wanted = sum(w * v for w, v in zip(weights, value.tolist(), strict=True)) / total
    assert out.item() == pytest.approx(wanted, abs=1e-5)
    for i in range(6):
        slope = math.exp(logits[i].item()) / total * (value[i].item() - wanted)
        assert grad[i].item() == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_masses_fold_as_weighted_means():
    g = torch.Generator().manual_seed(0)
    x, source = torch.randn(2, 3, 4, generator=g), torch.randn(2, 5, 4, generator=g)
    size, mass = 1 + torch.rand(2, 3, generator=g), torch.rand(2, 5, generator=g)
    mass[:, 0] = 0.0
    into = torch.randint(0, 3, (2, 5), generator=g)
    means, total = fold_masses(x, size, source, mass, into)
    for b in range(2):
        for t in range(3):
            here = [s for s in range(5) if into[b, s] == t]
            weight = size[b, t] + sum(mass[b, s] for s in here)
            value = (size[b, t] * x[b, t] + sum(mass[b, s] * source[b, s] for s in here)) / weight
            assert total[b, t].item() == pytest.approx(weight.item())
            assert torch.allclose(means[b, t], value, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masses_of_half_precision_tokens(dtype):
    x, source = torch.randn(1, 2, 4).to(dtype), torch.randn(1, 3, 4).to(dtype)
    means, total = fold_masses(x, torch.ones(1, 2), source, torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64))
    assert torch.equal(means, x)
    assert total.dtype == torch.float32


def test_a_mass_of_nothing_still_has_a_gradient():
    x, source = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    mass = torch.zeros(1, 1, requires_grad=True)
    means, _ = fold_masses(x, torch.full((1, 1), 4.0), source, mass, torch.zeros(1, 1, dtype=torch.int64))
    means.sum().backward()
    assert mass.grad.item() == pytest.approx(2 / 4)
