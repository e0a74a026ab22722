"""The fused-attention baseline of the benchmark. Imports attach and a method."""

from __future__ import annotations

import warnings

from torch import nn

from tokensieve.methods.registry import make_method
from tokensieve.models.attach import find_tower
from tokensieve.models.encoder.handle import EncoderHandle

__all__ = ["FusedBaseline", "attach_fused"]


class FusedBaseline(EncoderHandle):
    """A handle that runs every block our way - linear + scaled_dot_product_attention - and removes nothing.

    Plain keep-everything leaves the blocks alone. Stock nn.MultiheadAttention can be slower than linear + SDPA, and a
    reduction measured against stock alone would take credit for that difference. This is the fair opponent.
    """

    def _touches(self, index: int) -> bool:
        return True


def attach_fused(model: nn.Module) -> FusedBaseline:
    """Put a model on fused attention, with all its tokens, until the returned handle is removed."""
    tower, family = find_tower(model)
    handle = FusedBaseline(
        model, tower, family, make_method("random"), at=(0,), keep=1.0, keep_average=None, schedule="constant",
        mode="prune", fuse_weight=0.0, text=None,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is reduced is the point
        handle.install()
    return handle
