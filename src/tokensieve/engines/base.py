"""The one interface of all engines: images in, features out. Imports torch and about."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokensieve.engines.about import About
from tokensieve.engines.parity import Parity
from tokensieve.errors import MissingMaterialError, OptionError

__all__ = ["Engine", "need"]


class Engine(ABC):
    """A model ready to be called. path: the file it was read from, None where it lives in memory.

    threads: the number asked for, None: what the engine takes by itself.
    """

    name: ClassVar[str]

    def __init__(self, about: About, path: Path | None, threads: int | None) -> None:
        self.about, self.path, self.threads = about, path, threads
        self.parity: Parity | None = None  # to the model in torch, where it was just exported

    def __call__(self, images: Tensor) -> Any:
        """(B, 3, H, W) -> features (B, E); a pair with the kept indices (B, K) if the file was exported with them."""
        self._check(images)
        outputs = self.run(images)
        return outputs if self.about.kept else outputs[0]

    @abstractmethod
    def run(self, images: Tensor) -> tuple[Tensor, ...]:
        """All outputs for images that have been checked."""

    def preprocess(self, photo: Any) -> Tensor:
        """A PIL image -> (3, H, W), as the model was trained."""
        if self.about.preprocess is None:
            raise MissingMaterialError(
                f"{self.path or self.about.model} does not say how its images are prepared: export it with preprocess="
            )
        return self.about.preprocess(photo)

    def _check(self, images: Tensor) -> None:
        wanted = (3, *self.about.size)
        if not isinstance(images, Tensor):
            raise OptionError(f"an engine takes images as a tensor (B, {wanted})".replace("((", "(").replace("))", ")"))
        if images.dim() != 4 or tuple(images.shape[1:]) != wanted or not len(images):
            raise OptionError(
                f"images of shape {tuple(images.shape)}: this model takes (B, {', '.join(map(str, wanted))}), B >= 1"
            )
        if images.dtype != torch.float32:
            raise OptionError(f"images of {images.dtype}: this model takes float32")


def need(package: str, extra: str) -> Any:
    """The package, imported; MissingMaterialError names the extra that brings it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.partition(".")[0]:
            raise
        raise MissingMaterialError(f'this needs {package}: pip install "tokensieve[{extra}]"') from None
