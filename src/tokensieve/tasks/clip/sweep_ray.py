"""The runs of a sweep spread over a Ray cluster: each result comes back, and is written here. See `search.cluster`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

from tokensieve.errors import TokensieveError
from tokensieve.report.results import write_eval
from tokensieve.search.local import reason_of
from tokensieve.search.ray import Cluster, lost
from tokensieve.tasks.clip.config import OUTPUT
from tokensieve.tasks.clip.load import Loader
from tokensieve.tasks.clip.run import Job, run_job
from tokensieve.tasks.clip.sweep import Outcome, claimed, idle_word

__all__ = ["run_sweep_on_cluster"]


@cache
def _loader() -> Loader:
    """One for all runs of a worker: the model is loaded once."""
    return Loader()


def _run(job: Job) -> tuple[str, Any]:
    """One run, on any machine: ("done", result) or ("failed", reason). Nothing of it stays where it ran."""
    with tempfile.TemporaryDirectory() as folder:
        args = copy.copy(job.args)
        args.output = f"{folder}/{OUTPUT}"
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                return "done", run_job(dataclasses.replace(job, args=args), _loader())
        except Exception as error:  # a defect in one run must not cost the others
            return "failed", reason_of(error)


def run_sweep_on_cluster(
    jobs: Sequence[Job], cluster: Cluster, tell: Callable[[Job, str], None] = lambda job, how: None
) -> Outcome:
    """As `sweep.run_sweep`, with as many runs at once as fit into the cluster. What is there is not run again."""
    ray, task, outcome = cluster.ray, cluster.task(_run), Outcome()
    left = list(jobs)
    with ExitStack() as locks:
        running: dict[Any, tuple[Job, ExitStack]] = {}
        while left or running:
            while left and len(running) < cluster.slots:
                job, lock = left.pop(0), ExitStack()
                locks.push(lock)  # let go of whatever happens; `close` may come before
                how = _before(job, lock.enter_context(claimed(job.output)), outcome)
                if how:
                    lock.close()
                    tell(job, how)
                else:
                    running[task.remote(job)] = (job, lock)
            if running:
                (ready,), _ = ray.wait(list(running), num_returns=1)
                job, lock = running.pop(ready)
                how = _after(ray, ready, job, outcome)
                lock.close()
                tell(job, how)
    return outcome


def _before(job: Job, mine: bool, outcome: Outcome) -> str:
    """Why a job is not to be run; nothing where it is."""
    if not mine:
        outcome.elsewhere.append(job)
        return "elsewhere"
    try:
        there = job.exists()
    except TokensieveError as error:
        outcome.failed.append((job, reason_of(error)))
        return outcome.failed[-1][1]
    if there:
        outcome.skipped.append(job)
    return "there" if there else ""


def _after(ray: Any, reference: Any, job: Job, outcome: Outcome) -> str:
    try:
        how, what = ray.get(reference)
    except ray.exceptions.RayError as error:
        how, what = "failed", lost(ray, error)
    if how == "failed":
        outcome.failed.append((job, what))
        return str(what)
    write_eval(what, job.output)
    outcome.done.append(job)
    return idle_word(job, what)
