"""`tokensieve check`: every rule of the contract on a method, as a table. Imports contract and registry."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tokensieve.errors import OptionError, UnknownNameError, nearest, one_line
from tokensieve.methods.base import Method
from tokensieve.methods.registry import make_method
from tokensieve.testing.contract import ContractError, rules_of
from tokensieve.testing.models import tiny_models

__all__ = ["RuleResult", "check_all", "check_table", "methods_in"]


@dataclass(frozen=True)
class RuleResult:
    """One rule on one method. fault: how it is broken, None where it is kept."""

    method: str
    rule: str
    fault: str | None


def methods_in(path: Path) -> list[type[Method]]:
    """The method classes that a Python file defines, in its order; importing runs the file."""
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file; `tokensieve new method NAME` writes one to start from")
    name = f"_tokensieve_check_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{path} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    found = [
        value for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == name
    ]  # fmt: skip
    if not found:
        raise OptionError(f"{path}: no class in it is derived from tokensieve.Method or tokensieve.Selector")
    return found


def check_all(name: str, models: Sequence[str] | None, options: dict[str, Any]) -> list[RuleResult]:
    """Every rule on every method that is named: by FILE.py, FILE.py:Class, package.module:Class, or its name.

    models: tiny models to attach to; None: the one of the method's stage.
    """
    for model in models or ():
        if model not in (*tiny_models(), "llava"):
            raise UnknownNameError(f"unknown tiny model {model!r}.{nearest(model, [*tiny_models(), 'llava'])}")
    path, _, chosen = name.partition(":")
    if path.endswith(".py"):
        classes = methods_in(Path(path))
        if chosen:
            classes = [cls for cls in classes if cls.__name__ == chosen]
        if not classes:
            raise UnknownNameError(f"{path} has no method {chosen!r}")
        return [result for cls in classes for result in _check(cls.__name__, cls, models, options)]
    make_method(name, **options)  # an unknown name or option is said before the first rule
    return _check(name, name, models, options)


def _check(
    shown: str, method: str | type[Method], models: Sequence[str] | None, options: dict[str, Any]
) -> list[RuleResult]:
    results = []
    for rule, run in rules_of(method, models, options):
        fault = None
        try:
            run()
        except ContractError as error:
            fault = str(error)
        except Exception as error:  # a method that raises breaks the rule, and the rest of the table is still wanted
            fault = f"{rule}: it raises {type(error).__name__}: {one_line(error)}"
        results.append(RuleResult(shown, rule, fault))
    return results


def check_table(results: Sequence[RuleResult]) -> Table:
    """A line for each rule."""
    table = Table(title="contract")
    for column in ("method", "rule", ""):
        table.add_column(column)
    for result in results:
        table.add_row(result.method, result.rule, "[red]broken[/red]" if result.fault else "[green]kept[/green]")
    return table
