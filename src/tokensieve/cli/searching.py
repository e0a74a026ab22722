"""What `tokensieve search` and the searches of `tokensieve train` share: flags, the run, what is shown of it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tokensieve.cli.config_file import actions_of, hint
from tokensieve.cli.parser import show
from tokensieve.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from tokensieve.search import Search

__all__ = ["add_ray_flags", "carry_out", "managing", "unknown_flag"]


def add_ray_flags(parser: ArgumentParser) -> None:
    """Where to run."""
    add = parser.add_argument
    add("--ray", action="store_true", help="spread the runs over a Ray cluster, one on this machine unless named")
    add("--ray-address", "--ray_address", metavar="ADDRESS", help="of a Ray cluster (default: $RAY_ADDRESS)")
    add("--cpus", type=int, metavar="N", help="with --ray: CPUs of each run (default: 1)")
    add("--gpus", type=int, metavar="N", help="with --ray: GPUs of each run (default: 0)")


def managing(args: Namespace) -> dict[str, Any]:
    """These flags as manager_settings."""
    if (args.cpus is not None or args.gpus is not None or args.ray_address) and not args.ray:
        raise OptionError("--ray-address, --cpus and --gpus do nothing without --ray")
    for name, least in (("cpus", 1), ("gpus", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise OptionError(f"--{name} {value}: at least {least}")
    found = {"mode": "ray"} if args.ray else {}
    said = {"ray_address": args.ray_address, "cpus_per_subtask": args.cpus, "gpus_per_subtask": args.gpus or None}
    return found | {name: value for name, value in said.items() if value is not None}


def unknown_flag(task: str, word: str, flags: Iterable[str]) -> UnknownNameError:
    """The error of a word that is no flag of this search: neither its own nor one of these names, of the evaluation."""
    from tokensieve.cli.search import search_parser

    known = {*(f"--{name}" for name in flags), *actions_of(search_parser(task))}
    return UnknownNameError(f"tokensieve search {task} does not know {word!r}.{hint(word, known)}")


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
