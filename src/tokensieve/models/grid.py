"""Where patches lie: grids of rows and columns, with frames before them in a video. Imports torch and errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokensieve.errors import UnsupportedModelError

__all__ = ["grid_of", "nearest_kept", "places_in"]


def grid_of(patches: int, usual: tuple[int, ...], image: tuple[int, ...]) -> tuple[int, ...]:
    """Patches along each axis of an image of `patches`.

    usual: those of the model's usual image. image: the pixels of this one, () where they are not known.
    """
    for size in (image, usual):
        if len(size) == 2:
            rows = round(math.sqrt(patches * size[0] / size[1]))
            if rows and patches % rows == 0 and abs(patches // rows / rows - size[1] / size[0]) <= 1.0 / rows:
                return rows, patches // rows
        if math.prod(usual) == patches:
            return usual
    raise UnsupportedModelError(f"{patches} patches of an image of {image}: the grid they were cut from is not known")


def nearest_kept(origin: Tensor, grid: tuple[int, ...]) -> Tensor:
    """(B, N) for each patch of the grid the slot of the nearest kept one; of equally near ones the first.

    origin: (B, K) indices of the kept patches.
    """
    axes = [torch.arange(n, device=origin.device) for n in grid]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, len(grid))  # (N, axes)
    apart = (place[None, :, None] - place[origin][:, None]).square().sum(dim=-1)  # (B, N, K)
    order = torch.arange(origin.shape[1], device=origin.device)
    return (apart * origin.shape[1] + order).argmin(dim=-1)


def places_in(index: Tensor, grid: tuple[int, ...]) -> Tensor:
    """(B, K) indices of patches -> (B, K, axes) their row and column, with the frame before them in a video.

    Indices beyond one grid (further images of a prompt) count anew in each; -1 gives -1 everywhere.
    """
    rest, axes = index % math.prod(grid), []
    for size in reversed(grid):
        axes.append(rest % size)
        rest = rest // size
    return torch.stack(axes[::-1], dim=-1).masked_fill(index.unsqueeze(-1) < 0, -1)
