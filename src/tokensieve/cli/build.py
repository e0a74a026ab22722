"""Make one CSV of result files: a row each, clip_benchmark's columns and ours."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tokensieve.report.results import write_csv

EPILOG = """examples:
  tokensieve build runs/ -o benchmark.csv
  tokensieve build a.json b.json"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help="result files, or folders of them")
    parser.add_argument("-o", "--output", default="benchmark.csv", metavar="CSV", help="default: benchmark.csv")


def run(args: Namespace) -> int:
    rows = write_csv(args.files, args.output)
    print(f"{rows} rows: {args.output}")
    return 0
