"""Many questions about one picture in one sequence, none of which sees another: the picture is paid for once.

As `tasks.vlm.packing`, for a tokenizer of sub-words, and with the picture's tokens pooled if wanted. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.tasks.vlm.answers import PROMPT
from tokensieve.tasks.vlm.smol.features import TOKENS
from tokensieve.tasks.vlm.smol.pictures import PATCHES

__all__ = ["IGNORE", "Pack", "Texts", "answer_logits", "answers_right", "pack", "pool"]

IGNORE = -100


class Texts:
    """Token ids of the prompt's parts, as the processor cuts the whole; remembers what it has seen."""

    def __init__(self, tokenizer: Any, prompt: str = PROMPT) -> None:
        self.tokenizer = tokenizer
        self.before, self.behind = prompt.split("<image>")
        self.prefix: list[int] = tokenizer(self.before, add_special_tokens=False)["input_ids"]
        self.end: int = tokenizer.eos_token_id
        self._seen: dict[str, list[int]] = {}

    def question(self, text: str) -> list[int]:
        """What stands behind the image, up to the answer."""
        return self._ids(self.behind.replace("{question}", text))

    def answer(self, text: str) -> list[int]:
        return [*self._ids(f" {text}"), self.end]

    def _ids(self, text: str) -> list[int]:
        if text not in self._seen:
            self._seen[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._seen[text]


@dataclass(frozen=True)
class Pack:
    """The text behind B pictures, T tokens each, padded with segment -1; `before` tokens of text stand before them.

    ids, segment, position: (B, T), position counted from the end of the picture. targets: (B, T), the token that should
    follow, IGNORE where nobody asks. ends: (B, T) bool, where that token ends the answer.
    """

    ids: Tensor
    segment: Tensor
    position: Tensor
    targets: Tensor
    ends: Tensor
    before: list[int]

    def mask(self, tokens: int) -> Tensor:
        """(B, 1, L, L) float32, 0 where a query (row) may look: at its past, of text its own question's; else -inf."""
        head = len(self.before) + tokens
        count, length = self.ids.shape
        whole = torch.ones(head + length, head + length, dtype=torch.bool).tril().repeat(count, 1, 1)
        whole[:, head:, head:] &= self.segment[:, :, None] == self.segment[:, None, :]
        return torch.zeros(whole.shape).masked_fill(~whole, -torch.inf)[:, None]

    def positions(self, tokens: int) -> Tensor:
        """(B, L) position ids. Pooled tokens stand where the last of their patches would."""
        start = len(self.before)
        side = round(tokens**0.5)
        step = PATCHES // side
        at = torch.arange(step - 1, PATCHES, step)
        image = (at[:, None] * PATCHES + at).flatten() + start
        head = torch.cat([torch.arange(start), image]).expand(len(self.ids), -1)
        return torch.cat([head, self.position + start + TOKENS], 1)


def pack(texts: Texts, dialogues: Sequence[Sequence[tuple[str, str]]]) -> Pack:
    """(question, answer) pairs, a list for each picture -> one Pack, as long as the longest list."""
    rows = []
    for pairs in dialogues:
        row: list[tuple[int, int, int, int, int]] = []
        for number, (question, answer) in enumerate(pairs):
            asked, said = texts.question(question), texts.answer(answer)
            whole = [*asked, *said]
            for place, token in enumerate(whole[:-1]):  # the end is only ever a target
                target = whole[place + 1] if place >= len(asked) - 1 else IGNORE
                row.append((token, number, place, target, int(place == len(whole) - 2)))
        rows.append(row)
    length = max(len(row) for row in rows)
    table = np.empty((len(rows), length, 5), dtype=np.int64)
    table[:] = (texts.end, -1, 0, IGNORE, 0)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    ids, segment, position, targets, ends = torch.from_numpy(table).unbind(-1)
    return Pack(ids, segment, position, targets, ends.bool(), texts.prefix)


def pool(tokens: Tensor, side: int) -> Tensor:
    """(B, 256, D) -> (B, side * side, D): means of neighbouring patches; 16 leaves them as they are."""
    if side == PATCHES:
        return tokens
    grid = tokens.transpose(1, 2).unflatten(2, (PATCHES, PATCHES))
    return F.avg_pool2d(grid, PATCHES // side).flatten(2).transpose(1, 2)


def answer_logits(language: Any, head: Any, image: Tensor, packed: Pack) -> Tensor:
    """(answers' tokens, vocabulary): logits at every place that has a target, in the pack's order.

    language: the LlamaModel. image: (B, K, D) projected, perhaps pooled.
    """
    embed = language.embed_tokens
    start = embed(torch.tensor(packed.before, device=image.device)).expand(len(image), -1, -1)
    inputs = torch.cat([start, image.to(start.dtype), embed(packed.ids)], 1)
    tokens = image.shape[1]
    hidden = language(
        inputs_embeds=inputs, attention_mask=packed.mask(tokens).to(image.device, inputs.dtype),
        position_ids=packed.positions(tokens).to(image.device), use_cache=False,
    ).last_hidden_state  # fmt: skip
    return head(hidden[:, len(packed.before) + tokens :][packed.targets >= 0])


def answers_right(logits: Tensor, packed: Pack, questions: int) -> list[bool]:
    """Of a pack of one picture, whether each answer's tokens are the likeliest, each behind the true ones before it.

    That is the same as greedy generation being right.
    """
    there = packed.targets >= 0
    wrong = torch.zeros(packed.targets.shape, dtype=torch.bool)
    wrong[there] = logits.argmax(-1).cpu() != packed.targets[there]
    return [not bool(wrong[packed.segment == number].any()) for number in range(questions)]
