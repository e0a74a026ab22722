"""The errors a user can cause. Each message names what was wrong and what to do; the command line prints it alone.

A leaf: imports the standard library only.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

__all__ = [
    "BudgetError",
    "DataError",
    "MissingMaterialError",
    "OptionError",
    "ProcessLostError",
    "RecordError",
    "TokensieveError",
    "UnknownNameError",
    "UnsupportedModelError",
    "nearest",
    "one_line",
]


class TokensieveError(Exception):
    """Base of all errors that come from what was asked, not from a defect."""


class UnsupportedModelError(TokensieveError, TypeError):
    """The model has no tokens to drop, or is of a family that no adapter knows, or is already attached."""


class UnknownNameError(TokensieveError, LookupError):
    """A method, option or model name that does not exist."""


class OptionError(TokensieveError, ValueError):
    """An option with a value outside its range, or two options that cannot be used together."""


class BudgetError(TokensieveError, ValueError):
    """A budget that cannot be met."""


class DataError(TokensieveError, ValueError):
    """A data set that is not what it should be: files missing, cut short, or named otherwise."""


class MissingMaterialError(TokensieveError, FileNotFoundError):
    """Weights or data that are not on this machine."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ProcessLostError(TokensieveError, RuntimeError):
    """Another process of a run that several share has died."""


class RecordError(TokensieveError, ValueError):
    """A run record that cannot be read, or a place where none can be written."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' when something close is known, then the list. Made to end an error message."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f"{hint} Known: {', '.join(names) or 'none'}."


def one_line(error: BaseException, most: int = 300) -> str:
    """What a library's error says, in one line of at most N letters, cut between words; else what kind it is.

    A long path or address is cut itself rather than left out.
    """
    text = " ".join(str(error).split())
    if len(text) > most:
        whole = textwrap.shorten(text, most, placeholder=" ...")
        text = whole if len(whole) > most // 2 else text[: most - 4] + " ..."
    return text or type(error).__name__
