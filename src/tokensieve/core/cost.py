"""MACs of a transformer from its token counts: vision encoders and language models. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BlockShape", "Cost", "VlmCost", "block_macs", "decoder_macs", "decoder_shape", "encoder_cost"]


@dataclass(frozen=True)
class BlockShape:
    """What one block costs: MACs a token in its attention's and its MLP's linear layers, and the attention's width."""

    attention_linear: int
    attention_width: int
    mlp_linear: int


@dataclass(frozen=True)
class Cost:
    """MACs of one image with the reduction and without. The method's own work is not in it: it shows as overhead."""

    macs: int
    macs_full: int
    tokens_per_layer: tuple[int, ...]

    @property
    def possible(self) -> float:
        """The speed-up that the MACs make possible."""
        return self.macs_full / self.macs


def block_macs(shape: BlockShape, tokens_in: int, tokens_out: int) -> int:
    """One block: attention over tokens_in, MLP over the tokens_out that remain after the cut between the two."""
    attention = tokens_in * shape.attention_linear + 2 * tokens_in * tokens_in * shape.attention_width
    return attention + tokens_out * shape.mlp_linear


def encoder_cost(shapes: Sequence[BlockShape], tokens: int, leaving: Sequence[int], rest: int = 0) -> Cost:
    """Cost of an encoder whose block i is left by leaving[i] tokens, prefix included; `tokens` enter the first.

    rest: MACs outside the blocks (patch embedding, head), the same with and without.
    """
    macs = full = rest
    entering = tokens
    for shape, out in zip(shapes, leaving, strict=True):
        macs += block_macs(shape, entering, out)
        full += block_macs(shape, tokens, tokens)
        entering = out
    return Cost(macs=macs, macs_full=full, tokens_per_layer=tuple(leaving))


def decoder_shape(width: int, mlp_width: int, heads: int, kv_heads: int | None = None, head_dim: int = 0) -> BlockShape:
    """A Llama layer: q and o of all heads, k and v of `kv_heads` groups (None: all), and an MLP of three matrices.

    With as many groups as heads and heads * head_dim = width, n tokens cost 4nd^2 + 2n^2 d + 3ndm.
    """
    head_dim = head_dim or width // heads
    inner, outer = heads * head_dim, (kv_heads or heads) * head_dim
    return BlockShape(2 * width * inner + 2 * width * outer, inner, 3 * width * mlp_width)


def decoder_macs(shapes: Sequence[BlockShape], tokens: Sequence[int]) -> int:
    """Prefill of a language model whose layer i runs on tokens[i]: they leave before a layer, not inside it."""
    return sum(block_macs(shape, n, n) for shape, n in zip(shapes, tokens, strict=True))


@dataclass(frozen=True)
class VlmCost(Cost):
    """MACs of one prompt's prefill, text included: `macs` and `possible` of the language model's layers alone.

    `with_tower` adds the vision tower and the projector (which sees fewer tokens after stage 1). The method's own work
    is in neither.
    """

    vision_macs: int = 0  # tower and projector, with the reduction
    vision_macs_full: int = 0
    vision_tokens_per_layer: tuple[float, ...] = ()

    @property
    def with_tower(self) -> Cost:
        """The same with the vision tower and the projector counted."""
        return Cost(self.macs + self.vision_macs, self.macs_full + self.vision_macs_full, self.tokens_per_layer)

    @property
    def vision_tokens_average(self) -> float:
        """Vision tokens on layer average: what papers call retained tokens."""
        return sum(self.vision_tokens_per_layer) / max(1, len(self.vision_tokens_per_layer))

    @property
    def saved(self) -> float:
        """The share of the language model's MACs that is gone."""
        return 1.0 - self.macs / self.macs_full
