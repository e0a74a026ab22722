"""The legacy names, as thin names over the code that the rest of the package runs.

`apply_token_selection` and the four steps before it work on bare features (B, 1+N, D), CLS first; without projections
the features themselves stand in for queries and keys, split into `heads` heads (1 by default). The others work on a
model; those that prune go through `attach`. Imports adapters, methods and core.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core.reduction import take_tokens
from tokensieve.core.score import diversity
from tokensieve.core.view import TokenView
from tokensieve.errors import UnsupportedModelError
from tokensieve.methods.anchor import Anchor
from tokensieve.models.attach import attach, find_tower
from tokensieve.models.handle import Handle

__all__ = [
    "PrunedVisionEncoder",
    "apply_pruning_to_model",
    "apply_token_selection",
    "compute_diversity_scores",
    "compute_importance_scores",
    "get_image_features_with_tokens",
    "select_anchor_tokens",
    "select_tokens_with_scoring",
]


def select_anchor_tokens(tokens: Tensor, k: int = 10, heads: int = 1) -> Tensor:
    """(B, 1+N, D) -> (B, k) indices among the N patches, those with the highest CLS attention, ascending."""
    view = TokenView.of(tokens, heads)
    return Anchor(k=k).anchors(view, view.n)


def compute_importance_scores(tokens: Tensor, anchors: Tensor, heads: int = 1) -> Tensor:
    """(B, 1+N, D) and anchors (B, k) -> (B, N): mean attention of each patch to the anchors, softmax over all keys."""
    return TokenView.of(tokens, heads).mean_attention_to(anchors)


def compute_diversity_scores(tokens: Tensor, anchors: Tensor) -> Tensor:
    """(B, 1+N, D) and anchors (B, k) -> (B, N): 1 - the largest cosine to an anchor."""
    patches = tokens[:, 1:]
    return diversity(patches, take_tokens(patches, anchors))


def select_tokens_with_scoring(
    importance: Tensor,
    diversity_scores: Tensor,
    anchors: Tensor,
    m: int = 50,
    alpha: float = 0.5,
    normalize: str | None = "minmax",
) -> Tensor:
    """Scores (B, N) each, anchors (B, k) -> (B, k+m) indices: the anchors and the m best others, ascending.

    normalize=None is the literal formula, unscaled, in which alpha does little.
    """
    method = Anchor(k=anchors.shape[1], m=m, alpha=alpha, normalize=normalize)
    scores = method.weigh(importance, diversity_scores.to(importance.dtype))
    return method.choose(scores, anchors, min(anchors.shape[1] + m, scores.shape[1]))


def apply_token_selection(
    tokens: Tensor, k: int = 10, m: int = 50, alpha: float = 0.5, heads: int = 1, normalize: str | None = "minmax"
) -> Tensor:
    """(B, 1+N, D) -> the same shape: CLS, anchors and the top m in their places, zeros elsewhere.

    A 2-D input is pooled already and comes back as it is. Where k + m are all there are, a warning says so.
    """
    if tokens.dim() == 2:
        return tokens
    view = TokenView.of(tokens, heads)
    method = Anchor(k=k, m=m, alpha=alpha, normalize=normalize)
    if k + m >= view.n:
        warnings.warn(f"nothing is left out: k + m = {k + m} and there are {view.n} patches", stacklevel=2)
    mask = method.reduce(view, min(k + m, view.n)).mask(view.n)
    lead = torch.ones(view.batch, 1, dtype=torch.bool, device=tokens.device)
    return tokens * torch.cat([lead, mask], dim=1).unsqueeze(-1)


def get_image_features_with_tokens(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The standard CLS feature (B, E), bit for bit, and the patch tokens (B, N, D) as they leave the last block.

    Of a model from which tokens are taken out just now: what that one gives.
    """
    tower, family = find_tower(model)
    last = list(family.blocks(tower).children())[-1]
    caught: list[Tensor] = []
    hook = last.register_forward_hook(lambda module, args, out: caught.append(out))
    try:
        encode: Any = getattr(model, "encode_image", model)
        feature = encode(images)
    finally:
        hook.remove()
    if not isinstance(feature, Tensor):
        raise UnsupportedModelError(f"{type(model).__name__} does not return one feature tensor for an image")
    return feature, caught[-1][:, family.prefix(tower) :]


class PrunedVisionEncoder:
    """An encoder with anchor pruning attached: call it with images to get features. `remove()` undoes it."""

    def __init__(
        self, model: nn.Module, k: int = 10, m: int = 50, alpha: float = 0.5, layer: int | None = None
    ) -> None:
        self.model = model
        self.handle: Handle = attach(model, "anchor", at=layer, k=k, m=m, alpha=alpha)

    def __call__(self, images: Tensor) -> Tensor:
        encode: Any = getattr(self.model, "encode_image", self.model)
        features: Tensor = encode(images)
        return features

    def remove(self) -> None:
        self.handle.remove()


def apply_pruning_to_model(
    model: nn.Module, k_anchors: int = 10, top_m: int = 50, alpha: float = 0.5, layer: int | None = None
) -> PrunedVisionEncoder:
    """Attach anchor pruning to a model: its own `encode_image` is faster from here on, until `.remove()`."""
    return PrunedVisionEncoder(model, k_anchors, top_m, alpha, layer)
