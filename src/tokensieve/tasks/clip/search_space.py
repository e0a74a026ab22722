"""The trials of `tokensieve search clip`: `tokensieve eval` on the first images, MACs and accuracy from its result."""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.errors import OptionError
from tokensieve.tasks.arguments import Parser, option_pairs
from tokensieve.tasks.clip.flags import EXCLUSIVE, SEED_FLAGS, eval_parser, parse, sieve_config
from tokensieve.tasks.config_file import actions_of, given_flags, table_words
from tokensieve.tasks.search.flags import unknown_flag

if TYPE_CHECKING:
    from tokensieve.tasks.clip.load import Loader

__all__ = ["ALIASES", "COUNTS", "EXCLUSIVE", "LEFT_OUT", "SPACE", "check", "evaluated", "flags", "given"]

SPACE = {
    "method": ["sieve", "tome", "evit", "anchor"],
    "keep": {"low": 0.1, "high": 0.9, "step": 0.05},
    "schedule": ["constant", "geometric"],
    "alpha": {"low": 0.0, "high": 1.0, "step": 0.1, "type": "float"},
}
ALIASES = {"at": "prune_layer"}
COUNTS = True
LEFT_OUT = ("images",)
_NOT_OF_A_TRIAL = {"config", "help", "output", "stream", "strict", "distributed", "skip_existing"}
# of a trial, where nothing else is said: no untouched model beside it, no processes that read a few images
_QUICK = {"speed_batches": 0, "num_workers": 0}


@cache
def _parsers() -> tuple[Parser, ArgumentParser]:
    from tokensieve.tasks.clip.upstream import eval_parser as benchmark_parser

    return eval_parser(), benchmark_parser(Parser)


def flags() -> set[str]:
    return {flag[2:] for flag in actions_of(*_parsers())} - {*_NOT_OF_A_TRIAL, *SEED_FLAGS}


def given(words: Sequence[str]) -> dict[str, Any]:
    ours, theirs = _parsers()
    own, rest = given_flags(ours, words)
    passed, unknown = given_flags(theirs, rest)
    if unknown:
        raise unknown_flag("clip", unknown[0], flags())
    if "method_option" in own:
        own["method_option"] = option_pairs(own["method_option"])
    return {**passed, **own}


def check(table: Mapping[str, Any]) -> None:
    sieve_config(_parsed(table)[0])


def _parsed(table: Mapping[str, Any]) -> tuple[Namespace, Namespace]:
    return parse(eval_parser(), table_words("search", table, actions_of(*reversed(_parsers()))))


@cache
def _loader() -> Loader:
    """One for all trials of a process: the model is loaded once."""
    from tokensieve.tasks.clip.load import Loader

    return Loader()


def evaluated(table: Mapping[str, Any]) -> dict[str, Any]:
    from tokensieve.tasks.clip.run import plan, run_job
    from tokensieve.tasks.clip.sweep import into_folder
    from tokensieve.tasks.clip.upstream import expand

    own, base = _parsed({**_QUICK, **table})
    command = ["tokensieve", "eval", *table_words("search", table, actions_of(*reversed(_parsers())))]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),  # clip_benchmark's words and bars
        contextlib.redirect_stderr(io.StringIO()),
    ):
        runs = into_folder(expand(base), Path(folder))
        if len(runs) != 1:
            raise OptionError(f"a trial is one model on one dataset, these flags make {len(runs)} runs")
        (job,) = plan([sieve_config(own)], runs, own.speed_batches, command)
        result = run_job(job, _loader())
    return {**result, "command": shlex.join(command)}
