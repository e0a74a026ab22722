"""Augmentation of a sample: drawn once, applied to each of its modalities alike, so that they stay in register.

May import: torch, numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Augmentation", "draw_augmentation"]

PAD_SHARE = 10 / 256  # 10 pixels of a person 256 high
ERASE_AREA = (0.02, 0.4)
ERASE_ASPECT = (0.3, 1 / 0.3)


@dataclass(frozen=True)
class Augmentation:
    """flip: left to right. pad: pixels added on every side. top, left: where the crop of the old size starts.

    erase: (top, left, height, width) set to 0, the mean of normalised pixels; None: nothing is.
    """

    flip: bool
    pad: int
    top: int
    left: int
    erase: tuple[int, int, int, int] | None

    def apply(self, image: Tensor) -> Tensor:
        """(..., H, W), normalised -> the same shape."""
        height, width = image.shape[-2:]
        if self.flip:
            image = image.flip(-1)
        image = F.pad(image, (self.pad,) * 4)[..., self.top : self.top + height, self.left : self.left + width]
        if self.erase is None:
            return image
        top, left, tall, wide = self.erase
        image = image.clone()
        image[..., top : top + tall, left : left + wide] = 0.0
        return image


def draw_augmentation(key: tuple[int, int, int], size: tuple[int, int]) -> Augmentation:
    """For (seed, epoch, index) and images of `size` (height, width). The same key gives the same augmentation."""
    draw = np.random.default_rng(key)
    height, width = size
    pad = max(1, round(PAD_SHARE * max(height, width)))
    flip = bool(draw.random() < 0.5)
    top, left = (int(v) for v in draw.integers(0, 2 * pad + 1, size=2))
    return Augmentation(flip, pad, top, left, _erased(draw, height, width) if draw.random() < 0.5 else None)


def _erased(draw: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int] | None:
    """A box of random area and aspect that lies inside; None where ten attempts gave none that does."""
    low, high = np.log(ERASE_ASPECT)
    for _ in range(10):
        area = draw.uniform(*ERASE_AREA) * height * width
        aspect = float(np.exp(draw.uniform(low, high)))
        tall, wide = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < tall < height and 0 < wide < width:
            return int(draw.integers(0, height - tall + 1)), int(draw.integers(0, width - wide + 1)), tall, wide
    return None
