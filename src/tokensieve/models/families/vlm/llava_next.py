"""LLaVA-NeXT, LLaVA-NeXT-Video and LLaVA-OneVision: a base image and tiles, unpadded, each row with a token at its end.

Stage 1 chooses among the packed features. Ends of rows are not chosen among: one stays where its row has a token left.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokensieve.models.families.vlm.base import Encoded
from tokensieve.models.families.vlm.pooled import Pool, PooledImages
from tokensieve.models.families.vlm.towers import TowerFamily

__all__ = ["LlavaNext", "LlavaOnevision"]


class _PackedImages(PooledImages):
    """ends: for each image (n,) bool, the ends of rows; base: tokens of the base image before the first row."""

    def __init__(self, own: Any, attention: Any, depth: float, ends: list[Tensor], base: list[int]) -> None:
        super().__init__(own, attention, depth)
        self.ends, self.base = ends, base

    def choosable(self, image: int) -> Tensor | None:
        return ~self.ends[image]

    def follows(self, image: int, stays: Tensor) -> Tensor:
        """An end of a row stays where a token of its row does."""
        ends = self.ends[image].to(stays.device)
        row = ends.cumsum(0) - ends.long()
        alive = torch.zeros(len(stays) + 1, dtype=torch.bool, device=stays.device)
        inside = stays.clone()
        inside[: self.base[image]] = False
        alive[row[inside]] = True
        return stays | (ends & alive[row])

    def blank(self, image: int, like: Tensor) -> Tensor:
        ends = self.ends[image].to(like.device).unsqueeze(-1)
        return self.made[image].to(like.dtype) * ends


class LlavaNext(TowerFamily):
    name = "LLaVA-NeXT and LLaVA-NeXT-Video"
    models: ClassVar[tuple[str, ...]] = ("LlavaNextModel", "LlavaNextVideoModel")
    pixels: ClassVar[dict[str, str]] = {"image": "pixel_values", "video": "pixel_values_videos"}

    def token_id(self, inner: Any, modality: str) -> int:
        found = getattr(inner.config, f"{modality}_token_id", None)
        return -1 if found is None else int(found)

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        found = ("vision_feature_layer", "vision_feature_select_strategy")
        return ("image_sizes", *found) if modality == "image" else found

    def tile_counts(self, inner: Any, given: dict[str, Any]) -> list[int]:
        """Tiles of each image, the base image among them."""
        config = inner.config
        count = sys.modules[type(inner).__module__].image_size_to_num_patches
        return [
            int(count(image_size=size, grid_pinpoints=config.image_grid_pinpoints,
                      patch_size=config.vision_config.image_size))
            for size in given["image_sizes"]
        ]  # fmt: skip

    def tiles_of(self, inner: Any, modality: str, own: Any, given: dict[str, Any], tiles: int) -> list[list[int]]:
        if modality == "video":
            frames = given["pixel_values_videos"].shape[1]
            counts = [frames] * given["pixel_values_videos"].shape[0]
        else:
            counts = self.tile_counts(inner, given)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]

    def packed(self, inner: Any, given: dict[str, Any], image: int, x: Tensor, end: Tensor) -> Tensor:
        """(T, N, C) -> (n, C) as the model packs the tiles of one image, `end` (C,) at the end of each row."""
        sizes = given["image_sizes"][image : image + 1]
        found, _ = inner.pack_image_features([x], sizes, "default", image_newline=end)
        return found[0]

    def pooled_frames(self, inner: Any, x: Tensor) -> Tensor:
        """(T, N, C) of the frames of a video -> (T * n, C)."""
        return inner.vision_resampler(x).flatten(0, 1)

    def pool_of(self, inner: Any, modality: str, given: dict[str, Any], image: int) -> Pool:
        if modality == "video":
            return lambda x: self.pooled_frames(inner, x)
        return lambda x: self.packed(inner, given, image, x, x.new_zeros(x.shape[-1]))

    def images(
        self, inner: Any, modality: str, own: Any, attention: Any, given: dict[str, Any], depth: float
    ) -> Encoded:
        if modality == "video":
            return PooledImages(own, attention, depth)
        n, ends, base = self.side(inner) ** 2, [], []
        for image, count in enumerate(self.tile_counts(inner, given)):
            blank = torch.zeros(count, n, 1)
            ends.append(self.packed(inner, given, image, blank, torch.ones(1)).flatten() > 0)
            base.append(n if count > 1 else 0)
        return _PackedImages(own, attention, depth, ends, base)

    def grid(self, inner: Any) -> tuple[int, int]:
        """Of the base image alone."""
        return self.side(inner), self.side(inner)


class LlavaOnevision(LlavaNext):
    name = "LLaVA-OneVision"
    models: ClassVar[tuple[str, ...]] = ("LlavaOnevisionModel",)

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        found = super().arguments(inner, modality)
        return (*found, "vision_aspect_ratio", "batch_num_images") if modality == "image" else found

    def tile_counts(self, inner: Any, given: dict[str, Any]) -> list[int]:
        counts, together = super().tile_counts(inner, given), given.get("batch_num_images")
        if together is None:
            return counts
        alone = [n == 1 for n in together for _ in range(int(n))]
        return [count if single else 1 for count, single in zip(counts, alone, strict=True)]

    def packed(self, inner: Any, given: dict[str, Any], image: int, x: Tensor, end: Tensor) -> Tensor:
        sizes = given["image_sizes"][image : image + 1]
        ratio = given.get("vision_aspect_ratio") or inner.config.vision_aspect_ratio
        found, _ = inner.pack_image_features([x], sizes, image_newline=end, vision_aspect_ratio=ratio)
        return found[0]

    def pooled_frames(self, inner: Any, x: Tensor) -> Tensor:
        pooled = inner.apply_pooling(x).flatten(0, 1)
        return torch.cat([pooled, pooled.new_zeros(1, pooled.shape[-1])])

    def images(
        self, inner: Any, modality: str, own: Any, attention: Any, given: dict[str, Any], depth: float
    ) -> Encoded:
        if modality == "image":
            return super().images(inner, modality, own, attention, given, depth)
        lengths = [len(video) for video in own.pooler_output]
        ends = [torch.arange(n) == n - 1 for n in lengths]
        return _PackedImages(own, attention, depth, ends, [0] * len(ends))
