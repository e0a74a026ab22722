"""List the token-reduction methods with one line each, or show one with its options and defaults."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace

from tokensieve.methods.registry import list_methods, method_class, method_options, method_paper, method_stages
from tokensieve.methods.tables import markdown_tables

EPILOG = """examples:
  tokensieve methods
  tokensieve methods tome"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this one, a name or FILE.py:Class; the list if left out")
    parser.add_argument("--markdown", action="store_true", help="the tables of the README instead")


def run(args: Namespace) -> int:
    if args.markdown:
        print(markdown_tables())
    elif args.name is None:
        names = list_methods()
        width = max(map(len, names)) + 2
        where = {name: " ".join(method_stages(name)) for name in names}
        wide = max(map(len, where.values())) + 2
        for name, line in names.items():
            paper = method_paper(name)
            print(f"{name:<{width}}{where[name]:<{wide}}{line}{f' ({paper})' if paper else ''}")
    else:
        print(_describe(args.name))
    return 0


def _describe(name: str) -> str:
    """Docstring, options with defaults, and where it cuts by default."""
    cls = method_class(name)
    where = "one cut at half depth" if cls.one_cut else f"spread over the depth, {cls.schedule} schedule"
    stages = " and ".join(method_stages(name))
    if "encoder" not in cls.stages:
        where = "in a vision-language model (docs/vlm.md)"
    options = "\n".join(f"  {option} = {default!r}" for option, default in method_options(name).items())
    head = f"{name}: {cls.summary or 'a method of your own'}\n\n{inspect.getdoc(cls)}"
    return f"{head}\n\noptions:\n{options}\n\nworks at: {stages}\nby default: {where}"
