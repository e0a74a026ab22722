"""A search of a toy: figures by formula, each run noted in a file. As a program: one that may be killed in a trial.

python toy_search.py FOLDER STUDY TRIALS [KILL]    KILL: the run that kills its own process, once
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokensieve.search import Found, ManagerSettings, Objective, Parameter, Report, Search, SearchSettings, run_search

SPACE = {
    "shape": Parameter.model_validate(["round", "square"]),
    "x": Parameter.model_validate({"low": 0.0, "high": 4.0}),
    "n": Parameter.model_validate({"low": 1, "high": 32, "log": True}),
    "corner": Parameter.model_validate({"low": 0, "high": 3, "when": {"shape": "square"}}),
}
ACCURACY = Objective(metric="accuracy", direction="maximize")
MACS = Objective(metric="macs", direction="minimize")


def figures(params: Mapping[str, Any]) -> dict[str, float]:
    good = 3.0 - (params["x"] - 1.5) ** 2 - 0.1 * params.get("corner", 1)
    return {"accuracy": good, "macs": params["n"] + params["x"]}


def run(folder: Path, kill: int | None, params: Mapping[str, Any], origin: int, report: Report) -> Found:
    """Notes the run; kills its process once, in the run of that number."""
    with (folder / "runs.txt").open("a") as file:
        file.write(f"{origin} {os.getpid()}\n")
    if origin == kill and not (folder / "killed").exists():
        (folder / "killed").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return Found(figures(params))


def slow(folder: Path, params: Mapping[str, Any], origin: int, report: Report) -> Found:
    """Three steps; a report after each."""
    found = figures(params)
    for step in (1, 2, 3):
        report(step, found["accuracy"] * step / 3)
    return Found(found)


def waits(folder: Path, params: Mapping[str, Any], origin: int, report: Report) -> Found:
    """Runs at least until a second one does."""
    (folder / f"at-{origin}").write_text("")
    for _ in range(200):
        if len(list(folder.glob("at-*"))) > 1:
            break
        time.sleep(0.05)
    return Found(figures(params) | {"together": float(len(list(folder.glob("at-*"))))})


def dies_once(job: Any) -> tuple[str, Any]:
    """In place of a sweep's run: the second job's worker is killed the first time."""
    folder = job.output.parent
    with (folder / "runs.txt").open("a") as file:
        file.write(f"{job.number} {os.getpid()}\n")
    if job.number == 1 and not (folder / "killed").exists():
        (folder / "killed").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return ("failed", "no way") if job.number == 2 else ("done", {"number": job.number, "reduced": True})


@dataclass(frozen=True)
class ToyJob:
    """As much of a sweep's job as spreading it needs."""

    number: int
    output: Path
    config: Any = field(default_factory=lambda: SimpleNamespace(is_baseline=False, mode="prune"))

    def exists(self) -> bool:
        return self.output.exists()


def runs_of(folder: Path) -> list[int]:
    """Numbers of the trials that were run, in order."""
    return [int(line.split()[0]) for line in (folder / "runs.txt").read_text().splitlines()]


def toy(
    folder: Path, run: Any, trials: int = 8, objectives: tuple[Objective, ...] = (ACCURACY,), mode: str = "optuna",
    manager: Mapping[str, Any] | None = None, space: Any = None, study: str = "study.log", **settings: Any,
) -> Search:  # fmt: skip
    return Search(
        name="toy", settings=SearchSettings(n_trials=trials, study=study, **settings),
        manager=ManagerSettings(mode=mode, **(manager or {})), objectives=objectives, space=space or SPACE,
        folder=folder, run=run, facts={"of": "a toy"}, final=dict, command="toy",
    )  # fmt: skip


def main(folder: Path, study: str, trials: int, kill: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run_search(toy(folder, partial(run, folder, kill), trials, study=study), print)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
