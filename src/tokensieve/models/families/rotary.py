"""transformers' rotary image towers: DINOv3 (patches alone are turned) and MLCD (CLS too). Imports encoder and base."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.models.encoder.form import BlockForm, Given
from tokensieve.models.families.base import rotated, table_rows
from tokensieve.models.families.transformers import PLAIN_FORMS, TransformersFamily
from tokensieve.models.verify import random_like

__all__ = ["Dinov3Family", "MlcdFamily"]


def _patches(block: Any, x: Tensor, table: Any, origin: Tensor | None, prefix: int) -> Tensor:
    cos, sin = (table_rows(t, origin) for t in table)
    return rotated(x, cos, sin, True, prefix)


def _all_tokens(block: Any, x: Tensor, table: Any, origin: Tensor | None, prefix: int) -> Tensor:
    rows = None
    if origin is not None:  # the prefix has the first rows of the table
        lead = torch.arange(prefix, device=origin.device).expand(origin.shape[0], -1)
        rows = torch.cat([lead, origin + prefix], dim=1)
    cos, sin = (table_rows(t, rows) for t in table)
    return rotated(x.float(), cos.float(), sin.float(), True, 0)


class Dinov3Family(TransformersFamily):
    name = "a transformers DINOv3 ViT"
    examples: tuple[str, ...] = ("transformers.DINOv3ViTModel",)
    needs: tuple[str, ...] = ("embeddings.patch_embeddings", "rope_embeddings")
    blocks_at = "model.layer | layer"
    forms: tuple[BlockForm, ...] = tuple(replace(f, rotary="position_embeddings", rotate=_patches) for f in PLAIN_FORMS)

    def turns(self, tower: nn.Module) -> bool:
        return True

    def sample(self, tower: nn.Module, block: nn.Module, patches: int) -> Given:
        form = self.form(block)
        attn = form.attention(block)
        table = random_like(block, 2, patches + self._turned_prefix(tower), form.width(block) // form.head_count(attn))
        return {"position_embeddings": (table[0], table[1])}

    def _turned_prefix(self, tower: nn.Module) -> int:
        return 0


class MlcdFamily(Dinov3Family):
    name = "a transformers MLCD vision model"
    examples = ("transformers.MLCDVisionModel",)
    needs = ("embeddings.patch_embedding", "vision_rotary_embedding", "class_pos_emb")
    blocks_at = "encoder.layers"
    forms = tuple(replace(f, rotary="position_embeddings", rotate=_all_tokens) for f in PLAIN_FORMS)

    def _turned_prefix(self, tower: nn.Module) -> int:
        return self.prefix(tower)
