"""Clusters by density peaks. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["density_peaks"]


def density_peaks(x: Tensor, clusters: int, neighbours: int = 5) -> tuple[Tensor, Tensor]:
    """DPC-KNN on (B, M, D): the centres (B, C), in no order, and for each token the centre 0..C-1 it belongs to (B, M).

    Density: exp(-mean squared distance to the nearest `neighbours`). A centre is dense and far from anything denser:
    the C highest products of the two. Distances are divided by sqrt(D). A centre belongs to itself. 1 <= C <= M.
    """
    batch, m, width = x.shape
    distance = torch.cdist(x.float(), x.float()) / width**0.5
    near = min(neighbours + 1, m)  # a token is its own nearest
    density = (-distance.topk(near, dim=-1, largest=False).values[..., 1:].square().sum(-1) / max(1, near - 1)).exp()
    denser = density.unsqueeze(1) > density.unsqueeze(2)  # (B, M, M): column j is denser than row i
    far = distance.amax(dim=-1)
    apart = distance.masked_fill(~denser, float("inf")).amin(dim=-1)
    apart = torch.where(apart.isinf(), far, apart)
    centre = (density * apart).topk(clusters, dim=1).indices
    to = distance.gather(1, centre.unsqueeze(-1).expand(-1, -1, m))  # (B, C, M)
    belongs = to.argmin(dim=1)
    own = torch.arange(clusters, device=x.device).expand(batch, -1)
    return centre, belongs.scatter(1, centre, own)
