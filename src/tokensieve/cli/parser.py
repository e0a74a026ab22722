"""argparse with this project's manners: a wrong flag is an error of one line that names the nearest right one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from tokensieve.core.budget import parse_keep
from tokensieve.errors import BudgetError, OptionError, UnknownNameError, nearest

__all__ = ["Parser", "keep_number"]


class Parser(argparse.ArgumentParser):
    """Keeps the layout of texts, takes no abbreviated flags, and raises instead of printing its usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As parse_args, with a hint for a flag that does not exist."""
        found, rest = self.parse_known_args(argv)
        if rest:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            raise UnknownNameError(f"{self.prog} does not know {rest[0]!r}.{nearest(rest[0], known)}")
        return found

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see `{self.prog} --help`)")


def keep_number(text: str) -> int | float:
    """One budget as typed: "60" is a count, "0.4" a ratio."""
    try:
        keep = parse_keep(text)
    except BudgetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if isinstance(keep, list):
        raise argparse.ArgumentTypeError(f"{text!r} is a list; give the budgets apart, as in --keep 0.5 0.25")
    return keep
