"""Write a method and its test to start from: NAME.py and test_NAME.py. Nothing that exists is overwritten."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

EPILOG = """examples:
  tokensieve new method largest_norm
  tokensieve new method my_score -o src/methods"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", help="of the file, in lower case with underscores; the class is named after it")
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="DIR", help="(default: this folder)")


def run(args: Namespace) -> int:
    from tokensieve.testing.template import write_method

    path, test = write_method(args.name, args.output)
    print(f"method: {path}\ntest:   {test}\nnext:   tokensieve check {path}")
    return 0
