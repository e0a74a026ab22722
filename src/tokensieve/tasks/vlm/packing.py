"""Many questions about one image in one sequence, none of which sees another: the image's tokens are paid for once.

Each question stands where it would stand alone, right behind the image (position ids start again), and attends to the
image and to itself. So training on a pack is training on single questions. Imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokensieve.tasks.vlm.processor import ASSISTANT, USER
from tokensieve.tasks.vlm.scenes import GRID

__all__ = ["PREFIX", "Pack", "Words", "pack"]

PREFIX = 2 + GRID * GRID  # <s> user: and the image
_PIECES = re.compile(r"\w+:|[\w\-]+|[^\w\s]")
_IGNORE = -100


class Words:
    """Token ids of texts, cut as the tokenizer cuts them; remembers what it has seen."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary
        self._seen: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        if text not in self._seen:
            self._seen[text] = [self.vocabulary[piece] for piece in _PIECES.findall(text.lower())]
        return self._seen[text]

    @property
    def prefix(self) -> list[int]:
        """What stands before the image."""
        return [self.vocabulary["<s>"], self.vocabulary[USER]]


@dataclass(frozen=True)
class Pack:
    """The text behind B images, T tokens each, padded with segment -1.

    ids, segment, position: (B, T). targets: (B, T), the token that should follow, -100 where nobody asks. ends: (B, T)
    bool, where that token is </s>, which is easy.
    """

    ids: Tensor
    segment: Tensor
    position: Tensor
    targets: Tensor
    ends: Tensor

    def mask(self) -> Tensor:
        """(B, 1, P+T, P+T) bool, True where a query (row) may look: at its past, of text its own question's."""
        count, length = self.ids.shape
        whole = torch.ones(PREFIX + length, PREFIX + length, dtype=torch.bool).tril().repeat(count, 1, 1)
        whole[:, PREFIX:, PREFIX:] &= self.segment[:, :, None] == self.segment[:, None, :]
        return whole[:, None]

    def positions(self) -> Tensor:
        """(B, P+T) position ids of image and text."""
        return torch.cat([torch.arange(PREFIX).expand(len(self.ids), -1), self.position], 1)


def pack(words: Words, dialogues: Sequence[Sequence[tuple[str, str]]]) -> Pack:
    """(question, answer) pairs, a list for each image -> one Pack, as long as the longest list."""
    end, assistant = words.vocabulary["</s>"], words.vocabulary[ASSISTANT]
    rows = []
    for pairs in dialogues:
        row: list[tuple[int, int, int, int]] = []
        for number, (question, answer) in enumerate(pairs):
            asked = [*words(question), assistant]
            whole = [*asked, *words(answer), end]
            for place, token in enumerate(whole[:-1]):  # </s> is only ever a target
                row.append((token, number, PREFIX + place, whole[place + 1] if place >= len(asked) - 1 else _IGNORE))
        rows.append(row)
    length = max(len(row) for row in rows)
    table = np.empty((len(rows), length, 4), dtype=np.int64)
    table[:] = (words.vocabulary["<pad>"], -1, PREFIX, _IGNORE)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    ids, segment, position, targets = torch.from_numpy(table).unbind(-1)
    return Pack(ids, segment, position, targets, targets == end)
