"""Questions about test photos, drawn from a seed, for evaluation, and as JSONL and PNG files. Imports pillow."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tokensieve.errors import OptionError
from tokensieve.records import write_whole
from tokensieve.tasks.vlm.answers import Asked
from tokensieve.tasks.vlm.data import QUESTIONS
from tokensieve.tasks.vlm.smol.features import draw_picture
from tokensieve.tasks.vlm.smol.photos import SPLITS
from tokensieve.tasks.vlm.smol.pictures import COMBINATIONS, Picture
from tokensieve.tasks.vlm.smol.questions import DESCRIBE, KINDS, PhotoQuestion, ask, caption

__all__ = ["draw_photo_questions", "photo_questions", "write_photo_vqa"]


def draw_photo_questions(
    images: int, seed: int, split: str = "test", combinations: str = "all", each: int = 1
) -> Iterator[tuple[Picture, list[PhotoQuestion]]]:
    """Pictures, and `each` questions of every kind that fits about each; the same arguments, the same pictures."""
    if images < 1 or each < 1:
        raise OptionError(f"{images} images, {each} questions of each kind: at least 1")
    for name, value, known in (("split", split, SPLITS), ("combinations", combinations, COMBINATIONS)):
        if value not in known:
            raise OptionError(f"{name} {value!r}: one of {', '.join(known)}")
    for number in range(images):
        picture = draw_picture(split, seed, number, combinations)
        rng = np.random.default_rng([seed, SPLITS.index(split), number, 1])
        yield picture, list(ask(picture, rng, KINDS * each))


def photo_questions(images: int, seed: int, combinations: str = "all") -> list[Asked]:
    """Of test photos, a question of each kind that fits about each picture; "unseen": only those about such a pair."""
    return [
        Asked(picture.pixels, f"{number:06d}", q.text, (q.answer,), q.kind)
        for number, (picture, questions) in enumerate(draw_photo_questions(images, seed, "test", combinations))
        for q in questions
        if combinations != "unseen" or q.unseen
    ]


def write_photo_vqa(
    folder: Path, images: int, seed: int, split: str = "test", combinations: str = "all", each: int = 1
) -> int:
    """Write pictures as PNG files, `each` questions of every kind about each, and a caption; the number of lines.

    The questions' file comes last, so that a folder that has one is whole.
    """
    lines = []
    for number, (picture, questions) in enumerate(draw_photo_questions(images, seed, split, combinations, each)):
        name = f"images/{number:06d}.png"
        file = io.BytesIO()
        Image.fromarray(picture.pixels).save(file, format="PNG")
        write_whole(folder / name, file.getvalue())
        for asked in questions:
            line = {"image": name, "question": asked.text, "answers": [asked.answer], "type": asked.kind}
            lines.append({**line, "unseen": True} if asked.unseen else line)
        lines.append({"image": name, "question": DESCRIBE, "answers": [caption(picture)], "type": "caption"})
    write_whole(folder / QUESTIONS, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return len(lines)
