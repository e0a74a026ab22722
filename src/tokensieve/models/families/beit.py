"""transformers' BEiT and Data2Vec: a bias on the logits by the patches' relative position. Imports encoder and base."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from tokensieve.models.encoder.form import Given
from tokensieve.models.families.transformers import PLAIN_FORMS, TransformersFamily, pair

__all__ = ["BeitFamily"]


def _relative(block: Any, given: Given) -> Tensor | None:
    """(1, H, L, L) of the block's own table; one that all blocks share comes as the mask."""
    if block.relative_position_bias is None:
        return None
    down, across = (side // block.patch_size for side in given["resolution"])
    interpolates = bool(given.get("interpolate_pos_encoding"))
    return cast(Tensor, block.relative_position_bias((down, across), interpolates, dim_size=down * across + 1))


class BeitFamily(TransformersFamily):
    name = "a transformers BEiT"
    examples = ("transformers.BeitModel", "transformers.Data2VecVisionModel")
    needs = (
        "embeddings.patch_embeddings",
        "embeddings.cls_token",
        "config.use_relative_position_bias",
    )
    forms = tuple(replace(f, bias=_relative, reads=("resolution",), mask="attention_mask") for f in PLAIN_FORMS)

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return bool(cast(Any, tower).config.use_mean_pooling)

    def sample_patches(self, tower: nn.Module) -> int:
        down, across = self.grid(tower)
        return down * across

    def sample(self, tower: nn.Module, block: nn.Module, patches: int) -> Given:
        return {"resolution": pair(cast(Any, tower).config.image_size)}
