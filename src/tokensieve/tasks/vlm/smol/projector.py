"""The projector's start, patch by patch, without the language model: each patch becomes words.

What a patch shows is known (a class, a sign's text and colour, or backdrop), and where it is. So ridge regression maps
it to the embeddings of those words: the language model sees "cat", "top" and "left" there. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tokensieve.tasks.vlm.smol.features import Features
from tokensieve.tasks.vlm.smol.photos import CLASSES
from tokensieve.tasks.vlm.smol.pictures import BACKDROP, COLOURS, PATCHES, SIGN, TEXTS, Picture

__all__ = ["PatchWords", "Scaling", "solve_projector", "things_right"]

_PLACE = 0.5  # weight of the words for row and column beside the word for what is there
_BACKDROP = 0.3  # how much a patch of backdrop counts
_TOGETHER = 8  # pictures at a time


class PatchWords:
    """Word embeddings as targets. table: (V, D), the language model's; its mean is taken off and put back."""

    def __init__(self, table: Tensor, tokenizer: Any) -> None:
        self.table, self.tokenizer = table, tokenizer
        self.classes = torch.stack([self._of(name) for name in (*CLASSES, "sign", "background")])
        self.texts = torch.stack([self._of(text) for text in TEXTS])
        self.colours = torch.stack([self._of(colour) for colour in COLOURS])
        self.mean = torch.cat([self.classes, self.texts, self.colours]).mean(0)
        share = torch.linspace(0, 1, PATCHES)[:, None]
        rows, columns = (
            (1 - share) * self._of(first) + share * self._of(last)
            for first, last in (("top", "bottom"), ("left", "right"))
        )
        grid = rows[:, None] + columns[None] - self._of("top") / 2 - self._of("bottom") / 2
        grid = grid - self._of("left") / 2 - self._of("right") / 2
        self.places = grid.flatten(0, 1)  # (256, D), zero in the middle of the picture

    def _of(self, word: str) -> Tensor:
        """The mean of a word's tokens."""
        return self.table[self.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]].mean(0)

    def targets(self, pictures: list[Picture]) -> tuple[Tensor, Tensor]:
        """(B, 256) int64, what each patch shows (a class, sign, background), and (B, 256, D) its words."""
        shown = torch.from_numpy(np.stack([picture.patches for picture in pictures])).flatten(1)
        shown = torch.where(shown == BACKDROP, len(CLASSES) + 1, shown)
        words = self.classes[shown] - self.mean
        for index, picture in enumerate(pictures):
            if picture.sign is not None:
                here = shown[index] == SIGN
                more = self.texts[picture.sign.text] + self.colours[picture.sign.colour] - 2 * self.mean
                words[index, here] += more
        return shown, self.mean + words + _PLACE * self.places


class Scaling:
    """Standardises features: each channel has mean 0 and deviation 1 over some pictures. mean, deviation: (768,)."""

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        self.mean, self.deviation = mean, deviation

    @classmethod
    def of(cls, features: Features) -> Scaling:
        some = features.get(list(range(0, features.count, max(1, features.count // 100))))
        return cls(some.mean((0, 1)), some.std((0, 1)))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


@torch.no_grad()
def solve_projector(
    projector: Any,
    words: PatchWords,
    features: Features,
    pictures: int,
    seed: int = 0,
    shrink: float = 1e-3,
    tick: Callable[[int], None] = lambda done: None,
) -> None:
    """Set a LLaVA projector: its first layer random over standardised features, its second solved by ridge regression
    on the first `pictures` pictures. shrink: of the ridge, against the mean of the Gram matrix's diagonal."""
    first, second = projector.linear_1, projector.linear_2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nn.init.xavier_uniform_(first.weight)
    nn.init.zeros_(first.bias)
    _fold(first, Scaling.of(features))
    width = second.in_features + 1
    gram = torch.zeros(width, width, dtype=torch.float64)
    moment = torch.zeros(width, second.out_features, dtype=torch.float64)
    for start in range(0, pictures, _TOGETHER):
        numbers = list(range(start, min(start + _TOGETHER, pictures)))
        hidden = projector.act(first(features.get(numbers))).flatten(0, 1)
        hidden = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
        shown, target = words.targets([features.picture(number) for number in numbers])
        weighted = hidden * torch.where(shown == len(CLASSES) + 1, _BACKDROP, 1.0).flatten()[:, None]
        gram += (weighted.T @ hidden).double()
        moment += (weighted.T @ (target.flatten(0, 1) - words.mean)).double()
        tick(numbers[-1] + 1)
    ridge = shrink * gram.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    solved = torch.linalg.solve(gram + ridge, moment).float()
    second.weight.copy_(solved[:-1].T)
    second.bias.copy_(solved[-1] + words.mean)


def _fold(layer: Any, scale: Scaling) -> None:
    """Let a linear layer for standardised features take them as they are."""
    layer.weight /= scale.deviation
    layer.bias -= layer.weight @ scale.mean


@torch.no_grad()
def things_right(projector: Any, words: PatchWords, features: Features) -> float:
    """Share of the things in some pictures of which the projector says the right class: the mean of its patches'
    projections lies nearest to the class's word, by the angle."""
    directions = nn.functional.normalize(words.classes[: len(CLASSES)] - words.mean, dim=-1)
    right = []
    for number in range(features.count):
        picture = features.picture(number)
        logits = (projector(features.get([number]))[0] - words.mean) @ directions.T
        grid = logits.view(PATCHES, PATCHES, -1)
        for thing in picture.things:
            here = torch.from_numpy(picture.where(thing) & (picture.patches == thing.label))
            right.append(bool(grid[here].mean(0).argmax() == thing.label))
    return float(np.mean(right))
