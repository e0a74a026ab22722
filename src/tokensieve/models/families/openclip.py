"""open_clip's own VisionTransformer (and CoCa's): `conv1`, `class_embedding`, `transformer.resblocks`.

Recognised by the names `in_proj_weight`, `out_proj`, not by class: version 3 has nn.MultiheadAttention there, later
ones an attention class of their own. Imports engine and family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.block import SievedBlock
from tokensieve.models.encoder.run import State
from tokensieve.models.families.base import Family, attention_pool_macs, has, linear_macs

__all__ = ["OpenClipBlock", "OpenClipFamily"]


class OpenClipBlock(SievedBlock):
    """`ResidualAttentionBlock` and `CustomResidualAttentionBlock` with a cut."""

    ln_1: Any
    ln_2: Any
    attn: Any
    mlp: Any
    ls_1: Any
    ls_2: Any
    training: bool

    def forward(self, x: Tensor, *args: Any, run: Any = None, **kwargs: Any) -> Tensor:
        if getattr(self.attn, "batch_first", True):
            return super().forward(x, *args, run=run, **kwargs)
        if run is not None and run.attachment.mode != "prune":
            raise UnsupportedModelError('mode="analyse" and "fuse" need a tower that keeps the batch first')
        return super().forward(x.transpose(0, 1), *args, run=run, **kwargs).transpose(0, 1)

    def sieve_qkv(self, x: Tensor, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        if kwargs.get("attn_mask") is not None or any(a is not None for a in args):
            raise UnsupportedModelError("a reduced encoder takes no attention mask")
        attn = self.attn
        qkv = F.linear(self.ln_1(x), attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3 * attn.num_heads, -1)).transpose(1, 2).chunk(3, dim=1)
        if hasattr(attn, "ln_q"):
            q, k = attn.ln_q(q), attn.ln_k(k)
        return q, k, v, float(q.shape[-1]) ** -0.5

    def sieve_attended(self, x: Tensor, out: Tensor) -> Tensor:
        attn = self.attn
        if hasattr(attn, "ln_inner"):
            if attn.head_scale is not None:
                scale = attn.head_scale.flatten().repeat_interleave(out.shape[-1] // attn.num_heads)
                out = out * scale
            out = attn.out_drop(attn.out_proj(attn.ln_inner(out)))
        else:
            out = attn.out_proj(out)
        if hasattr(self, "ln_attn"):
            out = self.ln_attn(out)
        return x + self.ls_1(out)

    def sieve_mlp(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.ls_2(self.mlp(self.ln_2(x))))

    def sieve_dropout(self) -> float:
        if not self.training:
            return 0.0
        return float(self.attn.attn_drop.p if hasattr(self.attn, "attn_drop") else self.attn.dropout)


class OpenClipFamily(Family):
    name = "an open_clip ViT"
    block_mixin = OpenClipBlock

    def matches(self, module: nn.Module) -> bool:
        return has(module, "conv1", "class_embedding", "positional_embedding", "transformer.resblocks")

    def check(self, tower: nn.Module) -> None:
        for block in cast(Any, tower).transformer.resblocks:
            if not has(block, "attn.in_proj_weight", "attn.out_proj", "ln_1", "ln_2", "mlp", "ls_1", "ls_2"):
                raise UnsupportedModelError(f"open_clip block {type(block).__name__} has parts that no adapter knows")
            if has(block, "ln_1_kv") or getattr(block.attn, "logit_scale", None) is not None:
                raise UnsupportedModelError("open_clip blocks with cross-attention or scaled cosine are not supported")

    def blocks(self, tower: nn.Module) -> nn.Module:
        return cast(nn.Module, cast(Any, tower).transformer.resblocks)

    def prefix(self, tower: nn.Module) -> int:
        return 1

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        return cast(tuple[int, int], tuple(cast(Any, tower).grid_size))

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        t = cast(Any, tower)
        return t.attn_pool is not None or t.pool_type == "avg"

    def shape(self, block: nn.Module) -> BlockShape:
        b = cast(Any, block)
        width = b.attn.in_proj_weight.shape[0] // 3
        return BlockShape(linear_macs(b.attn), width, linear_macs(b.mlp))

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        t = cast(Any, tower)
        return int(patches * t.conv1.weight.numel() + (t.proj.numel() if t.proj is not None else 0))

    def pool_macs(self, tower: nn.Module, tokens: int) -> int:
        t = cast(Any, tower)
        if t.attn_pool is None:
            return 0
        queries = t.attn_pool.query.shape[0]
        total = attention_pool_macs(t.attn_pool, None, t.attn_pool.attn.embed_dim, queries, tokens)
        second = t.attn_pool_contrastive
        if second is not None:
            seen = queries if t.attn_pool_type == "cascade" else tokens
            total += attention_pool_macs(second, None, second.attn.embed_dim, 1, seen)
        return total

    def projector(self, model: nn.Module, tower: nn.Module) -> Callable[[Tensor], Tensor] | None:
        return None if cast(Any, tower).attn_pool is not None else _Projector(tower)

    def feature_module(self, model: nn.Module, tower: nn.Module) -> nn.Module:
        if cast(Any, tower).attn_pool is not None:
            return super().feature_module(model, tower)
        return tower

    def feature_projector(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        return _Projector(module)


class _Projector:
    """Patches through the tower's last norm and projection. A class, so that an attached model can be pickled."""

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower

    def __call__(self, x: Tensor) -> Tensor:
        tower = cast(Any, self.tower)
        x = tower.ln_post(x)
        return cast(Tensor, x if tower.proj is None else x @ tower.proj)
