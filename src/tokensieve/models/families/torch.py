"""torch's own: torchvision's VisionTransformer, and ViTs built on nn.TransformerEncoder. Imports encoder and base."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from torch import nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.form import BlockForm
from tokensieve.models.families.base import Family, linear_macs, matrix_entries

__all__ = ["TorchEncoderFamily", "TorchvisionFamily"]

_MULTIHEAD = BlockForm(qkv=("in_proj_weight",), norms=(), out=("out_proj",), dropout="dropout")


class TorchvisionFamily(Family):
    name = "a torchvision ViT"
    examples = ("torchvision.models.VisionTransformer",)
    needs = ("conv_proj", "class_token", "encoder.pos_embedding")
    blocks_at = "encoder.layers"
    forms = (replace(_MULTIHEAD, attn="self_attention", before=("ln_1",), after=("dropout",), mlp=("ln_2", "mlp")),)

    def prefix(self, tower: nn.Module) -> int:
        return 1

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        side = cast(Any, tower).image_size // cast(Any, tower).patch_size
        return side, side

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        return patches * matrix_entries(tower, "conv_proj.weight") + linear_macs(cast(Any, tower).heads)


class TorchEncoderFamily(Family):
    """A module with an nn.TransformerEncoder in it, a parameter of positions, and perhaps one of a CLS token."""

    name = "a ViT on nn.TransformerEncoder"
    examples = ("torch.nn.TransformerEncoder",)
    _mlp = ("linear1", "activation", "dropout", "linear2", "dropout2")
    forms = (
        replace(_MULTIHEAD, attn="self_attn", after=("dropout1",), mlp=("norm2", *_mlp)),
        replace(_MULTIHEAD, attn="self_attn", before=(), after=("dropout1",), joined=("norm1",), mlp=_mlp,
                mlp_joined=("norm2",)),
    )  # fmt: skip

    def matches(self, module: nn.Module) -> bool:
        return any(isinstance(child, nn.TransformerEncoder) for child in module.children())

    def blocks(self, tower: nn.Module) -> nn.Module:
        return next(child for child in tower.children() if isinstance(child, nn.TransformerEncoder)).layers

    def form(self, block: nn.Module) -> BlockForm:
        return cast(BlockForm, self.forms[0 if cast(Any, block).norm_first else 1].resolve(block))

    def prefix(self, tower: nn.Module) -> int:
        return sum(p.shape[-2] for n, p in tower.named_parameters(recurse=False) if "cls" in n or "class" in n)

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        rows = [p.shape[-2] for n, p in tower.named_parameters() if "pos" in n and "." not in n.removesuffix(".weight")]
        if len(rows) != 1:
            raise UnsupportedModelError(
                f"{type(tower).__name__}: no single table of positions says how many patches there are; describe the "
                "model with a Family of your own (tokensieve.register_family, docs/models.md)"
            )
        patches = rows[0] - self.prefix(tower)
        side = math.isqrt(patches)
        return (side, side) if side * side == patches else (1, patches)

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        """Convolutions are taken for the patch embedding, linear layers for heads."""
        convs = sum(patches * matrix_entries(m, "weight") for m in tower.children() if isinstance(m, nn.Conv2d))
        return convs + sum(linear_macs(m) for m in tower.children() if isinstance(m, nn.Linear))

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        return self.prefix(tower) == 0
