"""Efficiency of token reduction on engines: prints a table, writes a record.

    python benchmarks/engines.py                                        an hour on two quiet cores
    python benchmarks/engines.py --models vit-s14 --batch 1 --rounds 3 --engines onnxruntime     a few minutes

Real ViT-S/14 weights and ViT-B/16's shape with random ones. Untouched and reduced models take turns within a round, on
each engine by itself, with torch eager untouched in every round, so that speed-ups over torch are of the same minute.
efficiency: measured speed-up on the engine / MAC ratio. int8: dynamic. Zero-shot accuracy of int8:

    tokensieve eval --method sieve --keep 0.25 --engine onnxruntime --quantize int8
    tokensieve eval --method sieve --keep 0.25
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tokensieve
from tokensieve.engines.export import make_engine
from tokensieve.records import check_writable, new_record, write_record
from tokensieve.tasks.bench.models import build_model, images, twin
from tokensieve.tasks.bench.timing import interleave, interval, quartiles, ratio, ratios

ENGINES = ("torch", "onnxruntime", "openvino", "onnxruntime int8", "openvino int8")
METHODS = ("sieve", "tome", "evit")
EAGER = "torch eager, untouched"
console = Console(width=130)


def target(engine: str, method: str, batch: int) -> float | None:
    """The efficiency that is aimed for."""
    if engine in ("onnxruntime", "openvino"):
        return 0.95 if batch >= 16 else 0.93
    if engine == "torch" and method == "keep-all":
        return 0.99
    return 0.93 if engine == "torch" and method == "sieve" and batch >= 16 else None


def candidates(model: nn.Module, engine: str, args: argparse.Namespace) -> dict[tuple[str, float], Any]:
    """(method, keep) -> (callable, MAC ratio), on one engine."""
    name, _, quantize = engine.partition(" ")
    found: dict[tuple[str, float], Any] = {}
    wanted = [("untouched", 1.0), *((method, keep) for method in args.methods for keep in args.keep)]
    wanted += [("keep-all", 1.0)] if engine == "torch" else []
    for method, keep in wanted:
        copy = twin(model)
        possible = 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # keep-all reduces nothing
            if method != "untouched":
                handle = tokensieve.attach(copy, "random" if method == "keep-all" else method, keep=keep)
                possible = handle.cost().possible
            call: Callable[[Tensor], object] = (
                copy if name == "torch" else make_engine(copy, name, quantize=quantize or None, threads=args.threads)
            )
        console.print(f"ready: {engine}, {method} {keep}", highlight=False)
        found[method, keep] = (call, possible)
    return found


def measure(model_name: str, engine: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one model on one engine."""
    model, size = build_model(model_name)
    ready = candidates(model, engine, args)
    rows = []
    for batch in args.batch:
        x = images(batch, size)
        calls = {str(key): partial(call, x) for key, (call, _) in ready.items()}
        times = interleave(calls | {EAGER: partial(model, x)}, args.rounds)
        base = times[str(("untouched", 1.0))]
        for (method, keep), (_, possible) in ready.items():
            seconds = times[str((method, keep))]
            speedup = ratio(base, seconds)
            efficiency = [value / possible for value in ratios(base, seconds)]
            aim = None if method == "untouched" else target(engine, method, batch)
            rows.append(
                {"model": model_name, "engine": engine, "batch": batch, "method": method, "keep": keep}
                | {"ms": 1e3 * quartiles(seconds)[1], "speedup": speedup, "mac_ratio": possible}
                | {"efficiency": speedup / possible, "efficiency_interval": interval(efficiency)}
                | {"over_torch_eager": ratio(times[EAGER], seconds), "target": aim}
                | {"met": None if aim is None else speedup / possible >= aim}
            )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="efficiency = speed-up on the same engine / MAC ratio", title_justify="left")
    for name in ("model", "engine", "batch", "method", "keep"):
        table.add_column(name)
    for name in ("ms", "speed-up", "MAC ratio", r"efficiency \[95 %]", "over torch eager", "target"):
        table.add_column(name, justify="right")
    for row in rows:
        found = row["efficiency_interval"]
        span = rf" \[{found[0]:.2f}, {found[1]:.2f}]" if found else ""
        verdict = "" if row["target"] is None else f"{row['target']} {'met' if row['met'] else 'missed'}"
        table.add_row(
            row["model"], row["engine"], str(row["batch"]), row["method"], str(row["keep"]), f"{row['ms']:.1f}",
            f"{row['speedup']:.2f}", f"{row['mac_ratio']:.2f}", f"{row['efficiency']:.3f}{span}",
            f"{row['over_torch_eager']:.2f}", verdict,
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=["vit-s14", "vit-b16"])
    add("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    add("--methods", nargs="+", default=list(METHODS))
    add("--keep", nargs="+", type=float, default=[0.5, 0.25])
    add("--batch", nargs="+", type=int, default=[1, 16])
    add("--rounds", type=int, default=15)
    add("--threads", type=int, default=2)
    add("-o", "--output", type=Path, default=Path("benchmarks/records/engines.json"))
    args = parser.parse_args()
    check_writable(args.output)
    torch.set_num_threads(args.threads)
    rows = [row for name in args.models for engine in args.engines for row in measure(name, engine, args)]
    show(rows)
    config = {name: value for name, value in vars(args).items() if name != "output"}
    write_record(new_record("engines", config, rows, seed=0, threads=args.threads), args.output)
    console.print(f"record: {args.output}")


if __name__ == "__main__":
    main()
