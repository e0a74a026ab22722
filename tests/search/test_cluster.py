"""Trials and runs on a real Ray cluster of this machine: a worker is killed, nothing that ended is repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import toy_search
from helpers.tiny_material import tiny_clip, webdataset
from helpers.toy_search import ACCURACY, MACS, figures, runs_of, slow, toy, waits
from tokensieve.cli.main import main
from tokensieve.errors import MissingMaterialError, OptionError, UnknownNameError
from tokensieve.search import ManagerSettings, run_search
from tokensieve.search import ray as clusters
from tokensieve.search.ray import Cluster, connected
from tokensieve.tasks.clip import sweep_ray
from tokensieve.tasks.clip.sweep import claimed
from tokensieve.tasks.clip.sweep_ray import run_sweep_on_cluster

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (make setup)")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """A cluster with two CPUs. Ray is imported no sooner than that, for it to stay on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
        with connected(ManagerSettings(mode="ray")) as cluster:
            yield cluster.ray


def by_ray(folder: Path, run: Any, trials: int, *more: Any, **settings: Any) -> Any:
    return toy(folder, run, trials, *more, mode="ray", **settings)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no.such.host.invalid:6379", "head..cluster:1"]
)
def test_an_address_where_nobody_answers_is_said_at_once(address: str) -> None:
    with pytest.raises(MissingMaterialError, match=f"no Ray cluster at {address}: .*ray start --head"):
        clusters._check_reachable(address)


def test_the_cluster_is_of_this_machine_alone(ray) -> None:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    assert [node["NodeManagerAddress"] for node in nodes] == ["127.0.0.1"]
    assert ray.cluster_resources()["CPU"] == 2
    with connected(ManagerSettings(mode="ray")) as again:  # a process that is connected stays so
        assert again.slots == 2
    assert ray.is_initialized()


def test_a_killed_worker_s_trial_is_run_again_and_nothing_else_is(tmp_path) -> None:
    found = run_search(by_ray(tmp_path, partial(toy_search.run, tmp_path, 2), 6))
    assert (tmp_path / "killed").exists()
    assert int((tmp_path / "killed").read_text()) != os.getpid()
    assert sorted(runs_of(tmp_path)) == [0, 1, 2, 2, 3, 4, 5]
    assert [t["state"] for t in found.record["trials"]] == ["complete"] * 6
    assert all(t["values"] == [figures(t["params"])["accuracy"]] for t in found.record["trials"])
    pids = {line.split()[1] for line in (tmp_path / "runs.txt").read_text().splitlines()}
    assert str(os.getpid()) not in pids
    more = run_search(by_ray(tmp_path, partial(toy_search.run, tmp_path, None), 8))
    assert more.new == 2
    assert len(runs_of(tmp_path)) == 9


def test_trials_run_at_the_same_time_and_no_more_than_fit(tmp_path) -> None:
    record = run_search(by_ray(tmp_path, partial(waits, tmp_path), 2)).record
    assert [t["figures"]["together"] for t in record["trials"]] == [2.0, 2.0]


def test_hopeless_trials_end_early_there_too(tmp_path) -> None:
    settings = {"stop_after_trials": 3, "sampler": "random"}
    record = run_search(by_ray(tmp_path, partial(slow, tmp_path), 12, **settings)).record
    states = [t["state"] for t in record["trials"]]
    assert set(states) == {"complete", "pruned"}
    assert all(len(t["steps"]) == 3 for t in record["trials"] if t["state"] == "complete")
    best = max(t["values"][0] for t in record["trials"] if t["state"] == "complete")
    assert best == max(figures(t["params"])["accuracy"] for t in record["trials"])


def test_an_objective_that_no_run_has_leaves_a_folder_that_can_be_used(tmp_path) -> None:
    """Two run at once: the other one is of no use either."""
    wrong = ACCURACY.model_copy(update={"metric": "acuracy"})
    with pytest.raises(UnknownNameError, match="objective 'acuracy'"):
        run_search(by_ray(tmp_path, partial(waits, tmp_path), 4, (wrong,)))
    space = {name: toy_search.SPACE[name] for name in ("x", "n")}
    record = run_search(by_ray(tmp_path, partial(slow, tmp_path), 2, (MACS,), space=space)).record
    assert [set(t["params"]) for t in record["trials"]] == [{"x", "n"}] * 2


def test_two_objectives_and_a_trial_that_fails(tmp_path) -> None:
    def fails(params, origin, report):
        if origin == 1:
            raise ValueError("no\nway")
        return toy_search.Found(figures(params), record={"origin": origin})

    record = run_search(by_ray(tmp_path, fails, 3, (ACCURACY, MACS))).record
    assert [t["state"] for t in record["trials"]] == ["complete", "failed", "complete"]
    assert record["trials"][1]["error"] == "ValueError: no way"
    assert json.loads((tmp_path / "trials" / "0002.json").read_text()) == {"origin": 2}
    assert not (tmp_path / "trials" / "0001.json").exists()


