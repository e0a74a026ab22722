"""Clusters by density peaks. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["density_peaks"]


def density_peaks(x: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """DPC-KNN on (B, M, D): the centres (B, C), in no order, and for each token the centre 0..C-1 it belongs to (B, M).

    Density: exp(-mean squared distance to the nearest C), itself the first of them. A centre is dense and far from
    anything denser: the C highest products of the two; where nothing is denser, the largest distance of all counts.
    Distances are divided by sqrt(D). A centre belongs to itself. 1 <= C <= M. Of equal densities the one nearer to all
    is the denser.
    """
    batch, m, width = x.shape
    distance = torch.cdist(x.float(), x.float()) / width**0.5
    distance.diagonal(dim1=1, dim2=2).zero_()  # rounding leaves a little there
    density = (-distance.topk(clusters, dim=-1, largest=False).values.double().square().mean(-1)).exp()
    farthest = distance.amax(dim=(-2, -1), keepdim=True)
    density = density - 1e-6 * distance.mean(-1) / farthest.squeeze(-1).clamp_min(1e-12)
    denser = density.unsqueeze(1) > density.unsqueeze(2)  # (B, M, M): column j is denser than row i
    apart = torch.where(denser, distance, farthest).amin(dim=-1)
    centre = (density * apart).topk(clusters, dim=1).indices
    to = distance.gather(1, centre.unsqueeze(-1).expand(-1, -1, m))  # (B, C, M)
    belongs = to.argmin(dim=1)
    own = torch.arange(clusters, device=x.device).expand(batch, -1)
    return centre, belongs.scatter(1, centre, own)
