"""transformers' video encoders: tokens of time x height x width. Imports encoder and base."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.models.families.transformers import PLAIN_FORMS, TransformersFamily, pair

__all__ = ["VideoMaeFamily", "Vjepa2Family"]


def _by_place(block: Any, x: Tensor, table: None, origin: Tensor | None, prefix: int) -> Tensor:
    """The block's own rotation by frame, row and column, told the numbers of the patches that are left."""
    attn = block.attention
    ids = torch.arange(x.shape[2], device=x.device).expand(x.shape[0], -1) if origin is None else origin
    return cast(Tensor, attn.apply_rotary_embeddings(x, attn.get_position_ids(x, masks=ids)))


class VideoMaeFamily(TransformersFamily):
    name = "a transformers video encoder"
    examples = ("transformers.VideoMAEModel", "transformers.VivitModel")
    needs = ("embeddings.patch_embeddings", "config.num_frames", "config.tubelet_size")
    blocks_at = "encoder.layer | layers"

    def frames(self, tower: nn.Module) -> int:
        config = cast(Any, tower).config
        tube = config.tubelet_size
        return int(config.num_frames) // int(tube[0] if isinstance(tube, tuple | list) else tube)

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        config = cast(Any, tower).config
        patch = getattr(config, "patch_size", None) or config.tubelet_size[1:]
        (height, width), (down, across) = pair(config.image_size), pair(patch)
        return self.frames(tower) * (height // down), width // across


class Vjepa2Family(TransformersFamily):
    name = "a transformers V-JEPA 2 encoder"
    examples = ("transformers.VJEPA2Model", "transformers.VJEPA2ForVideoClassification")
    needs = ("embeddings.patch_embeddings", "config.crop_size", "config.frames_per_clip")
    blocks_at = "layer"
    forms = tuple(replace(f, rotate=_by_place, tuple_out=2) for f in PLAIN_FORMS)

    def turns(self, tower: nn.Module) -> bool:
        return True

    def frames(self, tower: nn.Module) -> int:
        config = cast(Any, tower).config
        return int(config.frames_per_clip) // int(config.tubelet_size)

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        side = int(cast(Any, tower).config.crop_size) // int(cast(Any, tower).config.patch_size)
        return self.frames(tower) * side, side
