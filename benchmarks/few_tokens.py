"""How far blocks fall behind their MACs when they get fewer tokens from the start: what no choice can win back.

The blocks of the real ViT-S/14, all of them, are fed 257, 225, ... tokens; nothing is selected. Speed-up against all
tokens, divided by what the MACs make possible; for the usual linear layers, and for the form in which a reduced model
runs its blocks (adapters/lean_blocks.py). Both are measured against the usual layers with all tokens, the baseline of
`tokensieve bench`, and the second also against itself with all tokens.

    python benchmarks/few_tokens.py --batch 1 --rounds 31
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tokensieve.adapters.baseline import attach_fused
from tokensieve.adapters.linear import plain_linear
from tokensieve.core.cost import block_macs
from tokensieve.results.record import check_writable, new_record, write_record
from tokensieve.tasks.bench.models import build_model
from tokensieve.tasks.bench.timing import interleave, interval, ratios

TOKENS = (257, 225, 193, 161, 129, 97, 65, 33)
console = Console(width=110)


def plain(blocks: nn.Module, x: Tensor) -> Tensor:
    with plain_linear():
        return cast(Tensor, blocks(x))


def measure(batch: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each number of tokens and form of the blocks."""
    model, _ = build_model("vit-s14", "cpu", 0)
    handle = attach_fused(model)
    tower = cast(Any, model)
    shape = handle.family.shape(tower.transformer.resblocks[0])  # all blocks are alike
    x = torch.randn(batch, TOKENS[0], tower.conv1.out_channels, generator=torch.Generator().manual_seed(0))
    calls = {}
    for n in TOKENS:
        part = x[:, :n].contiguous()
        calls[f"usual {n}"] = partial(plain, tower.transformer, part)
        calls[f"lean {n}"] = partial(tower.transformer, part)
    times = interleave(calls, rounds)
    rows = []
    for n in TOKENS:
        possible = block_macs(shape, TOKENS[0], TOKENS[0]) / block_macs(shape, n, n)
        for form in ("usual", "lean"):
            gained = [r / possible for r in ratios(times[f"usual {TOKENS[0]}"], times[f"{form} {n}"])]
            own = [r / possible for r in ratios(times[f"{form} {TOKENS[0]}"], times[f"{form} {n}"])]
            row: dict[str, Any] = {"batch": batch, "tokens": n, "blocks": form, "possible": possible}
            row |= {"gained_of_possible": median(gained), "gained_interval": interval(gained)}
            rows.append(row | {"same_layers": median(own), "same_layers_interval": interval(own)})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("batch", "blocks", *(str(n) for n in TOKENS), title="speed-up / possible by tokens")
    for form, figure, name in (
        ("usual", "gained_of_possible", "usual"),
        ("lean", "gained_of_possible", "lean"),
        ("lean", "same_layers", "lean, against lean"),
    ):
        found = [row for row in rows if row["blocks"] == form]
        table.add_row(str(found[0]["batch"]), name, *(f"{row[figure]:.2f}" for row in found))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/records/few_tokens.json"))
    args = parser.parse_args()
    check_writable(args.output)
    rows = measure(args.batch, args.rounds)
    show(rows)
    config = {"batch": args.batch, "rounds": args.rounds}
    write_record(new_record("few_tokens", config, rows, seed=0, threads=torch.get_num_threads()), args.output)
    console.print(f"record: {args.output}")


if __name__ == "__main__":
    main()
