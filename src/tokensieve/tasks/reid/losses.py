"""Cross entropy with label smoothing, and batch-hard triplets with a soft margin, over all processes' samples."""

from __future__ import annotations

import torch.nn.functional as F
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn

from tokensieve.training.distributed import gather_with_gradient

__all__ = ["ReidLoss", "SoftTriplet"]


class SoftTriplet(nn.Module):
    """Mean over the anchors of log(1 + exp(farthest positive - nearest negative)), Euclidean, not normalised.

    pytorch-metric-learning's defaults would normalise the embeddings, add a margin inside the softplus, and leave zero
    losses out of the mean.
    """

    def __init__(self) -> None:
        super().__init__()
        distance = LpDistance(normalize_embeddings=False, p=2, power=1)
        self.miner = BatchHardMiner(distance=distance)
        self.loss = TripletMarginLoss(margin=0.0, smooth_loss=True, distance=distance, reducer=MeanReducer())

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """features: (B, D), labels: (B,). Anchors without a positive or a negative in the batch do not count."""
        loss: Tensor = self.loss(features, labels, self.miner(features, labels))
        return loss


class ReidLoss(nn.Module):
    """id_weight * cross entropy of the logits + triplet_weight * soft triplet of the features before the BNNeck."""

    def __init__(self, smoothing: float = 0.1, id_weight: float = 0.25, triplet_weight: float = 1.0) -> None:
        super().__init__()
        self.smoothing, self.id_weight, self.triplet_weight = smoothing, id_weight, triplet_weight
        self.triplet = SoftTriplet()

    def forward(self, feature: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """feature: (B, D), logits: (B, C), labels: (B,), of this process. Returns the loss and its two parts.

        Triplets are found among all processes' samples. The cross entropy is of this process's own: with gradients
        averaged over processes that is the mean over all.
        """
        identity = F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
        triplet = self.triplet(gather_with_gradient(feature.float()), gather_with_gradient(labels))
        parts = {"id": identity.detach(), "triplet": triplet.detach()}
        return self.id_weight * identity + self.triplet_weight * triplet, parts
