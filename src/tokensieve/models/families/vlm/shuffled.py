"""InternVL, Aya Vision, Idefics3 and SmolVLM: tiles whose patches a pixel shuffle puts together, 2 x 2 or more.

Gemma 3 averages squares of patches, PaliGemma and VipLLaVA take each patch. Their image tokens see each other in both
directions in Gemma 3, and all of the prompt in PaliGemma.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.families.vlm.towers import TowerFamily

__all__ = ["AyaVision", "Gemma3", "Idefics2", "Idefics3", "InternVl", "PaliGemma", "VipLlava"]


class InternVl(TowerFamily):
    name = "InternVL"
    models: ClassVar[tuple[str, ...]] = ("InternVLModel",)
    joins_tiles: ClassVar[bool] = True

    def pool(self, inner: Any, x: Tensor) -> Tensor:
        return self._shuffled(inner, x).mean(dim=1)

    def _shuffled(self, inner: Any, x: Tensor) -> Tensor:
        """(T, N, C) -> (T * n, patches of a feature, C), by the model's own shuffle of single numbers."""
        side = self.side(inner)
        order = torch.arange(side * side, dtype=torch.float32).view(1, side, side, 1)
        found = inner.pixel_shuffle(order, scale_factor=inner.config.downsample_ratio)
        return _gathered(x, found.reshape(-1, found.shape[-1]))


def _gathered(x: Tensor, cells: Tensor) -> Tensor:
    """(T, N, C) and (n, patches) numbers -> (T * n, patches, C)."""
    return x[:, cells.long().to(x.device)].flatten(0, 1)


class AyaVision(InternVl):
    name = "Aya Vision"
    models: ClassVar[tuple[str, ...]] = ("AyaVisionModel",)

    def _shuffled(self, inner: Any, x: Tensor) -> Tensor:
        side = self.side(inner)
        order = torch.arange(side * side, dtype=torch.float32).view(1, side * side, 1)
        found = inner.multi_modal_projector.pixel_shuffle(order)
        return _gathered(x, found.reshape(-1, found.shape[-1]))


class Idefics3(InternVl):
    """pooler_output has the tiles of all images of a prompt together: a budget is of the prompt."""

    name = "Idefics3 and SmolVLM"
    models: ClassVar[tuple[str, ...]] = ("Idefics3Model", "SmolVLMModel")
    tower = "vision_model"
    language = "text_model"
    projector = "connector"
    joins_tiles: ClassVar[bool] = False

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ("pixel_attention_mask",)

    def _shuffled(self, inner: Any, x: Tensor) -> Tensor:
        side = self.side(inner)
        order = torch.arange(side * side, dtype=torch.float32).view(1, side * side, 1)
        found = inner.connector.pixel_shuffle(order, inner.connector.scale_factor)
        return _gathered(x, found.reshape(-1, found.shape[-1]))

    def tiles_of(self, inner: Any, modality: str, own: Any, given: dict[str, Any], tiles: int) -> list[list[int]]:
        each = len(self.pool(inner, torch.zeros(1, self.side(inner) ** 2, 1)))
        counts = [len(feature) // each for feature in own.pooler_output]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]


class Idefics2(TowerFamily):
    """A resampler makes 64 tokens of an image, each of all its patches: they leave inside the language model only."""

    name = "Idefics2 (inside the language model)"
    models: ClassVar[tuple[str, ...]] = ("Idefics2Model",)
    tower = "vision_model"
    language = "text_model"
    projector = "connector"

    def check(self, inner: Any, stage1: bool) -> None:
        if stage1:
            raise UnsupportedModelError(
                "stage 1 in Idefics2Model: its resampler mixes all patches into each token, so the tower's attention "
                "says nothing of one; inside the language model (at=...) it works"
            )

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ("pixel_attention_mask",)

    def grid(self, inner: Any) -> tuple[int, int]:
        return 1, int(inner.config.perceiver_config.resampler_n_latents)


class Gemma3(TowerFamily):
    name = "Gemma 3"
    models: ClassVar[tuple[str, ...]] = ("Gemma3Model",)

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ()

    def pool(self, inner: Any, x: Tensor) -> Tensor:
        side = self.side(inner)
        grid = x.float().transpose(1, 2).unflatten(2, (side, side))
        return inner.multi_modal_projector.avg_pool(grid).flatten(2).transpose(1, 2).flatten(0, 1)

    def blocks(self, inner: Any, given: dict[str, Any]) -> Tensor | None:
        """Each run of image tokens."""
        kinds = given.get("token_type_ids")
        if kinds is None:
            return None
        image = kinds == 1
        starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
        return torch.where(image, starts.long().cumsum(dim=1) - 1, -1)


class PaliGemma(TowerFamily):
    """The prefix (image and question) sees itself in both directions, what follows is causal."""

    name = "PaliGemma"
    models: ClassVar[tuple[str, ...]] = ("PaliGemmaModel",)
    blocks_in_window: ClassVar[bool] = False

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ()

    def blocks(self, inner: Any, given: dict[str, Any]) -> Tensor | None:
        kinds = given.get("token_type_ids")
        return None if kinds is None else torch.where(kinds == 0, 0, -1)


class VipLlava(TowerFamily):
    name = "VipLLaVA"
    models: ClassVar[tuple[str, ...]] = ("VipLlavaModel",)

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ("vision_feature_layers",)

    def scored_block(self, inner: Any, given: dict[str, Any]) -> int:
        layers = given.get("vision_feature_layers") or inner.config.vision_feature_layers
        return super().scored_block(inner, {"vision_feature_layer": layers})
