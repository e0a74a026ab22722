"""open_clip's own VisionTransformer (and CoCa's): `conv1`, `class_embedding`, `transformer.resblocks`.

Recognised by the names `in_proj_weight`, `out_proj`, not by class: version 3 has nn.MultiheadAttention there, later
ones an attention class of their own. Imports encoder and base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from tokensieve.models.encoder.form import BlockForm
from tokensieve.models.families.base import Family, attention_pool_macs, matrix_entries

__all__ = ["OpenClipFamily"]


class _HeadScaled(BlockForm):
    """Attention with a factor for each head, before the inner norm."""

    def attended(self, block: Any, x: Tensor, out: Tensor, rest: Tensor | None = None) -> Tensor:
        scale = getattr(block.attn, "head_scale", None)
        return super().attended(block, x, out if scale is None else out * scale)


class OpenClipFamily(Family):
    name = "an open_clip ViT"
    examples = ("open_clip.transformer.VisionTransformer", "open_clip.CLIP", "open_clip.CoCa")
    needs = ("conv1", "class_embedding", "positional_embedding")
    blocks_at = "transformer.resblocks"
    forms = (
        _HeadScaled(
            before=("ln_1",), qkv=("in_proj_weight",), norms=("ln_q", "ln_k"), inner=("ln_inner",),
            out=("out_proj", "out_drop"), after=("ln_attn", "ls_1"), mlp=("ln_2", "mlp", "ls_2"),
            dropout="attn_drop | dropout",
        ),
    )  # fmt: skip

    def prefix(self, tower: nn.Module) -> int:
        return 1

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        return cast(tuple[int, int], tuple(cast(Any, tower).grid_size))

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        t = cast(Any, tower)
        return t.attn_pool is not None or t.pool_type == "avg"

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        return patches * matrix_entries(tower, "conv1.weight") + matrix_entries(tower, "proj")

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
        return super().feature_module(model, tower) if cast(Any, tower).attn_pool is not None else tower

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
