"""`tokensieve eval reid` and `tokensieve extract reid` as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.reid_material import tiny_checkpoint, tiny_model, tiny_set
from tokensieve.cli.main import main
from tokensieve.errors import OptionError
from tokensieve.report.results import main_metric, read_eval, write_csv
from tokensieve.tasks.reid.data import load_set
from tokensieve.tasks.reid.evaluate import evaluate, rank
from tokensieve.tasks.reid.features import extract, load_features
from tokensieve.tasks.reid.model import load_checkpoint, save_model
from tokensieve.tasks.reid.runs import missing_sets


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_set(tmp_path_factory.mktemp("set") / "people")


@pytest.fixture(scope="module")
def checkpoint(people: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "best.safetensors", people)


def result(tmp_path: Path, *flags: object) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert main(["eval", "reid", *map(str, flags), "-o", str(path)]) == 0
    return read_eval(path)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    capsys.readouterr()
    assert main([*map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tokensieve: error: ")
    assert err.count("\n") == 1
    return err


def test_the_figures_are_those_of_the_features(checkpoint: Path, people: Path, tmp_path: Path) -> None:
    found = result(tmp_path, "--checkpoint", checkpoint)
    model, _ = load_checkpoint(checkpoint)
    reid = load_set("rgbnt201", people)
    features = extract(model, reid.query)
    labels = [s.pid for s in reid.query], [s.camera for s in reid.query]
    assert found["metrics"] == pytest.approx(evaluate(features, *labels, features, *labels).named())
    assert main_metric(found)[0] == "mAP"
    assert (found["task"], found["dataset"], found["method"], found["keep"]) == ("reid", "people", "sdtps", 2)
    assert (found["queries"], found["images"], found["unmatched"], found["reduced"]) == (12, 12, 0, True)
    assert found["command"].endswith("result.json")
    assert json.loads(found["config"])["model"]["SOLVER"]["SEED"] == 0


def test_everything_at_once(checkpoint: Path, people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--data", people, "--layout", "rgbnt201", "--rerank", "--flip", "--missing", "all", "--batch_size", 5)
    found = result(tmp_path, "--checkpoint", checkpoint, *flags, "--lists", 4)
    out = capsys.readouterr().out
    assert "re-ranked" in out
    assert "nir + tir" in out
    gaps = [[], ["rgb"], ["nir"], ["tir"], ["rgb", "nir"], ["rgb", "tir"], ["nir", "tir"]]
    assert [(row["missing"], row["reranked"]) for row in found["rows"]] == [(g, k) for g in gaps for k in (False, True)]
    plain, reranked = (found["rows"][k]["metrics"] for k in (0, 1))
    assert found["metrics"] == {**plain, "mAP re-ranked": reranked["mAP"], "R1 re-ranked": reranked["R1"]}
    assert found["option_flip"] is True
    model, _ = load_checkpoint(checkpoint)
    reid = load_set("rgbnt201", people)
    labels = [s.pid for s in reid.query], [s.camera for s in reid.query]
    for gap in gaps:
        features = extract(model, reid.query, missing=gap, flip=True)
        for rerank in (False, True):
            wanted = evaluate(features, *labels, features, *labels, rerank=rerank).named()
            row = next(row for row in found["rows"] if row["missing"] == gap and row["reranked"] == rerank)
            assert row["metrics"] == pytest.approx(wanted), (gap, rerank)
    assert len(found["lists"]) == 4


def test_ranked_lists_go_from_worst_to_best_and_name_their_files(
    checkpoint: Path, people: Path, tmp_path: Path
) -> None:
    found = result(tmp_path, "--checkpoint", checkpoint, "--lists", 5)
    model, _ = load_checkpoint(checkpoint)
    reid = load_set("rgbnt201", people)
    features = extract(model, reid.query)
    labels = [s.pid for s in reid.query], [s.camera for s in reid.query]
    ranking = rank(features, *labels, features, *labels, top=10)
    precisions = [entry["average_precision"] for entry in found["lists"]]
    assert precisions == sorted(precisions)
    assert (precisions[0], precisions[-1]) == pytest.approx((ranking.precision.min(), ranking.precision.max()))
    names = [s.name for s in reid.query]
    for entry in found["lists"]:
        query = names.index(entry["query"]["name"])
        assert [g["name"] for g in entry["gallery"]] == [names[i] for i in ranking.lists[query].gallery]
        assert [g["right"] for g in entry["gallery"]] == [g["pid"] == entry["query"]["pid"] for g in entry["gallery"]]
        assert set(entry["selected"]) == {"rgb", "nir", "tir"}
        assert entry["grid"] == [4, 2]
        for one in (entry["query"], *entry["gallery"]):
            assert all((Path(found["data"]) / file).is_file() for file in one["files"].values())
    assert result(tmp_path, "--checkpoint", checkpoint, "--lists", 0)["lists"] == []


def test_features_go_to_a_file_and_give_the_same_figures(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("f.npz", "f.safetensors"):
        found = result(tmp_path, "--checkpoint", checkpoint, "--rerank", "--export", tmp_path / name)
        again = result(tmp_path, "--features", tmp_path / name, "--rerank")
        assert again["metrics"] == found["metrics"]
        assert [row["metrics"] for row in again["rows"]] == [row["metrics"] for row in found["rows"]]
        assert {again[key] == found[key] for key in ("dataset", "model", "method", "keep", "seed", "reduced")} == {True}
    assert write_csv([tmp_path / "result.json"], tmp_path / "all.csv") == 1
    assert "lists" not in (tmp_path / "all.csv").read_text().splitlines()[0]


def test_seeds_give_mean_and_deviation(people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tiny_checkpoint(tmp_path / f"{seed}.safetensors", people, seed=seed) for seed in range(3)]
    alone = [result(tmp_path, "--checkpoint", file)["metrics"]["mAP"] for file in files]
    capsys.readouterr()
    found = result(tmp_path, "--checkpoint", *files)
    assert "\u00b1" in capsys.readouterr().out
    assert found["metrics"]["mAP"] == pytest.approx(np.mean(alone))
    assert found["rows"][0]["deviation"]["mAP"] == pytest.approx(np.std(alone, ddof=1))
    assert [run["metrics"]["mAP"] for run in found["runs"]] == pytest.approx(alone)
    assert found["seed"] == "0, 1, 2"
    other = tiny_checkpoint(tmp_path / "other.safetensors", people, "MODEL.USE_SDTPS=False")
    err = refused(capsys, "eval", "reid", "--checkpoint", files[0], other)
    assert "differ in more than the seed" in err


def test_a_baseline_selects_nothing(people: Path, tmp_path: Path) -> None:
    file = tiny_checkpoint(tmp_path / "base.safetensors", people, "MODEL.USE_SDTPS=False")
    found = result(tmp_path, "--checkpoint", file)
    assert (found["method"], found["keep"], found["reduced"]) == ("none", None, False)
    assert all(entry["selected"] == {} for entry in found["lists"])


@pytest.mark.parametrize("layout", ["rgbnt100", "msvr310", "folder"])
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    root = tiny_set(tmp_path / "set", layout)
    file = tiny_checkpoint(tmp_path / "m.safetensors", root, f"DATASETS.NAMES={layout}", "MODEL.SIE_CAMERA=False")
    found = result(tmp_path, "--checkpoint", file, "--missing", "rn")
    assert found["queries"] == 6
    assert found["rows"][1]["left"] == ["tir"]
    strip = found["lists"][0]["query"]["parts"]
    assert strip == ({"rgb": [0, 3], "nir": [1, 3], "tir": [2, 3]} if layout == "rgbnt100" else {})


def test_what_is_missing_can_be_said_by_letters_and_names() -> None:
    three = ("rgb", "nir", "tir")
    assert missing_sets("all", three) == [
        ("rgb",), ("nir",), ("tir",), ("rgb", "nir"), ("rgb", "tir"), ("nir", "tir")]  # fmt: skip
    assert missing_sets("nr, t", three) == [("rgb", "nir"), ("tir",)]
    assert missing_sets("rgb+tir,nir", three) == [("rgb", "tir"), ("nir",)]
    assert missing_sets("", three) == missing_sets("all", ("rgb",)) == []
    for wrong in ("x", "rnt", "rgb+uv", "rgb+nir+tir"):
        with pytest.raises(OptionError, match="--missing"):
            missing_sets(wrong, three)
    with pytest.raises(OptionError, match="--missing"):
        missing_sets("r", ("red", "rgb"))  # which of the two?


def test_wrong_command_lines_are_one_line(
    checkpoint: Path, people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ("eval", "reid")
    assert "either --checkpoint" in refused(capsys, *ours)
    assert "either --checkpoint" in refused(capsys, *ours, "--checkpoint", checkpoint, "--features", "f.npz")
    assert "nowhere.safetensors" in refused(capsys, *ours, "--checkpoint", "nowhere.safetensors")
    assert "nowhere is not a folder" in refused(capsys, *ours, "--checkpoint", checkpoint, "--data", "nowhere")
    assert "Did you mean" in refused(capsys, *ours, "--checkpoint", checkpoint, "--layout", "rgbnt102")
    assert "--missing x" in refused(capsys, *ours, "--checkpoint", checkpoint, "--missing", "x")
    assert "--missing needs the model" in refused(capsys, *ours, "--features", "f.npz", "--missing", "r")
    assert "--flip needs the model" in refused(capsys, *ours, "--features", "f.npz", "--flip")
    assert "f.npz" in refused(capsys, *ours, "--features", "f.npz")
    assert ".csv" in refused(capsys, *ours, "--checkpoint", checkpoint, "--export", tmp_path / "f.csv")
    assert "one --checkpoint" in refused(capsys, *ours, "--checkpoint", checkpoint, checkpoint, "--export", "f.npz")
    assert str(tmp_path) in refused(capsys, *ours, "--checkpoint", checkpoint, "-o", tmp_path)
    assert "--rerank" in refused(capsys, *ours, "--checkpoint", checkpoint, "--rerankk")
    assert "--batch_size" in refused(capsys, *ours, "--checkpoint", checkpoint, "--batch_size", "0")
    assert 'Did you mean "reid"' in refused(capsys, "eval", "ried")


def test_cameras_that_the_model_does_not_know(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "three"
    flags = ["--identities", "6", "--cameras", "3", "--images", "2", "--test_share", "0.5"]
    assert main(["data", "reid-synthetic", *flags, "-o", str(root)]) == 0
    assert "camera 2" in refused(capsys, "eval", "reid", "--checkpoint", checkpoint, "--data", root)
    found = result(tmp_path, "--checkpoint", checkpoint, "--data", root, "--no_cameras")
    assert (found["queries"], found["option_no_cameras"]) == (18, True)


def test_a_broken_set_is_found_before_anything_runs(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tiny_set(tmp_path / "broken")
    victim = next((root / "test" / "NI").iterdir())
    victim.unlink()
    assert victim.name in refused(capsys, "eval", "reid", "--checkpoint", checkpoint, "--data", root)
    found = result(tmp_path, "--checkpoint", checkpoint, "--data", root, "--skip_broken")
    assert found["queries"] == 11
    assert "1 broken" in capsys.readouterr().err


def test_a_set_without_one_modality_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layout", "folder", "--identities", "6", "--cameras", "2", "--images", "2", "--test_share", "0.5"]
    assert main(["data", "reid-synthetic", *flags, "--modalities", "rgb", "tir", "-o", str(tmp_path / "two")]) == 0
    file = tiny_checkpoint(tmp_path / "m.safetensors", tmp_path / "two", "DATASETS.NAMES=folder")
    found = result(tmp_path, "--checkpoint", file, "--export", tmp_path / "f.npz")
    assert "no nir" in capsys.readouterr().err
    assert found["queries"] == 6
    assert (load_features(tmp_path / "f.npz").block("nir") == 0).all()


def test_own_images_without_labels(
    checkpoint: Path, people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    for folder, modality in (("RGB", "rgb"), ("NI", "nir"), ("TI", "tir")):
        (own / modality).mkdir(parents=True)
        for path in sorted((people / "test" / folder).iterdir())[:4]:
            (own / modality / f"visitor {path.name[-12:]}").write_bytes(path.read_bytes())
    next((own / "tir").iterdir()).unlink()
    flags = ("--checkpoint", str(checkpoint), "-o", str(tmp_path / "own.npz"))
    assert main(["extract", "reid", str(own), *flags]) == 0
    said = capsys.readouterr()
    assert "1 of 4 images have no tir" in said.err
    table = load_features(tmp_path / "own.npz")
    assert table.features.shape == (4, 3 * 24)
    assert set(table.pids) == set(table.cameras) == {-1}
    assert ((table.block("tir") == 0).all(axis=1)).sum() == 1
    assert (table.block("rgb") != 0).any(axis=1).all()
    assert all(name.startswith("visitor") for name in table.names)
    assert "no query and gallery" in refused(capsys, "eval", "reid", "--features", tmp_path / "own.npz")


def test_plain_files_of_one_modality(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (20, 40), 90).save(tmp_path / "grey.png")
    flags = ("extract", "reid", "--checkpoint", checkpoint, tmp_path / "grey.png", "-o", tmp_path / "f.safetensors")
    assert "--modality" in refused(capsys, *flags)
    assert "--modality uv" in refused(capsys, *flags, "--modality", "uv")
    assert main([*map(str, flags), "--modality", "nir"]) == 0
    table = load_features(tmp_path / "f.safetensors")
    assert (table.names, table.features.shape) == (["grey"], (1, 72))
    assert (table.block("rgb") == 0).all()
    (tmp_path / "cut.jpg").write_bytes(b"\xff\xd8\xff")
    broken = ("extract", "reid", "--checkpoint", checkpoint, tmp_path / "cut.jpg", "--modality", "rgb", "-o", "f.npz")
    assert "cut.jpg" in refused(capsys, *broken)
    assert "gone.jpg" in refused(capsys, *broken[:4], tmp_path / "gone.jpg", "--modality", "rgb", "-o", "f.npz")
    (tmp_path / "empty" / "rgb").mkdir(parents=True)
    assert "no image in" in refused(capsys, *broken[:4], tmp_path / "empty", "-o", tmp_path / "f.npz")
    assert ".txt" in refused(capsys, *broken[:4], tmp_path, "-o", tmp_path / "f.txt")
    assert 'Did you mean "reid"' in refused(capsys, "extract", "ried")


def test_a_model_of_one_modality_needs_no_flag(people: Path, tmp_path: Path) -> None:
    save_model(tiny_model(people, modalities=("rgb",)), tmp_path / "one.safetensors")
    flags = ["--checkpoint", str(tmp_path / "one.safetensors"), "-o", str(tmp_path / "f.npz")]
    assert main(["extract", "reid", str(people / "test" / "RGB"), *flags]) == 0
    assert load_features(tmp_path / "f.npz").features.shape == (12, 24)
