"""transformers' CLIP, SigLIP and DINOv2 (with and without registers) vision models, alone or inside a larger model.

Imports engine and family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.block import SievedBlock
from tokensieve.models.encoder.run import State
from tokensieve.models.families.base import Family, attention_pool_macs, has, linear_macs

__all__ = ["ClipBlock", "ClipFamily", "Dinov2Block", "Dinov2Family"]


def _refuse_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    masks = (*args[:1], kwargs.get("attention_mask"), kwargs.get("head_mask"))
    if any(mask is not None for mask in masks) and not torch.compiler.is_exporting():  # there DINOv2 makes one of ones
        raise UnsupportedModelError("a reduced encoder takes no attention mask")
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError("fused attention has no attention maps: output_attentions is not supported")


def _heads(part: nn.Module, x: Tensor, heads: int) -> Tensor:
    out = part(x)
    return cast(Tensor, out.view(*out.shape[:2], heads, -1).transpose(1, 2))


class ClipBlock(SievedBlock):
    """`CLIPEncoderLayer` and `SiglipEncoderLayer` with a cut."""

    layer_norm1: Any
    layer_norm2: Any
    self_attn: Any
    mlp: Any
    training: bool

    def sieve_qkv(self, x: Tensor, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        _refuse_mask(args, kwargs)
        attn = self.self_attn
        x = self.layer_norm1(x)
        q, k, v = (_heads(part, x, attn.num_heads) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
        return q, k, v, float(attn.scale)

    def sieve_attended(self, x: Tensor, out: Tensor) -> Tensor:
        return cast(Tensor, x + self.self_attn.out_proj(out))

    def sieve_mlp(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.mlp(self.layer_norm2(x)))

    def sieve_dropout(self) -> float:
        return float(self.self_attn.dropout) if self.training else 0.0


class ClipFamily(Family):
    name = "a transformers CLIP or SigLIP vision model"
    block_mixin = ClipBlock

    def matches(self, module: nn.Module) -> bool:
        return has(module, "embeddings.patch_embedding", "encoder.layers", "post_layernorm")

    def check(self, tower: nn.Module) -> None:
        for block in cast(Any, tower).encoder.layers:
            if not has(block, "self_attn.q_proj", "self_attn.out_proj", "layer_norm1", "layer_norm2", "mlp"):
                raise UnsupportedModelError(f"{type(block).__name__} has parts that no adapter knows")

    def blocks(self, tower: nn.Module) -> nn.Module:
        return cast(nn.Module, cast(Any, tower).encoder.layers)

    def prefix(self, tower: nn.Module) -> int:
        return 1 if has(tower, "embeddings.class_embedding") else 0

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        side = cast(Any, tower).embeddings.image_size // cast(Any, tower).embeddings.patch_size
        return side, side

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return has(tower, "head") or type(model).__name__.endswith("ForImageClassification")

    def shape(self, block: nn.Module) -> BlockShape:
        b = cast(Any, block)
        return BlockShape(linear_macs(b.self_attn), b.self_attn.num_heads * b.self_attn.head_dim, linear_macs(b.mlp))

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        return int(patches * cast(Any, tower).embeddings.patch_embedding.weight.numel())

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


def _dinov2_parts(attn: Any) -> tuple[Any, Any, Any, Any, int]:
    """q, k, v and output projections and the head count, under the names of either version."""
    if has(attn, "q_proj"):
        return attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, attn.num_attention_heads
    inner = attn.attention
    return inner.query, inner.key, inner.value, attn.output.dense, inner.num_attention_heads


class Dinov2Block(SievedBlock):
    """`Dinov2Layer` and `Dinov2WithRegistersLayer` with a cut; both namings of the attention's parts are known."""

    norm1: Any
    norm2: Any
    attention: Any
    mlp: Any
    layer_scale1: Any
    layer_scale2: Any
    drop_path: Any
    training: bool

    def sieve_qkv(self, x: Tensor, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        _refuse_mask(args, kwargs)
        *parts, _, heads = _dinov2_parts(self.attention)
        x = self.norm1(x)
        q, k, v = (_heads(part, x, heads) for part in parts)
        return q, k, v, float(q.shape[-1]) ** -0.5

    def sieve_attended(self, x: Tensor, out: Tensor) -> Tensor:
        return cast(Tensor, x + self.drop_path(self.layer_scale1(_dinov2_parts(self.attention)[3](out))))

    def sieve_mlp(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.drop_path(self.layer_scale2(self.mlp(self.norm2(x)))))

    def sieve_dropout(self) -> float:
        inner = self.attention if has(self.attention, "q_proj") else self.attention.attention
        rate = getattr(inner, "attention_dropout", getattr(inner, "dropout_prob", 0.0))
        return float(rate) if self.training else 0.0


class Dinov2Family(Family):
    name = "a transformers DINOv2 model"
    block_mixin = Dinov2Block

    def matches(self, module: nn.Module) -> bool:
        return has(module, "embeddings.patch_embeddings", "embeddings.cls_token", "encoder.layer", "layernorm")

    def check(self, tower: nn.Module) -> None:
        for block in cast(Any, tower).encoder.layer:
            known = has(block, "attention.q_proj", "attention.o_proj") or has(block, "attention.attention.query")
            if not known or not has(block, "norm1", "norm2", "mlp", "layer_scale1", "layer_scale2"):
                raise UnsupportedModelError(f"{type(block).__name__} has parts that no adapter knows")

    def blocks(self, tower: nn.Module) -> nn.Module:
        return cast(nn.Module, cast(Any, tower).encoder.layer)

    def prefix(self, tower: nn.Module) -> int:
        registers = getattr(cast(Any, tower).embeddings, "register_tokens", None)
        return 1 if registers is None else 1 + int(registers.shape[1])

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        config = cast(Any, tower).config
        side = config.image_size // config.patch_size
        return side, side

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return type(model).__name__.endswith("ForImageClassification")

    def shape(self, block: nn.Module) -> BlockShape:
        b = cast(Any, block)
        q = _dinov2_parts(b.attention)[0]
        return BlockShape(linear_macs(b.attention), int(q.out_features), linear_macs(b.mlp))

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        return int(patches * cast(Any, tower).embeddings.patch_embeddings.projection.weight.numel())
