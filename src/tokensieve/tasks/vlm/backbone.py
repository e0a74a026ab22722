"""The frozen model that is pruned: with its weights, or, to plan with, without them. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokensieve.errors import BudgetError, OptionError, UnsupportedModelError
from tokensieve.methods.trained.merger import TokenMerger
from tokensieve.methods.trained.pruner import LayerPruners
from tokensieve.models.families.base import linear_macs
from tokensieve.tasks.vlm.config import LLAVA_15, VlmConfig
from tokensieve.tasks.vlm.default import SMALL_LLAVA

__all__ = ["Sizes", "build_networks", "empty_model", "load_backbone", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """patches: vision tokens of an image. merged: what stage 1 leaves of them. projector: its weights."""

    patches: int
    merged: int
    depth: int
    width: int
    vision_width: int
    projector: int


def load_backbone(config: VlmConfig) -> tuple[Any, Any]:
    """(model, processor), frozen, in evaluation mode."""
    from tokensieve.tasks.vlm.load import load_llava

    name = config.backbone_settings.name
    model, processor = load_llava(None if name == SMALL_LLAVA else name)
    if type(model).__name__ != "LlavaForConditionalGeneration":
        raise UnsupportedModelError(f"{name}: merger and pruners are trained on LLaVA, not on {type(model).__name__}")
    model.requires_grad_(False)
    return model, processor


def empty_model(config: VlmConfig) -> Any | None:
    """A model of the right shape without weights, for a plan; None where only loading says its shape."""
    if config.backbone_settings.name != LLAVA_15:
        return None
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    with torch.device("meta"):  # transformers' defaults are LLaVA-1.5-7B
        return LlavaForConditionalGeneration(LlavaConfig()).eval()


def sizes_of(config: VlmConfig, model: Any) -> Sizes:
    """What the configuration means for this model. What contradicts the model, or itself, is an error."""
    m, inner = config.method, model.config
    vision, text = inner.vision_config, inner.text_config
    patches = (vision.image_size // vision.patch_size) ** 2
    ratio = m.merge_ratio
    if m.target_merge_tokens is not None and m.target_merge_tokens > patches:
        raise OptionError(f"target_merge_tokens={m.target_merge_tokens}: an image of this model has {patches} tokens")
    if ratio is None:
        merged = m.target_merge_tokens if m.target_merge_tokens is not None else round(0.5 * patches)
    else:
        merged = max(1, round(ratio * patches))
        if m.target_merge_tokens is not None and m.target_merge_tokens != merged:
            raise OptionError(
                f"merge_ratio={ratio:g} of {patches} tokens is {merged}, but target_merge_tokens="
                f"{m.target_merge_tokens}: make them agree, or give one"
            )
    if m.max_vision_tokens is not None and m.max_vision_tokens < patches:
        raise BudgetError(
            f"max_vision_tokens={m.max_vision_tokens}: every image of this model has {patches} tokens, of any size"
        )
    depth = text.num_hidden_layers
    wrong = [layer for layer in m.pruning_layers if layer >= depth]
    if wrong:
        raise OptionError(f"pruning_layers: {wrong[0]} is none of this model's layers 0 to {depth - 1}")
    projector = linear_macs(model.model.multi_modal_projector)
    return Sizes(patches, merged, depth, text.hidden_size, vision.hidden_size, projector)


def build_networks(config: VlmConfig, sizes: Sizes) -> tuple[TokenMerger, LayerPruners]:
    """Fresh merger and pruners; the same seed gives the same."""
    m = config.method
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.dl.seed)
        merger = TokenMerger(
            sizes.vision_width, sizes.width, m.pruner_d_internal, m.pruner_num_heads, m.merger_type,
            ratio=sizes.merged / sizes.patches, temperature=m.temperature,
        )  # fmt: skip
        pruners = LayerPruners(
            sizes.width, sizes.depth, m.pruning_layers, sizes.patches, m.pruner_d_internal, m.pruner_num_heads,
            m.pruner_keep,
        )  # fmt: skip
    return merger, pruners
