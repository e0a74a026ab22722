"""Flags from a YAML file, or from a table of them: as the words of a command line, so that one parser reads both."""

from __future__ import annotations

import argparse
import copy
import difflib
from argparse import Action, ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.utils.yaml import read_config

__all__ = ["actions_of", "given_flags", "hint", "table_words", "with_file"]


def actions_of(*parsers: ArgumentParser) -> dict[str, Action]:
    """What each flag of these parsers does; of one name the last."""
    found: dict[str, Action] = {}
    for parser in parsers:
        found |= {flag: action for flag, action in parser._option_string_actions.items() if flag.startswith("--")}
    return found


def table_words(where: str, data: Mapping[str, Any], actions: Mapping[str, Action]) -> list[str]:
    """A table of flags as words. where: the file's name, for errors. An unknown flag's error names the nearest."""
    found: list[str] = []
    for key, value in data.items():
        if f"--{key}" not in actions or key in ("config", "help"):
            near = hint(str(key), (flag[2:] for flag in actions))
            raise UnknownNameError(f"{where}: no flag is named {str(key)!r}.{near}")
        found += _words(where, f"--{key}", actions[f"--{key}"], value)
    return found


def hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return (f' Did you mean "{close[0]}"?' if close else "") + " See --help."


def _words(where: str, flag: str, action: Action, value: Any) -> list[str]:
    if value is None:
        return []
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise OptionError(f"{where}: {flag[2:]} is a switch, give true or false")
        return [flag] if value else []
    if isinstance(value, Mapping) and flag == "--method_option":
        return [word for key, item in value.items() for word in (flag, f"{key}={item}")]
    if isinstance(value, Mapping):
        raise OptionError(f"{where}: {flag[2:]} takes a value or a list, no table")
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)] if action.nargs else [flag, ",".join(map(str, value))]
    return [flag, str(value)]


def with_file(parser: ArgumentParser, words: Sequence[str], exclusive: Sequence[set[str]] = ()) -> list[str]:
    """The words with those of their `--config FILE` before them, where there is one: what is typed wins.

    exclusive: groups of flags of which one on the command line takes the others out of the file.
    """
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config")
    file = reader.parse_known_args(words)[0].config
    if file is None:
        return list(words)
    said = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    dropped = set().union(*(group for group in exclusive if group & said)) - said
    data = {key: value for key, value in read_config(file).items() if key not in dropped}
    return [*table_words(f"--config {file}", data, actions_of(parser)), *words]


def given_flags(parser: ArgumentParser, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(flags that these words give, by name, with their values; the words that the parser does not know)."""
    bare = copy.deepcopy(parser)
    switch: dict[str, bool] = {}
    for action in bare._actions:
        action.default = argparse.SUPPRESS
        if action.option_strings:  # by the flag's name, which may not be that of what it sets
            action.dest = action.option_strings[-1].lstrip("-")
            switch[action.dest] = action.nargs == 0
    found, rest = bare.parse_known_args(words)
    given = {name: value for name, value in vars(found).items() if name in switch}
    return {name: True if switch[name] else _plain(value) for name, value in given.items()}, rest


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
