from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from tokensieve.errors import UnknownNameError
from tokensieve.tasks.vlm.smol.photos import CLASSES, PLURALS, Photos
from tokensieve.tasks.vlm.smol.pictures import COLOURS, PLACES, TEXTS, Picture, make_picture
from tokensieve.tasks.vlm.smol.questions import KINDS, NUMBERS, ask, caption, caption_score


def truth(picture: Picture, kind: str, text: str) -> str:
    """The answer, worked out from the wording and the list of things alone."""
    things = [(CLASSES[t.label], PLACES[t.place] if t.place >= 0 else "", t.place) for t in picture.things]
    names = [name for name, _, _ in things]
    words = text.lower().replace(",", " ").replace("?", " ").replace(".", " ").split()
    if kind == "what":
        return names[0]
    if kind == "at":
        place = max((p for p in PLACES if p in text), key=len)
        return next(name for name, at, _ in things if at == place)
    if kind == "exists":
        return "yes" if set(words) & set(names) else "no"
    if kind == "count":
        if "photos" in words:
            return NUMBERS[len(names)]
        return NUMBERS[names.count(CLASSES[next(PLURALS.index(w) for w in words if w in PLURALS)])]
    if kind == "where":
        return next(at for name, at, _ in things if name in words)
    if kind == "beside":
        row, column = divmod(next(p for name, _, p in things if name in words), 3)
        side = next(s for s in ("left of", "right of", "above", "below") if s in text)
        step = {"left of": (0, -2), "right of": (0, 2), "above": (-2, 0), "below": (2, 0)}[side]
        return next(name for name, _, p in things if divmod(p, 3) == (row + step[0], column + step[1]))
    assert picture.sign is not None
    return TEXTS[picture.sign.text] if kind == "sign" else COLOURS[picture.sign.colour]


def asked(noise: Photos, count: int) -> list:
    found = []
    for number in range(count):
        rng = np.random.default_rng([1, number])
        picture = make_picture(noise, rng, combinations="all")
        found += [(picture, question) for question in ask(picture, rng, KINDS * 2)]
    return found


def test_answers_are_true(noise: Photos) -> None:
    found = asked(noise, 200)
    assert {question.kind for _, question in found} == set(KINDS)
    for picture, question in found:
        assert question.answer == truth(picture, question.kind, question.text), question


def test_the_wording_says_little_about_the_answer(noise: Photos) -> None:
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for _, question in asked(noise, 600):
        kinds[question.kind][question.answer] += 1
        if question.kind in ("what", "exists", "sign", "colour"):
            answers[question.kind][question.answer] += 1
    share = {kind: max(counts.values()) / counts.total() for kind, counts in kinds.items()}
    assert share["exists"] < 0.57
    assert share["count"] < 0.5
    assert share["where"] < 0.33
    assert all(share[kind] < 0.25 for kind in ("what", "at", "beside", "sign", "colour"))


def test_a_caption_names_all_and_nothing_else(noise: Photos) -> None:
    for number in range(50):
        picture = make_picture(noise, np.random.default_rng(number))
        said = caption(picture)
        assert caption_score(said, picture) == 1.0
        assert caption_score("nothing at all", picture) == 0.0
        labels = {thing.label for thing in picture.things}
        other = next(label for label in range(len(CLASSES)) if label not in labels)
        assert caption_score(f"{said} and a {CLASSES[other]}", picture) == pytest.approx(
            2 * len(labels) / (2 * len(labels) + 1)
        )


def test_an_unknown_kind_names_the_nearest(noise: Photos) -> None:
    picture = make_picture(noise, np.random.default_rng(0))
    with pytest.raises(UnknownNameError, match="colour"):
        list(ask(picture, np.random.default_rng(0), ["color"]))
