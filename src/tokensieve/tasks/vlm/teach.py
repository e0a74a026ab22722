"""What the small LLaVA is taught with: patch labels for its tower, then packed questions for its decoder.

The tower's labels are words of the decoder's own vocabulary: a patch, projected and normed, shall have the logits of
"red", "circle" and "top-left". So the decoder begins with image tokens that already speak its language. Imports torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.tasks.vlm.packing import PREFIX, Pack, Words, pack
from tokensieve.tasks.vlm.questions import DESCRIBE, KINDS, Question, ask, describe
from tokensieve.tasks.vlm.scenes import COLOURS, DIGITS, PATCH, PLACES, SHAPES, SIDE, Scenes, patch_labels
from tokensieve.tasks.vlm.small import image_tensor

__all__ = ["TowerTeacher", "answer_logits", "answer_loss", "blind_level", "draw_pack", "evaluate_answers"]

NOTHING = "nothing"
_LABELS = {"colour": COLOURS, "shape": SHAPES, "digit": DIGITS, "place": PLACES}
_BACKGROUND = 0.15  # weight of patches that show nothing: most do
_MIDDLE = 4.0  # weight of the one patch that holds a thing's middle
_CLS = 0.3
_OUTLINE = 2.0
_END = 0.05  # weight of </s>, which is learned at once


class TowerTeacher(nn.Module):
    """The tower's lessons. Has two linear heads of its own that are thrown away afterwards.

    - after layer 1, which pixels of the patch belong to a thing; one layer before the features that LLaVA takes, the
      same for the eight neighbours at half resolution: a ladder to the shapes, which otherwise stay at chance for long;
    - of the features that LLaVA takes: colour, shape, digit and place of the thing there, and whether its middle is;
    - of CLS, there and at the end: which colours and shapes the image has, so that its attention means something.
    """

    def __init__(self, width: int, vocabulary: dict[str, int]) -> None:
        super().__init__()
        self.own = nn.Linear(width, PATCH * PATCH)
        self.near = nn.Linear(width, 9 * PATCH * PATCH // 4)
        self.words = {name: torch.tensor([vocabulary[w] for w in (*words, NOTHING)]) for name, words in _LABELS.items()}
        self.middle = vocabulary["object"]

    def forward(self, model: Any, scenes: Scenes) -> tuple[Tensor, dict[str, float]]:
        """The loss, and how often each label is right on the patches that show something."""
        llava, text = model.model, model.model.language_model
        seen = llava.vision_tower(image_tensor(scenes.images), output_hidden_states=True)
        table, project = text.embed_tokens.weight, lambda x: text.norm(llava.multi_modal_projector(x))
        spoken = project(seen.hidden_states[-2][:, 1:])  # (B, 144, D)
        loss, right = self._patches(spoken, table, patch_labels(scenes))
        loss = loss + self._outlines(seen.hidden_states, scenes)
        present = torch.from_numpy(_present(scenes))
        words = torch.cat([self.words["colour"][:-1], self.words["shape"][:-1]])
        for cls in (seen.hidden_states[-2][:, 0], seen.last_hidden_state[:, 0]):
            loss = loss + _CLS * F.binary_cross_entropy_with_logits(project(cls) @ table[words].T, present)
        return loss, right

    def _patches(self, spoken: Tensor, table: Tensor, labels: dict[str, np.ndarray]) -> tuple[Tensor, dict[str, float]]:
        total, right = spoken.new_zeros(()), {}
        for name, words in self.words.items():
            label = torch.from_numpy(labels[name])
            label = torch.where(label < 0, len(words) - 1, label)
            logits = spoken @ table[words].T
            weight = torch.ones(len(words))
            weight[-1] = _BACKGROUND
            total = total + F.cross_entropy(logits.flatten(0, 1), label.flatten(), weight=weight)
            shown = label < len(words) - 1
            right[name] = float((logits.argmax(-1) == label)[shown].float().mean())
        middle = torch.from_numpy(labels["middle"]).float()
        logit = spoken @ table[self.middle]
        return total + F.binary_cross_entropy_with_logits(logit, middle, pos_weight=torch.tensor(_MIDDLE)), right

    def _outlines(self, hidden: Sequence[Tensor], scenes: Scenes) -> Tensor:
        count = len(scenes)
        cover = torch.from_numpy(scenes.cover).reshape(count, 3, 3, SIDE // 3, SIDE // 3)
        cover = cover.permute(0, 1, 3, 2, 4).reshape(count, 1, SIDE, SIDE)
        own = F.unfold(cover, PATCH, stride=PATCH)  # (B, 64, 144)
        near = F.unfold(F.avg_pool2d(cover, 2), 3 * PATCH // 2, stride=PATCH // 2, padding=PATCH // 2)  # (B, 144, 144)
        total = cover.new_zeros(())
        for head, layer, goal in ((self.own, 1, own), (self.near, -3, near)):
            goal = goal.transpose(1, 2)
            weight = torch.where(goal.sum(-1, keepdim=True) > 0, 1.0, 0.1).expand_as(goal)
            loss = F.binary_cross_entropy_with_logits(head(hidden[layer][:, 1:]), goal, weight=weight)
            total = total + _OUTLINE * loss / weight.mean()
        return total


def _present(scenes: Scenes) -> np.ndarray:
    """(B, 10) float32: which of the colours, then of the shapes, an image has."""
    colour = (scenes.colour[:, :, None] == np.arange(len(COLOURS))).any(1)
    shape = (scenes.shape[:, :, None] == np.arange(len(SHAPES))).any(1)
    return np.concatenate([colour, shape], 1).astype(np.float32)


def draw_pack(
    scenes: Scenes, words: Words, seed: Sequence[int], each: int, terse: float, caption: bool
) -> tuple[Pack, list[list[Question]]]:
    """`each` questions of every kind about each image, and a description if wanted, which comes last."""
    rng = np.random.default_rng(list(seed))
    asked = [list(ask(scenes, index, rng, KINDS * each, terse)) for index in range(len(scenes))]
    dialogues = [[(q.text, q.answer) for q in questions] for questions in asked]
    if caption:
        for index, dialogue in enumerate(dialogues):
            dialogue.append((DESCRIBE, describe(scenes, index)))
    return pack(words, dialogues), asked


def answer_logits(model: Any, images: Tensor, packed: Pack, words: Words, blind: bool = False) -> Tensor:
    """(answers, vocabulary): logits at every place of the pack that has a target, in its order.

    blind: the image's tokens are zeros, for a model that is trained to guess from the wording.
    """
    llava, text = model.model, model.model.language_model
    with torch.set_grad_enabled(torch.is_grad_enabled() and next(llava.vision_tower.parameters()).requires_grad):
        features = llava.vision_tower(images, output_hidden_states=True).hidden_states[-2][:, 1:]
    image = llava.multi_modal_projector(features)
    if blind:
        image = torch.zeros_like(image)
    start = text.embed_tokens(torch.tensor(words.prefix)).expand(len(images), -1, -1)
    inputs = torch.cat([start, image, text.embed_tokens(packed.ids)], 1)
    hidden = text(
        inputs_embeds=inputs, attention_mask=packed.mask(), position_ids=packed.positions(), use_cache=False
    ).last_hidden_state  # fmt: skip
    return model.lm_head(hidden[:, PREFIX:][packed.targets >= 0])


def answer_loss(logits: Tensor, packed: Pack) -> Tensor:
    """Mean cross entropy of the answers' tokens, </s> counted little."""
    asked = packed.targets >= 0
    weight = torch.where(packed.ends[asked], _END, 1.0)
    return (F.cross_entropy(logits, packed.targets[asked], reduction="none") * weight).sum() / weight.sum()


