"""timm's blocks whose MLP runs beside attention, or that have several of both. Imports encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.models.encoder.form import BlockForm, Projected, linear_macs

__all__ = ["PARALLEL"]


class _ParallelScaling(BlockForm):
    """`ParallelScalingBlock`: one projection to the MLP's hidden units and q, k, v; one sum. The cut comes after it."""

    def project(self, block: Any, x: Tensor) -> Projected:
        hidden, *parts = block.in_proj(block.in_norm(x)).split(block.in_split, dim=-1)
        q, k, v = (y.unflatten(-1, (block.num_heads, -1)).transpose(1, 2) for y in parts)
        return Projected(block.q_norm(q), block.k_norm(k), v, hidden)

    def attended(self, block: Any, x: Tensor, out: Tensor, rest: Tensor | None = None) -> Tensor:
        assert rest is not None
        y = block.mlp_drop(block.mlp_act(rest if block.mlp_bias is None else rest + block.mlp_bias))
        out = out.transpose(1, 2).flatten(2)
        if block.out_proj is not None:
            y = block.out_proj(torch.cat([out, y], dim=-1))
        else:
            y = block.attn_out_proj(out) + block.mlp_out_proj(y)
        return cast(Tensor, x + block.drop_path(block.ls(y)))

    def shape(self, block: nn.Module) -> BlockShape:
        b: Any = block
        return BlockShape(linear_macs(block), b.num_heads * b.head_dim, 0)


class _ParallelThings(BlockForm):
    """`ParallelThingsBlock`: the heads of several attentions side by side, then several MLPs."""

    def resolve(self, block: nn.Module) -> BlockForm | None:
        if type(block).__name__ not in self.only:
            return None
        return replace(self, arguments=("attn_mask", "is_causal"))

    def attention(self, block: Any) -> Any:
        return block.attns[0].attn

    def project(self, block: Any, x: Tensor) -> Projected:
        found = []
        for part in block.attns:
            q, k, v = (
                part.attn.qkv(part.norm(x)).unflatten(-1, (3 * part.attn.num_heads, -1)).transpose(1, 2).chunk(3, 1)
            )
            found.append((part.attn.q_norm(q), part.attn.k_norm(k), v))
        return Projected(*(torch.cat(list(parts), dim=1) for parts in zip(*found, strict=True)))

    def attended(self, block: Any, x: Tensor, out: Tensor, rest: Tensor | None = None) -> Tensor:
        total = x
        for part, heads in zip(block.attns, out.chunk(len(block.attns), dim=1), strict=True):
            y = part.attn.norm(heads.transpose(1, 2).flatten(2))
            total = total + part.drop_path(part.ls(part.attn.proj_drop(part.attn.proj(y))))
        return total

    def finish(self, block: Any, x: Tensor) -> Tensor:
        return x + sum(ffn(x) for ffn in block.ffns)

    def shape(self, block: nn.Module) -> BlockShape:
        b: Any = block
        attns, attn = b.attns, b.attns[0].attn
        return BlockShape(linear_macs(attns), len(attns) * attn.num_heads * attn.head_dim, linear_macs(b.ffns))


PARALLEL: tuple[BlockForm, ...] = (
    _ParallelScaling(
        only=("ParallelScalingBlock",), attn="", before=(), qkv=("in_proj",), scale="scale", mlp=("mlp_act",),
        out=("out_proj | attn_out_proj",), parallel=True,
    ),
    _ParallelThings(only=("ParallelThingsBlock",), scale="scale"),
)  # fmt: skip
