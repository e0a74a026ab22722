"""Questions: each answer is found again from the scene's arrays by reading the question's words, not its form."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from tokensieve.errors import UnknownNameError
from tokensieve.tasks.vlm.questions import KINDS, PLURALS, ask, describe, vocabulary
from tokensieve.tasks.vlm.scenes import COLOURS, DIGITS, PLACES, SHAPES, Scenes, make_scenes


def answer_by_reading(scenes: Scenes, index: int, text: str) -> str:
    """A small parser of its own: which colours, shapes and places are named, and what the first words want."""
    words = text.lower().replace("?", " ").replace(",", " ").split()
    colours = [COLOURS.index(w) for w in words if w in COLOURS]
    shapes = [SHAPES.index(w) for w in words if w in SHAPES] + [PLURALS.index(w) for w in words if w in PLURALS]
    places = [PLACES.index(w) for w in words if w in PLACES]
    found = [
        p for p in range(9)
        if scenes.is_object[index, p]
        and all(scenes.colour[index, p] == c for c in colours)
        and all(scenes.shape[index, p] == s for s in shapes)
        and all(p == q for q in places)
    ]  # fmt: skip
    if words[0] in ("how", "count"):
        return str(len(found))
    if words[0] in ("is", "exists"):
        return "yes" if found else "no"
    if "digit" in words:
        found = [p for p in range(9) if scenes.is_digit[index, p] and all(p == q for q in places)]
    (place,) = found
    if words[0] in ("where", "place"):
        return PLACES[place]
    if "digit" in words:
        return DIGITS[scenes.digit[index, place]]
    return COLOURS[scenes.colour[index, place]] if "colour" in words else SHAPES[scenes.shape[index, place]]


@pytest.mark.parametrize("terse", [0.0, 1.0])
def test_answers_are_true(terse: float) -> None:
    scenes = make_scenes(60, 1, "test")
    rng = np.random.default_rng(0)
    kinds = Counter()
    for index in range(len(scenes)):
        for question in ask(scenes, index, rng, KINDS * 4, terse):
            assert question.answer == answer_by_reading(scenes, index, question.text), question
            kinds[question.kind] += 1
    assert set(kinds) == set(KINDS)


def test_about_is_the_place_that_holds_the_answer() -> None:
    scenes = make_scenes(30, 2)
    rng = np.random.default_rng(0)
    for index in range(len(scenes)):
        for question in ask(scenes, index, rng, KINDS * 3):
            place = question.about
            if question.kind in ("count", "exists"):
                assert place == -1
                continue
            looks = {COLOURS[scenes.colour[index, place]], SHAPES[scenes.shape[index, place]], PLACES[place],
                     DIGITS[scenes.digit[index, place]]}  # fmt: skip
            assert question.answer in looks


def test_guessing_from_the_wording_does_not_pay() -> None:
    scenes = make_scenes(300, 3, "test")
    rng = np.random.default_rng(0)
    answers: dict[str, dict[tuple[str, str], Counter]] = defaultdict(lambda: defaultdict(Counter))
    for index in range(len(scenes)):
        for question in ask(scenes, index, rng, KINDS * 2):
            answers[question.kind][question.kind, question.form][question.answer] += 1
    by_kind = {
        kind: sum(max(c.values()) for c in forms.values()) / sum(c.total() for c in forms.values())
        for kind, forms in answers.items()
    }
    assert np.mean(list(by_kind.values())) < 0.35, by_kind
    assert max(by_kind.values()) < 0.6, by_kind


def test_terse_wordings_end_with_their_key() -> None:
    scenes = make_scenes(40, 4)
    rng = np.random.default_rng(0)
    keys = {*COLOURS, *SHAPES, *PLURALS, *PLACES, "objects", "digit", "anywhere"}
    for index in range(len(scenes)):
        for question in ask(scenes, index, rng, KINDS, terse=1.0):
            assert question.text.split()[-1] in keys
            assert not question.text.endswith("?")


def test_descriptions_name_every_thing_in_reading_order() -> None:
    scenes = make_scenes(50, 5)
    for index in range(len(scenes)):
        parts = describe(scenes, index).removesuffix(".").split(", ")
        there = [p for p in range(9) if scenes.is_object[index, p] or scenes.is_digit[index, p]]
        assert [part.split()[0] for part in parts] == [PLACES[p] for p in there]
        for part, p in zip(parts, there, strict=True):
            if scenes.is_object[index, p]:
                assert part.split()[1:] == [COLOURS[scenes.colour[index, p]], SHAPES[scenes.shape[index, p]]]
            else:
                assert part.split()[1:] == ["digit", str(scenes.digit[index, p])]


def test_the_vocabulary_has_every_word() -> None:
    words = set(vocabulary())
    scenes = make_scenes(100, 6)
    rng = np.random.default_rng(0)
    for index in range(len(scenes)):
        for terse in (0.0, 1.0):
            for question in ask(scenes, index, rng, KINDS, terse):
                text = question.text.lower().replace("?", " ?").replace(",", " ,")
                assert set(text.split()) <= words
                assert question.answer in words


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"coulour.*colour"):
        list(ask(make_scenes(1, 0), 0, np.random.default_rng(0), ["coulour"]))
