"""The study: goes on after SIGKILL, repeats nothing, counts over restarts, ends what is hopeless, knows the front."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import optuna
import pytest
import yaml

from helpers import toy_search
from helpers.toy_search import ACCURACY, MACS, SPACE, figures, runs_of, slow, toy
from tokensieve.errors import MissingMaterialError, OptionError, RecordError, UnknownNameError
from tokensieve.report.studies import read_study, study_table
from tokensieve.search import Found, Objective, Parameter, run_search

STUDIES = ["study.db", "study.log"]


def quiet_run(folder: Path, kill=None):
    return partial(toy_search.run, folder, kill)


def ended(record):
    """What a study found, without what depends on when it was killed."""
    return [(t["params"], t["values"]) for t in record["trials"] if t["state"] == "complete"]


def program(folder: Path, study: str, trials: int, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, toy_search.__file__, str(folder), study, str(trials), *more]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("study", STUDIES)
def test_a_killed_study_goes_on_and_is_the_same_as_one_never_killed(tmp_path, study) -> None:
    folder = tmp_path / "killed"
    assert program(folder, study, 7, "3").returncode == -signal.SIGKILL
    assert runs_of(folder) == [0, 1, 2, 3]
    said: list[str] = []
    record = run_search(toy(folder, quiet_run(folder, 3), 7, study=study), said.append).record
    assert said[0] == "3 of 7 trials have ended; 1 that was interrupted runs again"
    assert runs_of(folder) == [0, 1, 2, 3, 3, 5, 6, 7]  # 4 is the second attempt at 3
    assert read_study(folder / "search.json") == json.loads(json.dumps(record))
    assert [t["state"] for t in record["trials"]] == ["complete"] * 3 + ["interrupted"] + ["complete"] * 4
    assert record["trials"][4]["retry_of"] == 3
    assert record["trials"][4]["params"] == record["trials"][3]["params"]
    whole = run_search(toy(tmp_path / "whole", quiet_run(tmp_path), 7)).record
    assert ended(record) == ended(whole)
    assert run_search(toy(folder, quiet_run(folder), 7, study=study)).new == 0
    assert len(runs_of(folder)) == 8


def test_more_trials_later_go_on_from_there(tmp_path) -> None:
    run_search(toy(tmp_path, quiet_run(tmp_path), 3))
    found = run_search(toy(tmp_path, quiet_run(tmp_path), 5))
    assert found.new == 2
    assert runs_of(tmp_path) == [0, 1, 2, 3, 4]
    assert ended(found.record) == ended(run_search(toy(tmp_path / "b", quiet_run(tmp_path), 5)).record)


def test_a_journal_that_was_cut_off_in_a_line_is_mended(tmp_path) -> None:
    run_search(toy(tmp_path, quiet_run(tmp_path), 3, study="study.log"))
    path = tmp_path / "study.log"
    path.write_bytes(path.read_bytes() + b'{"op_code": 5, "wor')
    (tmp_path / "study.log.lock").symlink_to(path)  # of a process that has ended
    found = run_search(toy(tmp_path, quiet_run(tmp_path), 4, study="study.log"))
    assert found.new == 1
    assert len(ended(found.record)) == 4


def test_an_interrupted_trial_runs_again_from_the_keyboard_too(tmp_path) -> None:
    def interrupted(params, origin, report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_search(toy(tmp_path, interrupted, 2))
    record = run_search(toy(tmp_path, quiet_run(tmp_path), 2)).record
    assert [t["state"] for t in record["trials"]] == ["interrupted", "complete", "complete"]
    assert record["trials"][1]["params"] == record["trials"][0]["params"]


def test_one_process_at_a_time(tmp_path) -> None:
    def nested(params, origin, report):
        with pytest.raises(RecordError, match="another process works on this search"):
            run_search(toy(tmp_path, quiet_run(tmp_path), 1))
        return Found(figures(params))

    assert run_search(toy(tmp_path, nested, 1)).new == 1


def test_another_search_is_not_gone_on_with(tmp_path) -> None:
    run_search(toy(tmp_path, quiet_run(tmp_path), 1))
    other = {"x": SPACE["x"]}
    with pytest.raises(OptionError, match=r"holds another search .space was"):
        run_search(toy(tmp_path, quiet_run(tmp_path), 2, space=other))
    with pytest.raises(OptionError, match="objectives was"):
        run_search(toy(tmp_path, quiet_run(tmp_path), 2, objectives=(ACCURACY, MACS)))


def test_what_is_no_study_is_named(tmp_path) -> None:
    for name in STUDIES:
        (tmp_path / name).write_text("no study at all\n" * 20)
        with pytest.raises(RecordError, match=f"{name} is not a study that can be read"):
            run_search(toy(tmp_path, quiet_run(tmp_path), 1, study=name))
    with pytest.raises(OptionError, match="no ending that says its kind"):
        run_search(toy(tmp_path, quiet_run(tmp_path), 1, study="study.txt"))
    with pytest.raises(OptionError, match="nothing is left to search"):
        run_search(replace(toy(tmp_path, quiet_run(tmp_path), 1), space={}))


def test_a_trial_that_fails_is_told_and_counted_and_the_rest_goes_on(tmp_path) -> None:
    def fails(params, origin, report):
        if origin == 1:
            raise OptionError("this one\ncannot be")
        if origin == 2:
            raise ZeroDivisionError("oh")
        return Found(figures(params) | ({"accuracy": float("nan")} if origin == 3 else {}))

    said: list[str] = []
    found = run_search(toy(tmp_path, fails, 5), said.append)
    assert [t["state"] for t in found.record["trials"]] == ["complete", "failed", "failed", "failed", "complete"]
    errors = [t.get("error") for t in found.record["trials"]]
    assert errors == [None, "this one cannot be", "ZeroDivisionError: oh", "ArithmeticError: accuracy is nan", None]
    assert "failed: this one cannot be" in said[2]
    assert run_search(toy(tmp_path, fails, 5)).new == 0


def test_an_objective_that_no_run_has_stops_the_search_and_can_be_put_right(tmp_path) -> None:
    wrong = ACCURACY.model_copy(update={"metric": "acuracy"})
    with pytest.raises(UnknownNameError, match=r"objective 'acuracy'.*mean .accuracy."):
        run_search(toy(tmp_path, quiet_run(tmp_path), 3, objectives=(wrong,)))
    assert len(ended(run_search(toy(tmp_path, quiet_run(tmp_path), 3)).record)) == 3


@pytest.mark.parametrize("study", STUDIES)
def test_an_objective_that_is_put_right_has_its_own_direction(tmp_path, study) -> None:
    wrong = Objective(metric="mac", direction="maximize")
    with pytest.raises(UnknownNameError, match="objective 'mac'"):
        run_search(toy(tmp_path, quiet_run(tmp_path), 6, (wrong,), study=study))
    record = run_search(toy(tmp_path, quiet_run(tmp_path), 6, (MACS,), study=study)).record
    assert record["best"] == [min(record["trials"], key=lambda trial: trial["values"][0])["number"]]


@pytest.mark.parametrize("study", STUDIES)
def test_a_search_that_has_nothing_yet_may_become_another_one(tmp_path, study) -> None:
    wrong = Objective(metric="mac", direction="maximize")
    with pytest.raises(UnknownNameError, match="objective 'mac'"):
        run_search(toy(tmp_path, quiet_run(tmp_path), 3, (wrong,), study=study))
    space = {name: SPACE[name] for name in ("x", "n")}
    found = run_search(toy(tmp_path, quiet_run(tmp_path), 3, (MACS,), space=space, study=study))
    assert [set(trial["params"]) for trial in found.record["trials"]] == [{"x", "n"}] * 3


def test_nothing_of_a_trial_without_its_figures_is_left(tmp_path) -> None:
    def leaves(params, origin, report):
        place = tmp_path / "trials" / f"{origin:04d}"
        place.mkdir(parents=True, exist_ok=True)
        assert not list(place.iterdir()), "another trial's"
        (place / f"{params['n']}.txt").write_text("")
        return Found(figures(params), record={"a": 1})

    wrong = Objective(metric="mac", direction="maximize")
    with pytest.raises(UnknownNameError, match="objective 'mac'"):
        run_search(toy(tmp_path, leaves, 3, (wrong,)))
    assert not list((tmp_path / "trials").glob("*.json"))
    space = {name: SPACE[name] for name in ("x", "n")}
    found = run_search(toy(tmp_path, leaves, 2, (MACS,), space=space))
    assert [trial["state"] for trial in found.record["trials"]] == ["complete"] * 2


def test_a_trial_without_its_figures_among_others_is_void(tmp_path) -> None:
    def now_and_then(params, origin, report):
        return Found(figures(params) if origin != 1 else {"macs": 1.0})

    with pytest.raises(UnknownNameError, match="objective 'accuracy'"):
        run_search(toy(tmp_path, now_and_then, 3))
    record = run_search(toy(tmp_path, quiet_run(tmp_path), 3)).record
    assert [trial["state"] for trial in record["trials"]] == ["complete", "void", "complete", "complete"]


def test_a_search_with_an_interrupted_trial_may_not(tmp_path) -> None:
    def interrupted(params, origin, report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_search(toy(tmp_path, interrupted, 2))
    with pytest.raises(OptionError, match="holds another search"):  # its values are of the old space
        run_search(toy(tmp_path, quiet_run(tmp_path), 2, space={"n": SPACE["n"]}))


def test_the_same_values_are_not_run_twice(tmp_path) -> None:
    space = {"n": Parameter.model_validate([1, 2]), "x": Parameter.model_validate([1.0])}
    record = run_search(toy(tmp_path, quiet_run(tmp_path), 6, space=space)).record
    assert len(ended(record)) == 6
    assert len(runs_of(tmp_path)) == len({json.dumps(t["params"]) for t in record["trials"]}) <= 2
    assert all(t["values"] == [figures(t["params"])["accuracy"]] for t in record["trials"])


# -- ending early, and the front ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["median", "percentile"])
def test_hopeless_trials_end_early_as_a_naive_median_says(tmp_path, how) -> None:
    settings = {"stop_hopeless": how, "stop_after_trials": 4, "stop_percentile": 30.0, "sampler": "random"}
    record = run_search(toy(tmp_path, partial(slow, tmp_path), 16, **settings)).record
    states = [t["state"] for t in record["trials"]]
    assert "pruned" in states
    assert states[:4] == ["complete"] * 4
    share = 50.0 if how == "median" else 70.0
    for trial in record["trials"][4:]:
        before = [dict(t["steps"]) for t in record["trials"][: trial["number"]] if t["state"] == "complete"]
        best, worse = -1e9, None
        for step, value in trial["steps"]:
            best = max(best, value)
            here = sorted(steps[step] for steps in before if step in steps)
            place = (len(here) - 1) * share / 100  # by hand: between the two nearest
            low = here[int(place)]
            limit = low + (place - int(place)) * (here[min(int(place) + 1, len(here) - 1)] - low)
            worse = best < limit
            if worse:
                break
        assert (trial["state"] == "pruned") == worse, trial
        assert len(trial["steps"]) == (step if worse else 3)


def test_two_objectives_end_no_trial_early_and_it_is_said(tmp_path) -> None:
    said: list[str] = []
    settings = {"stop_after_trials": 0, "sampler": "random"}
    record = run_search(toy(tmp_path, partial(slow, tmp_path), 8, (ACCURACY, MACS), **settings), said.append).record
    assert "with two objectives Optuna ends no trial early" in said[0]
    assert [t["state"] for t in record["trials"]] == ["complete"] * 8
    (tmp_path / "study.log").unlink()
    run_search(toy(tmp_path, partial(slow, tmp_path), 1, (ACCURACY, MACS), stop_hopeless="none"), said.append)
    assert "ends no trial early" not in said[-2]


def test_the_front_is_what_a_naive_loop_finds(tmp_path) -> None:
    found = run_search(toy(tmp_path, quiet_run(tmp_path), 20, (ACCURACY, MACS), sampler="random"))
    trials = found.record["trials"]
    front = []
    for one in trials:
        a, m = one["values"]
        beaten = any(b >= a and n <= m and (b > a or n < m) for b, n in (t["values"] for t in trials))
        front += [] if beaten else [one["number"]]
    assert sorted(found.record["best"]) == front
    accuracies = [trials[number]["values"][0] for number in found.record["best"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert [path.name for path in found.files] == [f"{number:04d}.yaml" for number in found.record["best"]]
    for path, number in zip(found.files, found.record["best"], strict=True):
        assert yaml.safe_load(path.read_text()) == trials[number]["params"]
    more = run_search(toy(tmp_path, quiet_run(tmp_path), 40, (ACCURACY, MACS), sampler="random"))
    assert {path.name for path in (tmp_path / "front").iterdir()} == {path.name for path in more.files}


def test_the_best_of_one_objective_and_the_table(tmp_path) -> None:
    found = run_search(toy(tmp_path, quiet_run(tmp_path), 12, (MACS,)))
    best = min(found.record["trials"], key=lambda t: t["values"][0])
    assert found.record["best"] == [best["number"]]
    assert [path.name for path in found.files] == ["best.yaml"]
    assert yaml.safe_load(found.files[0].read_text()) == best["params"]
    table = study_table(found.record)
    assert table.row_count == 12
    assert next(iter(table.columns[0].cells)) == str(best["number"])
    assert sum(found.record["importances"][0].values()) == pytest.approx(1.0)
    assert max(found.record["importances"][0], key=found.record["importances"][0].get) == "n"


def test_it_learns_where_chance_does_not(tmp_path) -> None:
    middle = {}
    for sampler in ("tpe", "random"):
        folder = tmp_path / sampler
        settings = {"sampler": sampler, "stop_hopeless": "none"}
        record = run_search(toy(folder, partial(slow, folder), 24, **settings)).record
        late = [t["values"][0] for t in record["trials"][12:]]
        middle[sampler] = sorted(late)[6]
    assert middle["tpe"] > middle["random"] + 0.3


def test_a_record_that_is_none(tmp_path) -> None:
    (tmp_path / "a.json").write_text('{"format": "tokensieve-search-1", "name": "a"}')
    with pytest.raises(RecordError, match="objectives, space, trials, best missing"):
        read_study(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"format": "other"}')
    with pytest.raises(RecordError, match="not a record of a search"):
        read_study(tmp_path / "b.json")


def test_without_optuna_one_line_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingMaterialError, match=r"pip install .tokensieve\[search\]."):
        run_search(toy(tmp_path, quiet_run(tmp_path), 1))


def test_optuna_reads_the_study_too(tmp_path) -> None:
    run_search(toy(tmp_path, quiet_run(tmp_path), 3, study="study.db"))
    study = optuna.load_study(study_name="tokensieve", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert len(study.trials) == 3