@torch.no_grad()
def evaluate_answers(
    model: Any, scenes: Scenes, words: Words, seed: Sequence[int], each: int = 1, terse: float = 0.0,
    blind: bool = False, batch: int = 32,
) -> dict[str, float]:  # fmt: skip
    """Share of questions answered rightly, by kind, "held-out" (about things whose combination training never showed)
    and "all" (mean of the kinds). An answer is right when all its tokens and the end are the likeliest, each behind
    the true ones: the same as greedy generation being right.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    strange = scenes.held_out()
    for at in range(0, len(scenes), batch):
        some = _slice(scenes, at, at + batch)
        packed, asked = draw_pack(some, words, [*seed, at], each, terse, caption=False)
        logits = answer_logits(model, image_tensor(some.images), packed, words, blind)
        wrong = torch.zeros(packed.targets.shape, dtype=torch.bool)
        wrong[packed.targets >= 0] = logits.argmax(-1) != packed.targets[packed.targets >= 0]
        for row, questions in enumerate(asked):
            for number, question in enumerate(questions):
                good = not bool(wrong[row][packed.segment[row] == number].any())
                right[question.kind].append(good)
                if question.about >= 0 and strange[at + row, question.about]:
                    right["held-out"].append(good)
    found = {name: float(np.mean(right[name])) for name in (*KINDS, "held-out") if right[name]}
    return {**found, "all": float(np.mean([found[kind] for kind in KINDS if kind in found]))}


def blind_level(train: Scenes, test: Scenes, seed: Sequence[int]) -> dict[str, float]:
    """How often the commonest training answer to each wording is right on the test scenes: by kind, and "all"."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    by_form: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    rng = np.random.default_rng(list(seed))
    for index in range(len(train)):
        for question in ask(train, index, rng, KINDS * 2):
            answers[question.text][question.answer] += 1
            by_form[question.kind, question.form][question.answer] += 1
    right: dict[str, list[bool]] = defaultdict(list)
    for index in range(len(test)):
        for question in ask(test, index, rng):
            known = answers.get(question.text) or by_form[question.kind, question.form]
            right[question.kind].append(known.most_common(1)[0][0] == question.answer)
    found = {kind: float(np.mean(right[kind])) for kind in KINDS}
    return {**found, "all": float(np.mean(list(found.values())))}


def _slice(scenes: Scenes, start: int, stop: int) -> Scenes:
    return Scenes(**{name: value[start:stop] for name, value in vars(scenes).items()})
