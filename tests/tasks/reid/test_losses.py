"""The losses against naive loops."""

from __future__ import annotations

import math

import pytest
import torch

from tokensieve.tasks.reid.losses import ReidLoss, SoftTriplet


def naive_triplet(features, labels):
    """Mean over anchors of log(1 + exp(farthest of the same - nearest of another)), anchor by anchor."""
    losses = []
    for i in range(len(labels)):
        same = [math.dist(features[i], features[j]) for j in range(len(labels)) if labels[j] == labels[i] and j != i]
        other = [math.dist(features[i], features[j]) for j in range(len(labels)) if labels[j] != labels[i]]
        if same and other:
            losses.append(math.log1p(math.exp(max(same) - min(other))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_soft_triplet(scale):
    torch.manual_seed(0)
    features = scale * torch.randn(12, 5)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    wanted = naive_triplet(features.tolist(), labels.tolist())
    assert float(SoftTriplet()(features, labels)) == pytest.approx(wanted, rel=1e-5)


def test_an_anchor_without_a_positive_does_not_count():
    torch.manual_seed(0)
    features, labels = torch.randn(5, 3), torch.tensor([0, 0, 1, 1, 2])
    wanted = naive_triplet(features.tolist(), labels.tolist())
    assert float(SoftTriplet()(features, labels)) == pytest.approx(wanted, rel=1e-5)


def test_lengths_of_features_matter():
    """Neither the loss nor its miner normalises: twice as long is not the same."""
    torch.manual_seed(0)
    features, labels = torch.randn(8, 3), torch.arange(8) // 2
    assert float(SoftTriplet()(features, labels)) != pytest.approx(float(SoftTriplet()(2 * features, labels)), rel=1e-3)


def test_both_parts_by_their_weights():
    torch.manual_seed(0)
    feature, logits, labels = torch.randn(8, 4), torch.randn(8, 6), torch.arange(8) // 2
    loss, parts = ReidLoss(smoothing=0.1, id_weight=0.25, triplet_weight=2.0)(feature, logits, labels)
    entropy = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(x) for x in row))
        wanted = [0.1 / 6 + (0.9 if i == label else 0.0) for i in range(6)]
        entropy -= sum(w * (x - log_sum) for w, x in zip(wanted, row, strict=True)) / len(labels)
    assert float(parts["id"]) == pytest.approx(entropy, rel=1e-5)
    assert float(parts["triplet"]) == pytest.approx(naive_triplet(feature.tolist(), labels.tolist()), rel=1e-5)
    assert float(loss) == pytest.approx(0.25 * entropy + 2.0 * float(parts["triplet"]), rel=1e-5)
