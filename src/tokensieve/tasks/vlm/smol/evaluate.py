"""How often SmolLaVA is right about pictures of test photos, and how often a guess from the wording alone is.

Questions about one picture go through the language model in one pack. Imports torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tokensieve.tasks.vlm.smol.data import draw_photo_questions
from tokensieve.tasks.vlm.smol.features import image_tensor, tower_features
from tokensieve.tasks.vlm.smol.packing import Texts, answer_logits, answers_right, pack, pool
from tokensieve.tasks.vlm.smol.questions import KINDS

__all__ = ["blind_answers", "evaluate_smol", "shares_by_kind"]

Scores = list[tuple[str, bool]]  # kind of the question, whether the answer is right


@torch.inference_mode()
def evaluate_smol(
    model: Any, tokenizer: Any, images: int, seed: int, side: int = 16, combinations: str = "all",
    tick: Callable[[int], None] = lambda done: None,
) -> Scores:  # fmt: skip
    """side: the picture's tokens are pooled to side x side after the projector. combinations: see `make_picture`; of
    "unseen" only the questions about such a pair count."""
    texts, inner, scores = Texts(tokenizer), model.model, Scores()
    for number, (picture, questions) in enumerate(draw_photo_questions(images, seed, "test", combinations)):
        asked = [q for q in questions if combinations != "unseen" or q.unseen]
        if asked:
            features = tower_features(inner.vision_tower, image_tensor(picture.pixels[None]))
            image = pool(inner.multi_modal_projector(features), side)
            packed = pack(texts, [[(q.text, q.answer) for q in asked]])
            logits = answer_logits(inner.language_model, model.lm_head, image, packed)
            right = answers_right(logits, packed, len(asked))
            scores += [(q.kind, good) for q, good in zip(asked, right, strict=True)]
        tick(number + 1)
    return scores


def blind_answers(train: int, images: int, seed: int) -> Scores:
    """The commonest answer to each wording in `train` training pictures, on the test pictures of `evaluate_smol`."""
    common: dict[str, Counter[str]] = defaultdict(Counter)
    of_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for _, questions in draw_photo_questions(train, seed, "train", "seen", each=3):
        for q in questions:
            common[q.text][q.answer] += 1
            of_kind[q.kind][q.answer] += 1
    return [
        (q.kind, (common.get(q.text) or of_kind[q.kind]).most_common(1)[0][0] == q.answer)
        for _, questions in draw_photo_questions(images, seed, "test")
        for q in questions
    ]


def shares_by_kind(scores: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """Share of right answers by kind, "all" over all questions, and their number."""
    found: dict[str, list[bool]] = defaultdict(list)
    for kind, good in scores:
        found[kind].append(good)
    every = [good for goods in found.values() for good in goods]
    shares = {kind: sum(found[kind]) / len(found[kind]) for kind in KINDS if kind in found}
    return {**shares, "all": sum(every) / max(1, len(every)), "questions": len(every)}
