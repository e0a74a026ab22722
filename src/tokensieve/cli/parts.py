"""What several commands share: a command of several words, tables on the terminal, a search from start to end."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokensieve.errors import UnknownNameError, nearest
from tokensieve.tasks.arguments import Parser

if TYPE_CHECKING:
    from tokensieve.search import Search

__all__ = ["carry_out", "run_part", "show"]


def run_part(command: str, argv: Sequence[str], parts: Mapping[str, str], about: str | None, epilog: str) -> int:
    """`tokensieve COMMAND WORD ...`: the exit code of the file that `parts` names for the word.

    That file stands beside this one and has `add_arguments(parser)`, `run(args)` and EPILOG. Without a word: the help.
    """
    words, prog = list(argv), f"tokensieve {command}"
    if not words or words[0].startswith("-"):
        usage = f"{prog} {{{','.join(parts)}}} [flags]"
        Parser(prog=prog, usage=usage, description=about, epilog=epilog).parse(words or ["--help"])
        return 0
    word = words.pop(0)
    if word not in parts:
        raise UnknownNameError(f"{prog} does not know {word!r}.{nearest(word, parts)}")
    part = importlib.import_module(f"tokensieve.cli.{parts[word]}")
    parser = Parser(prog=f"{prog} {word}", description=part.__doc__, epilog=part.EPILOG)
    part.add_arguments(parser)
    code: int = part.run(parser.parse(words))
    return code


def show(*tables: object) -> None:
    """Tables on the terminal; wide enough to read in a file or a pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for table in tables:
        console.print(table)


def carry_out(search: Search, about: Sequence[str] = ()) -> int:
    """Run a search, show its trials, name its files. Exit code 1 where no trial ended well."""
    from tokensieve.report.studies import study_table
    from tokensieve.search import run_search
    from tokensieve.search.run import RECORD

    for line in about:
        print(line)
    outcome = run_search(search, lambda line: print(line, flush=True))
    if outcome.record["trials"]:
        show(study_table(outcome.record))
    for path in outcome.files:
        print(f"configuration: {path}")
    print(f"record: {search.folder.resolve() / RECORD}")
    return 0 if outcome.files else 1
