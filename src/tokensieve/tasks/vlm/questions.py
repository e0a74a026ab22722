"""Questions about generated scenes and their true answers: colour, shape, count, existence, where, digit.

Every wording has a terse twin that ends with its key ("colour at top"), from which a small model learns faster.
Answers are spread as evenly as a scene allows, so that guessing from the wording alone does not pay. Imports numpy
and scenes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokensieve.errors import UnknownNameError, nearest
from tokensieve.tasks.vlm.scenes import COLOURS, DIGITS, PLACES, SHAPES, Scenes

__all__ = ["DESCRIBE", "KINDS", "PLURALS", "Question", "ask", "describe", "vocabulary"]

PLURALS = ("circles", "squares", "triangles", "crosses")
DESCRIBE = "Describe the image."

# kind -> form -> (terse, natural, natural, ...)
_WORDINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "colour": {
        "at": ("colour at {place}", "What colour is the object at the {place}?", "At the {place}, which colour is it?"),
        "of": ("colour of {shape}", "What colour is the {shape}?", "Which colour does the {shape} have?"),
    },
    "shape": {
        "at": ("shape at {place}", "What shape is the object at the {place}?", "At the {place}, which shape is it?"),
        "of": ("shape of {colour}", "What shape is the {colour} object?", "Which shape does the {colour} object have?"),
    },
    "count": {
        "all": ("count objects", "How many objects are there?", "How many objects are in the image?"),
        "colour": ("count {colour}", "How many {colour} objects are there?", "How many objects are {colour}?"),
        "shape": ("count {shapes}", "How many {shapes} are there?", "How many {shapes} are in the image?"),
    },
    "exists": {
        "both": ("exists {colour} {shape}", "Is there a {colour} {shape}?", "Is a {colour} {shape} in the image?"),
        "colour": ("exists {colour}", "Is there a {colour} object?", "Is a {colour} object in the image?"),
        "shape": ("exists {shape}", "Is there a {shape}?", "Is a {shape} in the image?"),
    },
    "where": {
        "both": ("place of {colour} {shape}", "Where is the {colour} {shape}?", "Where in the image is the {colour} {shape}?"),  # noqa: E501
        "digit": ("place of digit", "Where is the digit?", "Where in the image is the digit?"),
    },
    "digit": {
        "any": ("digit anywhere", "What digit is in the image?", "Which digit is there?"),
        "at": ("digit at {place}", "What digit is at the {place}?", "At the {place}, which digit is it?"),
    },
}  # fmt: skip
KINDS = tuple(_WORDINGS)


@dataclass(frozen=True)
class Question:
    """kind: of KINDS. form: which of its forms. about: the place it is about, -1 when it is about the whole image."""

    text: str
    answer: str
    kind: str
    form: str
    about: int = -1


def ask(
    scenes: Scenes, index: int, rng: np.random.Generator, kinds: Sequence[str] = KINDS, terse: float = 0.0
) -> Iterator[Question]:
    """One question of each of `kinds`, in that order (a kind may be named more than once); of a kind the form is drawn.

    terse: how often the terse wording is taken. Kinds that this scene cannot be asked (digit, without a digit) are
    left out.
    """
    scene = _Scene(scenes, index)
    for kind in kinds:
        if kind not in _WORDINGS:
            raise UnknownNameError(f"unknown kind of question {kind!r}.{nearest(kind, KINDS)}")
        forms = [form for form in _WORDINGS[kind] if scene.can(kind, form)]
        if not forms:
            continue
        form = forms[rng.integers(len(forms))]
        words, answer, about = getattr(scene, f"{kind}_{form}")(rng)
        wordings = _WORDINGS[kind][form]
        which = 0 if rng.random() < terse else rng.integers(1, len(wordings))
        yield Question(wordings[which].format(**words), answer, kind, form, about)


def describe(scenes: Scenes, index: int) -> str:
    """All things in reading order: "top-left red circle, centre digit 4."."""
    things = []
    for place in range(9):
        if scenes.is_object[index, place]:
            colour, shape = scenes.colour[index, place], scenes.shape[index, place]
            things.append(f"{PLACES[place]} {COLOURS[colour]} {SHAPES[shape]}")
        elif scenes.is_digit[index, place]:
            things.append(f"{PLACES[place]} digit {DIGITS[scenes.digit[index, place]]}")
    return ", ".join(things) + "."


def vocabulary() -> list[str]:
    """Every word and mark that questions and answers use, lower case, in a fixed order without doubles."""
    fillers = ("place", "colour", "shape", "shapes")
    words = [*COLOURS, *SHAPES, *PLURALS, *PLACES, *DIGITS, "yes", "no", "digit", ",", ".", "?"]
    texts = [DESCRIBE, *(text for forms in _WORDINGS.values() for row in forms.values() for text in row)]
    for text in texts:
        bare = text.format(**dict.fromkeys(fillers, ""))
        words += "".join(c if c.isalnum() or c == "-" else " " for c in bare.lower()).split()
    return list(dict.fromkeys(words))


class _Scene:
    """One scene's things, as the forms of questions need them. Each form returns (words, answer, place)."""

    def __init__(self, scenes: Scenes, index: int) -> None:
        self.objects = [int(p) for p in np.flatnonzero(scenes.is_object[index])]
        self.digits = [int(p) for p in np.flatnonzero(scenes.is_digit[index])]
        self.colour = [int(c) for c in scenes.colour[index]]
        self.shape = [int(s) for s in scenes.shape[index]]
        self.digit = [int(d) for d in scenes.digit[index]]
        self.by_colour = self._groups(lambda p: self.colour[p])
        self.by_shape = self._groups(lambda p: self.shape[p])
        self.by_both = self._groups(lambda p: (self.colour[p], self.shape[p]))

    def _groups(self, key: Callable[[int], Any]) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {}
        for place in self.objects:
            found.setdefault(key(place), []).append(place)
        return found

    def can(self, kind: str, form: str) -> bool:
        groups = {("colour", "of"): self.by_shape, ("shape", "of"): self.by_colour, ("where", "both"): self.by_both}
        if (kind, form) in groups:
            return any(len(places) == 1 for places in groups[kind, form].values())
        if kind == "digit" or (kind, form) == ("where", "digit"):
            return len(self.digits) == 1
        return bool(self.objects)

    def colour_at(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        place = _pick(rng, self.objects)
        return {"place": PLACES[place]}, COLOURS[self.colour[place]], place

    def colour_of(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        place = _pick(rng, _alone(self.by_shape))
        return {"shape": SHAPES[self.shape[place]]}, COLOURS[self.colour[place]], place

    def shape_at(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        place = _pick(rng, self.objects)
        return {"place": PLACES[place]}, SHAPES[self.shape[place]], place

    def shape_of(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        place = _pick(rng, _alone(self.by_colour))
        return {"colour": COLOURS[self.colour[place]]}, SHAPES[self.shape[place]], place

    def count_all(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        return {}, str(len(self.objects)), -1

    def count_colour(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        colour, count = _even(rng, [len(self.by_colour.get(c, ())) for c in range(len(COLOURS))])
        return {"colour": COLOURS[colour]}, str(count), -1

    def count_shape(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        shape, count = _even(rng, [len(self.by_shape.get(s, ())) for s in range(len(SHAPES))])
        return {"shapes": PLURALS[shape]}, str(count), -1

    def exists_both(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        pairs = [(c, s) for c in range(len(COLOURS)) for s in range(len(SHAPES))]
        here = [pair for pair in pairs if pair in self.by_both]
        # the hard "no": colour and shape are both there, on different objects
        near = [p for p in pairs if p not in self.by_both and p[0] in self.by_colour and p[1] in self.by_shape]
        absent = near if near and rng.random() < 0.5 else [p for p in pairs if p not in self.by_both]
        yes = rng.random() < 0.5
        chosen = here if yes else absent
        colour, shape = chosen[rng.integers(len(chosen))]
        return {"colour": COLOURS[colour], "shape": SHAPES[shape]}, "yes" if yes else "no", -1

    def exists_colour(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        colour, there = _even(rng, [c in self.by_colour for c in range(len(COLOURS))])
        return {"colour": COLOURS[colour]}, "yes" if there else "no", -1

    def exists_shape(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        shape, there = _even(rng, [s in self.by_shape for s in range(len(SHAPES))])
        return {"shape": SHAPES[shape]}, "yes" if there else "no", -1

    def where_both(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        place = _pick(rng, _alone(self.by_both))
        return {"colour": COLOURS[self.colour[place]], "shape": SHAPES[self.shape[place]]}, PLACES[place], place

    def where_digit(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        return {}, PLACES[self.digits[0]], self.digits[0]

    def digit_any(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        return {}, DIGITS[self.digit[self.digits[0]]], self.digits[0]

    def digit_at(self, rng: np.random.Generator) -> tuple[dict[str, str], str, int]:
        place = self.digits[0]
        return {"place": PLACES[place]}, DIGITS[self.digit[place]], place


def _pick(rng: np.random.Generator, places: Sequence[int]) -> int:
    return places[int(rng.integers(len(places)))]


def _alone(groups: dict[Any, list[int]]) -> list[int]:
    """The places of things that share their key with no other."""
    return [places[0] for places in groups.values() if len(places) == 1]


def _even(rng: np.random.Generator, values: Sequence[int]) -> tuple[int, int]:
    """A key and its value, each value that occurs as likely as the others."""
    kinds = sorted(set(values))
    value = kinds[rng.integers(len(kinds))]
    keys = [key for key, v in enumerate(values) if v == value]
    return keys[rng.integers(len(keys))], value
