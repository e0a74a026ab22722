"""What a run of `tokensieve train vlm` will do, before anything is trained: tokens per layer, MACs, what is wasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokensieve.core.cost import BlockShape, decoder_macs, decoder_shape
from tokensieve.methods.trained.merger import TokenMerger
from tokensieve.methods.trained.pruner import LayerPruners, pruned_counts
from tokensieve.tasks.vlm.backbone import Sizes
from tokensieve.tasks.vlm.config import VlmConfig

__all__ = ["Plan", "make_plan", "own_macs", "saved_share", "tokens_per_layer", "wasted_layers"]

TEXT = 65  # tokens of a usual prompt, where no data says it
_WORTH = 0.01


def tokens_per_layer(merged: int, depth: int, layers: Sequence[int], keep: float) -> list[int]:
    """Vision tokens that each decoder layer runs on; each of `layers` leaves `keep` of what comes to it."""
    left = [merged, *pruned_counts(merged, len(layers), keep)]
    return [left[sum(at <= layer for at in layers)] for layer in range(depth)]


def saved_share(shape: BlockShape, patches: int, tokens: Sequence[int], text: int, extra: int = 0) -> float:
    """The share of the language model's prefill MACs that is gone; extra: MACs that pruning itself costs."""
    full = decoder_macs([shape] * len(tokens), [patches + text] * len(tokens))
    return 1.0 - (decoder_macs([shape] * len(tokens), [n + text for n in tokens]) + extra) / full


def wasted_layers(
    shape: BlockShape, sizes: Sizes, layers: Sequence[int], keep: float, text: int
) -> list[tuple[int, float, float]]:
    """(layer, share saved with it, without it) of each pruner that saves under 1 % of the MACs."""

    def saved(some: Sequence[int]) -> float:
        return saved_share(shape, sizes.patches, tokens_per_layer(sizes.merged, sizes.depth, some, keep), text)

    found = [(layer, saved(layers), saved([at for at in layers if at != layer])) for layer in layers]
    return [(layer, with_it, without) for layer, with_it, without in found if with_it - without < _WORTH]


@dataclass(frozen=True)
class Plan:
    """lines: name -> what, to be printed. warnings: what is probably not meant."""

    lines: dict[str, str]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, self.lines)) + 2
        lines = [f"{name + ':':<{width}}{what}" for name, what in self.lines.items()]
        return "\n".join([*lines, *(f"warning: {line}" for line in self.warnings)])


def own_macs(merger: TokenMerger, pruners: LayerPruners, sizes: Sizes, tokens: Sequence[int], text: int) -> int:
    """What merger and pruners themselves cost, of one prompt."""
    before = [tokens[layer - 1] if layer else sizes.merged for layer in pruners.layers]
    heads = sum(pruners.macs(layer, n, text) for layer, n in zip(pruners.layers, before, strict=True))
    if sizes.merged == sizes.patches:
        return heads
    return merger.macs(sizes.patches, text, sizes.merged, sizes.projector) + heads


def make_plan(
    config: VlmConfig, model: Any, sizes: Sizes, networks: tuple[TokenMerger, LayerPruners], steps: int | None,
    data: str, text: int = TEXT,
) -> Plan:  # fmt: skip
    """steps: None where the data is not there to count them by."""
    m, words = config.method, model.config.text_config
    shape = decoder_shape(
        words.hidden_size, words.intermediate_size, words.num_attention_heads, words.num_key_value_heads,
        getattr(words, "head_dim", None) or 0,
    )  # fmt: skip
    merger, pruners = networks
    tokens = tokens_per_layer(sizes.merged, sizes.depth, pruners.layers, m.pruner_keep)
    own = own_macs(merger, pruners, sizes, tokens, text)
    average = sum(tokens) / len(tokens)
    counts = {
        name: sum(p.numel() for p in part.parameters())
        for name, part in zip(("merger", "pruners"), networks, strict=True)
    }
    lines = {
        "model": f"{config.backbone_settings.name}, {sizes.depth} layers of width {sizes.width}, frozen",
        "data": data,
        "merging": f"{m.merger_type}, {sizes.patches} -> {sizes.merged} tokens",
        "pruning": f"before layers {', '.join(map(str, pruners.layers))}, each keeps {m.pruner_keep:g}",
        "tokens per layer": " ".join(map(str, tokens)) + f" vision tokens, with {text} text tokens beside them",
        "vision tokens": f"{average:.1f} of {sizes.patches} on layer average, "
        f"{100 * (1 - average / sizes.patches):.1f} % less",
        "FLOPs": f"{100 * saved_share(shape, sizes.patches, tokens, text):.1f} % of the language model's prefill gone, "
        f"{100 * saved_share(shape, sizes.patches, tokens, text, own):.1f} % with merger and pruners counted",
        "parameters": ", ".join(f"{name} {count:,}" for name, count in counts.items()),
        "losses": f"task {m.task_loss_weight:g}, adversarial {m.adv_loss_weight:g}, distillation "
        f"{m.distill_loss_weight:g}, merge sparsity {m.merge_sparsity_weight:g}"
        + (f", merge guide {m.merge_guide_weight:g}" if m.merge_guide_weight else "")
        + (f", prune guide {m.prune_guide_weight:g}" if m.prune_guide_weight else ""),
        "temperature": f"{m.temperature:g} -> {m.temperature_min:g} over the first {m.temperature_anneal_rate:g} of "
        "the steps",
        "steps": "unknown without data" if steps is None else f"{steps} of {config.dl.batch_size} questions",
        "output": config.output_dir,
    }
    warnings = [
        f"pruning at layer {layer} saves {100 * (a - b):.1f} % of the FLOPs ({100 * a:.1f} % with it, {100 * b:.1f} % "
        "without): leave it out of pruning_layers"
        for layer, a, b in wasted_layers(shape, sizes, pruners.layers, m.pruner_keep, text)
    ]
    return Plan(lines, tuple(warnings))
