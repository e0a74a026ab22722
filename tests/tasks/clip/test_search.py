"""`tokensieve search clip` on a tiny CLIP: what is found is what eval finds, and eval takes it back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tokensieve.cli.main import main
from tokensieve.report.studies import read_study

SPACE = {
    "method": ["grid", "anchor"],
    "keep": {"low": 0.2, "high": 0.8, "step": 0.1},
    "at": [[1], [0, 2]],
    "k": {"low": 4, "high": 8},
}


def config(path: Path, tiny, **more) -> str:
    data = {
        "search_settings": {"n_trials": 5, "space": SPACE, "study": "study.log"} | more.pop("search_settings", {}),
        "eval_settings": {"model": "tiny-clip", "pretrained": str(tiny.folder / "tiny-clip.pt"), "images": 12,
                          "dataset": "wds/colours", "dataset_root": str(tiny.folder / "colours"), "batch_size": 8},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(data | more))
    return str(path)


def test_the_front_is_evaluated_alike_by_eval(tiny, here, run, capsys) -> None:
    assert main(["search", "clip", "--config", config(here / "c.yaml", tiny), "-o", "out"]) == 0
    said = capsys.readouterr().out
    assert "trial 4 (5 of 5)" in said
    assert "front" in said
    record = read_study("out/search.json")
    assert [o["metric"] for o in record["objectives"]] == ["accuracy", "macs"]
    assert all(("k" in t["params"]) == (t["params"]["method"] == "anchor") for t in record["trials"])
    number = record["best"][0]
    trial, result = record["trials"][number], json.loads(Path(f"out/trials/{number:04d}.json").read_text())
    assert result["images"] == 12
    assert trial["values"] == [result["metrics"]["acc1"], result["gmacs"]]
    again = run("--config", f"out/front/{number:04d}.yaml", "--images", "12", "--quiet")
    for key in ("metrics", "gmacs", "tokens_per_layer", "method", "at", "keep"):
        assert again[key] == result[key], key
    whole = run("--config", f"out/front/{number:04d}.yaml", "--quiet")
    assert whole["images"] == 24  # the file does not say how few the search looked at
    before = {path: path.stat().st_mtime_ns for path in Path("out/trials").iterdir()}
    assert main(["search", "clip", "--config", "c.yaml", "-o", "out"]) == 0
    assert "5 of 5 trials have ended" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in Path("out/trials").iterdir()}


def test_one_objective_looks_at_few_images_first(tiny, here, capsys) -> None:
    words = ["search", "clip", "--config", config(here / "c.yaml", tiny), "--objectives", "accuracy", "-o", "out"]
    assert main([*words, "--method", "anchor", "alpha=0.25"]) == 0
    record = read_study("out/search.json")
    assert set(record["space"]) == {"keep", "prune_layer", "k"}
    assert [step for step, _ in record["trials"][0]["steps"]] == [3]
    best = yaml.safe_load(Path("out/best.yaml").read_text())
    assert best["method"] == "anchor"
    assert best["method_option"]["alpha"] == 0.25
    assert best["prune_layer"] in ([1], [0, 2])
    result = json.loads(Path(f"out/trials/{record['best'][0]:04d}.json").read_text())
    assert result["option_alpha"] == 0.25


def test_a_method_that_is_named_leaves_the_other_methods_options_out(tiny, here, capsys) -> None:
    words = ["search", "clip", "--config", config(here / "c.yaml", tiny), "--trials", "1", "-o", "out"]
    assert main([*words, "--method", "random"]) == 0
    assert set(read_study("out/search.json")["space"]) == {"keep", "prune_layer"}
    assert main([*words, "--method", "random", "k=4"]) == 2
    assert "named 'k'" in capsys.readouterr().err


def test_a_trial_that_cannot_be_is_told_and_the_others_go_on(tiny, here, capsys) -> None:
    space = {"method": ["anchor", "grid"], "keep": [5, 100]}  # anchor needs more than its 10 anchors
    words = ["search", "clip", "--config", config(here / "c.yaml", tiny, search_settings={"space": space})]
    assert main([*words, "--trials", "8"]) == 0
    record = read_study("runs/search-clip/search.json")
    failed = [t for t in record["trials"] if t["state"] == "failed"]
    assert failed
    assert all(t["params"] == {"method": "anchor", "keep": 5} for t in failed)
    assert "this method cannot go under 10" in failed[0]["error"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--trails", "3"], 'does not know \'--trails\''),
        (["--trials", "0"], "--trials 0: at least 1"),
        (["--images", "0"], "--images 0: at least 1"),
        (["--objectives", "a", "b", "c"], "one, or two"),
        (["kk=3"], "named 'kk'. Did you mean \"k\""),
        (["--method", "anchro"], "unknown method 'anchro'"),
        (["--stop-hopeless", "meadian"], "meadian"),
        (["--study", "x.txt"], "no ending that says its kind"),
        (["--cpus", "2"], "do nothing without --ray"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--model", "tiny-clip", "tiny-coca", "--trials", "1"], None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tiny, here, capsys, more, words) -> None:
    base = [] if "--config" in more else ["--config", config(here / "c.yaml", tiny)]
    code = main(["search", "clip", *base, "-o", "out", *more])
    output = capsys.readouterr()
    if words is None:  # known only when the runs are made
        assert code == 1
        assert "these flags make 2 runs" in output.out
    else:
        assert code == 2
        assert words in output.err
        assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"search_settings": {"space": {"method": ["grid"], "schedule": ["constnat"]}}}, "unknown schedule"),
        ({"search_settings": {"space": {"method": ["tome", "tomee"]}}}, "tomee"),
        ({"search_settings": {"space": {"method": ["grid"], "alpha": [0.5]}}}, "named 'alpha'"),
        ({"search_settings": {"sapce": {}}}, 'Did you mean "search_settings.space"'),
        ({"manager_settings": {"mode": "single"}}, 'mode "optuna" or "ray"'),
        ({"eval_settings": {"batchsize": 8}}, 'Did you mean "batch_size"'),
        ({"eval_settings": {"stream": True}}, "named 'stream'"),
    ],
)
def test_a_wrong_file_is_one_line_before_anything_runs(tiny, here, capsys, settings, words) -> None:
    assert main(["search", "clip", "--config", config(here / "c.yaml", tiny, **settings), "-o", "out"]) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert len(output.err.splitlines()) == 1
    assert not Path("out").exists()


def test_images_limits_eval_and_is_part_of_what_a_result_is_of(tiny, here, run, capsys) -> None:
    some, every = run(*tiny.usual, "--images", "10"), run(*tiny.usual)
    assert (some["images"], every["images"]) == (10, 24)
    assert some["config_id"] != every["config_id"]
    assert main(["eval", *tiny.usual, "--images", "0"]) == 2
    assert "--images 0: at least 1" in capsys.readouterr().err
