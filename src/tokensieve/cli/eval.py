"""Run the CLIP benchmark with token reduction: accuracy, and the speed measured in the same run.

Stands on clip_benchmark: all its flags pass through, for all five of its tasks. With no model and no data named it runs
on the embedded ones. `tokensieve eval reid` evaluates re-identification, `tokensieve eval vlm` a LLaVA model; each has
its own flags and --help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokensieve.cli.clip_flags import add_seed_flags, add_shared_flags, parse, sieve_config
from tokensieve.cli.parser import Parser, budget, keep_number, show
from tokensieve.errors import OptionError, UnknownNameError, nearest

if TYPE_CHECKING:
    from tokensieve.tasks.clip.load import Loader
    from tokensieve.tasks.clip.run import Job

TASKS = ("clip", "reid", "vlm")
EPILOG = """examples:
  tokensieve eval                                           the untouched default model
  tokensieve eval --method sieve --keep 0.5
  tokensieve eval --dataset cifar10 --model ViT-B-32 --pretrained openai --enable_pruning --k_anchors 10 --top_m 20
  tokensieve eval --dataset wds/mine --dataset_root DIR --model ViT-B-16 --pretrained FILE --method tome --keep 60
  tokensieve eval --stream --dataset wds/mine --dataset_root DIR --method sieve --keep 0.4     shard by shard
  torchrun --nproc_per_node 2 -m tokensieve.cli eval --stream --dataset wds/mine --dataset_root DIR"""


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
        raise OptionError("--images and --stream contradict each other: shards are read whole")
    if own.strict and not own.stream:
        raise OptionError("--strict is for --stream: without it, a sample that cannot be read is always an error")

    from tokensieve.report.results import read_eval
    from tokensieve.tasks.clip.load import Loader
    from tokensieve.tasks.clip.run import plan, run_job
    from tokensieve.tasks.clip.upstream import expand

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


def eval_parser() -> Parser:
    """Our own flags of `tokensieve eval`."""
    parser = Parser(prog="tokensieve eval", description=__doc__, epilog=EPILOG, add_help=False,
                    usage="tokensieve eval [clip|reid|vlm] [flags]")  # fmt: skip
    add = parser.add_argument
    add("--method", metavar="NAME", help="see `tokensieve methods`; none: the untouched model (default: none)")
    add("--keep", type=budget, metavar="K", help="patches that remain: a count, a ratio, or a list as 0.7,0.5")
    add("--keep_average", type=keep_number, metavar="K", help="instead: patches that remain on average over the blocks")
    add("--stream", action="store_true",
        help="read a local webdataset shard by shard: memory stays flat, the same command goes on after an "
        "interruption, and the processes of torchrun share the shards out")  # fmt: skip
    add("--strict", action="store_true", help="with --stream: a sample that cannot be read ends the run")
    add_shared_flags(parser)
    add_seed_flags(parser)
    return parser


def show_results(results: Sequence[dict[str, object]]) -> None:
    """The table of these results on the terminal."""
    from tokensieve.tasks.clip.table import eval_table

    show(eval_table(results))
