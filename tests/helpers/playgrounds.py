"""A playground with a tiny model, and photos for it."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from tokensieve.tasks.playground.encoder import Playground
from tokensieve.tasks.viewer import Viewer
from tokensieve.testing.models import tiny_model

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def preprocess(photo: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.asarray(photo.resize((48, 48))).copy()).permute(2, 0, 1).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def photo(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 48, 3), dtype=np.uint8))


def playground() -> Playground:
    model = tiny_model("openclip").model
    width = model(torch.zeros(1, 3, 48, 48)).shape[-1]

    def encode(prompts):
        rows = [torch.randn(width, generator=torch.Generator().manual_seed(len(prompt))) for prompt in prompts]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)

    return Playground(Viewer("tiny", model, preprocess, MEAN, STD), encode)
