"""`tokensieve eval` end to end on a tiny checkpoint and tiny data: the legacy commands, all five tasks."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tokensieve.cli.main import main
from tokensieve.report.results import read_eval

SELECT = ["--enable_token_selection", "--token_selection_k", "15", "--token_selection_m", "60"]
PRUNE = ["--enable_pruning", "--k_anchors", "10", "--top_m", "50", "--alpha", "0.5"]


def test_the_untouched_model_is_recorded_whole(tiny, run) -> None:
    result = run(*tiny.usual)
    assert result["format"] == "tokensieve-eval-1"
    assert (result["method"], result["mode"], result["reduced"]) == ("none", None, False)
    assert result["speedup"] == result["speedup_low"] == result["speedup_high"] == result["possible"] == 1.0
    assert result["tokens_per_layer"] == "257 257 257 257"
    assert (result["images"], result["patches"], result["batch_size"], result["amp"]) == (24, 256, 8, False)
    assert result["gmacs"] == result["gmacs_full"] > 0
    assert set(result["metrics"]) == {"acc1", "acc5", "mean_per_class_recall"}
    assert result["images_per_second_low"] <= result["images_per_second"] <= result["images_per_second_high"]
    assert all(not isinstance(value, dict | list) for key, value in result.items() if key != "metrics")


def test_accuracy_is_that_of_the_benchmark_by_hand(tiny, run) -> None:
    import open_clip
    import torch
    from clip_benchmark.datasets.builder import build_dataset

    model, _, transform = open_clip.create_model_and_transforms("tiny-clip", pretrained=tiny.model[-1])
    model.eval()
    data = build_dataset("wds/colours", root=str(tiny.folder / "colours"), transform=transform)
    tokenizer = open_clip.get_tokenizer("tiny-clip")
    right = 0
    with torch.no_grad():
        heads = []
        for name in data.classes:
            texts = torch.nn.functional.normalize(
                model.encode_text(tokenizer([t.format(c=name) for t in data.templates])), dim=-1
            )
            heads.append(texts.mean(dim=0) / texts.mean(dim=0).norm())
        for image, label in data:
            feature = model.encode_image(image[None])[0]
            right += int(torch.stack([head @ feature for head in heads]).argmax()) == label
    assert run(*tiny.usual)["metrics"]["acc1"] == right / 24


def test_analyse_gives_exactly_the_untouched_accuracy(tiny, run) -> None:
    assert run(*tiny.usual)["metrics"] == run(*tiny.usual, *SELECT)["metrics"]


def test_the_selection_command_as_the_founding_script_has_it(tiny, run) -> None:
    result = run(*tiny.usual, *SELECT, "--token_selection_alpha", "0.6")
    assert (result["method"], result["mode"], result["reduced"]) == ("anchor", "analyse", False)
    assert (result["option_k"], result["option_m"], result["option_alpha"]) == (15, 60, 0.6)
    assert run(*tiny.usual, "--enable_token_selection")["option_k"] == 10


def test_the_pruning_command_as_the_founding_script_has_it(tiny, run) -> None:
    result = run(*tiny.usual, *PRUNE)
    assert (result["method"], result["mode"], result["reduced"]) == ("anchor", "prune", True)
    assert (result["keep"], result["at"], result["tokens_per_layer"]) == (60, "1", "257 61 61 61")
    assert result["possible"] == pytest.approx(result["gmacs_full"] / result["gmacs"])
    assert result["gained"] == pytest.approx(result["speedup"] / result["possible"])
    assert result["speedup_low"] <= result["speedup"] <= result["speedup_high"]


@pytest.mark.parametrize(("k", "m", "alpha"), [("5", "30", "0.6"), ("15", "70", "0.4")])
def test_the_other_pruning_settings(tiny, run, k: str, m: str, alpha: str) -> None:
    result = run(*tiny.usual, "--enable_pruning", "--k_anchors", k, "--top_m", m, "--alpha", alpha)
    assert result["tokens_per_layer"].split()[-1] == str(1 + int(k) + int(m))


def test_a_list_of_budgets_at_several_layers(tiny, run) -> None:
    result = run(*tiny.usual, "--method", "evit", "--keep", "0.5,0.25", "--prune_layer", "2", "0", "fuse=false")
    assert (result["keep"], result["at"], result["option_fuse"]) == ("0.5,0.25", "0,2", False)
    assert result["tokens_per_layer"] == "129 129 65 65"


def test_the_class_prompts_are_what_cdpruner_selects_by(tiny, run, monkeypatch) -> None:
    from tokensieve.methods.cdpruner import CDPruner

    seen = []
    select = CDPruner.select
    monkeypatch.setattr(
        CDPruner, "select", lambda self, view, keep: (seen.append(view.text), select(self, view, keep))[1]
    )
    result = run(*tiny.usual, "--method", "cdpruner", "--keep", "0.3", "--speed_batches", "0")
    assert result["text"] == "class prompts"
    assert all(text is not None and tuple(text.shape)[-2:] == (6, 16) for text in seen)


def test_fusing(tiny, run) -> None:
    result = run(*tiny.usual, "--method", "anchor", "--mode", "fuse", "--fuse_weight", "0.4")
    assert (result["mode"], result["fuse_weight"], result["reduced"]) == ("fuse", 0.4, False)


def test_speed_can_be_left_out(tiny, run) -> None:
    result = run(*tiny.usual, *PRUNE, "--speed_batches", "0")
    assert [result[name] for name in ("images_per_second", "speedup", "speedup_low", "gained")] == [None] * 4


def test_measuring_speed_changes_no_result(tiny, run) -> None:
    words = [*tiny.usual, "--method", "random", "--keep", "0.2"]
    assert run(*words, "--speed_batches", "2")["metrics"] == run(*words, "--speed_batches", "0")["metrics"]


def test_nothing_reduced_is_said_and_recorded(tiny, run, capsys) -> None:
    result = run(*tiny.usual, "--method", "anchor", "--method_option", "k=10", "--method_option", "m=300")
    assert result["reduced"] is False
    output = capsys.readouterr()
    assert "warning: nothing is reduced" in output.err
    assert "nothing reduced" in output.out


def test_fewer_than_five_classes_give_null(tiny, run, here: Path) -> None:
    result = run(*tiny.model, *tiny.data("few"), "--quiet")
    assert result["metrics"]["acc5"] is None
    assert "NaN" not in next(here.glob("*.json")).read_text()


def test_retrieval(tiny, run) -> None:
    words = [*tiny.model, *tiny.data("captioned"), "--task", "zeroshot_retrieval", "--recall_k", "1", "5", "--quiet"]
    result = run(*words, "--method", "tome", "--keep", "0.4")
    assert set(result["metrics"]) == {f"{side}_retrieval_recall@{k}" for side in ("image", "text") for k in (1, 5)}
    assert result["reduced"]
    assert run(*words, *SELECT)["metrics"] == run(*words)["metrics"]


def test_image_caption_selection(tiny, run) -> None:
    words = [*tiny.model, "--dataset", "sugar_crepe/add_att", "--dataset_root", str(tiny.folder / "crepe"), "--quiet"]
    result = run(*words, "--batch_size", "4", "--num_workers", "0", "--method", "random", "--keep", "0.3")
    assert (result["task"], result["reduced"], result["images"]) == ("image_caption_selection", True, 10)
    assert set(result["metrics"]) == {"image_acc", "text_acc", "acc"}


def test_captioning_with_a_small_coca(tiny, run, monkeypatch) -> None:
    monkeypatch.setattr("tokensieve.tasks.clip.captions.shutil.which", lambda _: None)  # the same with and without Java
    words = ["--model", "tiny-coca", "--pretrained", str(tiny.folder / "tiny-coca.pt"), "--task", "captioning"]
    result = run(*words, *tiny.data("captioned"), "--quiet", "--method", "evit", "--keep", "0.4")
    assert {"Bleu_1", "Bleu_4", "ROUGE_L", "CIDEr"} <= set(result["metrics"])
    assert all(name in result["captioning_left_out"] for name in ("METEOR", "SPICE"))
    assert (result["reduced"], result["images"]) == (True, 12)
    assert result["speedup"] is not None


def test_linear_probe_keeps_features_for_each_configuration(tiny, run, here: Path) -> None:
    words = [*tiny.usual, "--task", "linear_probe", "--fewshot_epochs", "5", "--speed_batches", "1"]
    whole = run(*words)
    reduced = run(*words, "--method", "random", "--keep", "8")
    assert set(whole["metrics"]) >= {"lp_acc1", "lp_acc5", "lp_mean_per_class_recall", "weight_decay"}
    folders = sorted(path.name for path in (here / "features").iterdir())
    assert len(folders) == 2
    assert reduced["images"] == whole["images"] == 48
    import torch

    features = [torch.load(here / "features" / name / "test.pt")["features"] for name in folders]
    assert not torch.equal(*features)


def test_linear_probe_with_validation_and_from_the_cache(tiny, run, here: Path, capsys) -> None:
    words = [*tiny.usual, "--task", "linear_probe", "--fewshot_epochs", "2", "--val_split", "val", "--method", "grid"]
    words += ["--keep", "0.5", "--normalize", "False"]
    result = run(*words)
    assert result["metrics"]["normalized"] is False
    assert 1e-6 <= result["metrics"]["weight_decay"] <= 1e2
    again = read_cached(words, here)
    assert again["metrics"] == result["metrics"]
    assert again["images"] == 0
    assert main(["eval", *words, "--skip_load", "--seed", "1"]) == 2
    assert "no cached features" in capsys.readouterr().err
    assert main(["eval", *tiny.usual, "--skip_load"]) == 2
    assert "--skip_load" in capsys.readouterr().err


def read_cached(words: list[str], here: Path) -> dict[str, Any]:
    assert main(["eval", *words, "--skip_load", "--output", "cached.json"]) == 0
    return read_eval(here / "cached.json")


def test_normalisation_is_what_was_asked(tiny, run, here: Path) -> None:
    import torch

    words = [*tiny.usual, "--task", "linear_probe", "--fewshot_epochs", "1", "--speed_batches", "0"]
    for flag, unit in (("False", False), ("True", True)):
        run(*words, "--normalize", flag, "--feature_root", flag)
        (file,) = (here / flag).glob("*/test.pt")
        norms = torch.load(file)["features"].norm(dim=-1)
        assert torch.allclose(norms, torch.ones(24), atol=1e-4) is unit


def test_two_budgets_never_share_a_name_and_existing_ones_are_skipped(tiny, run, here: Path, capsys) -> None:
    first = run(*tiny.usual, "--method", "grid", "--keep", "0.5", "--speed_batches", "0")
    second = run(*tiny.usual, "--method", "grid", "--keep", "0.25", "--speed_batches", "0", "--skip_existing")
    assert first["config_id"] != second["config_id"]
    times = {path: path.stat().st_mtime_ns for path in here.glob("*.json")}
    words = [*tiny.usual, "--method", "grid", "--keep", "0.5", "--speed_batches", "0", "--skip_existing"]
    assert main(["eval", *words]) == 0
    assert "skipped" in capsys.readouterr().out
    assert times == {path: path.stat().st_mtime_ns for path in here.glob("*.json")}


def test_an_output_of_another_configuration_is_not_taken_for_it(tiny, run, here: Path, capsys) -> None:
    run(*tiny.usual, "--speed_batches", "0", "--output", "one.json")
    words = [*tiny.usual, "--speed_batches", "0", "--output", "one.json", "--skip_existing"]
    assert main(["eval", *words]) == 0
    assert main(["eval", *words, "--method", "grid", "--keep", "0.5"]) == 2
    assert "another configuration" in capsys.readouterr().err


def test_half_precision_only_where_it_is_asked_for(tiny, run) -> None:
    words = [*tiny.usual, "--speed_batches", "0", "--method", "grid", "--keep", "0.5"]
    assert run(*words)["amp"] is False
    assert run(*words, "--amp")["amp"] is True


def test_only_our_own_words_tell_of_files(tiny, run, capsys) -> None:
    run(*tiny.model, *tiny.data())
    out, _ = capsys.readouterr()
    assert "Running 'zeroshot_classification'" in out  # clip_benchmark's own words are there
    assert "Dump results to" not in out  # but not its temporary file
    assert "has no len()" not in out


def test_nothing_in_the_benchmark_stays_changed(tiny, run) -> None:
    import clip_benchmark.cli as cli
    from clip_benchmark import models
    from clip_benchmark.metrics import captioning, linear_probe, zeroshot_classification

    def state() -> list[Any]:
        modules = (cli, captioning, linear_probe, zeroshot_classification, models)
        return [dict(vars(module)) for module in modules] + [dict(models.TYPE2FUNC), list(models.MODEL_TYPES), sys.argv]

    before = state()
    run(*tiny.usual, "--speed_batches", "0")
    assert main(["eval", *tiny.model, *tiny.data("broken"), "--quiet"]) == 2
    assert state() == before


def test_without_the_caption_scorers_zero_shot_still_runs(tiny, monkeypatch) -> None:
    """In a fresh import of clip_benchmark whose scorers are missing."""
    import importlib.util

    from tokensieve.tasks.clip import upstream

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(("clip_benchmark", "pycoco"))}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pycocoevalcap" else find(name, *a)
    )
    try:
        assert upstream.benchmark().run is not None
        assert not any(name.startswith("pycocoevalcap") for name in sys.modules)
    finally:
        for name in [name for name in sys.modules if name.startswith("clip_benchmark")]:
            del sys.modules[name]
        sys.modules.update(kept)


def test_the_configuration_is_in_the_result_and_repeats_it(tiny, run) -> None:
    result = run(*tiny.usual, "--method", "sieve", "--keep", "0.3", "--seed", "3")
    config = json.loads(result["config"])
    assert config["reduction"]["keep"] == 0.3
    assert config["benchmark"]["seed"] == result["seed"] == 3
    assert "--method sieve" in result["command"]
    assert math.isclose(result["tokens_average"], sum(map(int, result["tokens_per_layer"].split())) / 4)
