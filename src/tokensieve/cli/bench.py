"""Measure what methods gain in wall-clock time, interleaved with the untouched model in one run.

Speed-ups are medians of per-round ratios against the faster of the untouched model ("stock") and the same model on
linear + scaled_dot_product_attention ("sdpa"). Next to each: what its MACs make possible, and the efficiency.
"keep-all" is a method attached with a budget that keeps everything. In brackets the 95 % interval of the median
for this number of rounds, whatever the distribution; a target inside it is "unsure".
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from tokensieve.core.budget import SCHEDULES
from tokensieve.engines.names import ENGINES
from tokensieve.records import Record, check_writable, write_record
from tokensieve.tasks.arguments import keep_number
from tokensieve.tasks.bench.config import METHODS, MODELS, PARTS, BenchConfig, quick
from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve bench --quick                                  about a minute, the real ViT-S/14
  tokensieve bench -o runs/bench.json                       three models; 20 minutes on two cores
  tokensieve bench --models ViT-B-32 --batch 32 --keep 0.4  any open_clip model, random weights
  tokensieve bench --engine onnxruntime --threads 2         the same in ONNX Runtime; --quantize int8 in 8 bits
  tokensieve bench --speed --share --memory -o all.json     everything in one record
  tokensieve bench --vlm --rounds 15 -o runs/vlm.json       a LLaVA of 576 + 64 tokens: prefill, decoding, cache"""

_TABLE_WIDTH = 160  # where the output is not a terminal, and so has no width


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="vit-s14 only, batch 1 and 8, 6 rounds; other flags still win")
    add("--models", nargs="+", metavar="NAME", help=f"of {', '.join(MODELS)}, or any of open_clip (default: these)")
    add("--batch", nargs="+", type=int, metavar="B", help="batch sizes (default: 1 16; vit-l14-336: 1)")
    add("--methods", nargs="+", metavar="NAME", help=f"see `tokensieve methods` (default: {' '.join(METHODS)})")
    add("--keep", nargs="+", type=keep_number, metavar="K", help="ratios or counts at the end (default: 0.5 0.25)")
    add("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)} (default: each method's own)")
    add("--rounds", type=int, metavar="R", help="each runs every candidate once; under 6 nothing is sure (default: 11)")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cpu)")
    add("--threads", type=int, metavar="T", help="threads on CPU (default: as many as the engine takes)")
    add("--engine", metavar="NAME", help=f"{', '.join(ENGINES)}: models and baseline alike (default: torch)")
    add("--quantize", metavar="KIND", help="int8, on the engines onnxruntime and openvino (default: float32)")
    add("--seed", type=int, metavar="S", help="of random weights and images (default: 0)")
    add("--speed", action="store_true", help="measure speed; the default where no part is named")
    add("--share", action="store_true",
        help="measure selection's share of the time as patches grow to 4096 (--quick: 1024), keep 0.5")  # fmt: skip
    add("--memory", action="store_true", help="measure peak memory, each in a fresh process")
    add(
        "--vlm",
        action="store_true",
        help="measure a LLaVA of random weights; --methods, --keep, --batch, --schedule are its",
    )
    add("-o", "--output", metavar="FILE", help="write the record here, as JSON, when all is measured")


def run(args: Namespace) -> int:
    config = _config(args)
    if args.output:
        check_writable(args.output)
    record = _measure(config)
    _show(record)
    if args.output:
        write_record(record, args.output)
        print(f"record: {args.output}")
    return 0


def _config(args: Namespace) -> BenchConfig:
    """What was said on the command line; the rest is the configuration's own default."""
    said: dict[str, Any] = {
        "models": args.models and tuple(args.models),
        "batches": args.batch and tuple(args.batch),
        "vlm_methods" if args.vlm else "methods": args.methods and tuple(args.methods),
        "keep": args.keep and tuple(args.keep),
        "schedule": args.schedule,
        "rounds": args.rounds,
        "device": args.device,
        "threads": args.threads,
        "engine": args.engine,
        "quantize": args.quantize,
        "seed": args.seed,
        "parts": tuple(part for part in PARTS if getattr(args, part)) or None,
    }
    said = {name: value for name, value in said.items() if value is not None}
    if args.methods and not args.vlm:
        said["share_methods"] = said["methods"]
    return quick(**said) if args.quick else BenchConfig(**said)


def _measure(config: BenchConfig) -> Record:
    """Run with a progress bar on stderr."""
    from tokensieve.tasks.bench.run import run_bench

    with bars({"loading": config.steps}) as shown:
        return run_bench(config, lambda what: shown.further("loading", label=what))


def _show(record: Record) -> None:
    from rich.console import Console

    from tokensieve.tasks.bench.table import bench_tables

    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    for table in bench_tables(record.rows):
        console.print(table)
    aimed = [row for row in record.rows if row["target"] is not None]
    met, unsure = sum(row["met"] for row in aimed), sum(not row.get("sure", True) for row in aimed)
    hint = f" ({unsure} unsure: another run may say otherwise; more --rounds tell)" if unsure else ""
    where = "{cpu}, {cores} cores, {threads} threads, {device}".format(**record.hardware)
    torch = record.versions.get("torch", "?")
    console.print(f"{met} of {len(aimed)} targets met{hint}; {where}, torch {torch}", highlight=False)
