"""What a user can get wrong: one line, code 2, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokensieve.cli.main import main


@pytest.fixture
def fails(here: Path, capsys):
    """Run a command line that must fail with one line, and give that line."""

    def call(*words: str) -> str:
        capsys.readouterr()
        assert main(["eval", *words]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokensieve: error:")]
        assert len(lines) == 1
        assert not list(here.glob("*.json"))
        return lines[0]

    return call


def test_unknown_model(tiny, fails) -> None:
    assert "ViT-B-32" in fails("--model", "ViT-B32", "--pretrained", "openai", *tiny.data())


def test_unknown_weights_and_missing_checkpoint(tiny, fails) -> None:
    assert "laion400m_e32" in fails("--model", "ViT-B-32", "--pretrained", "laion400m", *tiny.data())
    assert "no such checkpoint file" in fails("--model", "tiny-clip", "--pretrained", "gone.pt", *tiny.data())


def test_truncated_checkpoint(tiny, fails, tmp_path: Path) -> None:
    whole = (tiny.folder / "tiny-clip.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    line = fails("--model", "tiny-clip", "--pretrained", str(tmp_path / "cut.pt"), *tiny.data())
    assert "cut.pt cannot be loaded: the file is truncated or not a checkpoint" in line
    (tmp_path / "noise.pt").write_bytes(bytes(range(256)) * 12)
    line = fails("--model", "tiny-clip", "--pretrained", str(tmp_path / "noise.pt"), *tiny.data())
    assert "truncated or not a checkpoint" in line
    assert "weights_only" not in line  # torch's own words advise to load it unsafely


def test_a_checkpoint_that_would_run_code_is_refused(tiny, fails, tmp_path: Path) -> None:
    import torch

    torch.save({"state_dict": {}, "code": test_unknown_model}, tmp_path / "odd.pt")
    assert "cannot be loaded" in fails("--model", "tiny-clip", "--pretrained", str(tmp_path / "odd.pt"), *tiny.data())


def test_checkpoint_of_another_model(tiny, fails) -> None:
    words = ["--model", "tiny-clip", "--pretrained", str(tiny.folder / "tiny-resnet.pt")]
    assert "cannot be loaded" in fails(*words, *tiny.data())


def test_unknown_dataset_and_missing_folder(tiny, fails) -> None:
    assert 'Did you mean "cifar10"' in fails(*tiny.model, "--dataset", "cifar-10", "--dataset_root", "x", "--quiet")
    assert "no webdataset" in fails(*tiny.model, "--dataset", "wds/x", "--dataset_root", "nowhere")


def test_unreadable_image_is_named(tiny, fails) -> None:
    for workers in ("0", "2"):
        line = fails(*tiny.model, *tiny.data("broken"), "--quiet", "--num_workers", workers)
        assert "s0005.png" in line
        assert "0.tar" in line


def test_a_tower_without_tokens(tiny, fails) -> None:
    words = ["--model", "tiny-resnet", "--pretrained", str(tiny.folder / "tiny-resnet.pt"), *tiny.data(), "--quiet"]
    assert "ResNet" in fails(*words, "--method", "tome", "--keep", "0.5")
    assert main(["eval", *words]) == 0


def test_impossible_budgets(tiny, fails) -> None:
    assert "keep=0.0" in fails(*tiny.usual, "--method", "tome", "--keep", "0.0")
    assert "under 10" in fails(*tiny.usual, "--method", "anchor", "--keep", "5")
    assert "at=9" in fails(*tiny.usual, "--method", "evit", "--keep", "0.5", "--prune_layer", "9")


def test_recall_of_more_than_there_is(tiny, fails) -> None:
    words = [*tiny.model, *tiny.data("captioned"), "--task", "zeroshot_retrieval", "--recall_k", "100", "--quiet"]
    assert "--recall_k" in fails(*words)


def test_captioning_needs_a_model_that_writes(tiny, fails) -> None:
    assert "CoCa" in fails(*tiny.model, *tiny.data("captioned"), "--task", "captioning", "--quiet")


def test_too_few_examples_and_no_proportion_of_a_stream(tiny, fails) -> None:
    assert "--fewshot_k" in fails(*tiny.usual, "--task", "linear_probe", "--fewshot_k", "9")
    assert "--val_proportion" in fails(*tiny.usual, "--task", "linear_probe", "--val_proportion", "0.2")


def test_a_run_before_the_wrong_one_is_kept(tiny, here: Path) -> None:
    words = [*tiny.model, "--dataset", "wds/colours", "wds/broken", "--dataset_root", str(tiny.folder / "{dataset}")]
    assert main(["eval", *words, "--quiet", "--speed_batches", "0"]) == 2
    assert [path.name.split("_")[0] for path in here.glob("*.json")] == ["colours"]


def test_classifiers_that_cannot_be_read(tiny, fails, tmp_path: Path) -> None:
    assert "gone.pt" in fails(*tiny.usual, "--load_clfs", "gone.pt")
    (tmp_path / "odd.pt").write_bytes(b"no tensor")
    assert "cannot be read" in fails(*tiny.usual, "--load_clfs", str(tmp_path / "odd.pt"))


def test_two_runs_into_one_file(tiny, fails) -> None:
    words = [*tiny.model, "--dataset", "wds/colours", "wds/few", "--dataset_root", str(tiny.folder / "{dataset}")]
    assert "two runs" in fails(*words, "--output", "same.json")
    assert "braces" in fails(*tiny.usual, "--output", "{nothing}.json")
