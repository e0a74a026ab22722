"""The trials of `tokensieve search reid`: `tokensieve eval reid` of one trained model, selecting otherwise."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.errors import OptionError
from tokensieve.tasks.config_file import actions_of, given_flags, table_words
from tokensieve.tasks.reid.flags import EXCLUSIVE, eval_args, eval_options, eval_parser
from tokensieve.tasks.search.flags import unknown_flag

__all__ = ["ALIASES", "COUNTS", "EXCLUSIVE", "LEFT_OUT", "SPACE", "check", "evaluated", "flags", "given"]

SPACE = {
    "sparse_ratio": {"low": 0.2, "high": 1.0, "step": 0.1},
    "beta": {"low": 0.0, "high": 0.5, "step": 0.05},
    "formula": ["paper", "convex"],
    "after_neck": "bool",
}
ALIASES: dict[str, str] = {}
COUNTS = False
LEFT_OUT: tuple[str, ...] = ()
_QUICK = {"lists": 0}  # no ranked lists in a trial's record


def flags() -> set[str]:
    return {flag[2:] for flag in actions_of(eval_parser())} - {"config", "help", "output", "export", "features"}


def given(words: Sequence[str]) -> dict[str, Any]:
    found, unknown = given_flags(eval_parser(), words)
    if unknown:
        raise unknown_flag("reid", unknown[0], flags())
    return found


def _words(table: Mapping[str, Any]) -> list[str]:
    return table_words("search", table, actions_of(eval_parser()))


def check(table: Mapping[str, Any]) -> None:
    if "checkpoint" not in table:
        raise OptionError("tokensieve search reid needs a trained model: give --checkpoint FILE")
    args = eval_args(_words(table))
    eval_options(args)
    for path in args.checkpoint:
        if not Path(path).is_file():
            raise OptionError(f"--checkpoint {path}: there is no such file; `tokensieve train reid` writes one")


def evaluated(table: Mapping[str, Any]) -> dict[str, Any]:
    from tokensieve.tasks.reid.runs import evaluate_checkpoints

    args = eval_args(_words({**_QUICK, **table}))
    command = shlex.join(["tokensieve", "eval", "reid", *_words(table)])
    return evaluate_checkpoints(args.checkpoint, eval_options(args), command=command)
