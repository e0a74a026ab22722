"""How far an engine's features are from the model's, on real photos. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["TOLERANCE", "Parity", "compare"]

TOLERANCE = 1e-4  # of float32


@dataclass(frozen=True)
class Parity:
    """photos: compared. difference: the largest of any feature, relative to the largest feature of its photo. cosine:
    the lowest of a photo. top1: the share of photos with the same nearest other photo."""

    photos: int
    difference: float
    cosine: float
    mean_cosine: float
    top1: float


def compare(wanted: Tensor, got: Tensor) -> Parity:
    """Both (P, E)."""
    wanted, got = wanted.double(), got.double()
    cosine = F.cosine_similarity(wanted, got, dim=-1)
    difference = (wanted - got).abs().amax(dim=-1) / wanted.abs().amax(dim=-1).clamp_min(1e-12)
    # not a number in either is as far apart as can be
    worst = torch.nan_to_num(difference, nan=float("inf")).max()
    return Parity(
        len(wanted), float(worst), float(torch.nan_to_num(cosine, nan=-1.0).min()),
        float(torch.nan_to_num(cosine, nan=-1.0).mean()), float((_nearest(wanted) == _nearest(got)).double().mean()),
    )  # fmt: skip


def _nearest(features: Tensor) -> Tensor:
    """(P,) the photo most like each, by cosine; 0 where there is one photo alone."""
    unit = F.normalize(features, dim=-1)
    return (unit @ unit.T).fill_diagonal_(-2.0).argmax(dim=-1)
