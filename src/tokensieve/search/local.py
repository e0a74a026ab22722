"""Run a study's trials one after another in this process. `search.cluster` does the same on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokensieve.errors import TokensieveError, one_line
from tokensieve.records import write_whole
from tokensieve.report.results import write_eval
from tokensieve.search.study import Asked, Found, StudyFile, UnknownObjectiveError

__all__ = ["Hopeless", "Report", "Run", "keep_found", "reason_of", "run_here", "settled"]

Report = Callable[[int, float], None]
# (values by name, number of the trial's first attempt, report) -> what came out. `report(step, value)` raises Hopeless.
Run = Callable[[Mapping[str, Any], int, Report], Found]


class Hopeless(Exception):  # noqa: N818  # no error: the trial has done its part
    """A trial is not worth going on with. Raised by `report`, for the run to fall through."""


def reason_of(error: BaseException) -> str:
    """One line: the words of a user's mistake, of a defect its kind as well."""
    text = one_line(error)
    return text if isinstance(error, TokensieveError) else f"{type(error).__name__}: {text}"


def run_here(store: StudyFile, run: Run, total: int, folder: Path, after: Callable[[Asked], None]) -> None:
    """Go on until `total` trials have ended. after: called when a trial has ended, however."""
    while store.spent < total:
        asked = store.ask()
        if not settled(store, asked):
            _one(store, run, asked, folder)
        after(asked)


def _one(store: StudyFile, run: Run, asked: Asked, folder: Path) -> None:
    start = time.monotonic()

    def report(step: int, value: float) -> None:
        if store.report(asked, step, value):
            raise Hopeless

    try:
        found = run(asked.params, asked.origin, report)
        keep_found(store, asked, found, folder, time.monotonic() - start)
    except Hopeless:
        store.pruned(asked, time.monotonic() - start)
    except KeyboardInterrupt:
        store.interrupted(asked)
        raise
    except UnknownObjectiveError:
        store.void(asked)
        raise
    except Exception as error:  # a defect in one trial must not cost the others
        store.failed(asked, reason_of(error), time.monotonic() - start)


def keep_found(store: StudyFile, asked: Asked, found: Found, folder: Path, seconds: float) -> None:
    """Write what a trial brought, then count it as ended: what has ended is always there."""
    store.values(found.figures)
    if found.record is not None:
        write_eval(found.record, folder / "trials" / f"{asked.number:04d}.json")
    for name, data in found.files.items():
        write_whole(folder / "trials" / f"{asked.origin:04d}" / name, data)
    store.found(asked, found.figures, seconds)


def settled(store: StudyFile, asked: Asked) -> bool:
    """Whether the same values were run before: the trial then ends as that one did, at once."""
    twin = store.twin(asked)
    if twin is None:
        return False
    if twin.state.name == "PRUNED":
        for step, value in twin.intermediate_values.items():
            store.report(asked, step, value)
        store.pruned(asked, 0.0, twin.number)
    else:
        store.found(asked, twin.user_attrs["figures"], 0.0, twin.number)
    return True
