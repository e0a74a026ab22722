"""List the token-reduction methods with one line each, or show one with its options and defaults."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace

from tokensieve.methods.registry import list_methods, method_class, method_options

EPILOG = """examples:
  tokensieve methods
  tokensieve methods tome"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this one; the list if left out")


def run(args: Namespace) -> int:
    if args.name is None:
        names = list_methods()
        width = max(map(len, names)) + 2
        print("\n".join(f"{name:<{width}}{line}" for name, line in names.items()))
    else:
        print(_describe(args.name))
    return 0


def _describe(name: str) -> str:
    """Docstring, options with defaults, and where it cuts by default."""
    cls = method_class(name)
    where = "one cut at half depth" if cls.one_cut else f"spread over all blocks, {cls.schedule} schedule"
    options = "\n".join(f"  {option} = {default!r}" for option, default in method_options(name).items())
    return f"{name}: {list_methods()[name]}\n\n{inspect.getdoc(cls)}\n\noptions:\n{options}\n\nby default: {where}"
