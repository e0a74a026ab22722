"""transformers' SigLIP 2 with images of any shape, padded to one length (NaFlex). Imports encoder and base."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.form import BlockForm, Given
from tokensieve.models.encoder.padding import MaskedHead
from tokensieve.models.families.base import has
from tokensieve.models.families.transformers import PLAIN_FORMS, TransformersFamily

__all__ = ["PatchMaskFamily", "Siglip2Family"]


class PatchMaskFamily(TransformersFamily):
    """Towers whose blocks get a mask (B, 1, L, L) that hides the padding of smaller images."""

    name = "a transformers vision model with a patch mask"
    examples: tuple[str, ...] = (
        "transformers.Idefics2VisionTransformer", "transformers.Idefics3VisionTransformer",
        "transformers.SmolVLMVisionTransformer",
    )  # fmt: skip
    needs: tuple[str, ...] = (
        "embeddings.patch_embedding",
        "embeddings.num_patches_per_side",
        "post_layernorm",
        "encoder.layers",
    )
    forms: tuple[BlockForm, ...] = tuple(replace(f, mask="attention_mask") for f in PLAIN_FORMS)

    def sample(self, tower: nn.Module, block: nn.Module, patches: int) -> Given:
        mask = torch.ones(2, 1, patches, patches, dtype=torch.bool, device=next(block.parameters()).device)
        mask[1, :, :, -2:] = False
        return {"attention_mask": mask}

    def check(self, tower: nn.Module) -> None:
        if has(tower, "head") and not self.masked_pools(tower):
            raise UnsupportedModelError(f"{type(tower).__name__}: it pools with a mask, which is not reduced")
        super().check(tower)


class Siglip2Family(PatchMaskFamily):
    name = "a transformers SigLIP 2 vision model"
    examples = ("transformers.Siglip2VisionModel", "transformers.Siglip2Model")
    needs = (
        "embeddings.patch_embedding",
        "embeddings.position_embedding_size",
        "post_layernorm",
        "encoder.layers",
    )

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        side = int(cast(Any, tower).embeddings.position_embedding_size)
        return side, side

    def masked_pools(self, tower: nn.Module) -> list[tuple[nn.Module, type]]:
        return [(cast(Any, tower).head, MaskedHead)] if has(tower, "head") else []
