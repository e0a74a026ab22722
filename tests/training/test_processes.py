"""One run, several processes: two real ones over gloo train as one does, evaluate each sample once, and may die."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import together
from tokensieve.cli.main import main
from tokensieve.errors import OptionError, ProcessLostError
from tokensieve.training import distributed
from tokensieve.training.loop import seed_of_step

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
HERE = Path(__file__).parents[1] / "helpers"


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def torchrun(*words: str, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    return subprocess.run(
        [*line, *words], env=ENV, capture_output=True, text=True, timeout=timeout, check=False, cwd=HERE
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each training in one process and in two; torn off in either and resumed in the other."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("together")
    fresh = get_context("spawn")  # what this process has trained so far is not a state of theirs
    port, start = free_port(), fresh.Event()
    both = [fresh.Process(target=together.process, args=(number, port, root, start)) for number in range(2)]
    for process in both:
        process.start()
    together.prepare(root)
    one = {}
    for name, (training, _) in together.TRAININGS.items():
        one[name] = training(root, root / "one" / name)
        together.torn(root, name, root / "from-one" / name)
    start.set()
    for process in both:
        process.join(600)
    assert [process.exitcode for process in both] == [0, 0]
    two = json.loads((root / "found.json").read_text())
    for name, (training, _) in together.TRAININGS.items():
        two[name]["2 -> 1"] = training(root, root / "from-two" / name, resume=True)
    return root, json.loads(json.dumps(one)), json.loads(json.dumps(two))


def flat(value) -> list[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in flat(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in flat(item)]
    return [float(value)]


@pytest.mark.parametrize("how", ["whole", "1 -> 2", "2 -> 1"])
@pytest.mark.parametrize("name", list(together.TRAININGS))
def test_two_processes_train_as_one(runs, name, how):
    """Losses with Gumbel noise, augmentation and renewed discriminators on; validation on uneven numbers of samples."""
    _, one, two = runs
    assert len(flat(one[name]["losses"])) >= 6
    assert len(set(flat(one[name]["losses"]))) > 3
    assert flat(two[name][how]["losses"]) == pytest.approx(flat(one[name]["losses"]), abs=1e-4, rel=1e-4)
    assert flat(two[name][how]["validations"]) == pytest.approx(flat(one[name]["validations"]), abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("name", list(together.TRAININGS))
def test_the_first_process_alone_writes(runs, name):
    root, _, _ = runs

    def written(folder: Path) -> dict[str, int]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        lines = {path.name: len(path.read_text().splitlines()) for path in files if path.suffix == ".log"}
        names = [re.sub(r"tfevents.*", "tfevents", str(path.relative_to(folder))) for path in files]
        return {each: lines.get(Path(each).name, names.count(each)) for each in names}

    assert written(root / "two" / name) == written(root / "one" / name)


def distance(one: Path, two: Path) -> float:
    """Of the weights in two files, against their size.

    Without the bias of a pruner's score: a shift of all scores chooses the same, so its gradient is 0 but for rounding,
    of which Adam makes whole steps.
    """
    a, b = (load_file(path) for path in (one, two))
    assert set(a) == set(b)
    a = {
        name: value
        for name, value in a.items()
        if not (name.startswith("layer_pruners") and name.endswith("last.bias"))
    }
    off = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (off / sum(float(value.double().square().sum()) for value in a.values())) ** 0.5


@pytest.mark.parametrize("name", ["reid", "vlm"])
def test_the_weights_are_the_same(runs, name):
    root, _, _ = runs
    one, two, torn = (root / folder / name / "last.safetensors" for folder in ("one", "two", "from-one"))
    assert distance(one, two) < 1e-4
    assert distance(one, torn) < 1e-4


def test_a_process_that_dies_ends_the_run_and_another_number_goes_on(runs, tmp_path, capsys):
    root, _, _ = runs
    (tmp_path / "c.yml").write_text("MODEL:\n  USE_SDTPS: True\n")
    line = ["train", "reid", "--config", str(tmp_path / "c.yml"), *together.REID, f"DATASETS.ROOT_DIR={root / 'reid'}"]
    line += ["-o", str(tmp_path / "out")]
    done = torchrun("dying.py", *line)
    assert done.returncode != 0
    assert done.stdout.count("parameters:") == 1  # one plan, not two
    said = [text for text in done.stderr.splitlines() if "tokensieve: error:" in text]
    assert len(said) == 1
    assert "another process" in said[0]
    assert "--resume" in said[0]
    assert main([*line, "--resume"]) == 0
    assert "going on from step 6" in capsys.readouterr().out
    assert distance(root / "one" / "reid" / "last.safetensors", tmp_path / "out" / "last.safetensors") < 1e-4


# -- without other processes -------------------------------------------------------------------------------------------


def test_a_broken_connection_is_one_error():
    with pytest.raises(ProcessLostError, match=r"does not answer \(Connection closed by peer\).*--resume"), \
            distributed._together():  # fmt: skip
        raise RuntimeError("Connection closed by peer\nand much more")
    with pytest.raises(ProcessLostError, match=r"told to end.*--resume"):
        distributed._told_to_end(15, None)


def test_a_batch_that_cannot_be_split_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(OptionError, match="batch_size 8 cannot be split among 3 processes"):
        distributed.own_part(range(8), "batch_size")


def test_the_small_llava_is_trained_in_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "vlm-base"]) == 2
    assert "one process" in capsys.readouterr().err


def test_steps_have_seeds_of_their_own():
    seeds = {seed_of_step(seed, step) for seed in range(3) for step in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**32 for seed in (seed_of_step(-1, 5), seed_of_step(2**40, 7)))


def test_noise_is_a_samples_own(monkeypatch):
    """Three processes with two rows each draw what one with six rows draws."""
    from torch import Tensor

    from tokensieve.utils import processes

    torch.manual_seed(5)
    whole = processes.drawn_for_batch(torch.empty(6, 4), Tensor.uniform_)
    monkeypatch.setattr(processes, "world_size", lambda: 3)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        torch.manual_seed(5)
        parts.append(processes.drawn_for_batch(torch.empty(2, 4), Tensor.uniform_))
    assert torch.equal(torch.cat(parts), whole)
