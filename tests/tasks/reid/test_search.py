"""Searches of a tiny ReID model: how a trained one selects, and training runs as trials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.reid_material import tiny_checkpoint, tiny_set
from tokensieve.cli.main import main
from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.report.studies import read_study
from tokensieve.search import run_search
from tokensieve.tasks.reid.config import load_config, parse_config
from tokensieve.tasks.reid.search import default_space, reid_search

SMALL = ["MODEL.PATCH=8", "MODEL.WIDTH=24", "MODEL.DEPTH=2", "MODEL.HEADS=2", "INPUT.SIZE_TRAIN=[32, 16]",
         "SOLVER.IMS_PER_BATCH=8", "SOLVER.MAX_STEPS=4", "SOLVER.WARMUP_STEPS=1", "SOLVER.EVAL_PERIOD=2",
         "SOLVER.CHECKPOINT_PERIOD=2", "SOLVER.BACKBONE_LR=1e-3", "DATASETS.VAL_SHARE=0.5",
         "study=study.log"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reid") / "set"
    flags = ["--identities", "10", "--cameras", "2", "--images", "2", "--test_share", "0.3"]
    assert main(["data", "reid-synthetic", *flags, "-o", str(folder)]) == 0
    return folder


def test_how_a_trained_model_selects_is_searched(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_checkpoint(tmp_path / "m.safetensors", tiny_set(tmp_path / "set"))
    words = ["search", "reid", "--checkpoint", str(model), "--trials", "6", "-o", "out", "--study", "s.log"]
    assert main(words) == 0
    record = read_study("out/search.json")
    macs = {t["params"]["sparse_ratio"]: t["values"][1] for t in record["trials"]}
    assert [macs[ratio] for ratio in sorted(macs)] == sorted(macs.values())
    number = record["best"][0]
    result = json.loads(Path(f"out/trials/{number:04d}.json").read_text())
    assert record["trials"][number]["values"] == [result["metrics"]["mAP"], result["gmacs"]]
    assert main(["eval", "reid", "--config", f"out/front/{number:04d}.yaml", "-o", "again.json"]) == 0
    again = json.loads(Path("again.json").read_text())
    for key in ("metrics", "gmacs", "option_beta", "option_formula"):
        assert again[key] == result[key], key
    capsys.readouterr()
    for more, said in ((["--beta", "0.7"], "--beta 0.7: from 0 to 0.5"), (["--formula", "papre"], "Did you mean"),
                       (["--sparse_ratio", "0"], "above 0, at most 1")):  # fmt: skip
        assert main(["eval", "reid", "--checkpoint", str(model), *more]) == 2
        assert said in capsys.readouterr().err
    assert main(["search", "reid", "--trials", "1", "-o", "b"]) == 2
    assert "needs a trained model: give --checkpoint" in capsys.readouterr().err
    assert main(["search", "reid", "--checkpoint", "nowhere", "-o", "b"]) == 2
    assert "nowhere: there is no such file" in capsys.readouterr().err


def test_selecting_otherwise_is_what_a_model_built_so_would_do(tmp_path) -> None:
    """The referee: the same weights in a model whose configuration has that ratio, and as many tokens aggregated."""
    import torch

    from tokensieve.tasks.reid.runs import EvalOptions, _Loaded, _selecting, load_checkpoint

    root = tiny_set(tmp_path / "set")
    path = tiny_checkpoint(tmp_path / "m.safetensors", root)  # 8 tokens: 4 selected, aggregated to 1
    pairs = {"SPARSE_RATIO": 0.75, "AGGR_RATIO": 0.3, "BETA": 0.1, "FORMULA": "convex"}
    other = tiny_checkpoint(tmp_path / "o.safetensors", root, *(f"MODEL.SDTPS_{k}={v}" for k, v in pairs.items()))
    loaded, wanted = _Loaded(path, *load_checkpoint(path)), load_checkpoint(other)[0]
    _selecting(loaded, EvalOptions(sparse_ratio=0.75, beta=0.1, formula="convex"))
    wanted.load_state_dict(loaded.model.state_dict())
    torch.manual_seed(0)
    images = {name: torch.rand(2, 3, 32, 16) for name in ("rgb", "nir", "tir")}
    cameras = torch.tensor([0, 1])
    with torch.no_grad():
        assert torch.equal(loaded.model(images, cameras).feature, wanted(images, cameras).feature)
    assert loaded.model.compressor_macs() == wanted.compressor_macs()
    baseline = tiny_checkpoint(tmp_path / "b.safetensors", root, "MODEL.USE_SDTPS=False")
    with pytest.raises(OptionError, match="selects no patches by SDTPS"):
        _selecting(_Loaded(baseline, *load_checkpoint(baseline)), EvalOptions(beta=0.1))


def test_trials_are_training_runs_with_the_seed_s_keys(data, tmp_path, capsys) -> None:
    file = tmp_path / "c.yml"
    file.write_text(
        "manager_settings: {mode: optuna}\nsearch_settings:\n  n_trials: 2\n  objectives: [accuracy, macs]\n"
        "  space:\n    MODEL.SDTPS_SPARSE_RATIO: [0.5, 0.75]\n    BASE_LR: {low: 1e-4, high: 1e-2, log: true}\n"
    )
    words = ["train", "reid", "--config", str(file), *SMALL, f"DATASETS.ROOT_DIR={data}", "-o", str(tmp_path / "out")]
    assert main(words) == 0
    record = read_study(tmp_path / "out" / "search.json")
    assert [t["state"] for t in record["trials"]] == ["complete"] * 2
    assert all(0 <= t["values"][0] <= 1 and t["values"][1] > 0 for t in record["trials"])
    number = record["best"][0]
    config = load_config(tmp_path / "out" / "front" / f"{number:04d}.yaml")
    assert record["trials"][number]["params"]["MODEL.SDTPS_SPARSE_RATIO"] == config.MODEL.SDTPS_SPARSE_RATIO
    assert record["trials"][number]["params"]["BASE_LR"] == config.SOLVER.BASE_LR
    capsys.readouterr()
    assert main(["train", "reid", "--config", str(tmp_path / "out" / "front" / f"{number:04d}.yaml")]) == 0
    value = record["trials"][number]["values"][0]
    assert f"mAP {100 * value:.1f} %" in capsys.readouterr().out
    assert main([*words, "n_trials=2", "--dry-run"]) == 0


def test_hopeless_runs_end_early(data, tmp_path) -> None:
    pairs = [*SMALL, f"DATASETS.ROOT_DIR={data}", f"OUTPUT_DIR={tmp_path}", "mode=optuna", "n_trials=6",
             "stop_after_trials=2", "sampler=random", "SOLVER.MAX_STEPS=3", "SOLVER.EVAL_PERIOD=1",
             'search_settings.space={"SOLVER.SEED": {"low": 0, "high": 999}}']  # fmt: skip
    record = run_search(reid_search({}, pairs)).record
    states = [t["state"] for t in record["trials"]]
    assert set(states) <= {"complete", "pruned"}
    assert states.count("pruned") >= 1
    early = next(t for t in record["trials"] if t["state"] == "pruned")
    assert 1 <= len(early["steps"]) <= 3


def test_wrong_spaces_are_refused(tmp_path) -> None:
    with pytest.raises(UnknownNameError, match=r"BASE_LRR.*mean .*SOLVER.BASE_LR"):
        reid_search({}, ["mode=optuna", 'search_settings.space={"SOLVER.BASE_LRR": [1]}'])
    with pytest.raises(OptionError, match="SDTPS_BETA"):
        reid_search({}, ["mode=optuna", 'search_settings.space={"MODEL.SDTPS_BETA": [0.7]}'])
    with pytest.raises(OptionError, match="enable is false"):
        reid_search({}, ["mode=optuna", "enable=false"])
    assert reid_search({}, ["mode=optuna"]).space == default_space(parse_config({}))
    assert "MODEL.SDTPS_BETA" not in reid_search({}, ["mode=optuna", "MODEL.USE_SDTPS=False"]).space
