"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V: images of any size in one packed row, merged 2 x 2 after the tower.

Positions are three rows (time, height, width) and stay as they are; the features that Qwen3-VL adds to the first layers
go with their tokens. Qwen2.5 attends in windows but in a few blocks, and permutes its cells for it.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokensieve.models.families.base import linear_macs
from tokensieve.models.families.vlm.base import Encoded, VlmFamily
from tokensieve.models.families.vlm.pooled import Attention, PooledImages, Watched, tower_heads, watch

__all__ = ["Glm4v", "PackedTower", "Qwen"]

_SIDE = 448  # pixels of an image of the usual size, where a model takes any


class PackedTower(VlmFamily):
    """A tower that takes all images of a batch in one row, cell by cell, and merges each cell into one feature."""

    tower = "visual"
    projector = None
    renumbers = False
    pixels: ClassVar[dict[str, str]] = {"image": "pixel_values", "video": "pixel_values_videos"}

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return (f"{modality}_grid_thw",)

    def grid(self, inner: Any) -> tuple[int, int]:
        tower = inner.visual
        side = max(1, _SIDE // (tower.config.patch_size * tower.spatial_merge_size))
        return side, side

    def scored_block(self, tower: Any) -> int:
        """The block whose attention says which patches matter: the last in which all patches of an image meet."""
        full = getattr(tower, "fullatt_block_indexes", None)
        return int(max(full)) if full else len(tower.blocks) - 1

    def encode(self, inner: Any, modality: str, given: dict[str, Any]) -> Encoded:
        tower = inner.visual
        number = self.scored_block(tower)
        own, seen = watch(tower.blocks[number], lambda: self.own_features(inner, modality, given))
        grids = given[f"{modality}_grid_thw"].tolist()
        cell = tower.spatial_merge_size**2
        order = self._cells(tower, given[f"{modality}_grid_thw"])
        starts = [0]
        for t, h, w in grids:
            starts.append(starts[-1] + t * h * w)

        def attention(image: int) -> Attention:
            frames = grids[image][0]
            return _attention(tower.blocks[number], seen, starts[image], starts[image + 1], frames, cell, order)

        return PooledImages(own, attention, (number + 1) / len(tower.blocks))

    def _cells(self, tower: Any, grid: Tensor) -> Tensor | None:
        """Where each cell stands in the tower's row, in the order of the features; None: in that order."""
        if not hasattr(tower, "fullatt_block_indexes"):
            return None
        module = sys.modules[type(tower).__module__]
        index, _ = module.get_vision_window_index(
            grid, spatial_merge_size=tower.spatial_merge_size, window_size=tower.window_size,
            patch_size=tower.patch_size, kwargs={},
        )  # fmt: skip
        return torch.argsort(index)

    def tower_macs(self, inner: Any, tokens: float) -> int:
        """Blocks and merger on an image of that many features; attention in windows counted as such."""
        tower = inner.visual
        config, cell = tower.config, tower.spatial_merge_size**2
        patches = tokens * cell
        width = int(getattr(config, "embed_dim", None) or config.hidden_size)
        full = getattr(tower, "fullatt_block_indexes", None)
        macs = 0.0
        for number, block in enumerate(tower.blocks):
            seen = patches
            if full and number not in full:
                seen = min(patches, (tower.window_size // tower.patch_size) ** 2)
            macs += patches * linear_macs(block) + 2 * patches * seen * width
        merged = [tower.merger, *getattr(tower, "deepstack_merger_list", [])]
        return round(macs + sum(tokens * linear_macs(part) for part in merged))


def _attention(
    block: Any, seen: Watched, start: int, end: int, frames: int, cell: int, order: Tensor | None
) -> Attention:
    """Of one image or video: its patches, frame by frame, cell by cell in the order of the features."""
    states, rotary = seen.states, seen.arguments["position_embeddings"]
    parts = [states, *rotary]
    if order is not None:
        cells = order[start // cell : end // cell]
        parts = [part.unflatten(0, (-1, cell))[cells.to(part.device)].flatten(0, 1) for part in parts]
    else:
        parts = [part[start:end] for part in parts]
    x, cos, sin = (part.unflatten(0, (frames, -1)) for part in parts)
    q, k, scale = tower_heads(block, x, (cos, sin))
    return Attention(q, k, scale, 0, False, lambda fine: fine.flatten(0, 1).unflatten(0, (-1, cell)).mean(dim=1))


class Qwen(PackedTower):
    name = "Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
    models: ClassVar[tuple[str, ...]] = ("Qwen2VLModel", "Qwen2_5_VLModel", "Qwen3VLModel")


class Glm4v(PackedTower):
    """A video's frames stand on image placeholders, so a prompt has images or videos."""

    name = "GLM-4.1V"
    models: ClassVar[tuple[str, ...]] = ("Glm4vModel",)

    def token_id(self, inner: Any, modality: str) -> int:
        return int(inner.config.image_token_id)
