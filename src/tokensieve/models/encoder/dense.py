"""Feature maps of a reduced encoder have their full size. Imports run.

Some callers lay a block's tokens out as a grid: transformers' backbones (DPT, Depth Anything), `output_hidden_states`,
`forward_intermediates` and `get_intermediate_layers` of timm and open_clip, the boxes of OWL-ViT. While such a call
runs, every block takes the tokens that are left from what it is given and returns one token for each patch: a kept one
its own, a merged one that of the patch it went into, a dropped one that of the nearest kept patch in the grid. Prefix
tokens stay in their places; extra tokens are left out. Inside the blocks there are as few tokens as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.models.encoder.run import image_sizes

__all__ = ["DenseFeatures", "DenseTower", "dense_mixin"]

_ALWAYS = ("Backbone", "OwlViT", "Owlv2")  # towers whose last tokens are laid out as a grid, whatever is asked for


@contextmanager
def _full_size(inputs: Iterator[Any]) -> Iterator[None]:
    """Within: forwards return one token for each patch."""
    images = next((x for x in inputs if isinstance(x, Tensor) and x.dim() >= 4), None)
    token = image_sizes.set(() if images is None else tuple(images.shape[2:]))
    try:
        yield
    finally:
        image_sizes.reset(token)


@torch.compiler.disable  # a context variable breaks the graph anyway; so the whole call runs as it stands
def _run(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _full_size(chain(args, kwargs.values())):
        return call(*args, **kwargs)


class DenseTower:
    """Mixin for a tower whose hidden states may be asked for."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = cast(nn.Module, super()).forward
        wanted = kwargs.get("output_hidden_states")
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), "output_hidden_states", False)
        if wanted or any(word in type(self).__name__ for word in _ALWAYS):
            return _run(call, args, kwargs)
        return call(*args, **kwargs)


class DenseFeatures(DenseTower):
    """Mixin for a tower that has `forward_intermediates` beside."""

    def forward_intermediates(self, *args: Any, **kwargs: Any) -> Any:
        return _run(cast(Any, super()).forward_intermediates, args, kwargs)


def dense_mixin(tower: nn.Module) -> type:
    """The mixin for a tower."""
    return DenseFeatures if hasattr(type(tower), "forward_intermediates") else DenseTower
