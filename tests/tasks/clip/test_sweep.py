"""`tokensieve sweep` and `build`: baseline first, nothing run twice, one failure stops nothing, two processes agree."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tokensieve.cli.main import main
from tokensieve.errors import RecordError
from tokensieve.report.results import read_eval, read_evals, write_eval
from tokensieve.tasks.clip import sweep as sweeping

QUICK = ["--speed_batches", "1", "--num_workers", "0"]


def facts(folder: Path) -> dict[str, Any]:
    """What two runs of the same thing must have in common."""
    keys = ("method", "keep", "metrics", "tokens_per_layer", "gmacs", "reduced", "config_id", "model", "dataset")
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {name: {key: result[key] for key in keys} for name, result in found.items()}


def test_methods_times_budgets_with_the_untouched_model_first(tiny, here: Path, capsys) -> None:
    words = ["sweep", "--methods", "tome", "anchor", "--keep", "0.5", "0.25", "-o", "runs", *tiny.usual, *QUICK, "k=6"]
    assert main(words) == 0
    output = capsys.readouterr()
    results = read_evals(["runs"])
    assert sorted((r["method"], r["keep"]) for r in results if r["keep"]) == [
        ("anchor", 0.25), ("anchor", 0.5), ("tome", 0.25), ("tome", 0.5),
    ]  # fmt: skip
    assert len(results) == 5
    assert {r["option_k"] for r in results if r["method"] == "anchor"} == {6}
    assert output.err.splitlines()[0].startswith("1 of 5: wds/colours tiny-clip none: done")
    assert "s left" in output.err
    assert "speed-up" in output.out
    times = {path: path.stat().st_mtime_ns for path in Path("runs").iterdir()}
    assert main(words) == 0
    assert "5 there before" in capsys.readouterr().out
    assert times == {path: path.stat().st_mtime_ns for path in Path("runs").iterdir()}


def test_one_that_fails_does_not_stop_the_others(tiny, here: Path, capsys) -> None:
    data = ["--dataset", "wds/broken", "wds/colours", "--dataset_root", str(tiny.folder / "{dataset}")]
    words = ["sweep", "--methods", "grid", "--keep", "0.5", "-o", "runs", *tiny.model, *data, *QUICK]
    assert main([*words, "--batch_size", "8"]) == 1
    output = capsys.readouterr()
    assert output.err.count("tokensieve: failed: broken") == 2
    assert "s0005.png" in output.err
    assert {r["dataset"] for r in read_evals(["runs"])} == {"wds/colours"}
    assert "2 run, 2 failed" in output.out


def test_a_budget_that_one_method_cannot_meet(tiny, here: Path, capsys) -> None:
    words = ["sweep", "--methods", "anchor", "grid", "--keep", "5", "-o", "runs", *tiny.usual, *QUICK]
    assert main(words) == 1
    assert "anchor" in [line for line in capsys.readouterr().err.splitlines() if "failed" in line][-1]
    assert {r["method"] for r in read_evals(["runs"])} == {"none", "grid"}


def test_an_interrupted_sweep_loses_no_finished_run(tiny, here: Path, monkeypatch) -> None:
    words = ["sweep", "--methods", "grid", "--keep", "0.5", "0.25", "-o", "runs", *tiny.usual, *QUICK]
    run_job, count = sweeping.run_job, []

    def second_is_interrupted(job: Any, loader: Any) -> Any:
        count.append(job)
        if len(count) == 2:
            raise KeyboardInterrupt
        return run_job(job, loader)

    monkeypatch.setattr(sweeping, "run_job", second_is_interrupted)
    assert main(words) == 130
    assert [r["method"] for r in read_evals(["runs"])] == ["none"]
    assert not list(Path("runs").glob(".*"))
    assert main(words) == 0
    assert len(read_evals(["runs"])) == 3
    assert len(count) == 4


def test_what_another_sweep_is_at_is_left_to_it(tiny, here: Path, capsys) -> None:
    words = ["sweep", "--methods", "grid", "--keep", "0.5", "-o", "runs", *tiny.usual, *QUICK]
    assert main(words) == 0
    (baseline,) = Path("runs").glob("*_none_*.json")
    baseline.unlink()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with sweeping.claimed(here / baseline) as mine:
            assert mine
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    entered.wait(60)
    assert main(words) == 0
    assert "1 left to another sweep" in capsys.readouterr().out
    leave.set()
    other.join()
    assert not baseline.exists()
    assert main(words) == 0
    assert baseline.exists()


def test_wrong_sweeps(tiny, here: Path, capsys) -> None:
    for words, said in (
        (["-o", "runs"], "--methods"),
        (["--methods", "tome"], "-o FOLDER"),
        (["--methods", "tomee", "-o", "runs"], "tome"),
        (["--methods", "tome", "-o", "runs", "x=1"], "x"),
        (["--methods", "tome", "-o", "runs", "--keep", "0.5", "--keep_average", "0.5"], "--keep_average"),
        (["--methods", "tome", "-o", "runs", "--method", "evit"], "--methods"),
    ):
        assert main(["sweep", *words, *tiny.usual]) == 2
        assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def torchrun(words: list[str], folder: Path) -> None:
    """The command line under torchrun with two processes. Model names are registered by a module on the way."""
    launcher = folder / "launch.py"
    launcher.write_text(
        "import sys\nimport tokensieve\nimport open_clip\nfrom tokensieve.cli.main import main\n"
        f"open_clip.add_model_config({str(folder / 'configs')!r})\nsys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(launcher)]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_processes_share_the_runs_and_give_the_same_files(tiny, here: Path) -> None:
    words = ["sweep", "--methods", "tome", "random", "--keep", "0.5", "0.25", *tiny.usual, *QUICK]
    torchrun([*words, "--distributed", "-o", "two"], tiny.folder)
    assert main([*words, "-o", "one"]) == 0
    assert facts(Path("one")) == facts(Path("two"))
    assert len(facts(Path("one"))) == 5


def test_eval_is_shared_as_the_benchmark_shares_it(tiny, here: Path, monkeypatch) -> None:
    data = [
        "--dataset",
        "wds/colours",
        "wds/few",
        "--dataset_root",
        str(tiny.folder / "{dataset}"),
        "--batch_size",
        "8",
    ]
    words = ["eval", *tiny.model, *data, "--method", "grid", "--keep", "0.5", "--quiet", *QUICK]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main([*words, "--distributed", "--output", "two/{dataset}_{config}.json"]) == 0
        assert len(facts(Path("two"))) == int(rank) + 1
    assert main([*words, "--output", "one/{dataset}_{config}.json"]) == 0
    assert facts(Path("one")) == facts(Path("two"))


# -- build and the readers ------------------------------------------------------------------------------------------


def test_build_has_our_columns_and_no_nested_ones(tiny, here: Path, capsys) -> None:
    assert main(["eval", *tiny.usual, *QUICK, "--dump_classnames", "--output", "runs/a.json"]) == 0
    assert main(["eval", *tiny.usual, *QUICK, "--method", "grid", "--keep", "0.5", "--output", "runs/b.json"]) == 0
    theirs = {"dataset": "d", "model": "m", "pretrained": "p", "task": "t", "language": "en", "metrics": {"acc1": 0.5}}
    Path("plain.json").write_text(json.dumps(theirs | {"metrics": {"acc1": 0.5, "acc5": float("nan")}}))
    assert main(["build", "runs", "plain.json", "-o", "out/all.csv"]) == 0
    with Path("out/all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["none", "grid", ""]
    assert rows[1]["model_fullname"].startswith("tiny-clip ")
    assert {"acc1", "keep", "speedup", "gmacs", "tokens_per_layer", "option_fold"} <= set(rows[0])
    assert (rows[2]["acc1"], rows[2]["acc5"]) == ("0.5", "")
    assert rows[0]["classnames"] == "red; green; blue; white; black; grey"
    assert not any("{" in str(value) for row in rows for value in row.values())


def test_readers_refuse_what_is_no_result(tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    good = {"dataset": "d", "model": "m", "pretrained": "p", "task": "t", "metrics": {}, "format": "tokensieve-eval-1"}
    write_eval(good | {"speedup": float("nan")}, whole)
    assert read_eval(whole)["speedup"] is None
    cases = {"cut.json": whole.read_text()[:40], "list.json": "[]", "other.json": "{}", "gone.json": None}
    cases["foreign.json"] = json.dumps({key: value for key, value in good.items() if key != "format"})
    for name, text in cases.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(RecordError, match=name):
            read_eval(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="empty"):
        read_evals([tmp_path / "empty"])


def test_build_names_the_wrong_file(tmp_path: Path, capsys) -> None:
    (tmp_path / "cut.json").write_text('{"metrics": {')
    assert main(["build", str(tmp_path), "-o", str(tmp_path / "out.csv")]) == 2
    assert "cut.json" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
