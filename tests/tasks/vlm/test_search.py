"""Searches of a tiny LLaVA: `tokensieve search vlm`, and training runs as trials, ended early and taken up again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tokensieve.cli.main import main
from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.report.studies import read_study
from tokensieve.search import run_search
from tokensieve.tasks.search.training import watched
from tokensieve.tasks.vlm import train as training
from tokensieve.tasks.vlm.base import save_small_llava
from tokensieve.tasks.vlm.config import SMALL, load_config
from tokensieve.tasks.vlm.search import default_space, vlm_search

torch.set_num_threads(1)
QUICK = [
    "batch_size=4", "questions=24", "val_questions=8", "eval_every=2", "checkpoint_every=2", "pruner_d_internal=16",
    "pruning_layers=[1]", "warmup_steps=1", "mode=optuna", "study=study.log",
]  # fmt: skip
SPACE = (
    'search_settings.space={"layer_pruners.lr": {"low": 1e-4, "high": 1e-2, "log": true}, "merge_ratio": [0.25, 0.5]}'
)


@pytest.fixture
def model(tiny, processor, tmp_path) -> str:
    save_small_llava(tiny, processor, tmp_path / "model")
    return str(tmp_path / "model")


def test_search_vlm_finds_what_eval_vlm_takes_back(model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["search", "vlm", "--model", model, "--trials", "3", "--images", "2", "--new_tokens", "2", "-o", "out"]
    assert main([*words, "--study", "study.log"]) == 0
    record = read_study("out/search.json")
    number = record["best"][0]
    result = json.loads(Path(f"out/trials/{number:04d}.json").read_text())
    assert record["trials"][number]["values"] == [result["metrics"]["accuracy"], result["gmacs"]]
    assert main(["eval", "vlm", "--config", f"out/front/{number:04d}.yaml", "--images", "2", "-o", "again.json"]) == 0
    again = json.loads(Path("again.json").read_text())
    for key in ("metrics", "gmacs", "tokens_per_layer", "method", "keep_average"):
        assert again[key] == result[key], key
    capsys.readouterr()
    assert main(["eval", "vlm", "--config", str(tmp_path / "nowhere.yaml")]) == 2
    (tmp_path / "wrong.yaml").write_text("methd: fastv")
    assert main(["eval", "vlm", "--config", "wrong.yaml"]) == 2
    assert 'Did you mean "method"' in capsys.readouterr().err.splitlines()[-1]
    assert main(["search", "vlm", "--image", "3"]) == 2
    assert "--image" in capsys.readouterr().err


def test_trials_are_training_runs_and_train_takes_the_best_back(model, tmp_path, capsys) -> None:
    words = ["train", "vlm", *QUICK, f"backbone_settings.name={model}", "n_trials=3", "-o", str(tmp_path / "out")]
    assert main([*words, SPACE]) == 0
    record = read_study(tmp_path / "out" / "search.json")
    assert [t["state"] for t in record["trials"]] == ["complete"] * 3
    assert [step for step, _ in record["trials"][0]["steps"]] == [2, 4, 6]
    best = record["trials"][record["best"][0]]
    assert best["values"][0] == max(value for _, value in best["steps"])
    assert (tmp_path / "out" / "trials" / f"{best['number']:04d}" / "best.safetensors").is_file()
    config = load_config(tmp_path / "out" / "best.yaml")
    assert config.manager_settings.mode == "single"
    assert config.dl.optimizers.layer_pruners.lr == best["params"]["layer_pruners.lr"]
    assert config.method.merge_ratio == best["params"]["merge_ratio"]
    assert config.method.target_merge_tokens is None
    assert config.dl.batch_size == 4
    capsys.readouterr()
    assert main(["train", "vlm", "--config", str(tmp_path / "out" / "best.yaml")]) == 0
    assert f"accuracy_hard {100 * best['values'][0]:.1f} %" in capsys.readouterr().out
    assert main([*words, SPACE]) == 0
    assert "3 of 3 trials have ended" in capsys.readouterr().out


def test_a_trial_that_was_cut_off_goes_on_from_its_checkpoint(model, tmp_path, monkeypatch) -> None:
    pairs = [*QUICK, SPACE, f"backbone_settings.name={model}", "n_trials=1"]
    whole = run_search(vlm_search(SMALL, [*pairs, f"output_dir={tmp_path / 'whole'}"])).record["trials"][0]
    pairs.append(f"output_dir={tmp_path / 'cut'}")
    steps: list[int] = []
    step = training.VlmTask.step

    def counted(self, batch, number):
        if number == 5 and 5 not in steps:
            steps.append(number)
            raise KeyboardInterrupt
        steps.append(number)
        return step(self, batch, number)

    monkeypatch.setattr(training.VlmTask, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        run_search(vlm_search(SMALL, pairs))
    record = run_search(vlm_search(SMALL, pairs)).record
    assert [t["state"] for t in record["trials"]] == ["interrupted", "complete"]
    assert steps == [0, 1, 2, 3, 4, 5, 4, 5]
    assert record["trials"][1]["values"] == whole["values"]
    assert record["trials"][1]["steps"] == whole["steps"]
    assert [path.name for path in (tmp_path / "cut" / "trials").iterdir()] == ["0000"]


def test_a_hopeless_run_stops_at_that_validation(tmp_path) -> None:
    class Task:
        def validate(self):
            return training.Validation(0.5, {"accuracy_hard": 0.5})

    told: list[tuple[int, float]] = []

    class Enough(Exception):  # noqa: N818
        pass

    def report(step, value):
        told.append((step, value))
        if len(told) == 2:
            raise Enough

    def train(*, resume, tick):
        assert not resume
        for done in range(9):
            tick(done)
            task.validate()

    task = Task()
    with pytest.raises(Enough):
        watched(task, train, tmp_path, report)
    assert told == [(1, 0.5), (2, 0.5)]


def test_wrong_spaces_and_many_processes_are_refused_before_anything_runs(tmp_path, monkeypatch) -> None:
    def space(text: str) -> list[str]:
        return [*QUICK, f"search_settings.space={text}", f"output_dir={tmp_path / 'out'}"]

    with pytest.raises(UnknownNameError, match=r"merge_ratoi.*Did you mean"):
        vlm_search(SMALL, space('{"merge_ratoi": [0.5]}'))
    with pytest.raises(OptionError, match=r"merge_ratio=1\.5"):
        vlm_search(SMALL, space('{"merge_ratio": {"low": 0.5, "high": 1.5}}'))
    with pytest.raises(OptionError, match="cannot be split among 3"):
        vlm_search(SMALL, space('{"pruner_num_heads": [4, 3]}'))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="a search starts its trials itself"):
        vlm_search(SMALL, space('{"merge_ratio": [0.5]}'))
    assert not (tmp_path / "out").exists()


def test_the_seed_s_two_keys_are_enough() -> None:
    data = yaml.safe_load("manager_settings: {mode: optuna}\nsearch_settings: {enable: true, n_trials: 50}")
    search = vlm_search({**SMALL, **data})
    assert search.settings.n_trials == 50
    assert not search.notes
    assert "first of them" in vlm_search(SMALL, ["mode=ray", "gpus_per_subtask=2"]).notes[0]
    assert search.space == default_space(load_config(None))
    assert [p.rsplit(".", 2)[-2] for p in search.space][:2] == ["token_merger", "layer_pruners"]
