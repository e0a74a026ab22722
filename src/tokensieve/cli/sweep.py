"""Run methods x budgets x models x datasets into one folder, the untouched model always first.

Takes every flag of `tokensieve eval` beside its own. What is in the folder already is skipped, so that an interrupted
sweep goes on where it was; one run that fails does not stop the others. Several sweeps may share a folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.cli.eval import show_results
from tokensieve.errors import OptionError, RecordError
from tokensieve.tasks.arguments import Parser, keep_number, option_pairs
from tokensieve.tasks.clip.flags import add_shared_flags, parse, refuse_both
from tokensieve.tasks.search.flags import add_ray_flags, managing
from tokensieve.utils.progress import Bars, bars

if TYPE_CHECKING:
    from tokensieve.tasks.clip.run import Job
    from tokensieve.tasks.clip.sweep import Outcome

EPILOG = """examples:
  tokensieve sweep --methods sieve tome evit random --keep 0.5 0.25 -o runs/
  tokensieve sweep --methods anchor --keep 60 --model ViT-B-32 ViT-B-16 --pretrained openai --dataset cifar10 -o runs/
  tokensieve sweep --methods sieve tome --keep 0.5 --ray --cpus 2 -o runs/
  torchrun --nproc_per_node 2 -m tokensieve.cli sweep --distributed --methods tome --keep 0.5 -o runs/"""

_KEEP = (0.5, 0.25)


def main(argv: Sequence[str]) -> int:
    own, base = parse(_parser(), argv)
    if not own.methods or own.output is None:
        raise OptionError("tokensieve sweep needs --methods and -o FOLDER")
    refuse_both(own, "keep", "keep_average")
    if own.fuse_weight is not None and own.mode != "fuse":
        raise OptionError("--fuse_weight does nothing without --mode fuse")
    manager = managing(own)
    if own.ray and base.distributed:
        raise OptionError("--ray and --distributed cannot be used together: give one")
    folder = Path(own.output)
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"-o {folder}: it is a file; give a folder")

    from tokensieve.tasks.clip.run import plan
    from tokensieve.tasks.clip.sweep import configurations, into_folder, run_sweep
    from tokensieve.tasks.clip.upstream import expand, world

    configs = configurations(own.methods, _budgets(own), option_pairs(own.method_option), **_shared(own))
    rank, size = world() if base.distributed else (0, 1)
    base.distributed, base.verbose = False, False
    jobs = plan(configs, into_folder(expand(base), folder), own.speed_batches, ["tokensieve", "sweep", *argv])
    own_jobs = jobs[rank::size]
    with bars({"running": len(own_jobs)}) as shown:
        progress = _Progress(len(own_jobs), shown)
        if own.ray:
            from tokensieve.search.ray import connected
            from tokensieve.search.settings import ManagerSettings
            from tokensieve.tasks.clip.sweep_ray import run_sweep_on_cluster

            with connected(ManagerSettings(**manager)) as cluster:
                outcome = run_sweep_on_cluster(jobs, cluster, progress.tell)
        else:
            outcome = run_sweep(own_jobs, progress.tell)
    if rank == 0:
        _table(jobs)
    return _report(outcome)


def _parser() -> Parser:
    parser = Parser(prog="tokensieve sweep", description=__doc__, epilog=EPILOG, add_help=False,
                    usage="tokensieve sweep --methods NAME... -o FOLDER [flags]")  # fmt: skip
    add = parser.add_argument
    add("--methods", nargs="+", metavar="NAME", help="see `tokensieve methods`")
    add("--keep", nargs="+", type=keep_number, metavar="K", help="ratios or counts that remain (default: 0.5 0.25)")
    add("--keep_average", nargs="+", type=keep_number, metavar="K", help="instead: on average over the blocks")
    add("-o", "--output", metavar="FOLDER", help="where the results go")
    add_ray_flags(parser)
    add_shared_flags(parser)
    return parser


def _budgets(own: Any) -> list[dict[str, Any]]:
    if own.keep_average is not None:
        return [{"keep_average": keep} for keep in own.keep_average]
    return [{"keep": keep} for keep in own.keep or _KEEP]


def _shared(own: Any) -> dict[str, Any]:
    said = {
        "mode": own.mode,
        "schedule": own.schedule,
        "at": tuple(sorted(own.prune_layer)) if own.prune_layer else None,
        "fuse_weight": own.fuse_weight,
    }
    return {name: value for name, value in said.items() if value is not None}


class _Progress:
    """A line for each run, on stderr, with the time left; and the bar."""

    def __init__(self, total: int, shown: Bars) -> None:
        self._shown = shown
        self._total, self._count, self._ran, self._start = total, 0, 0, time.monotonic()

    def tell(self, job: Job, how: str) -> None:
        self._count += 1
        self._ran += how != "there"
        self._shown.further("running")
        spent = time.monotonic() - self._start
        left = spent / self._ran * (self._total - self._count) if self._ran else 0.0
        what = f"{job.args.dataset} {job.args.model} {job.config.slug}"
        line = f"{self._count} of {self._total}: {what}: {how} (about {left:.0f} s left)"
        self._shown.tell(line, file=sys.stderr)


def _table(jobs: Sequence[Job]) -> None:
    from tokensieve.report.results import read_eval

    results = [read_eval(job.output) for job in jobs if job.output.is_file()]
    if results:
        show_results(results)


def _report(outcome: Outcome) -> int:
    counts = [(len(outcome.done), "run"), (len(outcome.skipped), "there before"), (len(outcome.failed), "failed")]
    counts.append((len(outcome.elsewhere), "left to another sweep"))
    print(", ".join(f"{number} {what}" for number, what in counts if number or what == "run"))
    for job, reason in outcome.failed:
        print(f"tokensieve: failed: {job.output.name}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0
