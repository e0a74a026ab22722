"""A set of your own questions, the generated one written as such, and the two ways of scoring."""

import hashlib
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tokensieve.cli.main import main
from tokensieve.errors import DataError
from tokensieve.tasks.vlm.data import exact_match, load_image, load_questions, normalise_answer, vqa_accuracy
from tokensieve.tasks.vlm.scenes import make_scenes


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_the_generated_set_is_read_back_and_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert main(["data", "vqa-synthetic", "-o", str(tmp_path / name), "--images", "6", "--seed", seed]) == 0
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")
    questions = load_questions(tmp_path / "a")
    assert len(questions) >= 6 * 5
    assert f"6 images, {len(questions)} questions" in capsys.readouterr().out
    scenes = make_scenes(6, [5, 0], "test")
    for index, path in enumerate(sorted((tmp_path / "a" / "images").iterdir())):
        assert (np.asarray(load_image(path)) == scenes.images[index]).all()
    assert {q.kind for q in questions} >= {"colour", "shape", "count", "exists", "where"}


def test_lines_of_ones_own(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    lines = [
        {"image": "one.png", "question": "What?", "answers": "red"},
        {"image": "one.png", "question": "Why?", "answers": ["a", "b"], "type": "reason", "id": 7},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = load_questions(file)
    assert (first.answers, first.kind, first.image) == (("red",), "any", tmp_path / "one.png")
    assert (second.answers, second.kind) == (("a", "b"), "reason")
    assert load_image(first.image).mode == "RGB"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"image": "one.png", "question": "What?"', "line 1: no whole JSON"),
        ("[1]", "line 1: no JSON object"),
        ('{"image": "one.png", "answers": ["x"]}', "question missing"),
        ('{"image": "one.png", "question": "What?", "answers": []}', "at least one"),
        ('{"image": "one.png", "question": "What?", "answers": [3]}', "list of texts"),
        ('{"image": "one.png", "question": " ", "answers": "x"}', '"question" is a text'),
        ('{"image": "two.png", "question": "What?", "answers": "x"}', "no image .*two.png"),
        ("", "has no question"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, said: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    (tmp_path / "mine.jsonl").write_text(line)
    with pytest.raises(DataError, match=said):
        load_questions(tmp_path / "mine.jsonl")


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere"):
        load_questions(tmp_path / "nowhere.jsonl")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    with pytest.raises(DataError, match=r"cut\.png cannot be read"):
        load_image(tmp_path / "cut.png")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        load_questions(tmp_path / "bytes.jsonl")


def test_wrong_flags_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--images", "0"], ["--each", "0"], ["--seed", "-1"]):
        assert main(["data", "vqa-synthetic", "-o", str(tmp_path / "x"), *flags]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_answers_are_compared_as_people_would() -> None:
    assert normalise_answer(" The Red,  circle. ") == "red circle"
    assert normalise_answer("Two") == "2"
    assert normalise_answer("top-left!") == "top-left"
    assert exact_match("A red one", ["blue", "red 1"]) == 1.0
    assert exact_match("red", ["dark red"]) == 0.0
    assert exact_match("than", ["thn"]) == 0.0, "articles are words, not letters"


def test_vqa_accuracy_by_all_subsets_of_nine() -> None:
    """The measure's definition: the mean over all ways to leave one of ten people out."""
    answers = ["red"] * 2 + ["blue"] * 5 + ["green"] * 3
    for given in ("red", "blue", "green", "white"):
        subsets = combinations(range(10), 9)
        expected = np.mean([min(1.0, sum(answers[i] == given for i in s) / 3) for s in subsets])
        assert vqa_accuracy(given, answers) == pytest.approx(expected)
    assert vqa_accuracy("Red.", ["red"]) == 1.0
