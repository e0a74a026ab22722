"""Flags of `tokensieve eval` and `sweep`: ours, the legacy, the file's; contradictions name the flags."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tokensieve.cli import eval as command
from tokensieve.cli.main import main
from tokensieve.errors import TokensieveError
from tokensieve.tasks.clip.config import SieveConfig
from tokensieve.tasks.clip.flags import parse, sieve_config

NAMED = ["--model", "ViT-B-32", "--pretrained", "openai", "--dataset", "cifar10"]


def flags(*words: str) -> tuple[SieveConfig, Namespace]:
    own, theirs = parse(command.eval_parser(), [*NAMED, *words])
    return sieve_config(own), theirs


def test_the_founding_flags_are_names_for_the_anchor_method() -> None:
    config, _ = flags("--enable_token_selection", "--token_selection_k", "15", "--token_selection_alpha", "0.6")
    assert config == SieveConfig(method="anchor", mode="analyse", options={"k": 15, "alpha": 0.6})
    config, _ = flags("--enable_pruning", "--k_anchors", "5", "--top_m", "30", "--prune_layer", "3", "1")
    assert config == SieveConfig(method="anchor", mode="prune", options={"k": 5, "m": 30}, at=(1, 3))
    assert flags()[0] == flags("--method", "none")[0] == SieveConfig()


def test_budgets_and_options() -> None:
    assert flags("--method", "tome", "--keep", "1")[0].keep == 1
    assert flags("--method", "tome", "--keep", "1.0")[0].keep == 1.0
    assert flags("--method", "tome", "--keep", "0.7,0.5,40", "--prune_layer", "1", "2", "3")[0].keep == (0.7, 0.5, 40)
    words = ("--method", "anchor", "--method_option", "normalize=none", "--language", "en", "k=7", "alpha=0.25")
    assert flags(*words)[0].options == {"normalize": None, "k": 7, "alpha": 0.25}
    assert flags("--dataset_root", "a=b")[1].dataset_root == "a=b"


def test_everything_else_is_the_benchmarks() -> None:
    words = ["--dataset", "cifar10", "vtab/pets", "--fewshot_k", "-1", "--recall_k", "1", "5", "--no_amp", "--language"]
    _, theirs = flags(*words, "en", "jp", "--task", "linear_probe", "--skip_existing")
    assert theirs.dataset == ["cifar10", "vtab/pets"]
    assert (theirs.fewshot_k, theirs.recall_k, theirs.language) == (-1, [1, 5], ["en", "jp"])
    assert (theirs.task, theirs.skip_existing, theirs.amp, theirs.normalize) == ("linear_probe", True, False, True)
    assert flags("--normalize", "False")[1].normalize is False
    assert flags("--amp")[1].amp is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--enable_pruning --enable_token_selection", "--enable_pruning"),
        ("--enable_pruning --method tome", "--method tome"),
        ("--enable_pruning --mode analyse", "--mode analyse"),
        ("--k_anchors 5", "--enable_pruning"),
        ("--token_selection_m 5 --enable_pruning", "--enable_token_selection"),
        ("--enable_pruning --k_anchors 5 --method_option k=6", "--k_anchors"),
        ("--enable_pruning --top_m 5 --keep 0.5", "--top_m"),
        ("--method tome --keep 0.5 --keep_average 0.5", "--keep_average"),
        ("--keep 0.5", "--keep"),
        ("--method none --schedule linear", "--schedule"),
        ("--method tome --keep 0.5 --fuse_weight 0.3", "--fuse_weight"),
        ("--method tomee --keep 0.5", "tome"),
        ("--method tome --keep half", "--keep"),
        ("--method tome --keep 0.5 --mode prunes", "prune"),
        ("--method tome --keep 0.5 --schedule linea", "linear"),
        ("--method tome --keep 0.5 --method_option alpha=3", "alpha"),
        ("--method tome --keep 0.5 --method_option alpha", "KEY=VALUE"),
        ("--enable_pruning --alpha 1.5", "alpha=1.5"),
        ("--enable_pruning --k_anchors 0", "k=0"),
        ("--amp --no_amp", "--no_amp"),
        ("--datset cifar10", "--dataset"),
        ("--kep 0.5", "--keep"),
        ("--normalize maybe", "--normalize"),
        ("--task zeroshot", "--task"),
        ("--speed_batches -1", "--speed_batches"),
        ("--batch_size 0", "--batch_size"),
        ("stray", "stray"),
    ],
)
def test_wrong_flags_are_named(words: str, said: str) -> None:
    with pytest.raises(TokensieveError, match=said.replace("(", r"\(")):
        flags("--quiet", *words.split())


def test_a_file_says_what_flags_say_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "method: anchor\nkeep: [0.7, 0.5]\nprune_layer: [1, 2]\nmethod_option: {k: 5, alpha: 0.3}\n"
        "recall_k: [1, 10]\nskip_existing: true\ndistributed: false\nseed: 7\n"
    )
    config, theirs = flags("--config", str(file))
    assert (config.keep, config.at, config.options) == ((0.7, 0.5), (1, 2), {"k": 5, "alpha": 0.3})
    assert (theirs.recall_k, theirs.skip_existing, theirs.distributed, theirs.seed) == ([1, 10], True, False, 7)
    config, theirs = flags("--config", str(file), "--keep_average", "0.6", "--seed", "8", "alpha=0.9")
    assert (config.keep, config.keep_average, theirs.seed) == (None, 0.6, 8)
    assert config.options == {"k": 5, "alpha": 0.9}
    file.write_text("enable_pruning: true\ntop_m: 30\n")
    assert flags("--config", str(file))[0].options == {"m": 30}
    assert flags("--config", str(file), "--method", "tome", "--keep", "9")[0].method == "tome"


@pytest.mark.parametrize(
    ("text", "said"),
    [("kep: 1", "keep"), ("- a", "keys"), ("a: [", "YAML"), ("quiet: 3", "switch"), ("seed: {a: 1}", "table")],
)
def test_wrong_files_are_errors_that_name_the_key(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(TokensieveError, match=said):
        flags("--config", str(tmp_path / "run.yaml"))
    with pytest.raises(TokensieveError, match="cannot be read"):
        flags("--config", str(tmp_path / "gone.yaml"))


def test_help_shows_both_sets(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("eval", "sweep"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = capsys.readouterr().out
        assert all(flag in text for flag in ("--keep", "--at", "--speed_batches", "--dataset", "--fewshot_lr"))
    assert "--methods" in text


@pytest.mark.parametrize(("words", "said"), [(["reid"], "--checkpoint"), (["vlm", "--model", "gone"], "gone"),
                                             (["clp"], "clip")])  # fmt: skip
def test_other_tasks_and_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_default_model_and_data_where_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokensieve.tasks.clip import load

    monkeypatch.setattr(load, "default_dataset_root", lambda: "embedded")
    _, theirs = parse(command.eval_parser(), ["clip"][1:])
    assert (theirs.model, theirs.pretrained) == (["vit-s14-minilm"], ["tokensieve"])
    assert (theirs.dataset, theirs.dataset_root) == (["wds/cifar10-sample"], "embedded")
    _, theirs = parse(command.eval_parser(), ["--model", "ViT-B-16"])
    assert (theirs.model, theirs.pretrained) == (["ViT-B-16"], ["laion400m_e32"])
