"""One run: clip_benchmark's arguments and a configuration in, one result file out."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import json
import pickle
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tokensieve.errors import MissingMaterialError, OptionError, RecordError, TokensieveError
from tokensieve.records import check_writable, hardware, versions
from tokensieve.report.results import EVAL_FORMAT, read_eval, write_eval
from tokensieve.tasks.clip import probe
from tokensieve.tasks.clip.benchmark_patches import patched_benchmark
from tokensieve.tasks.clip.config import SieveConfig, digest, run_facts
from tokensieve.tasks.clip.load import Loader, check_model
from tokensieve.tasks.clip.session import Session
from tokensieve.tasks.clip.upstream import benchmark, check_dataset, default_task, model_type, shards

__all__ = ["Job", "finish", "plan", "run_job"]


@dataclass(frozen=True)
class Job:
    """One model on one dataset in one language, with one configuration. `args` are clip_benchmark's, of one run."""

    config: SieveConfig
    args: Namespace
    speed_batches: int
    command: str

    @property
    def task(self) -> str:
        task: str = self.args.task
        return default_task(self.args.dataset) if task == "auto" else task

    @property
    def ident(self) -> str:
        """Eight digits that stand for everything that changes the result."""
        return digest(self.config.plain(), run_facts(self.args), self.speed_batches)

    @property
    def output(self) -> Path:
        """The result file, from the template of `--output`."""
        a, c = self.args, self.config
        is_file = Path(a.pretrained).is_file()
        names = {
            "model": a.model.replace("/", "_"),
            "pretrained": Path(a.pretrained).name if is_file else a.pretrained,
            "pretrained_full_path": a.pretrained.replace("/", "_"),
            "task": self.task,
            "dataset": a.dataset.removeprefix("wds/").replace("/", "_"),
            "language": a.language,
            "config": f"{c.slug}_{self.ident}",
            "method": c.method,
            "mode": c.mode,
            "keep": c.keep if c.keep_average is None else c.keep_average,
        }
        try:
            return Path(a.output.format(**names))
        except (KeyError, IndexError, ValueError):
            raise OptionError(f"--output {a.output}: the names in braces are {', '.join(names)}") from None

    @property
    def features(self) -> str:
        """The folder where a linear probe keeps the features of this configuration."""
        name = digest(self.config.plain(), run_facts(self.args, features_only=True))
        return str(Path(self.args.feature_root, f"{self.config.slug}_{name}"))

    def exists(self) -> bool:
        """Whether its result is there. A file of another configuration in its place is an error."""
        if not self.output.exists():
            return False
        if read_eval(self.output).get("config_id") != self.ident:
            raise RecordError(
                f"{self.output} is there with another configuration: give another --output, or add {{config}}"
            )
        return True


def plan(
    configs: Sequence[SieveConfig], runs: Iterable[Namespace], speed_batches: int, command: Sequence[str]
) -> list[Job]:
    """Runs x configurations, checked: models, weights and data are there, and no two jobs write the same file."""
    jobs: dict[Path, Job] = {}
    for args in runs:
        check_model(args)
        check_dataset(args)
        for config in configs:
            job = Job(config, args, speed_batches, shlex.join(command))
            if job.output in jobs:
                raise OptionError(f"--output {args.output}: two runs would write {job.output}; add {{config}} to it")
            if args.skip_load and job.task != "linear_probe":
                raise OptionError(f"--skip_load is for linear probes on cached features, not for {job.task}")
            jobs[job.output] = job
    return list(jobs.values())


def run_job(job: Job, loader: Loader) -> dict[str, Any]:
    """Run, write the result file whole, and give the result back. Nothing in clip_benchmark stays changed."""
    check_writable(job.output)
    if job.args.save_clf is not None:
        check_writable(job.args.save_clf)
    session = Session(job.config, loader, job.args.model_type, job.speed_batches)
    start = time.perf_counter()
    theirs = _from_cache(job) if job.args.skip_load else _through_benchmark(job, session)
    return finish(job, session, theirs, start)


def finish(job: Job, session: Session, theirs: dict[str, Any], start: float) -> dict[str, Any]:
    """The result of a run that began at `start`: what clip_benchmark says and all about it, written whole."""
    facts = session.facts()
    for line in session.warnings:
        print(f"tokensieve: warning: {line}", file=sys.stderr)
    if not facts["reduced"] and not job.config.is_baseline and job.config.mode != "prune":
        print(f"tokensieve: note: mode {job.config.mode} removes no tokens", file=sys.stderr)
    result = theirs | _about(job, session, facts) | {"seconds": time.perf_counter() - start}
    write_eval(result, job.output)
    return result


def _through_benchmark(job: Job, session: Session) -> dict[str, Any]:
    """clip_benchmark's own run, its result file read back."""
    args = copy.copy(job.args)
    most = shards(args)
    args.num_workers = args.num_workers if most is None else min(args.num_workers, most)
    args.feature_root, args.skip_existing = job.features, False
    images = getattr(args, "images", None)
    with (
        tempfile.TemporaryDirectory() as folder,
        model_type(session.load) as kind,
        patched_benchmark(session, args.dataset, images),
    ):
        args.output, args.model_type = f"{folder}/result.json", kind
        try:
            benchmark().run(args)
        except TokensieveError:
            raise
        except AssertionError as error:  # how it says that a flag does not fit a dataset
            raise OptionError(f"clip_benchmark refuses this run: {error}") from error
        except (OSError, pickle.UnpicklingError) as error:
            raise MissingMaterialError(f"a file of this run cannot be read: {error}") from error
        theirs: dict[str, Any] = json.loads(Path(args.output).read_text(encoding="utf-8"))
    return theirs


def _from_cache(job: Job) -> dict[str, Any]:
    """A linear probe without loading a model."""
    a = job.args
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fit = probe.Fit(a.fewshot_lr, a.fewshot_epochs, a.batch_size, a.seed, device, a.amp)
    metrics = probe.cached(job.features, fit, a.fewshot_k, a.normalize)
    names = {name: getattr(a, name) for name in ("dataset", "model", "pretrained", "language")}
    return names | {"task": job.task, "metrics": metrics}


def _about(job: Job, session: Session, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything beside clip_benchmark's keys: what was asked, what it cost, where it ran. Flat."""
    args = job.args
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = hardware(torch.get_num_threads(), torch.cuda.get_device_name() if device == "cuda" else device)
    config = {"reduction": job.config.plain(), "benchmark": run_facts(args), "speed_batches": job.speed_batches}
    return {
        "format": EVAL_FORMAT,
        **facts,
        "images": session.speed.images if session.speed else 0,
        "speed_batches": job.speed_batches,
        "seed": args.seed,
        "batch_size": args.batch_size,
        "amp": args.amp,
        **{name: where[name] for name in ("device", "threads", "cpu", "cores")},
        **{f"version_{name}": version for name, version in _versions().items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": job.command,
        "config": json.dumps(config, sort_keys=True, default=str),
        "config_id": job.ident,
    }


def _versions() -> dict[str, str]:
    found = versions()
    for name in ("clip-benchmark", "webdataset"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.replace("-", "_")] = importlib.metadata.version(name)
    return found
