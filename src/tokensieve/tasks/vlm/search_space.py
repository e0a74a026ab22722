"""The trials of `tokensieve search vlm`: `tokensieve eval vlm` on the first images, accuracy and MACs of its result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokensieve.tasks.arguments import option_pairs
from tokensieve.tasks.config_file import actions_of, given_flags, table_words
from tokensieve.tasks.search.flags import unknown_flag
from tokensieve.tasks.vlm.flags import EXCLUSIVE, eval_args, eval_options, eval_parser

__all__ = ["ALIASES", "COUNTS", "EXCLUSIVE", "LEFT_OUT", "SPACE", "check", "evaluated", "flags", "given"]

SPACE = {
    "method": ["fastv", "pyramiddrop", "visionzip", "divprune"],
    "keep_average": {"low": 0.25, "high": 0.85, "step": 0.05},
}
ALIASES: dict[str, str] = {}
COUNTS = True
LEFT_OUT = ("images",)
_QUICK = {"samples": 0}  # no pictures of questions in a trial's record


def flags() -> set[str]:
    return {flag[2:] for flag in actions_of(eval_parser())} - {"config", "help", "output"}


def given(words: Sequence[str]) -> dict[str, Any]:
    parser = eval_parser()
    found, unknown = given_flags(parser, words)
    if unknown:
        raise unknown_flag("vlm", unknown[0], flags())
    if "method_option" in found:
        found["method_option"] = option_pairs(found["method_option"])
    return found


def _words(table: Mapping[str, Any]) -> list[str]:
    return table_words("search", table, actions_of(eval_parser()))


def check(table: Mapping[str, Any]) -> None:
    from tokensieve.methods.registry import make_method

    options = eval_options(eval_args(_words(table)))
    if options.method != "none":
        make_method(options.method, **options.options)


@lru_cache(maxsize=1)
def _load(name: str | None) -> tuple[Any, Any]:
    """One for all trials of a process: the model is loaded once."""
    from transformers.utils.logging import disable_progress_bar

    from tokensieve.tasks.vlm.load import load_llava

    disable_progress_bar()
    return load_llava(name)


def evaluated(table: Mapping[str, Any]) -> dict[str, Any]:
    from tokensieve.tasks.vlm.evaluate import evaluate_vlm

    command = shlex.join(["tokensieve", "eval", "vlm", *_words(table)])
    return evaluate_vlm(eval_options(eval_args(_words({**_QUICK, **table}))), command=command, load=_load)
