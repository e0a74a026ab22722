"""Vision transformers as the ReID model wants them: blocks that can be cut between attention and MLP.

May import: open_clip, timm, the zoo.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.errors import MissingMaterialError, OptionError, UnknownNameError, nearest, one_line
from tokensieve.tasks.reid.config import ModelSection

__all__ = ["Backbone", "OpenClipBackbone", "TimmBackbone", "build_backbone", "pixel_stats"]

SMALL, VIT_S14 = "small", "vit-s14"
HALF = (0.5, 0.5, 0.5)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


class Backbone(nn.Module, ABC):
    """width: of the tokens inside. dim: of the tokens that come out. depth: blocks. grid: rows, columns of patches."""

    width: int
    dim: int
    depth: int
    grid: tuple[int, int]
    prefix: ClassVar[int] = 1

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @abstractmethod
    def embed(self, images: Tensor, camera: Tensor | None) -> Tensor:
        """(B, 3, H, W) -> (B, 1 + N, width). camera: (B, width), added to CLS."""

    @abstractmethod
    def attend(self, block: int, x: Tensor) -> Tensor:
        """The first half of a block."""

    @abstractmethod
    def feed(self, block: int, x: Tensor) -> Tensor:
        """The second half of a block, token by token."""

    @abstractmethod
    def finish(self, x: Tensor) -> Tensor:
        """What follows the last block: (B, 1 + K, width) -> (B, 1 + K, dim)."""

    @abstractmethod
    def shape(self) -> BlockShape:
        """What one block costs."""

    @abstractmethod
    def outside_macs(self, leaving: int) -> int:
        """MACs of one image outside the blocks; `leaving` tokens come out of the last one."""


def _with_camera(x: Tensor, camera: Tensor | None) -> Tensor:
    return x if camera is None else torch.cat([x[:, :1] + camera.unsqueeze(1), x[:, 1:]], dim=1)


class TimmBackbone(Backbone):
    """Of timm's `VisionTransformer` with one CLS token."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit
        self.width = self.dim = vit.embed_dim
        self.depth = len(vit.blocks)
        self.grid = tuple(vit.patch_embed.grid_size)

    def embed(self, images: Tensor, camera: Tensor | None) -> Tensor:
        x = self.vit._pos_embed(self.vit.patch_embed(images))
        return self.vit.norm_pre(_with_camera(x, camera))

    def attend(self, block: int, x: Tensor) -> Tensor:
        b = self.vit.blocks[block]
        return x + b.drop_path1(b.ls1(b.attn(b.norm1(x))))

    def feed(self, block: int, x: Tensor) -> Tensor:
        b = self.vit.blocks[block]
        return x + b.drop_path2(b.ls2(b.mlp(b.norm2(x))))

    def finish(self, x: Tensor) -> Tensor:
        return self.vit.norm(x)

    def shape(self) -> BlockShape:
        hidden = self.vit.blocks[0].mlp.fc1.out_features
        return BlockShape(4 * self.width**2, self.width, 2 * self.width * hidden)

    def outside_macs(self, leaving: int) -> int:
        return self.patches * self.vit.patch_embed.proj.weight.numel()


