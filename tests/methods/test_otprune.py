"""OTPrune against greedy maximisation of the log det itself, and the distance it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.method_views import draw_view, one_of, patches_of
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method


def covariance(x):
    return x.T @ x / len(x)


def root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag(np.sqrt(values.clip(0))) @ vectors.T


def naive(x, keep, strength):
    """The set that grows by what adds most to log det(I + strength * V^1/2 V_S V^1/2), V_S over `keep` tokens."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    half, chosen = root(covariance(x)), []
    while len(chosen) < keep:

        def worth(i, chosen=chosen):
            part = x[[*chosen, i]]
            inner = half @ (part.T @ part / keep) @ half
            return np.linalg.slogdet(np.eye(len(inner)) + strength * inner)[1]

        chosen.append(max((i for i in range(len(x)) if i not in chosen), key=worth))
    return sorted(chosen)


def wasserstein(x, part):
    """Squared, of Gaussians without a mean."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    a, b = covariance(x), covariance(x[part])
    return np.trace(a) + np.trace(b) - 2 * np.trace(root(root(a) @ b @ root(a)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strength", [1.0, 100.0])
def test_greedy_log_det(seed, strength):
    view = draw_view(seed, n=14, d=5, biased=False)
    for keep in (1, 4, 9):
        got = make_method("otprune", strength=strength).reduce(view, keep)
        assert got.keep.tolist() == [naive(patches_of(view, b), keep, strength) for b in range(3)]
        assert got.scores is None


def test_the_set_is_nearer_to_all_than_one_spread_widest():
    view = draw_view(0, n=60, d=8, batch=8, biased=False)
    view.tokens[:, 1:40] = view.tokens[:, :1] + 0.3 * view.tokens[:, 1:40]  # two thirds are alike
    means = {}
    for name in ("otprune", "divprune"):
        kept = make_method(name).reduce(view, 12).keep
        means[name] = np.mean([wasserstein(patches_of(view, b), kept[b].tolist()) for b in range(8)])
    assert means["otprune"] < 0.7 * means["divprune"]


def test_before_a_language_model_tokens_are_compared_after_the_projector():
    view = draw_view(0, n=12, stage="projector", project=lambda x: x[..., :3].square())
    got = make_method("otprune").reduce(view, 5).keep.tolist()
    assert got == [naive(view.joint[b].double().numpy(), 5, 100.0) for b in range(3)]
    assert got != [naive(patches_of(view, b), 5, 100.0) for b in range(3)]


def test_a_batch_equals_its_singles():
    view = draw_view(1)
    kept = make_method("otprune").reduce(view, 5).keep
    assert torch.equal(kept, torch.cat([make_method("otprune").reduce(one_of(view, b), 5).keep for b in range(3)]))


def test_wrong_inputs():
    with pytest.raises(OptionError, match=r"^strength=0"):
        make_method("otprune", strength=0.0)
    with pytest.raises(BudgetError, match="keep=10 of 9"):
        make_method("otprune").reduce(draw_view(0), 10)
