"""timm's VisionTransformer (DeiT, DINOv2, SigLIP, registers, qk-norm) and EVA-02, alone or as open_clip's tower.

Blocks are known by the names of their parts; blocks with the same names in another order (post-norm, parallel) are
refused. Imports engine and family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.block import SievedBlock
from tokensieve.models.encoder.run import State
from tokensieve.models.families.base import Family, attention_pool_macs, has, linear_macs

__all__ = ["TimmBlock", "TimmFamily"]

_KNOWN_BLOCKS = ("Block", "EvaBlock")


class TimmBlock(SievedBlock):
    """`Block` and `EvaBlock` with a cut. Rotary tables are gathered along with the patches."""

    norm1: Any
    norm2: Any
    attn: Any
    mlp: Any
    drop_path1: Any
    drop_path2: Any
    training: bool

    def sieve_qkv(self, x: Tensor, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        rope = kwargs.pop("rope", None)
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            raise UnsupportedModelError("a reduced encoder takes no attention mask and no causal flag")
        attn = self.attn
        x = self.norm1(x)
        if getattr(attn, "qkv", None) is not None:
            if getattr(attn, "q_bias", None) is None:
                qkv = attn.qkv(x)  # called, not read: it may be a layer of the user's own
            else:
                qkv = F.linear(x, attn.qkv.weight, torch.cat((attn.q_bias, attn.k_bias, attn.v_bias)))
            q, k, v = qkv.unflatten(-1, (3 * attn.num_heads, -1)).transpose(1, 2).chunk(3, dim=1)
        else:
            parts = (attn.q_proj, attn.k_proj, attn.v_proj)
            q, k, v = (part(x).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in parts)
        q, k = attn.q_norm(q), attn.k_norm(k)
        if rope is not None:
            q, k = self._rotate(q, rope, state).type_as(v), self._rotate(k, rope, state).type_as(v)
        return q, k, v, float(attn.scale)

    def _rotate(self, x: Tensor, rope: Tensor, state: State) -> Tensor:
        """Rotate the patches of (B, H, L, d) by the rows of `rope` (N, 2d) that belong to them."""
        if rope.dim() != 2:
            raise UnsupportedModelError("rotary tables that differ by head or by image are not supported")
        if state.made:
            raise UnsupportedModelError("a made token has no place in a rotary tower: use evit with fuse=False")
        if state.origin is not None:
            rope = rope[state.origin].unsqueeze(1)
        prefix = self.attn.num_prefix_tokens
        sin, cos = rope.chunk(2, dim=-1)
        part = x[:, :, prefix:]
        if getattr(self.attn, "rotate_half", False):
            a, b = part.chunk(2, dim=-1)
            turned = torch.cat([-b, a], dim=-1)
        else:
            turned = torch.stack([-part[..., 1::2], part[..., ::2]], dim=-1).flatten(-2)
        return torch.cat([x[:, :, :prefix], part * cos + turned * sin], dim=2)

    def sieve_attended(self, x: Tensor, out: Tensor) -> Tensor:
        attn = self.attn
        out = attn.norm(out)
        if getattr(attn, "gate", None) is not None:
            out = out * attn.gate(self.norm1(x)).sigmoid()
        out = attn.proj_drop(attn.proj(out))
        return cast(Tensor, x + self.drop_path1(_scaled(out, self._scale("ls1", "gamma_1"))))

    def sieve_mlp(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.drop_path2(_scaled(self.mlp(self.norm2(x)), self._scale("ls2", "gamma_2"))))

    def _scale(self, module: str, parameter: str) -> nn.Module | Tensor | None:
        """LayerScale: a module in `Block`, a bare parameter or nothing in `EvaBlock`."""
        found: nn.Module | Tensor | None = getattr(self, module, None)
        return getattr(self, parameter, None) if found is None else found

    def sieve_dropout(self) -> float:
        return float(self.attn.attn_drop.p) if self.training else 0.0


def _scaled(x: Tensor, scale: nn.Module | Tensor | None) -> Tensor:
    return x if scale is None else x * scale if isinstance(scale, Tensor) else cast(Tensor, scale(x))


class TimmFamily(Family):
    name = "a timm ViT"
    block_mixin = TimmBlock

    def matches(self, module: nn.Module) -> bool:
        of_timm = any(cls.__module__.startswith("timm.") for cls in type(module).__mro__)  # or derived from one
        return of_timm and has(module, "patch_embed", "blocks", "num_prefix_tokens")

    def check(self, tower: nn.Module) -> None:
        for block in cast(Any, tower).blocks:
            if type(block).__name__ not in _KNOWN_BLOCKS or not has(block, "attn.proj", "attn.q_norm", "attn.norm"):
                raise UnsupportedModelError(
                    f"timm block {type(block).__name__} is not supported: its parts run in another order than in "
                    f"{' or '.join(_KNOWN_BLOCKS)}"
                )

    def blocks(self, tower: nn.Module) -> nn.Module:
        return cast(nn.Module, tower.blocks)

    def prefix(self, tower: nn.Module) -> int:
        return int(cast(Any, tower).num_prefix_tokens)

    def has_cls(self, tower: nn.Module) -> bool:
        return getattr(tower, "cls_token", None) is not None

    def turns(self, tower: nn.Module) -> bool:
        return getattr(tower, "rope", None) is not None

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        return cast(tuple[int, int], tuple(cast(Any, tower).patch_embed.grid_size))

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return cast(Any, tower).global_pool not in ("token", "")

    def shape(self, block: nn.Module) -> BlockShape:
        b = cast(Any, block)
        return BlockShape(linear_macs(b.attn), b.attn.num_heads * b.attn.head_dim, linear_macs(b.mlp))

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        t = cast(Any, tower)
        return int(patches * t.patch_embed.proj.weight.numel() + linear_macs(t.head))

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
