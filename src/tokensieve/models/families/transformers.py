"""transformers' vision models of plain pre-norm blocks, alone or inside a larger model: one description for all names.

Imports encoder and base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from tokensieve.models.encoder.form import BlockForm
from tokensieve.models.families.base import Family, attention_pool_macs, has, matrix_entries

__all__ = ["ClipFamily", "Dinov2Family"]


class ClipFamily(Family):
    name = "a transformers CLIP or SigLIP vision model"
    example = "transformers.CLIPVisionModel(config)"
    needs = ("embeddings.patch_embedding", "post_layernorm")
    blocks_at = "encoder.layers"
    forms = (
        BlockForm(
            attn="self_attn", before=("layer_norm1",), qkv=("q_proj", "k_proj", "v_proj"), norms=(), scale="scale",
            out=("out_proj",), mlp=("layer_norm2", "mlp"), dropout="dropout",
        ),
    )  # fmt: skip

    def prefix(self, tower: nn.Module) -> int:
        return 1 if has(tower, "embeddings.class_embedding") else 0

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        side = cast(Any, tower).embeddings.image_size // cast(Any, tower).embeddings.patch_size
        return side, side

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return has(tower, "head") or type(model).__name__.endswith("ForImageClassification")

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        return patches * matrix_entries(tower, "embeddings.patch_embedding.weight")

    def pool_macs(self, tower: nn.Module, tokens: int) -> int:
        head = getattr(tower, "head", None)
        return 0 if head is None else attention_pool_macs(head, None, head.attention.embed_dim, 1, tokens)

    def projector(self, model: nn.Module, tower: nn.Module) -> Callable[[Tensor], Tensor] | None:
        head = getattr(model, "visual_projection", None)
        return _Projector(tower, head) if head is not None else None


class _Projector:
    """Patches through the last norm and the projection that CLS goes through."""

    def __init__(self, tower: nn.Module, head: nn.Module) -> None:
        self.tower, self.head = tower, head

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(cast(Any, self.tower).post_layernorm(x)))


class Dinov2Family(Family):
    name = "a transformers DINOv2 model"
    example = "transformers.Dinov2Model(config)"
    needs = ("embeddings.patch_embeddings", "embeddings.cls_token", "layernorm")
    blocks_at = "encoder.layer"
    forms = (
        BlockForm(
            attn="attention", qkv=("q_proj | attention.query", "k_proj | attention.key", "v_proj | attention.value"),
            norms=(), heads="num_attention_heads | attention.num_attention_heads", out=("o_proj | output.dense",),
            after=("layer_scale1", "drop_path"), mlp=("norm2", "mlp", "layer_scale2", "drop_path"),
            dropout="attention_dropout | attention.dropout_prob",
        ),
    )  # fmt: skip

    def prefix(self, tower: nn.Module) -> int:
        registers = getattr(cast(Any, tower).embeddings, "register_tokens", None)
        return 1 if registers is None else 1 + int(registers.shape[1])

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        config = cast(Any, tower).config
        side = config.image_size // config.patch_size
        return side, side

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return type(model).__name__.endswith("ForImageClassification")

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        return patches * matrix_entries(tower, "embeddings.patch_embeddings.projection.weight")
