"""`tokensieve check`: every rule of the contract on a method, as a table. Imports contract and registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tokensieve.errors import OptionError, UnknownNameError, nearest, one_line
from tokensieve.methods.base import Method
from tokensieve.methods.reference import load_file, methods_in
from tokensieve.methods.registry import make_method
from tokensieve.testing.contract import ContractError, rules_of
from tokensieve.testing.models import tiny_models

__all__ = ["RuleResult", "check_all", "check_table"]


@dataclass(frozen=True)
class RuleResult:
    """One rule on one method. fault: how it is broken, None where it is kept."""

    method: str
    rule: str
    fault: str | None


def _methods_of(path: Path) -> list[type[Method]]:
    """The method classes that a Python file defines, in its order; importing runs the file."""
    found = methods_in(load_file(path))
    if not found:
        raise OptionError(f"{path}: no class in it is derived from tokensieve.Method or tokensieve.Selector")
    return list(found.values())


def check_all(name: str, models: Sequence[str] | None, options: dict[str, Any]) -> list[RuleResult]:
    """Every rule on every method that is named: by FILE.py, FILE.py:Class, package.module:Class, or its name.

    models: tiny models to attach to; None: the one of the method's stage.
    """
    for model in models or ():
        if model not in (*tiny_models(), "llava"):
            raise UnknownNameError(f"unknown tiny model {model!r}.{nearest(model, [*tiny_models(), 'llava'])}")
    if name.endswith(".py"):
        return [result for cls in _methods_of(Path(name)) for result in _check(cls.__name__, cls, models, options)]
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
