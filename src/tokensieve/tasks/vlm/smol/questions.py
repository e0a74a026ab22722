"""Questions about pictures of photos, in several wordings, and their true answers; and a caption of each picture.

Answers are spread as evenly as a picture allows, so that guessing from the wording alone does not pay. Imports numpy,
photos and pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tokensieve.errors import UnknownNameError, nearest
from tokensieve.tasks.vlm.smol.photos import CLASSES, PLURALS
from tokensieve.tasks.vlm.smol.pictures import COLOURS, PLACES, TEXTS, UNSEEN, Picture

__all__ = ["DESCRIBE", "KINDS", "PhotoQuestion", "ask", "caption", "caption_score", "named_in"]

KINDS = ("what", "at", "exists", "count", "where", "beside", "sign", "colour")
DESCRIBE = "Describe the picture."
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_WORDINGS = {
    "what": ("What is it?", "What is in the photo?", "What does the photo show?"),
    "at": ("What is at the {place}?", "Which thing is at the {place}?", "At the {place}, what is there?"),
    "exists": ("Is there a {name}?", "Is a {name} in the picture?", "Can you see a {name}?"),
    "count": ("How many {names} are there?", "How many {names} are in the picture?", "Count the {names}."),
    "count all": ("How many photos are there?", "How many photos are in the picture?", "Count the photos."),
    "where": ("Where is the {name}?", "Where in the picture is the {name}?", "At which place is the {name}?"),
    "beside": ("What is {side} the {name}?", "Which thing is {side} the {name}?", "Name what is {side} the {name}."),
    "sign": ("What does the sign say?", "What is written on the sign?", "Read the sign."),
    "colour": ("What colour is the sign?", "Which colour is the sign?", "What is the colour of the sign?"),
}
_SIDES = {  # of one corner of a mosaic: (corner beside it, what to call it from there)
    0: ((2, "left of"), (6, "above")), 2: ((0, "right of"), (8, "above")),
    6: ((8, "left of"), (0, "below")), 8: ((6, "right of"), (2, "below")),
}  # fmt: skip


@dataclass(frozen=True)
class PhotoQuestion:
    """kind: of KINDS. unseen: it is about a class at a place that training never shows."""

    text: str
    answer: str
    kind: str
    unseen: bool = False


def ask(picture: Picture, rng: np.random.Generator, kinds: Sequence[str] = KINDS) -> Iterator[PhotoQuestion]:
    """One question of each of `kinds` that the picture can be asked; a kind may be named more than once."""
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownNameError(f"unknown kind of question {kind!r}.{nearest(kind, KINDS)}")
        found = _ASK[kind](picture, rng)
        if found is not None:
            wording, words, answer, unseen = found
            choices = _WORDINGS[wording]
            text = choices[rng.integers(len(choices))].format(**words)
            yield PhotoQuestion(text.replace(" a apple", " an apple").replace(" a orange", " an orange")
                .replace(" a airplane", " an airplane"), answer, kind, unseen)  # fmt: skip


_Found = tuple[str, dict[str, str], str, bool] | None


def _what(picture: Picture, rng: np.random.Generator) -> _Found:
    return ("what", {}, CLASSES[picture.things[0].label], False) if picture.layout == "photo" else None


def _at(picture: Picture, rng: np.random.Generator) -> _Found:
    if picture.layout == "photo":
        return None
    thing = picture.things[rng.integers(len(picture.things))]
    pair = (thing.label, thing.place)
    return "at", {"place": PLACES[thing.place]}, CLASSES[thing.label], pair in UNSEEN


def _exists(picture: Picture, rng: np.random.Generator) -> _Found:
    here = sorted({thing.label for thing in picture.things})
    absent = [label for label in range(len(CLASSES)) if label not in here]
    yes = rng.random() < 0.5
    labels = here if yes else absent
    name = CLASSES[labels[rng.integers(len(labels))]]
    return "exists", {"name": name}, "yes" if yes else "no", False


def _count(picture: Picture, rng: np.random.Generator) -> _Found:
    """Of a class, each count that occurs as likely as the others; of all photos where no class comes twice."""
    if picture.layout == "photo":
        return None
    counts = Counter(thing.label for thing in picture.things)
    if rng.random() < (0.2 if max(counts.values()) > 1 else 0.7):
        return "count all", {}, NUMBERS[len(picture.things)], False
    value = sorted(set(counts.values()))[rng.integers(len(set(counts.values())))]
    labels = sorted(label for label, count in counts.items() if count == value)
    return "count", {"names": PLURALS[labels[rng.integers(len(labels))]]}, NUMBERS[value], False


def _where(picture: Picture, rng: np.random.Generator) -> _Found:
    alone = [] if picture.layout == "photo" else _alone(picture)
    if not alone:
        return None
    thing = picture.things[alone[rng.integers(len(alone))]]
    pair = (thing.label, thing.place)
    return "where", {"name": CLASSES[thing.label]}, PLACES[thing.place], pair in UNSEEN


def _beside(picture: Picture, rng: np.random.Generator) -> _Found:
    """What is left of, right of, above or below a thing of a mosaic that is the only one of its class."""
    if picture.layout != "mosaic":
        return None
    at = {thing.place: thing for thing in picture.things}
    choices = []
    for index in _alone(picture):
        anchor = picture.things[index]
        for place, thing in at.items():
            choices += [(thing, anchor, side) for near, side in _SIDES[place] if near == anchor.place]
    if not choices:
        return None
    thing, anchor, side = choices[rng.integers(len(choices))]
    return "beside", {"side": side, "name": CLASSES[anchor.label]}, CLASSES[thing.label], False


def _sign(picture: Picture, rng: np.random.Generator) -> _Found:
    return None if picture.sign is None else ("sign", {}, TEXTS[picture.sign.text], False)


def _colour(picture: Picture, rng: np.random.Generator) -> _Found:
    return None if picture.sign is None else ("colour", {}, COLOURS[picture.sign.colour], False)


_ASK: dict[str, Callable[[Picture, np.random.Generator], _Found]] = {
    "what": _what, "at": _at, "exists": _exists, "count": _count, "where": _where, "beside": _beside, "sign": _sign,
    "colour": _colour,
}  # fmt: skip


def _alone(picture: Picture) -> list[int]:
    """The numbers of the things that are the only ones of their class."""
    counts = Counter(thing.label for thing in picture.things)
    return [index for index, thing in enumerate(picture.things) if counts[thing.label] == 1]


# -- captions ----------------------------------------------------------------------------------------------------------


def caption(picture: Picture) -> str:
    """What the picture shows, in the order of its places: "a cat, a ship and two dogs"."""
    counts: dict[int, int] = {}
    for thing in sorted(picture.things, key=lambda thing: thing.place):
        counts[thing.label] = counts.get(thing.label, 0) + 1
    parts = [_named(label, count) for label, count in counts.items()]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _named(label: int, count: int) -> str:
    if count > 1:
        return f"{NUMBERS[count]} {PLURALS[label]}"
    return f"{'an' if CLASSES[label][0] in 'aeiou' else 'a'} {CLASSES[label]}"


def named_in(text: str) -> set[int]:
    """The classes that a text names, singular or plural."""
    words = set("".join(c if c.isalnum() else " " for c in text.lower()).split())
    return {label for label in range(len(CLASSES)) if words & {CLASSES[label], PLURALS[label]}}


def caption_score(given: str, picture: Picture) -> float:
    """F1 of the classes named against those shown: 1 when all are named and no other; 0 when none is."""
    shown, named = {thing.label for thing in picture.things}, named_in(given)
    return 2 * len(shown & named) / (len(shown) + len(named))
