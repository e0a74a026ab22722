"""MACs of a transformer encoder from its token counts. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BlockShape", "Cost", "block_macs", "encoder_cost"]


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
