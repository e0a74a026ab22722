"""transformers' vision models of plain pre-norm blocks, alone or inside a larger model: one description for all names.

Imports encoder and base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.form import BlockForm
from tokensieve.models.families.base import Family, attention_pool_macs, first_of, has, linear_macs

__all__ = ["PLAIN_FORMS", "ClipFamily", "Dinov2Family", "TransformersFamily"]

_APART = BlockForm(
    attn="attention | self_attn",
    before=("layernorm_before | layer_norm1 | norm1 | rms_norm1",),
    qkv=("q_proj | query | attention.query", "k_proj | key | attention.key", "v_proj | value | attention.value"),
    heads="num_attention_heads | num_heads | attention.num_attention_heads",
    scale="scaling | scale | attention.scaling",
    out=("o_proj | out_proj | projection_layer | proj | output.dense", "projection_dropout | output.dropout"),
    after=("dropout", "layer_scale1 | lambda_1", "drop_path"),
    mlp=(
        "layernorm_after | layer_norm2 | norm2 | rms_norm2", "mlp | ffn | intermediate", "output.dense",
        "output.dropout", "dropout", "layer_scale2 | lambda_2", "drop_path",
    ),
    dropout="attention_dropout | dropout_prob | attn_dropout | dropout | attention.dropout_prob | attention.dropout",
)  # fmt: skip
PLAIN_FORMS = (
    replace(_APART, only=("FlavaLayer",), tuple_out=1),
    _APART,
    replace(_APART, qkv=("qkv",), out=("projection | proj", "dropout")),
)
_PATCHES = "embeddings.patch_embeddings | embeddings.patch_embedding | embeddings.patch_embed"
_CLS = "embeddings.cls_token | embeddings.class_embedding | embeddings.class_token"


def pair(size: Any) -> tuple[int, int]:
    """A size of a configuration, one number or two, as rows and columns."""
    return (int(size[0]), int(size[1])) if isinstance(size, tuple | list) else (int(size), int(size))


class TransformersFamily(Family):
    """Whatever has transformers' parts: `embeddings` with patches, a list of layers, a configuration with sizes."""

    name = "a transformers vision model"
    examples: tuple[str, ...] = (
        "transformers.ViTModel", "transformers.DeiTModel", "transformers.ViTMAEModel", "transformers.ViTMSNModel",
        "transformers.IJepaModel", "transformers.BlipVisionModel", "transformers.Blip2VisionModel",
        "transformers.Aimv2VisionModel", "transformers.InternVLVisionModel", "transformers.FlavaImageModel",
        "transformers.PixioModel",
    )  # fmt: skip
    needs: tuple[str, ...] = (_PATCHES,)
    blocks_at = "encoder.layers | encoder.layer | layers"
    forms: tuple[BlockForm, ...] = PLAIN_FORMS

    def matches(self, module: nn.Module) -> bool:
        # not the model with a head on it, whose forward may add tokens of its own
        return type(module).__name__.endswith(("Model", "Transformer", "Encoder", "Backbone")) and super().matches(
            module
        )

    def check(self, tower: nn.Module) -> None:
        if has(tower, "embeddings.detection_tokens | embeddings.text_embeddings | embeddings.word_embeddings"):
            raise UnsupportedModelError(
                f"{type(tower).__name__}: its sequence is not prefix and patches alone (detection tokens or text too)"
            )
        super().check(tower)

    def prefix(self, tower: nn.Module) -> int:
        tokens = [first_of(tower, _CLS), first_of(tower, "embeddings.distillation_token")]
        tokens += [first_of(tower, "embeddings.register_tokens")]
        return sum(1 if t.dim() == 1 else int(t.shape[-2]) for t in tokens if isinstance(t, Tensor))

    def has_cls(self, tower: nn.Module) -> bool:
        return has(tower, _CLS)

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        config = first_of(tower, "config | embeddings.config | embeddings")
        if not has(config, "image_size", "patch_size"):
            raise UnsupportedModelError(f"{type(tower).__name__}: its configuration says no image_size or patch_size")
        (height, width), (down, across) = pair(config.image_size), pair(config.patch_size)
        return height // down, width // across

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        # without a CLS token somebody pools the patches, if not the model then its user
        return has(tower, "head") or not self.has_cls(tower) or type(model).__name__.endswith("Classification")

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        weights = first_of(tower, _PATCHES).parameters()
        return patches * sum(p.numel() for p in weights if p.dim() > 1)

    def pool_macs(self, tower: nn.Module, tokens: int) -> int:
        head = getattr(tower, "head", None)
        if head is None:
            return 0
        if has(head, "attention"):
            return attention_pool_macs(head, None, head.attention.embed_dim, 1, tokens)
        met = linear_macs(head.k_proj) + linear_macs(head.v_proj)
        return linear_macs(head) - met + tokens * (met + 2 * head.k_proj.out_features)


class ClipFamily(TransformersFamily):
    name = "a transformers CLIP or SigLIP vision model"
    examples = (
        "transformers.CLIPVisionModel",
        "transformers.CLIPModel",
        "transformers.SiglipVisionModel",
    )
    needs = ("embeddings.patch_embedding", "post_layernorm", "encoder.layers")

    def projector(self, model: nn.Module, tower: nn.Module) -> Callable[[Tensor], Tensor] | None:
        head = getattr(model, "visual_projection", None)
        return _Projector(tower, head) if head is not None else None


class _Projector:
    """Patches through the last norm and the projection that CLS goes through."""

    def __init__(self, tower: nn.Module, head: nn.Module) -> None:
        self.tower, self.head = tower, head

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(cast(Any, self.tower).post_layernorm(x)))


class Dinov2Family(TransformersFamily):
    name = "a transformers DINOv2 model"
    examples = ("transformers.Dinov2Model", "transformers.Dinov2WithRegistersModel")
    needs = ("embeddings.patch_embeddings", "embeddings.cls_token", "layernorm", "encoder.layer")
