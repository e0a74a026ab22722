"""argparse with this project's manners: a wrong flag is an error of one line that names the nearest right one."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokensieve.core.budget import parse_keep
from tokensieve.errors import BudgetError, OptionError, UnknownNameError, nearest

__all__ = [
    "Blocks",
    "Parser",
    "add_budget_flags",
    "blocks",
    "budget",
    "check_budget",
    "keep_number",
    "keep_or_default",
    "option_pairs",
    "take_pairs",
]


# flag -> the smallest and, where there is one, the largest number that it may have
_RANGES: dict[str, tuple[int, int | None]] = {
    "batch": (1, None), "batch_size": (1, None), "cameras": (1, None), "each": (1, None), "epochs": (1, None),
    "every": (1, None), "gpus": (0, None), "held_out": (1, None), "images": (1, None), "lists": (0, None),
    "new_tokens": (1, None), "num_workers": (0, 1024), "rounds": (1, None), "samples": (0, None),
    "sampler_seed": (0, 2**32 - 1), "seed": (0, 2**32 - 1), "speed_batches": (0, None), "start": (0, None),
    "steps": (1, None), "threads": (1, 4096), "tower_batch": (1, None), "tower_steps": (1, None),
    "trials": (1, None), "workers": (0, 1024),
}  # fmt: skip
_MAY_BE_EMPTY = {"pretrained", "missing", "overrides", "options"}
_PAIR = re.compile(r"[A-Za-z_]\w*=")


class Parser(argparse.ArgumentParser):
    """Keeps the layout of texts, takes no abbreviated flags, and raises instead of printing its usage.

    Numbers are finite, whole numbers fit 64 bits, and no text or path is empty: for every flag of every command.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)
        for kind, reader in ((Path, _path), (int, _whole), (float, _finite)):
            self.register("type", kind, reader)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As parse_args, with a hint for a flag that does not exist."""
        found, rest = self.parse_known_intermixed_args(argv)  # KEY=VALUE may come after flags
        if rest:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            raise UnknownNameError(f"{self.prog} does not know {rest[0]!r}.{nearest(rest[0], known)}")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, and the numbers are in the range that their flag's name has in every command."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            for each in value if isinstance(value, list) else [value]:
                if each != action.default:
                    _check_given(action, each)
        return found, rest

    def error(self, message: str) -> NoReturn:
        for action in self._actions:  # what may follow, and is not required, is listed by argparse as if it were
            if action.nargs == "*" and not action.option_strings:
                message = message.replace(f", {action.metavar}", "")
        raise OptionError(f"{message} (see `{self.prog} --help`)")


def _check_given(action: argparse.Action, value: Any) -> None:
    """Raise where a value is out of the range that its flag has in every command, or empty."""
    name = "/".join(action.option_strings) or str(action.metavar)
    if isinstance(value, str) and not value.strip() and action.dest not in _MAY_BE_EMPTY:
        raise OptionError(f"{name}: it is empty: give a value, or leave it out")
    least, most = _RANGES.get(action.dest, (None, None))
    if least is None or not isinstance(value, int | float):
        return
    if value < least or (most is not None and value > most):
        raise OptionError(f"{name} {value}: {f'at least {least}' if most is None else f'{least} to {most}'}")


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value, or leave it out")
    return Path(text)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}: give a finite number")
    return value


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
    if abs(value) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]} is too large")
    return value


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
    if args.keep is not None and args.keep_average is not None:
        raise OptionError("--keep and --keep_average cannot be used together: give one")
    check_budget(args.method, args.keep is not None or args.keep_average is not None, options)
    if args.keep is not None or args.keep_average is not None:
        return args.keep
    from tokensieve.methods.registry import make_method

    method = make_method(args.method, **options)
    own = method.own_keep() if options.keys() & set(method.budget_options) else None
    return 0.4 if own is None else None


def check_budget(method: str | None, given: bool, options: Mapping[str, Any]) -> None:
    """Raise where a budget is given beside an option that is one. given: whether --keep or --keep_average is there."""
    if method == "anchor" and "m" in options and given:
        raise OptionError(
            "--keep and anchor's m (--top_m) cannot be used together: with a budget, m is what k leaves of it"
        )


def blocks(text: str) -> list[int]:
    """Blocks as typed: "5", or "3,6,9"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of blocks; give whole numbers, as in 3,6,9") from None


class Blocks(argparse.Action):
    """Of a flag of type `blocks` that takes several words: --at 3,6,9 and --at 3 6 9 are the same list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [block for part in values for block in part])


def option_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE as typed -> a method's options: whole numbers, numbers, true and false, none; the rest is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise OptionError(f"{pair!r} is not KEY=VALUE")
        found[key] = _value(value)
        if isinstance(found[key], float) and not math.isfinite(found[key]):
            raise OptionError(f"{pair}: give a finite number")
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
