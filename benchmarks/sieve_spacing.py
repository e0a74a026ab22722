"""How often sieve should cut: the feature's error at the same measured time, for single images and for batches.

For cuts at every block, every second and every third, and a row of budgets: the measured speed-up at batch 1 and 16,
interleaved with fused attention and all tokens, and the relative error of the CLS feature on training images. Errors at
a given speed-up are read off by straight lines between the budgets.

    python benchmarks/sieve_spacing.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sieve_vs_tome import SPACINGS, Choice, feature_error, measured_speeds, pixels

from tokensieve.records import check_writable, new_record, write_record
from tokensieve.zoo import vit_s14
from tokensieve.zoo.cifar10 import load_cifar10

KEEPS = (160, 128, 104, 84, 66, 50, 38, 28, 20)
ROUNDS = {1: 15, 16: 4}
SPEEDS = {1: (1.2, 1.4, 1.6, 1.8), 16: (1.4, 1.7, 2.0, 2.5)}
console = Console(width=110)


def read_off(rows: list[dict[str, Any]], every: int, batch: int, speed: float) -> float | None:
    """The error at a measured speed-up; None beyond what was measured."""
    mine = sorted((row[f"speedup_{batch}"], row["error"]) for row in rows if row["every"] == every)
    speeds, errors = zip(*mine, strict=True)
    return float(np.interp(speed, speeds, errors)) if speeds[0] <= speed <= speeds[-1] else None


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("batch", "measured", *(f"every {every}" for every in SPACINGS), title="error of the feature")
    for batch, speeds in SPEEDS.items():
        for speed in speeds:
            found = [read_off(rows, every, batch, speed) for every in SPACINGS]
            table.add_row(str(batch), f"{speed}x", *("-" if error is None else f"{error:.3f}" for error in found))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=96, help="training images to take the error on")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/records/sieve_spacing.json"))
    args = parser.parse_args()
    check_writable(args.output)
    model = vit_s14.vit_s14_openclip()
    images = load_cifar10("train")[0][6000 : 6000 + args.images]
    choices = [Choice("sieve", 0.0, "geometric", keep, every) for every in SPACINGS for keep in KEEPS]
    speedups = {n: measured_speeds(model, choices, pixels(images[:n]), rounds) for n, rounds in ROUNDS.items()}
    with torch.inference_mode():
        full = torch.cat([model(pixels(images[i : i + 16])) for i in range(0, len(images), 16)])
    rows: list[dict[str, Any]] = []
    for i, choice in enumerate(choices):
        error = feature_error(model, choice, images, full, 16)
        with choice.attach(model) as handle:
            row = {"every": choice.every, "keep": choice.keep, "possible": handle.cost().possible, "error": error}
        rows.append(row | {f"speedup_{n}": found[i] for n, found in speedups.items()})
    show(rows)
    config = {"images": args.images, "rounds": {str(n): rounds for n, rounds in ROUNDS.items()}}
    write_record(new_record("sieve_spacing", config, rows, seed=0, threads=torch.get_num_threads()), args.output)
    console.print(f"record: {args.output}")


if __name__ == "__main__":
    main()
