"""See it work: a CLIP of real weights on real images, untouched and with four methods at two budgets.

Prints a table (accuracy, images per second, speed-up, MAC ratio, efficiency, tokens, GMACs) and writes report.html,
a page that opens offline. Model and images are the embedded ones. Run again, it goes on where it stopped.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

EPILOG = """examples:
  tokensieve demo
  tokensieve demo --methods sieve tome random --keep 0.4 0.2 -o runs/mine"""

METHODS = ("sieve", "tome", "anchor", "evit")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--methods", nargs="+", default=list(METHODS), metavar="NAME", help=f"(default: {' '.join(METHODS)})")
    add("--keep", nargs="+", default=["0.5", "0.25"], metavar="K", help="budgets (default: 0.5 0.25)")
    add("-o", "--output", default="runs/demo", metavar="FOLDER", type=Path, help="(default: runs/demo)")


def run(args: Namespace) -> int:
    from tokensieve.cli.main import main

    runs, page = str(args.output / "runs"), str(args.output / "report.html")
    budget = ["--batch_size", "8", "--num_workers", "0", "--speed_batches", "3"]
    code = main(["sweep", "--methods", *args.methods, "--keep", *args.keep, "-o", runs, *budget])
    if code:
        return code
    return main(["report", runs, "-o", page])
