"""`tokensieve eval vlm` as typed, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tokensieve.cli.main import main
from tokensieve.report.results import main_metric, read_eval, write_csv
from tokensieve.tasks.vlm.base import save_small_llava
from tokensieve.tasks.vlm.processor import build_processor
from tokensieve.tasks.vlm.section import with_baselines
from tokensieve.tasks.vlm.small import SmallSizes, build_small_llava

TINY = SmallSizes(width=32, heads=2, vision_layers=3, text_layers=2, vision_mlp=48, text_mlp=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, and two images with three questions."""
    place = tmp_path_factory.mktemp("vlm")
    processor = build_processor()
    save_small_llava(build_small_llava(TINY, processor.tokenizer, seed=1), processor, place / "model")
    Image.new("RGB", (60, 40), (200, 30, 30)).save(place / "a.png")
    Image.new("L", (96, 96), 90).save(place / "b.png")
    lines: list[dict[str, Any]] = [
        {"image": "a.png", "question": "What <b>colour</b>?", "answers": ["red", "red", "dark red"], "type": "colour"},
        {"image": "a.png", "question": "How many?", "answers": "0", "type": "<i>count</i>"},
        {"image": "b.png", "question": "Which colour?", "answers": ["grey"] * 10, "type": "colour"},
    ]
    (place / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place


def result(folder: Path, tmp_path: Path, *flags: object) -> dict[str, Any]:
    path = tmp_path / "result.json"
    argv = ["eval", "vlm", "--model", folder / "model", "--new_tokens", 3, *flags, "-o", path]
    assert main([*map(str, argv)]) == 0
    return read_eval(path)


def refused(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    capsys.readouterr()
    assert main(["eval", "vlm", *map(str, flags)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tokensieve: error: ")
    assert err.count("\n") == 1
    return err


def test_questions_of_ones_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(folder, tmp_path, "--data", folder / "mine.jsonl", "--method", "fastv", "--keep", 40, "--at", 1,
                   "--metric", "vqa", "--batch_size", 2)  # fmt: skip
    assert (found["task"], found["dataset"], found["method"], found["keep"], found["at"]) == (
        "vlm", "mine", "fastv", 40, "1",
    )  # fmt: skip
    assert (found["questions"], found["images"], found["tokens_per_layer"]) == (3, 2, "144 40")
    assert main_metric(found)[0] == "accuracy"
    assert found["baseline"]["tokens_per_layer"] == "144 144"
    assert found["baseline"]["metrics"]["loyalty"] == 1.0
    assert found["gmacs"] < found["baseline"]["gmacs"]
    assert found["kv_bytes"] < found["baseline"]["kv_bytes"]
    assert found["first_token_ms"] > 0
    assert found["decode_tokens_per_second"] > 0
    assert found["overhead_ms"] > 0
    assert [row["type"] for row in found["rows"]] == ["colour", "<i>count</i>"]
    assert len(found["samples"]) == 3
    assert all(len(sample["kept"]) == 40 for sample in found["samples"])
    out = capsys.readouterr().out
    assert "KV bytes" in out
    assert "1 of 144, 1 of 40" in out
    assert "<i>count</i>" in out
    assert write_csv([tmp_path / "result.json"], tmp_path / "all.csv") == 1
    assert "samples" not in (tmp_path / "all.csv").read_text().splitlines()[0]


def test_the_report_shows_them_and_escapes(folder: Path, tmp_path: Path) -> None:
    result(folder, tmp_path, "--data", folder / "mine.jsonl", "--method", "divprune", "--keep", 0.25)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "result.json"), "-o", str(page)]) == 0
    text = page.read_text()
    assert "What &lt;b&gt;colour&lt;/b&gt;?" in text
    assert "&lt;i&gt;count&lt;/i&gt;" in text
    assert "<b>colour</b>" not in text
    assert "36 of 144 patches" in text
    assert "accuracy against GMACs" in text  # the untouched model of the same run is the second point
    assert text.count("<img ") == 6  # an image and what is kept, three questions


def test_untouched_and_generated(folder: Path, tmp_path: Path) -> None:
    found = result(folder, tmp_path, "--images", 2, "--samples", 0)
    assert (found["dataset"], found["method"], found["images"]) == ("generated questions", "none", 2)
    assert found["metrics"] == found["baseline"]["metrics"]
    assert found["samples"] == []
    again = result(folder, tmp_path, "--images", 2, "--samples", 0, "--seed", 5)
    assert again["seed"] == 5


def test_options_schedule_and_positions_are_the_methods(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--images", 2, "--samples", 0, "--keep_average", 0.5)
    flags = ("--method", "divprune", "--positions", "renumber", "fold=True")
    found = result(folder, tmp_path, *given, *flags)
    assert (found["option_fold"], found["positions"], found["schedule"]) == (True, "renumber", None)
    untouched = with_baselines([found])[0]
    assert (untouched["method"], untouched["positions"], untouched["option_fold"]) == ("none", None, None)
    found = result(folder, tmp_path, "--images", 2, "--samples", 0, "--keep", 40, "--method", "random",
                   "--schedule", "linear", "--at", "0,1")  # fmt: skip
    assert (found["schedule"], found["tokens_per_layer"]) == ("linear", "75 40")  # two thirds of 104 leave first
    assert found["positions"] is None
    assert with_baselines([found])[0]["schedule"] is None
    assert "foldd" in refused(capsys, "--model", folder / "model", *given, "--method", "fastv", "foldd=True")
    assert "renumbered" in refused(capsys, "--model", folder / "model", *given, *flags[:2], "--positions", "renumbered")
    assert "lineal" in refused(capsys, "--model", folder / "model", *given, *flags[:2], "--schedule", "lineal")
    loose = ("--model", folder / "model", "--keep", 40, "--method")
    assert "--positions renumber" in refused(capsys, *loose, "fastv", "--positions", "renumber")
    assert "--schedule linear" in refused(capsys, *loose, "divprune", "--schedule", "linear")
    assert "'schedule'" in refused(capsys, *loose, "divprune", "schedule=linear")
    assert "positions does nothing" in refused(capsys, "--model", folder / "model", "--positions", "renumber")


def test_keeping_everything_changes_no_answer(folder: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing is reduced"):
        found = result(folder, tmp_path, "--images", 2, "--method", "fastv", "--keep", 1.0, "--at", 1)
    assert found["metrics"]["loyalty"] == 1.0
    assert (found["reduced"], found["macs_saved"]) == (False, 0.0)


def test_bad_input_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", folder / "model")
    broken = tmp_path / "broken.jsonl"
    broken.write_text((folder / "mine.jsonl").read_text().replace('"a.png"', json.dumps(str(folder / "a.png"))) + "\n{")
    (tmp_path / "b.png").write_bytes((folder / "b.png").read_bytes())
    assert "line 4" in refused(capsys, *model, "--data", broken)
    bad = tmp_path / "bad.jsonl"
    (tmp_path / "bad.png").write_bytes(b"no image")
    bad.write_text('{"image": "bad.png", "question": "What?", "answers": "red"}')
    assert "bad.png cannot be read" in refused(capsys, *model, "--data", bad)
    two = tmp_path / "two.jsonl"
    two.write_text('{"image": "b.png", "question": "<image> What?", "answers": "red"}')
    assert "2 placeholders for one image" in refused(capsys, *model, "--data", two)
    assert "image placeholder" in refused(capsys, *model, "--images", 1, "--prompt", "USER: {question}")
    assert "does nothing without --method" in refused(capsys, *model, "--keep", 0.5)
    assert "used together" in refused(capsys, *model, "--method", "fastv", "--keep", 0.5, "--keep_average", 0.5)
    assert "--images 0" in refused(capsys, *model, "--images", 0)
    assert "metric" in refused(capsys, *model, "--metric", "bleu")
    assert "cannot go under" in refused(capsys, *model, "--method", "fastv", "--at", 1, "--keep_average", 0.2,
                                        "--images", 1)  # fmt: skip
    assert "no such file" in refused(capsys, *model, "--images", 1, "--adapter", tmp_path / "nothing.safetensors")


def test_a_checkpoint_of_another_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    assert "is a bert model" in refused(capsys, "--model", other)
    for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / "model" / name).is_file():
            (other / name).write_bytes((folder / "model" / name).read_bytes())
    whole = (folder / "model" / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in refused(capsys, "--model", other)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model" / "model.safetensors")
    gone = next(name for name in tensors if "vision" in name and name.endswith("weight"))
    save_file({name: x for name, x in tensors.items() if name != gone}, other / "model.safetensors", {"format": "pt"})
    assert "not in its checkpoint" in refused(capsys, "--model", other)
    assert "cannot read" in refused(capsys, "--model", tmp_path)
