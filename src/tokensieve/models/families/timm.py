"""timm's VisionTransformer (DeiT, DINOv2, SigLIP, registers, qk-norm) and EVA-02, alone or as open_clip's tower.

Imports encoder and base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from tokensieve.models.encoder.form import BlockForm, Given
from tokensieve.models.families.base import (
    Family,
    attention_pool_macs,
    linear_macs,
    matrix_entries,
    rotated,
    table_rows,
)  # fmt: skip
from tokensieve.models.verify import random_like

__all__ = ["TimmFamily"]


def _rotate(block: Any, x: Tensor, rope: Tensor, origin: Tensor | None, prefix: int) -> Tensor:
    sin, cos = table_rows(rope, origin).chunk(2, dim=-1)
    return rotated(x, cos, sin, getattr(block.attn, "rotate_half", False), prefix)


_COMMON: dict[str, Any] = {
    "norms": ("q_norm", "k_norm"), "scale": "scale", "inner": ("norm",), "gate": "gate", "out": ("proj", "proj_drop"),
    "mask": "attn_mask", "rotary": "rope", "rotate": _rotate,
}  # fmt: skip
_PROJECTIONS: tuple[dict[str, Any], ...] = (
    {"qkv_bias": ("q_bias", "k_bias", "v_bias")},
    {"qkv": ("q_proj", "k_proj", "v_proj")},
)
_FUSED: dict[str, Any] = {"qkv_bias": ("q_bias", "k_bias", "v_bias")}
_APART: dict[str, Any] = {"qkv": ("q_proj", "k_proj", "v_proj")}
_PRE: dict[str, Any] = {
    "after": ("ls1 | gamma_1", "drop_path1"), "mlp": ("norm2", "mlp", "ls2 | gamma_2", "drop_path2"),
}  # fmt: skip
_POST: dict[str, Any] = {
    "only": ("ResPostBlock", "EvaBlockPostNorm"), "before": (), "after": ("norm1", "drop_path1"),
    "mlp": ("mlp", "norm2", "drop_path2"),
}  # fmt: skip


class TimmFamily(Family):
    name = "a timm ViT"
    example = 'timm.create_model("vit_base_patch16_224")'
    library = "timm"
    needs = ("patch_embed", "num_prefix_tokens")
    forms = tuple(BlockForm(**_COMMON, **order, **qkv) for order in (_POST, _PRE) for qkv in (_FUSED, _APART))

    def prefix(self, tower: nn.Module) -> int:
        return int(cast(Any, tower).num_prefix_tokens)

    def has_cls(self, tower: nn.Module) -> bool:
        return getattr(tower, "cls_token", None) is not None

    def turns(self, tower: nn.Module) -> bool:
        return getattr(tower, "rope", None) is not None

    def sample(self, tower: nn.Module, block: nn.Module, patches: int) -> Given:
        attn = cast(Any, block).attn
        return {"rope": random_like(block, patches, 2 * attn.head_dim, seed=2)} if self.turns(tower) else {}

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        return cast(tuple[int, int], tuple(cast(Any, tower).patch_embed.grid_size))

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return cast(Any, tower).global_pool not in ("token", "")

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        t = cast(Any, tower)
        return patches * matrix_entries(t, "patch_embed.proj.weight") + linear_macs(t.head)

    def pool_macs(self, tower: nn.Module, tokens: int) -> int:
        pool = cast(Any, tower).attn_pool
        if pool is None:
            return 0
        return attention_pool_macs(pool, pool.kv, pool.num_heads * pool.head_dim, pool.latent_len, tokens)

    def projector(self, model: nn.Module, tower: nn.Module) -> Callable[[Tensor], Tensor] | None:
        if getattr(tower, "attn_pool", None) is not None:
            return None
        return _Projector(tower, getattr(_owner(model, tower), "head", None))

    def feature_module(self, model: nn.Module, tower: nn.Module) -> nn.Module:
        owner = _owner(model, tower)
        if owner is None or getattr(tower, "attn_pool", None) is not None:
            return super().feature_module(model, tower)
        return owner

    def feature_projector(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        return _Projector(cast(Any, module).trunk, cast(Any, module).head)


def _owner(model: nn.Module, tower: nn.Module) -> nn.Module | None:
    """open_clip's wrapper around a timm trunk, if there is one."""
    for module in model.modules():
        if getattr(module, "trunk", None) is tower:
            return module
    return None


class _Projector:
    """Patches through the trunk's last norms and the heads, each as if it were the pooled token."""

    def __init__(self, tower: nn.Module, head: nn.Module | None) -> None:
        self.tower, self.head = tower, head

    def __call__(self, x: Tensor) -> Tensor:
        tower = cast(Any, self.tower)
        x = tower.head(tower.fc_norm(tower.norm(x)))
        return cast(Tensor, x if self.head is None else self.head(x))
