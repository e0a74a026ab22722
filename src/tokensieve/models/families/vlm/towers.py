"""What the families with an ordinary tower (CLIP, SigLIP and their like) share. Imports pooled and base."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.families.base import linear_macs
from tokensieve.models.families.vlm.base import Encoded, VlmFamily
from tokensieve.models.families.vlm.pooled import Attention, Pool, PooledImages, tower_heads, watch

__all__ = ["TowerFamily", "prefix_of", "tower_blocks"]


def _inner(tower: Any) -> Any:
    return getattr(tower, "vision_model", tower)


def tower_blocks(tower: Any) -> list[Any]:
    """The blocks of a tower, wherever its class keeps them."""
    inner = _inner(tower)
    for path in ("encoder.layers", "encoder.layer", "transformer.layers", "blocks", "layers", "layer"):
        found: Any = inner
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return list(found)
    raise UnsupportedModelError(f"a vision tower of {type(inner).__name__} is not known here")


def prefix_of(tower: Any) -> int:
    """Tokens before the patches: CLS, and registers after it."""
    embeddings = getattr(_inner(tower), "embeddings", None)
    cls = any(getattr(embeddings, name, None) is not None for name in ("class_embedding", "cls_token"))
    registers = getattr(embeddings, "register_tokens", None)
    return int(cls) + (0 if registers is None else int(registers.shape[1]))


class TowerFamily(VlmFamily):
    """A tower that takes images or tiles (I, C, H, W) of one size; features are pooled from its patches."""

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ("vision_feature_layer", "vision_feature_select_strategy")

    def scored_block(self, inner: Any, given: dict[str, Any]) -> int:
        """The block whose output the features come from."""
        config, count = inner.config, len(tower_blocks(self.vision_tower(inner)))
        layer: Any = given.get("vision_feature_layer")
        layer = getattr(config, "vision_feature_layer", -1) if layer is None else layer
        deepest = max(i % (count + 1) for i in ([layer] if isinstance(layer, int) else layer))
        if not deepest:
            raise UnsupportedModelError(
                "the features are the tower's input: no layer's attention says anything of them"
            )
        return deepest - 1

    def side(self, inner: Any) -> int:
        """Patches down and across of an image or tile."""
        vision = inner.config.vision_config
        size, patch = vision.image_size, vision.patch_size
        first = [n if isinstance(n, int) else n[0] for n in (size, patch)]
        return int(first[0] // first[1])

    def pool(self, inner: Any, x: Tensor) -> Tensor:
        """(T, N, C) of the patches of T tiles -> (n, C) of their features. As the model: one feature for each patch."""
        return x.flatten(0, 1)

    def grid(self, inner: Any) -> tuple[int, int]:
        side = self.side(inner)
        n = len(self.pool(inner, torch.zeros(1, side * side, 1)))
        return (math.isqrt(n), math.isqrt(n)) if math.isqrt(n) ** 2 == n else (1, n)

    def tiles_of(self, inner: Any, modality: str, own: Any, given: dict[str, Any], tiles: int) -> list[list[int]]:
        """The numbers of the tiles that make each image."""
        return [[i] for i in range(tiles)]

    def encode(self, inner: Any, modality: str, given: dict[str, Any]) -> Encoded:
        tower = self.vision_tower(inner)
        number = self.scored_block(inner, given)
        blocks = tower_blocks(tower)
        own, seen = watch(blocks[number], lambda: self.own_features(inner, modality, given))
        prefix, states = prefix_of(tower), seen.states
        tiles = self.tiles_of(inner, modality, own, given, len(states))

        def attention(image: int) -> Attention:
            q, k, scale = tower_heads(blocks[number], states[tiles[image]])
            return Attention(q, k, scale, prefix, prefix > 0, self.pool_of(inner, modality, given, image))

        return self.images(inner, modality, own, attention, given, (number + 1) / len(blocks))

    def images(
        self, inner: Any, modality: str, own: Any, attention: Any, given: dict[str, Any], depth: float
    ) -> Encoded:
        return PooledImages(own, attention, depth)

    def pool_of(self, inner: Any, modality: str, given: dict[str, Any], image: int) -> Pool:
        """`pool` of one image."""
        return lambda x: self.pool(inner, x)

    def tower_macs(self, inner: Any, tokens: float) -> int:
        """All blocks on the tiles that this many features come from; the patch embedding too."""
        tower = self.vision_tower(inner)
        blocks, side = tower_blocks(tower), self.side(inner)
        down, across = self.grid(inner)
        patches = side * side + prefix_of(tower)
        width = int(inner.config.vision_config.hidden_size)
        one = sum(patches * linear_macs(block) + 2 * patches * patches * width for block in blocks)
        embedding = next((m for m in tower.modules() if isinstance(m, nn.Conv2d)), None)
        one += 0 if embedding is None else side * side * embedding.weight.numel()
        return round(one * tokens / (down * across))