class OpenClipBackbone(Backbone):
    """Of open_clip's `VisionTransformer`; every token goes through CLIP's projection, not CLS alone."""

    def __init__(self, visual: Any) -> None:
        super().__init__()
        self.visual = visual
        self.width = visual.conv1.out_channels
        self.dim = self.width if visual.proj is None else visual.proj.shape[1]
        self.depth = len(visual.transformer.resblocks)
        self.grid = tuple(visual.grid_size)
        if not visual.transformer.batch_first or not hasattr(visual.transformer.resblocks[0], "attention"):
            raise OptionError("an open_clip tower with blocks of its own kind is not supported")

    def embed(self, images: Tensor, camera: Tensor | None) -> Tensor:
        v = self.visual
        x = v.conv1(images).flatten(2).transpose(1, 2)
        x = torch.cat([v.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
        return v.ln_pre(_with_camera(x + v.positional_embedding.to(x.dtype), camera))

    def attend(self, block: int, x: Tensor) -> Tensor:
        b = self.visual.transformer.resblocks[block]
        return x + b.ls_1(b.attention(b.ln_1(x)))

    def feed(self, block: int, x: Tensor) -> Tensor:
        b = self.visual.transformer.resblocks[block]
        return x + b.ls_2(b.mlp(b.ln_2(x)))

    def finish(self, x: Tensor) -> Tensor:
        x = self.visual.ln_post(x)
        return x if self.visual.proj is None else x @ self.visual.proj

    def shape(self) -> BlockShape:
        hidden = self.visual.transformer.resblocks[0].mlp.c_fc.out_features
        return BlockShape(4 * self.width**2, self.width, 2 * self.width * hidden)

    def outside_macs(self, leaving: int) -> int:
        out = 0 if self.visual.proj is None else leaving * self.visual.proj.numel()
        return self.patches * self.visual.conv1.weight.numel() + out


def pixel_stats(kind: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels that a backbone was trained with."""
    return {SMALL: (HALF, HALF), VIT_S14: IMAGENET}.get(kind, CLIP)


def build_backbone(config: ModelSection, size: tuple[int, int], *, pretrained: bool = True) -> Backbone:
    """The backbone for images of (height, width). pretrained=False: its shape alone, for weights that follow."""
    kind = config.TRANSFORMER_TYPE
    if kind == SMALL:
        return TimmBackbone(_timm(size, config.PATCH, config.WIDTH, config.DEPTH, config.HEADS))
    if kind == VIT_S14:
        return TimmBackbone(_vit_s14(size, pretrained))
    return OpenClipBackbone(_open_clip(kind, config.PRETRAIN_PATH if pretrained else None, size))


def _check_patch(size: tuple[int, int], patch: int) -> None:
    if size[0] % patch or size[1] % patch:
        near = tuple(max(patch, side // patch * patch) for side in size)
        raise OptionError(f"INPUT.SIZE_TRAIN {list(size)}: no multiples of the patch size {patch}; try {list(near)}")


def _timm(size: tuple[int, int], patch: int, width: int, depth: int, heads: int, **more: Any) -> Any:
    from timm.models.vision_transformer import VisionTransformer

    _check_patch(size, patch)
    return VisionTransformer(
        img_size=size, patch_size=patch, embed_dim=width, depth=depth, num_heads=heads, num_classes=0, **more
    )


def _vit_s14(size: tuple[int, int], pretrained: bool) -> Any:
    from tokensieve.zoo import vit_s14 as zoo

    vit = _timm(size, zoo.PATCH, zoo.WIDTH, zoo.DEPTH, zoo.HEADS, init_values=1.0)
    if pretrained:
        state = zoo.vit_s14_timm().state_dict()
        table = zoo.weights()["pos"]
        patches = table[:, 1:].reshape(1, 37, 37, -1).permute(0, 3, 1, 2)
        patches = F.interpolate(patches, size=vit.patch_embed.grid_size, mode="bicubic", align_corners=False)
        state["pos_embed"] = torch.cat([table[:, :1], patches.flatten(2).transpose(1, 2)], dim=1)
        vit.load_state_dict(state)
    return vit


def _open_clip(name: str, checkpoint: str | None, size: tuple[int, int]) -> Any:
    """An open_clip image tower, positions interpolated to the grid. checkpoint: None leaves the weights at random."""
    from tokensieve.utils.torchvision import declare_missing_schemas

    declare_missing_schemas()
    import open_clip
    from open_clip.model import _build_vision_tower  # alone: a whole model would build its text tower too

    shape = open_clip.get_model_config(name)
    if shape is None:
        known = [SMALL, VIT_S14, *open_clip.list_models()]
        raise UnknownNameError(f"unknown MODEL.TRANSFORMER_TYPE {name!r}.{nearest(name, known)}")
    vision = shape["vision_cfg"]
    if not isinstance(vision.get("layers"), int) or "patch_size" not in vision or vision.get("attentional_pool"):
        raise OptionError(f"MODEL.TRANSFORMER_TYPE {name}: its image tower is not a plain vision transformer")
    _check_patch(size, vision["patch_size"])
    visual = _build_vision_tower(shape["embed_dim"], {**vision, "image_size": size}, shape.get("quick_gelu", False))
    if checkpoint is not None:
        _load_open_clip(visual, name, Path(checkpoint))
    return visual


def _load_open_clip(visual: Any, name: str, path: Path) -> None:
    """The image tower's part of a checkpoint, in whatever precision it was saved."""
    from open_clip.factory import load_state_dict

    if not path.is_file():
        given = str(path) if path.name else ""
        raise MissingMaterialError(
            f"MODEL.PRETRAIN_PATH {given!r}: there is no such file; name a local checkpoint of open_clip's {name}"
        )
    try:
        whole = load_state_dict(str(path))
        state = {key.removeprefix("visual."): value.float() for key, value in whole.items() if key[:7] == "visual."}
        state["positional_embedding"] = _positions(state["positional_embedding"], visual.grid_size)
        visual.load_state_dict(state)
    except Exception as error:  # a file that is something else can fail in any way
        reason = one_line(error, 200)
        raise MissingMaterialError(f"MODEL.PRETRAIN_PATH {path}: no checkpoint of {name}: {reason}") from None


def _positions(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """(1 + g * g, width) of a square grid -> (1 + rows * columns, width), as open_clip interpolates."""
    side = math.isqrt(len(table) - 1)
    if (side, side) == tuple(grid):
        return table
    patches = table[1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=tuple(grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([table[:1], patches[0].flatten(1).T])
