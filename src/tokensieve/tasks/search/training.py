"""A training run as a trial of a search: in a folder of its own, telling how it does, going on where it was cut off.

May import: training, search.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tokensieve.errors import OptionError
from tokensieve.search import Found, ManagerSettings, Objective, Parameter, Report, Search
from tokensieve.search.local import Run
from tokensieve.search.space import corners
from tokensieve.training import FitResult, Task
from tokensieve.training.checkpoint import checkpoints_in
from tokensieve.training.loop import BEST, CHECKPOINTS
from tokensieve.utils.settings import Section

__all__ = ["SINGLE", "Train", "pairs_of", "training_search", "trial_folder", "watched"]

SINGLE = ('manager_settings={"mode": "single"}', "search_settings={}")  # on top of a trial's settings


class Train(Protocol):
    """A run of a task that is made already."""

    def __call__(self, *, resume: bool, tick: Callable[[int], None]) -> FitResult: ...


def trial_folder(folder: Path, origin: int) -> Path:
    """Where a trial's run lies; every attempt at it in the same place."""
    return folder / "trials" / f"{origin:04d}"


def pairs_of(params: Mapping[str, Any]) -> list[str]:
    """A trial's values as KEY=VALUE; JSON is YAML."""
    return [f"{name}={json.dumps(value)}" for name, value in params.items()]


def training_search(
    name: str, config: Any, output: str, space: Mapping[str, Parameter],
    made: Callable[[Mapping[str, Any], Path], Section], run: Run, command: str,
) -> Search:  # fmt: skip
    """What to search; everything of it that can be checked is checked.

    config: has manager_settings and search_settings, and under the name `output` the folder. space: where the settings
    name none. made: the configuration of a trial from its values and its folder.
    """
    _refuse_processes()
    settings, folder = config.search_settings, Path(getattr(config, output)).resolve()
    space = settings.space or space
    for params in corners(space):
        made(params, folder)
    sections = {"manager_settings", "search_settings"}
    return Search(
        name=name, settings=settings, manager=config.manager_settings,
        objectives=settings.objectives or (Objective(metric="accuracy", direction="maximize"),), space=space,
        folder=folder, run=run, facts={"config": config.model_dump(mode="json", exclude={*sections, output})},
        final=lambda params: made(params, folder / "best").model_dump(mode="json", exclude=sections),
        command=command, notes=_notes_of(config.manager_settings),
    )  # fmt: skip


def _refuse_processes() -> None:
    """A search under torchrun would run every trial in every process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError(
            'a search starts its trials itself: run it in one process, with manager_settings.mode "ray" to spread them'
        )


def _notes_of(manager: ManagerSettings) -> list[str]:
    """What the settings ask for that a trial does not do."""
    gpus = manager.gpus_per_subtask or 1
    return [f"note: gpus_per_subtask {gpus}: a trial is one process, which trains on the first of them"] * (gpus > 1)


def watched(task: Task, train: Train, folder: Path, report: Report) -> Found:
    """Run a trial that reports each validation's score at its step. One that was cut off goes on from its checkpoint.

    Found has the score as `accuracy`, and the other figures of the best validation.
    """
    done, evaluate = 0, task.validate

    def tick(steps: int) -> None:
        nonlocal done
        done = steps

    def validate() -> Any:
        found = evaluate()
        if found is not None:
            report(done + 1, found.score)
        return found

    task.validate = validate  # type: ignore[method-assign]
    result = train(resume=bool(checkpoints_in(folder / CHECKPOINTS)), tick=tick)
    if result.best_score is None:
        raise OptionError("nothing was evaluated: there is no score to search by")
    best = next(one for one in result.validations if one["step"] == result.best_step)
    figures = {name: float(value) for name, value in best.items() if isinstance(value, int | float)}
    figures |= {"accuracy": float(result.best_score), "best_step": float(best["step"])}
    del figures["score"], figures["step"]
    return Found(figures, made={BEST: folder / BEST})
