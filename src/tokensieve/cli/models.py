"""List the model families that can be reduced, or say whether and how one class works, without weights."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

EPILOG = """examples:
  tokensieve models
  tokensieve models Siglip2VisionModel"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a class, with or without its library; the list if left out")
    parser.add_argument("--markdown", action="store_true", help="docs/models.md instead")


def run(args: Namespace) -> int:
    from tokensieve.models.families.table import describe, listed, markdown

    print(markdown() if args.markdown else listed() if args.name is None else describe(args.name))
    return 0
