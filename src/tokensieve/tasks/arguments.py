"""argparse with this project's manners: a wrong flag is an error of one line that names the nearest right one."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tokensieve.core.budget import parse_keep
from tokensieve.errors import BudgetError, OptionError, UnknownNameError, nearest

__all__ = [
    "Parser",
    "add_budget_flags",
    "blocks",
    "budget",
    "keep_number",
    "keep_or_default",
    "option_pairs",
    "take_pairs",
]


_BUDGETS = {"k", "m", "adapter"}  # options that are a budget by themselves: anchor's, and what was trained for one
_PAIR = re.compile(r"[A-Za-z_]\w*=")


class Parser(argparse.ArgumentParser):
    """Keeps the layout of texts, takes no abbreviated flags, and raises instead of printing its usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As parse_args, with a hint for a flag that does not exist."""
        found, rest = self.parse_known_intermixed_args(argv)  # KEY=VALUE may come after flags
        if rest:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            raise UnknownNameError(f"{self.prog} does not know {rest[0]!r}.{nearest(rest[0], known)}")
        return found

    def error(self, message: str) -> NoReturn:
        for action in self._actions:  # what may follow, and is not required, is listed by argparse as if it were
            if action.nargs == "*" and not action.option_strings:
                message = message.replace(f", {action.metavar}", "")
        raise OptionError(f"{message} (see `{self.prog} --help`)")


def budget(text: str) -> int | float | list[int | float]:
    """A budget as typed: "60" is a count, "0.4" a ratio, "0.7,0.5" a list."""
    try:
        return parse_keep(text)
    except BudgetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def keep_number(text: str) -> int | float:
    """One budget as typed: "60" is a count, "0.4" a ratio."""
    keep = budget(text)
    if isinstance(keep, list):
        raise argparse.ArgumentTypeError(f"{text!r} is a list; give one number (several, where taken, as 0.5 0.25)")
    return keep


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    """--keep and --keep_average of a command that has a budget of its own: `keep_or_default` reads them."""
    add = parser.add_argument
    add("--keep", type=budget, metavar="K",
        help="ratio or count at the end, or a list 0.7,0.5 (default: what KEY=VALUE say, or 0.4)")  # fmt: skip
    add("--keep_average", type=keep_number, metavar="K", help="instead: ratio or count on average over all layers")


def keep_or_default(args: argparse.Namespace, options: Mapping[str, Any]) -> Any:
    """`--keep`. Where no budget is given: None if the method's own options are one, else 0.4."""
    if args.keep is not None or args.keep_average is not None:
        return args.keep
    from tokensieve.methods.registry import make_method

    own = make_method(args.method, **options).own_keep() if _BUDGETS & options.keys() else None
    return 0.4 if own is None else None


def blocks(text: str) -> list[int]:
    """Blocks as typed: "5", or "3,6,9"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of blocks; give whole numbers, as in 3,6,9") from None


def option_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE as typed -> a method's options: whole numbers, numbers, true and false, none; the rest is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise OptionError(f"{pair!r} is no KEY=VALUE")
        found[key] = _value(value)
    return found


def take_pairs(argv: Sequence[str], *parsers: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Bare KEY=VALUE words, and the rest. One right after a flag that takes a value (not --flag=value) is that value.

    parsers: those that know which flags are switches, and take none.
    """
    switches = {
        flag for parser in parsers for flag, action in parser._option_string_actions.items() if action.nargs == 0
    }
    pairs: list[str] = []
    rest: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        waits = before.startswith("-") and "=" not in before and before not in switches
        (pairs if _PAIR.match(word) and not waits else rest).append(word)
    return pairs, rest


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