def test_files_of_another_machine_come_back(tmp_path, monkeypatch, ray) -> None:
    """A cluster of two machines is none that can be had here: the node's name is what differs."""
    made = tmp_path / "there" / "best.safetensors"
    made.parent.mkdir()
    made.write_bytes(b"weights")
    board = SimpleNamespace()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))

    def run(params, origin, report):
        return toy_search.Found({"accuracy": 1.0}, made={"best.safetensors": made})

    for home, files in (("elsewhere", {"best.safetensors": b"weights"}), ("here", {})):
        how, found = clusters._trial(run, {}, 0, 0, board, home)
        assert how == "found"
        assert found.files == files
    search = by_ray(tmp_path, lambda params, origin, report: found, 1)
    found = replace(found, files={"best.safetensors": b"weights"})
    run_search(replace(search, manager=ManagerSettings(mode="optuna")))
    assert (tmp_path / "trials" / "0000" / "best.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(("cpus", "gpus", "words"), [(64, 0, "wants 64 CPU"), (1, 3, "3 GPU")])
def test_what_does_not_fit_is_said_and_not_waited_for(tmp_path, ray, cpus, gpus, words) -> None:
    with pytest.raises(OptionError, match=words):
        assert Cluster(ray, cpus, gpus).slots
    manager = {"cpus_per_subtask": cpus, "gpus_per_subtask": gpus or None}
    with pytest.raises(OptionError, match=words):
        run_search(by_ray(tmp_path, partial(toy_search.run, tmp_path, None), 1, manager=manager))


def test_a_busy_machine_gets_a_second_chance_and_a_hopeless_one_a_line(monkeypatch) -> None:
    def starting(*errors: str) -> Any:
        left = list(errors)

        def init(**_: Any) -> None:
            if left:
                raise Exception(left.pop(0))

        return SimpleNamespace(init=init, shutdown=lambda: None)

    clusters._init(starting("The current node timed out", "timed out"), {})
    for errors in (["timed out"] * 3, ["no room"]):
        with pytest.raises(MissingMaterialError, match="a Ray cluster cannot be started here"):
            clusters._init(starting(*errors), {})


def test_without_ray_one_line_says_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingMaterialError, match=r"pip install .tokensieve\[ray\]."):
        run_search(by_ray(tmp_path, partial(toy_search.run, tmp_path, None), 1))


# -- the runs of a sweep -----------------------------------------------------------------------------------------------


def test_a_sweep_s_killed_run_is_repeated_and_its_results_come_back(tmp_path, ray, monkeypatch) -> None:
    monkeypatch.setattr(sweep_ray, "_run", toy_search.dies_once)
    jobs: list[Any] = [toy_search.ToyJob(number, tmp_path / f"{number}.json") for number in range(4)]
    said: list[tuple[int, str]] = []
    cluster = Cluster(ray, 1, 0)
    outcome = run_sweep_on_cluster(jobs, cluster, lambda job, how: said.append((job.number, how)))
    assert (tmp_path / "killed").exists()
    assert sorted(runs_of(tmp_path)) == [0, 1, 1, 2, 3]
    assert sorted(said) == [(0, "done"), (1, "done"), (2, "no way"), (3, "done")]
    assert [(job.number, why) for job, why in outcome.failed] == [(2, "no way")]
    assert json.loads((tmp_path / "1.json").read_text()) == {"number": 1, "reduced": True}
    assert not list(tmp_path.glob(".*.lock"))
    again = run_sweep_on_cluster(jobs, cluster)
    assert sorted(job.number for job in again.skipped) == [0, 1, 3]
    assert runs_of(tmp_path).count(2) == 2
    with claimed(jobs[2].output):
        assert [job.number for job in run_sweep_on_cluster(jobs, cluster).elsewhere] == [2]


def test_sweep_ray_is_the_same_as_sweep(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_clip(tmp_path / "tiny")
    webdataset(tmp_path / "colours")
    words = ["sweep", "--methods", "grid", "--keep", "0.5", "--model", f"local-dir:{model}", "--pretrained", "",
             "--dataset", "wds/colours", "--dataset_root", str(tmp_path / "colours"), "--batch_size", "8",
             "--speed_batches", "0", "--num_workers", "0"]  # fmt: skip
    assert main([*words, "--ray", "--cpus", "2", "-o", "spread"]) == 0, capsys.readouterr().err
    assert main([*words, "-o", "here"]) == 0
    found = [
        {path.name: json.loads(path.read_text()) for path in Path(place).glob("*.json")} for place in ("spread", "here")
    ]
    assert len(found[0]) == 2
    assert found[0].keys() == found[1].keys()
    for name, result in found[0].items():
        for key in ("metrics", "gmacs", "method", "keep", "config_id", "images"):
            assert result[key] == found[1][name][key], key
    capsys.readouterr()
    assert main([*words, "--ray", "-o", "spread"]) == 0
    assert "2 there before" in capsys.readouterr().out
    assert main([*words, "--ray", "--distributed", "-o", "spread"]) == 2
    assert main([*words, "--gpus", "1", "-o", "spread"]) == 2
    assert "do nothing without --ray" in capsys.readouterr().err
