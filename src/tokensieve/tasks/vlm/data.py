"""Visual questions from your own JSONL file, and the generated set written as one.

A line is {"image": "photos/1.png", "question": "What colour is the car?", "answers": ["red", "dark red"]}; the
image's path is relative to the file. "answers" may be one text; "type" groups the results. Scoring: exact match, or as
VQA does it. Imports pillow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokensieve.errors import DataError, OptionError
from tokensieve.tasks.vlm.questions import KINDS, Question, ask
from tokensieve.tasks.vlm.scenes import SPLITS, make_scenes
from tokensieve.utils.files import read_text, whole_file, whole_folder
from tokensieve.utils.images import read_image

__all__ = [
    "VisualQuestion",
    "draw_questions",
    "exact_match",
    "load_image",
    "load_questions",
    "normalise_answer",
    "vqa_accuracy",
    "write_synthetic",
]

QUESTIONS = "questions.jsonl"
_CHUNK = 256  # scenes drawn at a time


@dataclass(frozen=True)
class VisualQuestion:
    """image: its file. answers: every answer that people gave, at least one. kind: "type" of the line, or "any"."""

    image: Path
    question: str
    answers: tuple[str, ...]
    kind: str = "any"


def load_questions(path: Path) -> list[VisualQuestion]:
    """Read a JSONL file; a folder stands for the `questions.jsonl` in it. What is wrong with a line names the line."""
    path = Path(path)
    if path.is_dir():
        path = path / QUESTIONS
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; a set of questions is a JSONL file") from None
    found = [
        _question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    ]  # fmt: skip
    if not found:
        raise DataError(f"{path} has no question in it")
    return found


def _question(path: Path, number: int, line: str) -> VisualQuestion:
    where = f"{path}, line {number}"
    try:
        data = json.loads(line)
    except ValueError:
        raise DataError(f"{where}: no whole JSON object") from None
    if not isinstance(data, dict):
        raise DataError(f"{where}: no JSON object")
    missing = [key for key in ("image", "question", "answers") if key not in data]
    if missing:
        raise DataError(f"{where}: {', '.join(missing)} missing; a line has image, question, answers")
    answers = [data["answers"]] if isinstance(data["answers"], str) else data["answers"]
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise DataError(f'{where}: "answers" is a text or a list of texts, at least one')
    for key in ("image", "question"):
        if not isinstance(data[key], str) or not data[key].strip():
            raise DataError(f'{where}: "{key}" is a text')
    image = path.parent / data["image"]
    if not image.is_file():
        raise DataError(f"{where}: there is no image {image}")
    return VisualQuestion(image, data["question"], tuple(answers), str(data.get("type", "any")))


def load_image(path: Path) -> Image.Image:
    """The picture as RGB; one that cannot be read is named."""
    return read_image(path)


def draw_questions(
    images: int, seed: int, split: str = "test", each: int = 1
) -> Iterator[tuple[np.ndarray, list[Question]]]:
    """Scenes, (96, 96, 3) uint8, and `each` questions of every kind about each; the same arguments, the same scenes."""
    if images < 1 or each < 1:
        raise OptionError(f"{images} images, {each} questions of each kind: at least 1")
    if split not in SPLITS:
        raise OptionError(f"split {split!r}: one of {', '.join(SPLITS)}")
    rng = np.random.default_rng([seed, SPLITS.index(split), 2])
    for first in range(0, images, _CHUNK):
        scenes = make_scenes(min(_CHUNK, images - first), [seed, first], split)
        for index in range(len(scenes)):
            yield scenes.images[index], list(ask(scenes, index, rng, KINDS * each))


def write_synthetic(folder: Path, images: int, seed: int, split: str = "test", each: int = 1) -> int:
    """Write scenes as PNG files and `each` questions of every kind about each; the number of questions.

    Whole or not at all: a set that was in the folder before is replaced when the new one is complete.
    """
    lines: list[dict[str, Any]] = []
    with whole_file(folder / QUESTIONS) as text, whole_folder(folder / "images") as pictures:
        for number, (picture, questions) in enumerate(draw_questions(images, seed, split, each)):
            name = f"{number:06d}.png"
            Image.fromarray(picture).save(pictures / name, format="PNG")
            lines += [
                {"image": f"images/{name}", "question": asked.text, "answers": [asked.answer], "type": asked.kind}
                for asked in questions
            ]
        text.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


# -- scoring -----------------------------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_MARKS = re.compile(r"[^\w\s\-']|_")
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
}


def normalise_answer(text: str) -> str:
    """Lower case, without articles, marks and doubled spaces, numbers up to ten as digits."""
    words = _ARTICLES.sub(" ", _MARKS.sub(" ", text.lower())).split()
    return " ".join(_NUMBERS.get(word, word) for word in words)


def exact_match(given: str, answers: Sequence[str]) -> float:
    """1 when the given answer is one of the answers, else 0; both normalised."""
    return float(normalise_answer(given) in {normalise_answer(answer) for answer in answers})


def vqa_accuracy(given: str, answers: Sequence[str]) -> float:
    """VQA's measure: min(1, matches / 3), averaged over leaving out each answer in turn. Fewer than 3: exact match."""
    if len(answers) < 3:
        return exact_match(given, answers)
    same = [normalise_answer(answer) == normalise_answer(given) for answer in answers]
    return float(np.mean([min(1.0, (sum(same) - one) / 3) for one in same]))
