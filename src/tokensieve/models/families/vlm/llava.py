"""LLaVA-1.5: a CLIP or SigLIP tower, whose tokens stage 1 chooses among before they are projected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tokensieve.core.cost import encoder_cost
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.models.families.transformers import ClipFamily
from tokensieve.models.families.vlm.base import Encoded, VlmFamily

__all__ = ["Llava", "TowerTokens", "encode", "inner_tower"]

_CLIP = ClipFamily()


def inner_tower(tower: Any) -> Any:
    """The module that owns the embeddings and blocks of a CLIP-like tower, wherever this version puts it."""
    return getattr(tower, "vision_model", tower)


class TowerTokens(Encoded):
    """Images as the tower left them, projector still to come: generate encodes before it shows the prompt.

    tokens: (I, P+N, D) of the feature layer; entered: what entered that layer's block, for its attention.
    after: the block that takes `tokens`; None where their layer is not the one before it.
    """

    def __init__(
        self, tokens: Tensor, entered: Tensor | None, block: nn.Module | None, prefix: int, has_cls: bool, depth: float,
        projector: nn.Module, after: nn.Module | None,
    ) -> None:  # fmt: skip
        super().__init__([tokens.shape[1] - prefix] * tokens.shape[0])
        self.tokens, self.entered, self.block = tokens, entered, block
        self.prefix, self.has_cls, self.depth, self.projector, self.after = prefix, has_cls, depth, projector, after

    def view(self, images: list[int], text: Tensor | None, valid: Tensor | None, following: bool = False) -> TokenView:
        """The feature layer's tokens; queries and keys of its attention are worked out when asked for."""
        block: Any = self.after if following else self.block
        whole = images == list(range(len(self.tokens)))
        tokens = self.tokens if whole else self.tokens[images]
        entered = self.entered if whole or self.entered is None else self.entered[images]
        if following:
            entered = None if self.after is None else tokens

        def part(name: str, row: int | None) -> Tensor:
            if entered is None:
                raise OptionError(
                    "the features are the tower's input, or its output: there is no such layer's attention"
                )
            x = entered if row is None else entered[:, row : row + 1]
            out = getattr(block.self_attn, name)(block.layer_norm1(x))
            return cast(Tensor, out.view(*out.shape[:2], block.self_attn.num_heads, -1).transpose(1, 2))

        return TokenView(
            tokens, lambda row: part("q_proj", row), lambda row: part("k_proj", row),
            scale=1.0 if block is None else float(block.self_attn.scale), prefix=self.prefix, has_cls=self.has_cls,
            depth=self.depth, text=text, text_valid=valid, project=self.projector, stage="projector",
        )  # fmt: skip

    def features(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.projector(tokens))

    def output(self, features: list[Tensor]) -> Any:
        return SimpleNamespace(pooler_output=features)


def encode(
    model: Any, pixels: Tensor, layer: Any = None, strategy: str | None = None, sizes: Any = None
) -> TowerTokens:
    """Run a LLaVA's tower and stop before the projector."""
    config = model.config
    layer = config.vision_feature_layer if layer is None else layer
    strategy = config.vision_feature_select_strategy if strategy is None else strategy
    has_cls = hasattr(inner_tower(model.vision_tower).embeddings, "class_embedding")
    if sizes is not None or (strategy != "default" and has_cls):
        raise UnsupportedModelError(
            f"stage 1 knows images of one size and features without CLS; here: strategy {strategy!r}, sizes {sizes!r}"
        )
    states = model.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
    layers = [layer] if isinstance(layer, int) else list(layer)
    tokens = states[layers[0]] if len(layers) == 1 else torch.cat([states[i] for i in layers], dim=-1)
    blocks = list(inner_tower(model.vision_tower).encoder.layers)
    deepest = max(i % len(states) for i in layers)
    return TowerTokens(
        tokens, states[deepest - 1] if deepest else None, blocks[deepest - 1] if deepest else None,
        1 if strategy == "default" else 0, has_cls, deepest / len(blocks), model.multi_modal_projector,
        blocks[deepest] if len(layers) == 1 and deepest < len(blocks) else None,
    )  # fmt: skip


class Llava(VlmFamily):
    name = "LLaVA"
    models: ClassVar[tuple[str, ...]] = ("LlavaModel",)
    chooses_before_projector: ClassVar[bool] = True

    def matches(self, inner: nn.Module) -> bool:
        return super().matches(inner) and _CLIP.matches(inner_tower(cast(Any, inner).vision_tower))

    def grid(self, inner: Any) -> tuple[int, int]:
        return _CLIP.grid(inner_tower(inner.vision_tower))

    def patches(self, inner: Any) -> int:
        with_cls = inner.config.vision_feature_select_strategy != "default"
        return super().patches(inner) + (_CLIP.prefix(inner_tower(inner.vision_tower)) if with_cls else 0)

    def tower_macs(self, inner: Any, tokens: float) -> int:
        """All its blocks, as transformers runs them, on an image of the usual size."""
        tower = inner_tower(inner.vision_tower)
        blocks = list(cast(Any, _CLIP.blocks(tower)))
        grid = self.grid(inner)
        patches = grid[0] * grid[1]
        full = [_CLIP.prefix(tower) + patches] * len(blocks)
        shapes = [_CLIP.shape(block) for block in blocks]
        return encoder_cost(shapes, full[0], full, _CLIP.rest_macs(tower, patches)).macs_full

    def vision_width(self, inner: Any) -> int:
        layers = inner.config.vision_feature_layer
        return int(inner.config.vision_config.hidden_size * (1 if isinstance(layers, int) else len(layers)))

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        return ("vision_feature_layer", "vision_feature_select_strategy", "image_sizes")

    def encode(self, inner: Any, modality: str, given: dict[str, Any]) -> Encoded:
        return encode(inner, given["pixel_values"], *(given.get(name) for name in self.arguments(inner, modality)))
