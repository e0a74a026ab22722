"""Many runs into one folder: what is there is skipped, what fails is listed, what another sweep is at is left to it."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import io
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokensieve.errors import OptionError, TokensieveError
from tokensieve.methods.registry import method_options
from tokensieve.tasks.clip.config import BASELINE, OUTPUT, SieveConfig
from tokensieve.tasks.clip.load import Loader
from tokensieve.tasks.clip.run import Job, run_job

__all__ = ["Outcome", "claimed", "configurations", "idle_word", "into_folder", "run_sweep"]


@dataclass
class Outcome:
    """How each job ended. failed: with the reason. elsewhere: another process is at it."""

    done: list[Job] = field(default_factory=list)
    skipped: list[Job] = field(default_factory=list)
    elsewhere: list[Job] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)


def configurations(
    methods: Sequence[str], budgets: Sequence[dict[str, Any]], options: dict[str, Any], **shared: Any
) -> list[SieveConfig]:
    """The untouched model first, then methods x budgets. An option goes to the methods that have it."""
    names = [name for name in dict.fromkeys(methods) if name != "none"]
    known = {name: method_options(name) for name in names}
    for option in options:
        if not any(option in its for its in known.values()):
            raise OptionError(f"--method_option {option}: none of {', '.join(names)} has it")
    found = [BASELINE]
    for name in names:
        own = {option: value for option, value in options.items() if option in known[name]}
        found += [SieveConfig(method=name, options=own, **budget, **shared) for budget in budgets]
    return found


def into_folder(runs: Iterable[Namespace], folder: Path) -> list[Namespace]:
    """The same runs with their results in `folder`, each under a name of its own."""
    quiet = []
    for args in runs:
        args = copy.copy(args)
        args.output = str(folder).replace("{", "{{").replace("}", "}}") + f"/{OUTPUT}"
        args.verbose = False
        quiet.append(args)
    return quiet


def run_sweep(jobs: Sequence[Job], tell: Callable[[Job, str], None] = lambda job, how: None) -> Outcome:
    """Run what is not there. `tell(job, how)` after each: "done", "there", "elsewhere", or what is wrong."""
    outcome, loader = Outcome(), Loader()
    for job in jobs:
        with claimed(job.output) as mine:
            how = _one(job, loader, outcome) if mine else "elsewhere"
        if not mine:
            outcome.elsewhere.append(job)
        tell(job, how)
    return outcome


def _one(job: Job, loader: Loader, outcome: Outcome) -> str:
    try:
        if job.exists():
            outcome.skipped.append(job)
            return "there"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result = run_job(job, loader)
    except TokensieveError as error:
        outcome.failed.append((job, " ".join(str(error).split())))
    except Exception as error:  # a defect in one run must not cost the others
        outcome.failed.append((job, f"{type(error).__name__}: {' '.join(str(error).split())}"))
    else:
        outcome.done.append(job)
        return idle_word(job, result)
    return outcome.failed[-1][1]


def idle_word(job: Job, result: dict[str, Any]) -> str:
    """How a run ended well: whether anything was reduced."""
    idle = not result["reduced"] and not job.config.is_baseline and job.config.mode == "prune"
    return "done, nothing reduced" if idle else "done"


@contextmanager
def claimed(result: Path) -> Iterator[bool]:
    """Whether this process may write `result` now. The lock goes with its holder, however that ends."""
    result.parent.mkdir(parents=True, exist_ok=True)
    path = result.with_name(f".{result.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)
