"""The projector's first lessons, patch by patch, without the language model: each patch becomes words of its own.

What a patch shows is known (a class, a sign's text and colour, or backdrop), and where it is. So the projector is
taught to give the embeddings of those words: it sees "cat", "top" and "left". Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tokensieve.tasks.vlm.smol.features import Features
from tokensieve.tasks.vlm.smol.photos import CLASSES
from tokensieve.tasks.vlm.smol.pictures import BACKDROP, COLOURS, PATCHES, SIGN, TEXTS, Picture
from tokensieve.training import Step, Validation
from tokensieve.training.checkpoint import save_tensors

__all__ = ["PatchConfig", "PatchTask", "PatchWords", "fold_scaling", "start_by_regression"]

_PLACE = 0.5  # weight of the words for row and column beside the word for what is there
_BACKDROP = 0.3  # how much a patch of backdrop counts


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


@dataclass(frozen=True)
class PatchConfig:
    """batch: pictures a step."""

    seed: int = 0
    batch: int = 8
    lr: float = 1e-3
    weight_decay: float = 0.05


class PatchTask:
    """A task of `training.fit`: the projector from standardised features to words."""

    def __init__(
        self, config: PatchConfig, projector: nn.Module, words: PatchWords, train: Features, held_out: Features
    ) -> None:
        self.config, self.projector, self.words = config, projector, words
        self.train, self.held_out = train, held_out
        self.scale = Scaling.of(train)
        self.modules: Mapping[str, nn.Module] = {"projector": projector}
        self.optimisers: Mapping[str, Optimizer] = {
            "projector": torch.optim.AdamW(projector.parameters(), config.lr, weight_decay=config.weight_decay)
        }

    def batches(self, start: int) -> Iterator[list[int]]:
        step = start
        while True:
            rng = np.random.default_rng([self.config.seed, step])
            yield sorted(int(n) for n in rng.choice(self.train.count, self.config.batch, replace=False))
            step += 1

    def _loss(self, features: Features, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        out = self.projector(self.scale(features.get(numbers)))
        shown, target = self.words.targets([features.picture(n) for n in numbers])
        weight = torch.where(shown == len(CLASSES) + 1, _BACKDROP, 1.0)
        power = (self.words.classes - self.words.mean).pow(2).mean()
        squared = (out - target).pow(2).mean(-1) / power
        directions = F.normalize(self.words.classes - self.words.mean, dim=-1)
        logits = (out - self.words.mean) @ directions.T / power.sqrt() / 3
        named = F.cross_entropy(logits.flatten(0, 1), shown.flatten(), reduction="none").view_as(shown)
        return ((squared + named) * weight).sum() / weight.sum(), logits, shown

    def step(self, batch: list[int], step: int) -> Step:
        return Step({"projector": self._loss(self.train, batch)[0]})

    def validate(self) -> Validation:
        """How often the likeliest class is right: of patches, and of whole things by the mean of their patches."""
        losses, right, whole = [], [], []
        for start in range(0, self.held_out.count, 20):
            numbers = list(range(start, min(start + 20, self.held_out.count)))
            loss, logits, shown = self._loss(self.held_out, numbers)
            losses.append(float(loss))
            right.append((logits.argmax(-1) == shown)[shown < len(CLASSES)].float().mean())
            for index, number in enumerate(numbers):
                whole += _things_right(self.held_out.picture(number), logits[index, :, : len(CLASSES)])
        patches, things = float(torch.stack(right).mean()), float(np.mean(whole))
        return Validation(things, {"loss": float(np.mean(losses)), "patches": patches, "things": things})

    def facts(self) -> dict[str, Any]:
        return {"stage": "projector", **vars(self.config), "pictures": self.train.count}

    def export(self, path: Path) -> None:
        state = fold_scaling(self.projector, self.scale)
        save_tensors(path, {f"projector.{name}": x for name, x in state.items()}, {"format": "pt"})


@torch.no_grad()
def start_by_regression(task: PatchTask, pictures: int, shrink: float = 1e-3) -> None:
    """Solve for the second layer by ridge regression, the first one as random as it is; on the first
    `pictures` pictures."""
    first, second = task.projector.linear_1, task.projector.linear_2
    width, out = second.in_features + 1, second.out_features
    gram, moment = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, out, dtype=torch.float64)
    for start in range(0, min(pictures, task.train.count), 8):
        numbers = list(range(start, min(start + 8, task.train.count)))
        hidden = task.projector.act(first(task.scale(task.train.get(numbers)))).flatten(0, 1)
        shown, target = task.words.targets([task.train.picture(n) for n in numbers])
        weight = torch.where(shown == len(CLASSES) + 1, _BACKDROP, 1.0).flatten()[:, None]
        hidden = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
        gram += ((hidden * weight).T @ hidden).double()
        moment += ((hidden * weight).T @ (target.flatten(0, 1) - task.words.mean)).double()
    ridge = shrink * gram.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    solved = torch.linalg.solve(gram + ridge, moment).float()
    second.weight.copy_(solved[:-1].T)
    second.bias.copy_(solved[-1] + task.words.mean)


class Scaling:
    """Standardises features: each channel has mean 0 and deviation 1 over the training pictures."""

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        self.mean, self.deviation = mean, deviation

    @classmethod
    def of(cls, features: Features) -> Scaling:
        some = features.get(list(range(0, features.count, max(1, features.count // 100))))
        return cls(some.mean((0, 1)), some.std((0, 1)))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


@torch.no_grad()
def fold_scaling(projector: Any, scale: Scaling) -> dict[str, Tensor]:
    """The projector's tensors for features that are not standardised."""
    state = {name: x.detach().clone() for name, x in projector.state_dict().items()}
    state["linear_1.weight"] = state["linear_1.weight"] / scale.deviation
    state["linear_1.bias"] = state["linear_1.bias"] - state["linear_1.weight"] @ scale.mean
    return state


def _things_right(picture: Picture, logits: Tensor) -> list[bool]:
    """logits: (256, classes). For each thing whether its patches' mean has its class on top."""
    grid = logits.view(PATCHES, PATCHES, -1)
    shown = torch.from_numpy(picture.patches)
    step = 224 // PATCHES
    middle = torch.arange(PATCHES) * step + step / 2
    found = []
    for thing in picture.things:
        left, top, side = thing.box
        rows, columns = ((middle >= at) & (middle < at + side) for at in (top, left))
        here = rows[:, None] & columns & (shown == thing.label)
        found.append(bool(grid[here].mean(0).argmax() == thing.label))
    return found
