"""Photographs to compare and calibrate with that come with the package."""

from __future__ import annotations

import io
import tarfile
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from tokensieve.engines.preprocess import Preprocess
from tokensieve.errors import MissingMaterialError

__all__ = ["real_images"]


def real_images(size: tuple[int, int], preprocess: Preprocess | None, count: int = 8) -> Tensor:
    """(count, 3, H, W) photographs that every installation has: CIFAR-10's, enlarged. Prepared as the model wants
    them; where it does not say, with ImageNet's mean and deviation."""
    from PIL import Image

    prepare = preprocess or Preprocess(size, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), resize=min(size))
    if prepare.size != size:
        prepare = Preprocess(size, prepare.mean, prepare.std, prepare.interpolation)
    path = Path(str(resources.files("tokensieve"))) / "tasks/clip/data/cifar10-sample/test/0.tar"
    if not path.is_file():
        raise MissingMaterialError(f"{path.name} is missing from this installation: give photos=")
    found: list[Tensor] = []
    with tarfile.open(path) as tar:
        for member in tar:
            if member.name.endswith((".png", ".jpg", ".webp")) and len(found) < count:
                file = tar.extractfile(member)
                assert file is not None
                found.append(prepare(Image.open(io.BytesIO(file.read()))))
    return torch.stack(found)
