"""A CLIP's image tower on an engine, in place of `encode_image`. Imports engines."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.engines.base import Engine
from tokensieve.engines.export import make_engine
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.tasks.clip.config import SieveConfig

__all__ = ["EngineEncoder", "refuse_amp"]


class EngineEncoder:
    """Images -> features, by the engine that a configuration names.

    The engine is made at the first call: what a method selects by (class prompts) is known by then.
    """

    def __init__(self, model: nn.Module, config: SieveConfig) -> None:
        if hasattr(model, "_encode_image"):
            raise UnsupportedModelError(
                f"--engine {config.engine}: {type(model).__name__} reads its image tokens too; only torch runs it"
            )
        self.model, self.config = model, config
        self.engine: Engine | None = None

    def __call__(self, images: Tensor, normalize: bool = False) -> Any:
        """(B, 3, H, W) -> (B, E), on the device of the images."""
        if self.engine is None:
            c = self.config
            self.engine = make_engine(self.model, c.engine, quantize=c.quantize, threads=c.threads)
        features = self.engine(images.cpu().float()).to(images.device)
        return F.normalize(features, dim=-1) if normalize else features


def refuse_amp(config: SieveConfig, amp: bool) -> None:
    """Mixed precision is torch's."""
    if amp and config.engine not in ("torch", "compile"):
        raise OptionError(f"--amp does nothing on --engine {config.engine}: leave it out, or give --quantize int8")
