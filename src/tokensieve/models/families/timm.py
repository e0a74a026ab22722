"""timm's VisionTransformer (DeiT, DINOv2, SigLIP, registers, qk-norm) and EVA-02, alone or as open_clip's tower.

Imports encoder and base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.form import BlockForm, Given
from tokensieve.models.encoder.padding import MaskedPool
from tokensieve.models.families.base import (
    Family,
    attention_pool_macs,
    has,
    linear_macs,
    matrix_entries,
    rotated,
    table_rows,
)  # fmt: skip
from tokensieve.models.families.timm_parallel import PARALLEL
from tokensieve.models.verify import random_like

__all__ = ["NaflexFamily", "TimmFamily"]


def _rotate(block: Any, x: Tensor, rope: Tensor, origin: Tensor | None, prefix: int) -> Tensor:
    sin, cos = table_rows(rope, origin).chunk(2, dim=-1)
    return rotated(x, cos, sin, getattr(block.attn, "rotate_half", False), prefix)


def _relative(block: Any, given: Given) -> Tensor | None:
    """(1, H, L, L) bias by relative position: the block's own table, one that all blocks share, or both."""
    attn, own = block.attn, None
    if getattr(attn, "relative_position_bias_table", None) is not None:
        own = attn._get_rel_pos_bias()
    elif getattr(attn, "rel_pos", None) is not None:
        own = attn.rel_pos.get_bias()
    shared = next((given[name] for name in _SHARED if name in given), None)
    both = own if shared is None else shared if own is None else own + shared
    return cast("Tensor | None", both if both is None or both.dim() == 4 else both.unsqueeze(0))


_SHARED = ("shared_rel_pos_bias", "shared_rel_pos")
_COMMON: dict[str, Any] = {
    "norms": ("q_norm", "k_norm"), "scale": "scale", "inner": ("norm",), "gate": "gate", "out": ("proj", "proj_drop"),
    "mask": "attn_mask", "rotary": "rope", "rotate": _rotate,
    "bias": _relative, "reads": _SHARED,
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
    "only": ("ResPostBlock", "EvaBlockPostNorm", "ResPostRelPosBlock"), "before": (), "after": ("norm1", "drop_path1"),
    "mlp": ("mlp", "norm2", "drop_path2"),
}  # fmt: skip


_MERGING = ("deepseek_vit", "gemma4_vit", "qwen3_vit")  # towers of vision-language models, alone


class TimmFamily(Family):
    name = "a timm ViT"
    examples: tuple[str, ...] = (
        "timm.models.VisionTransformer",
        "timm.models.Eva",
        "timm.models.Beit",
        "open_clip.TimmModel",
    )
    library = "timm"
    needs: tuple[str, ...] = ("patch_embed", "num_prefix_tokens")
    forms: tuple[BlockForm, ...] = (
        *PARALLEL,
        *(BlockForm(**_COMMON, **order, **qkv) for order in (_POST, _PRE) for qkv in (_FUSED, _APART)),
    )

    def check(self, tower: nn.Module) -> None:
        name = type(tower).__module__.rpartition(".")[2]
        if name in _MERGING:
            raise UnsupportedModelError(
                f"{type(tower).__name__}: what follows its blocks merges neighbouring patches, so it needs all of them"
            )
        super().check(tower)

    def prefix(self, tower: nn.Module) -> int:
        return int(cast(Any, tower).num_prefix_tokens)

    def has_cls(self, tower: nn.Module) -> bool:
        return getattr(tower, "cls_token", None) is not None

    def turns(self, tower: nn.Module) -> bool:
        return getattr(tower, "rope", None) is not None

    def sample(self, tower: nn.Module, block: nn.Module, patches: int) -> Given:
        if not self.turns(tower):
            return {}
        return {"rope": random_like(block, patches, 2 * cast(Any, block).attn.head_dim, seed=2)}

    def sample_patches(self, tower: nn.Module) -> int:
        attn = getattr(cast(Any, tower).blocks[0], "attn", None)
        bias = has(attn, "relative_position_bias_table | rel_pos") or has(tower, "rel_pos_bias | shared_rel_pos")
        down, across = self.grid(tower)
        return down * across if bias else 7

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        return cast(tuple[int, int], tuple(cast(Any, tower).patch_embed.grid_size))

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return cast(Any, tower).global_pool not in ("token", "")

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        t = cast(Any, tower)
        return patches * matrix_entries(t, "patch_embed.proj.weight") + linear_macs(getattr(t, "head", nn.Identity()))

    def pool_macs(self, tower: nn.Module, tokens: int) -> int:
        pool = getattr(tower, "attn_pool", None)
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


class NaflexFamily(TimmFamily):
    """timm's ViT for images of any shape: padded batches carry a mask, rotary tables differ by image."""

    name = "a timm NaFlexViT"
    examples = ("timm.models.NaFlexVit",)
    needs = ("embeds", "num_prefix_tokens")

    def has_cls(self, tower: nn.Module) -> bool:
        return has(tower, "embeds.cls_token")

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        embeds = cast(Any, tower).embeds
        if embeds.pos_embed_grid_size is not None:
            return cast(tuple[int, int], tuple(embeds.pos_embed_grid_size))
        (height, width), (down, across) = embeds.default_img_size, embeds.patch_size
        return int(height) // int(down), int(width) // int(across)

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        return patches * matrix_entries(tower, "embeds.proj.weight") + linear_macs(cast(Any, tower).head)

    def masked_pools(self, tower: nn.Module) -> list[tuple[nn.Module, type]]:
        return [(tower, MaskedPool)]


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
