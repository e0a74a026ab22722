"""What a family of vision-language models has to say so that their vision tokens can be reduced. Imports core only.

The pass through the decoder, budgets, cache, statistics and both stages are written once, in `models.decoder`. A family
says where the features of an image come out, which places of the prompt they fill, what a score may look at, and which
tokens see each other in both directions. Models are recognised by the names of their classes.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokensieve.core.view import TokenView

__all__ = ["Encoded", "VlmFamily", "feature_list"]


class Encoded(ABC):
    """Images (or videos) as stage 1 sees them, before it has chosen.

    pooler_output: for each image as many times its number as it has tokens. generate repeats this list for beams and
    counts its lengths; `order` reads it back.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.pooler_output = [torch.full((n,), i) for i, n in enumerate(lengths)]
        self.lengths = lengths

    def order(self) -> list[int]:
        """Numbers of the images that the prompts ask for, in their order."""
        return [int(number[0]) for number in self.pooler_output]

    def choosable(self, image: int) -> Tensor | None:
        """(n,) bool: which tokens of an image a method chooses among. None: all."""
        return None

    def follows(self, image: int, stays: Tensor) -> Tensor:
        """(n,) bool: all tokens that stay where `stays` are the chosen ones: ends of rows that still have a token."""
        return stays

    def blank(self, image: int, like: Tensor) -> Tensor:
        """(n, E) features of an image before the chosen ones are put in: zeros, but for what no method chooses among.
        like: (K, E)."""
        return like.new_zeros(self.lengths[image], like.shape[-1])

    @abstractmethod
    def view(self, images: list[int], text: Tensor | None, valid: Tensor | None, following: bool = False) -> TokenView:
        """The choosable tokens of images that have equally many; text: (I, T, D) embeddings of their questions.

        following: with the attention of the block that takes the features, where there is one.
        """

    def joined(self, groups: list[list[int]]) -> Encoded:
        """The same with several tiles as one image. groups: places in `order`, for each image."""
        raise NotImplementedError

    @abstractmethod
    def features(self, tokens: Tensor) -> Tensor:
        """(I, K, D) tokens as the method left them, without prefix -> (I, K, E) what the language model gets."""

    @abstractmethod
    def output(self, features: list[Tensor]) -> Any:
        """What the model's own code takes for these images: one (n, E) for each, in the prompts' order."""


class VlmFamily(ABC):
    """A kind of vision-language model."""

    name: ClassVar[str]
    models: ClassVar[tuple[str, ...]]  # classes of the model without its head
    tower: ClassVar[str] = "vision_tower"
    language: ClassVar[str] = "language_model"
    projector: ClassVar[str | None] = "multi_modal_projector"
    pixels: ClassVar[dict[str, str]] = {"image": "pixel_values"}  # modality -> the argument that holds its pixels
    renumbers: ClassVar[bool] = True  # positions are one row of numbers, so they can be counted anew
    chooses_before_projector: ClassVar[bool] = False  # so that it projects fewer tokens
    joins_tiles: ClassVar[bool] = False  # features come tile by tile; a run of placeholders is an image
    blocks_in_window: ClassVar[bool] = True  # a sliding window also bounds tokens that see each other both ways

    def matches(self, inner: nn.Module) -> bool:
        """Whether this is the model without its head, of this family."""
        return type(inner).__name__ in self.models

    def check(self, inner: Any, stage1: bool) -> None:  # noqa: B027
        """Raise UnsupportedModelError where a variant cannot be reduced."""

    def language_model(self, inner: Any) -> Any:
        return getattr(inner, self.language)

    def vision_tower(self, inner: Any) -> Any:
        return getattr(inner, self.tower)

    def projection(self, inner: Any) -> nn.Module | None:
        """What stands between tower and language model; None where the tower ends with it."""
        return None if self.projector is None else getattr(inner, self.projector)

    def token_id(self, inner: Any, modality: str) -> int:
        return int(getattr(inner.config, f"{modality}_token_id"))

    @abstractmethod
    def grid(self, inner: Any) -> tuple[int, int]:
        """Tokens down and across that the language model gets from an image of the usual size."""

    def patches(self, inner: Any) -> int:
        """Vision tokens of one image of the usual size, before any reduction."""
        down, across = self.grid(inner)
        return down * across

    @abstractmethod
    def tower_macs(self, inner: Any, tokens: float) -> int:
        """MACs of the vision tower for an image of which the language model gets that many tokens."""

    def vision_width(self, inner: Any) -> int:
        """Width of the tokens that stage 1 chooses among."""
        return int(inner.config.text_config.hidden_size)

    def arguments(self, inner: Any, modality: str) -> tuple[str, ...]:
        """Names of what `encode` takes beside the pixels."""
        return ()

    def own_features(self, inner: Any, modality: str, given: dict[str, Any]) -> Any:
        """The model's own features; given: the arguments of its forward."""
        names = (self.pixels[modality], *self.arguments(inner, modality))
        arguments = {name: given[name] for name in names if given.get(name) is not None}
        return getattr(inner, f"get_{modality}_features")(**arguments, return_dict=True)

    @abstractmethod
    def encode(self, inner: Any, modality: str, given: dict[str, Any]) -> Encoded:
        """What stage 1 sees of the images; given: the arguments of the model's forward."""

    def lengths(self, output: Any) -> list[int]:
        """Tokens of each image, from the model's own features."""
        return [len(feature) for feature in feature_list(output.pooler_output)]

    def blocks(self, inner: Any, given: dict[str, Any]) -> Tensor | None:
        """(B, L) int64: tokens of the same number see each other in both directions, -1: only what comes before. None:
        there are none. given: the arguments of the model's forward."""
        return None


def feature_list(features: Any) -> list[Tensor]:
    """The features of each image as (n, E), however a model packs them."""
    return [feature.reshape(-1, feature.shape[-1]) if feature.dim() > 1 else feature for feature in features]


def packed_like(output: Any, features: list[Tensor]) -> Any:
    """A model's own output with other features: as a tensor or a list of them, as it has them."""
    found, own = copy.copy(output), output.pooler_output
    if isinstance(own, Tensor):
        found.pooler_output = torch.cat(features).reshape(-1, *own.shape[1:])
    else:
        found.pooler_output = features
    return found
