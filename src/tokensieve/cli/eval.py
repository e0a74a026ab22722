"""`tokensieve eval`, and `tokensieve eval reid|vlm`. The flags are in tasks/*/flags.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokensieve.cli.parts import show
from tokensieve.errors import OptionError, UnknownNameError, nearest
from tokensieve.tasks.clip.flags import eval_parser, parse, sieve_config

if TYPE_CHECKING:
    from tokensieve.tasks.clip.load import Loader
    from tokensieve.tasks.clip.run import Job

TASKS = ("clip", "reid", "vlm")


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if words and not words[0].startswith("-") and "=" not in words[0]:
        task = words.pop(0)
        if task not in TASKS:
            raise UnknownNameError(f"tokensieve eval does not know {task!r}.{nearest(task, TASKS)}")
        if task == "reid":
            from tokensieve.cli import eval_reid

            return eval_reid.main(words)
        if task == "vlm":
            from tokensieve.cli import eval_vlm

            return eval_vlm.main(words)
    own, base = parse(eval_parser(), words)
    config = sieve_config(own)
    if own.stream and own.images is not None:
        raise OptionError("--images and --stream cannot be used together: shards are read whole")
    if own.strict and not own.stream:
        raise OptionError("--strict is for --stream: without it, a sample that cannot be read is always an error")

    from tokensieve.report.results import read_eval
    from tokensieve.tasks.clip.engine import refuse_amp
    from tokensieve.tasks.clip.load import Loader
    from tokensieve.tasks.clip.run import plan, run_job
    from tokensieve.tasks.clip.upstream import expand

    refuse_amp(config, base.amp)
    jobs = plan([config], expand(base), own.speed_batches, ["tokensieve", "eval", *argv])
    loader, results = Loader(), []
    for job in jobs:
        if base.skip_existing and job.exists():
            print(f"skipped: {job.output} is there already")
            results.append(read_eval(job.output))
            continue
        result = _streamed(job, loader, own.strict) if own.stream else run_job(job, loader)
        if result is None:
            print(f"this process's shards are done; the result comes when the others' are: {job.output}")
            continue
        results.append(result)
        print(f"result: {job.output}")
    if results:
        show_results(results)
    return 0


def _streamed(job: Job, loader: Loader, strict: bool) -> dict[str, Any] | None:
    import sys

    from tokensieve.tasks.clip.stream_eval import run_streamed

    result = run_streamed(
        job, loader, strict=strict, say=lambda line: print(f"tokensieve: note: {line}", file=sys.stderr)
    )
    if result is not None and result["bad_samples"]:
        print(f"{result['bad_samples']} samples of {result['shards']} shards could not be read and do not count")
    return result


def show_results(results: Sequence[dict[str, object]]) -> None:
    """The table of these results on the terminal."""
    from tokensieve.tasks.clip.table import eval_table

    show(eval_table(results))
