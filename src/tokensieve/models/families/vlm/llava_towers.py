"""LLaVA's classes with other towers (DINOv2 and its like; Pixtral) and Mistral 3: stage 1 chooses after the projector.

Pixtral takes all images of a batch in one row with a 2-D rotation, each as large as it is; Mistral 3 merges its patches
2 x 2.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.families.base import linear_macs
from tokensieve.models.families.vlm.base import Encoded
from tokensieve.models.families.vlm.pooled import Attention, PooledImages, tower_heads, watch
from tokensieve.models.families.vlm.towers import TowerFamily, prefix_of, tower_blocks

__all__ = ["LlavaTower", "Mistral3", "Pixtral"]


class LlavaTower(TowerFamily):
    name = "LLaVA with another tower"
    models: ClassVar[tuple[str, ...]] = ("LlavaModel",)

    def check(self, inner: Any, stage1: bool) -> None:
        prefix = prefix_of(inner.vision_tower)
        left = prefix - (inner.config.vision_feature_select_strategy == "default")
        if left:
            raise UnsupportedModelError(f"{left} of the features are not of patches (registers or CLS of the tower)")


class Pixtral(TowerFamily):
    name = "Pixtral"
    models: ClassVar[tuple[str, ...]] = ("LlavaModel",)

    def matches(self, inner: Any) -> bool:
        return super().matches(inner) and type(inner.vision_tower).__name__ == "PixtralVisionModel"

    def cell(self, inner: Any) -> int:
        """Patches down and across that make one feature."""
        return 1

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ("image_sizes", *super().arguments(inner, modality))

    def grid(self, inner: Any) -> tuple[int, int]:
        side = max(1, 448 // (inner.config.vision_config.patch_size * self.cell(inner)))
        return side, side

    def encode(self, inner: Any, modality: str, given: dict[str, Any]) -> Encoded:
        tower, pixels = inner.vision_tower, given["pixel_values"]
        number, patch = self.scored_block(inner, given), inner.vision_tower.patch_size
        block = tower_blocks(tower)[number]
        own, seen = watch(block, lambda: self.own_features(inner, modality, given))
        sizes = given.get("image_sizes")
        sizes = [tuple(pixels.shape[-2:])] * len(pixels) if sizes is None else [tuple(map(int, size)) for size in sizes]
        grids = [(h // patch, w // patch) for h, w in sizes]
        starts = [0]
        for h, w in grids:
            starts.append(starts[-1] + h * w)
        side = self.cell(inner)

        def attention(image: int) -> Attention:
            here = slice(starts[image], starts[image + 1])
            cos, sin = (part.reshape(-1, part.shape[-1])[here] for part in seen.arguments["position_embeddings"])
            q, k, scale = tower_heads(block, seen.states[:, here], (cos, sin))
            return Attention(q, k, scale, 0, False, lambda x: _squares(x, *grids[image], side))

        return PooledImages(own, attention, (number + 1) / len(tower_blocks(tower)))

    def tower_macs(self, inner: Any, tokens: float) -> int:
        patches = tokens * self.cell(inner) ** 2
        width = int(inner.config.vision_config.hidden_size)
        each = (patches * linear_macs(b) + 2 * patches**2 * width for b in tower_blocks(inner.vision_tower))
        return round(sum(each) + patches * inner.vision_tower.patch_conv.weight.numel())


def _squares(x: Tensor, down: int, across: int, side: int) -> Tensor:
    """(1, down * across, C) -> (n, C), the mean of squares of side x side; what does not fill one is left out."""
    grid = x[0].unflatten(0, (down, across))[: down // side * side, : across // side * side]
    cells = grid.unflatten(1, (-1, side)).unflatten(0, (-1, side))  # (n_h, side, n_w, side, C)
    return cells.mean(dim=(1, 3)).flatten(0, 1)


class Mistral3(Pixtral):
    name = "Mistral 3"
    models: ClassVar[tuple[str, ...]] = ("Mistral3Model",)

    def cell(self, inner: Any) -> int:
        return int(inner.config.spatial_merge_size)

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ("image_sizes", "vision_feature_layer")
