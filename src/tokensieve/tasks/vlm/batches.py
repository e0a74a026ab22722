"""Questions as batches to train on: prompts padded on the left, their answers behind them padded on the right.

Every batch depends on its step alone, so that a resumed run sees what it would have seen. Imports torch and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokensieve.errors import DataError
from tokensieve.tasks.vlm.data import VisualQuestion, load_image, load_questions
from tokensieve.tasks.vlm.packing import Words
from tokensieve.tasks.vlm.processor import ASSISTANT, IMAGE, PROMPT
from tokensieve.tasks.vlm.questions import KINDS, ask
from tokensieve.tasks.vlm.scenes import GRID, make_scenes
from tokensieve.tasks.vlm.small import image_tensor

__all__ = ["Batch", "FileQuestions", "GeneratedQuestions", "Questions", "collate", "scaled_down"]

_IGNORE = -100
_ALL = slice(None)
_TERSE = 0.1  # share of terse wordings, as the small model saw them last
_HELD_BACK = 1_800_000  # seeds of the scenes that choose the best step lie beyond any training step's


@dataclass
class Batch:
    """ids, mask: (B, P + T), prompts in the first P columns. answers: (B, T), -100 where one is shorter. pixels."""

    ids: Tensor
    mask: Tensor
    answers: Tensor
    pixels: Tensor

    @property
    def prompt_length(self) -> int:
        return self.ids.shape[1] - self.answers.shape[1]

    def prompt(self) -> Tensor:
        """(B, P + T) bool: True for what is asked, False for what is answered."""
        column = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (column < self.prompt_length).expand_as(self.ids)

    def rows(self, own: slice) -> Batch:
        """Some of its rows, padded as before."""
        return Batch(self.ids[own], self.mask[own], self.answers[own], self.pixels[own])

    def to(self, device: Any) -> Batch:
        """On another device; Accelerate calls it."""
        return Batch(*(part.to(device) for part in (self.ids, self.mask, self.answers, self.pixels)))


def collate(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pixels: Tensor, pad: int) -> Batch:
    """Rows of token ids -> one batch. answers end with the token that ends them."""
    left, right = max(map(len, prompts)), max(map(len, answers))
    ids = torch.full((len(prompts), left + right), pad)
    mask = torch.zeros_like(ids)
    wanted = torch.full((len(prompts), right), _IGNORE)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = left - len(prompt), left + len(answer)
        ids[row, start:end] = torch.tensor([*prompt, *answer])
        mask[row, start:end] = 1
        wanted[row, : len(answer)] = torch.tensor(list(answer))
    return Batch(ids, mask, wanted, pixels)


class Questions(Protocol):
    """Where batches come from. own: the rows of a step's batch that are wanted, for a process that has a part of it."""

    def __len__(self) -> int: ...

    def batch(self, step: int, size: int, own: slice = ...) -> Batch: ...

    def held_back(self, size: int) -> Iterator[Batch]: ...

    def facts(self) -> dict[str, Any]: ...


class GeneratedQuestions:
    """Scenes and questions made for each step; those held out show other scenes of the same kind."""

    def __init__(self, processor: Any, questions: int, held_out: int, seed: int) -> None:
        self.vocabulary = processor.tokenizer.get_vocab()
        self.words = Words(self.vocabulary)
        self.questions, self.held_out, self.seed = questions, held_out, seed

    def __len__(self) -> int:
        return self.questions

    def batch(self, step: int, size: int, own: slice = _ALL) -> Batch:
        return self._drawn([self.seed, step], size, _TERSE).rows(own)

    def held_back(self, size: int) -> Iterator[Batch]:
        for start in range(0, self.held_out, size):
            yield self._drawn([_HELD_BACK, start], min(size, self.held_out - start), 0.0)

    def _drawn(self, seed: Sequence[int], size: int, terse: float) -> Batch:
        scenes = make_scenes(size, list(seed), "train")
        rng = np.random.default_rng([*seed, 1])
        asked = []
        for index in range(size):
            kinds = [KINDS[i] for i in rng.permutation(len(KINDS))]  # not every scene can be asked every kind
            asked.append(next(ask(scenes, index, rng, kinds, terse)))
        image, assistant = self.vocabulary[IMAGE], self.vocabulary[ASSISTANT]
        prompts = [
            [*self.words.prefix, *[image] * (GRID * GRID), *self.words(question.text), assistant] for question in asked
        ]
        answers = [[*self.words(question.answer), self.vocabulary["</s>"]] for question in asked]
        return collate(prompts, answers, image_tensor(scenes.images), self.vocabulary["<pad>"])

    def facts(self) -> dict[str, Any]:
        return {"generated": self.questions}


class FileQuestions:
    """Questions of JSONL files, in another order in each epoch. limit: longest side of an image, None for any."""

    def __init__(self, processor: Any, train: str, val: str, seed: int, limit: int | None = None) -> None:
        self.processor, self.seed, self.limit = processor, seed, limit
        self.train, self.val = load_questions(Path(train)), load_questions(Path(val))
        if Path(train).resolve() == Path(val).resolve():
            raise DataError(
                f"dataset_settings.train and .val are the same file {train}: evaluate on others than you train on"
            )

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, step: int, size: int, own: slice = _ALL) -> Batch:
        chosen: list[VisualQuestion] = []
        at = step * size
        while len(chosen) < size:
            epoch, start = divmod(at + len(chosen), len(self.train))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.train))
            chosen += [self.train[i] for i in order[start : start + size - len(chosen)]]
        return self._made(chosen[own])

    def held_back(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self.val), size):
            yield self._made(self.val[start : start + size])

    def _made(self, questions: Sequence[VisualQuestion]) -> Batch:
        tokenizer = self.processor.tokenizer
        images = [scaled_down(load_image(question.image), self.limit) for question in questions]
        texts = [PROMPT.format(question=question.question) for question in questions]
        made = self.processor(images=images, text=texts, padding=True, padding_side="left", return_tensors="pt")
        prompts = [
            row[kept.bool()].tolist() for row, kept in zip(made["input_ids"], made["attention_mask"], strict=True)
        ]
        answers = [
            [*tokenizer(question.answers[0], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for question in questions
        ]
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return collate(prompts, answers, made["pixel_values"], pad)

    def facts(self) -> dict[str, Any]:
        return {"train": len(self.train), "val": len(self.val)}


def scaled_down(image: Any, limit: int | None) -> Any:
    """The picture with its longest side at most `limit` pixels."""
    longest = max(image.size)
    if limit is None or longest <= limit:
        return image
    return image.resize([max(1, round(side * limit / longest)) for side in image.size])
