"""The contract that every method passes. A method of your own is checked with three lines:

    @pytest.mark.parametrize("rule", contract_cases(MyMethod))
    def test_my_method(rule):
        rule()

or, without pytest, with one: `check_method(MyMethod)`. A rule that fails raises ContractError, which says which rule,
on what input, and how. Rules on tensors show the method random views of the stages where it works; rules on models
attach it to a tiny model of each family named in `models`, "llava" among them.

Imports models, methods and core; pytest only inside `contract_cases`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tokensieve.methods.base import Method
from tokensieve.methods.registry import make_method
from tokensieve.testing.model_rules import MODEL_RULES
from tokensieve.testing.models import TinyModel, tiny_model
from tokensieve.testing.tensor_rules import TENSOR_RULES
from tokensieve.testing.vlm import TinyLlava, tiny_llava
from tokensieve.testing.vlm_rules import VLM_RULES

__all__ = ["MODEL_RULES", "TENSOR_RULES", "ContractError", "check_method", "contract_cases", "rules_of"]

Make = Callable[[], Method]


class ContractError(AssertionError):
    """A method breaks a rule of the contract."""

    def __init__(self, rule: str, method: Method, how: str) -> None:
        self.rule = rule
        super().__init__(f"{type(method).__name__} breaks the rule {rule!r}: {how}")


def _factory(method: str | Method | type[Method] | Make, options: dict[str, Any]) -> Make:
    """Whatever was given, as a function that makes a fresh method."""
    if isinstance(method, str):
        return partial(make_method, method, **options)
    if isinstance(method, Method):
        if options:
            raise TypeError(f"options {', '.join(options)} go with a name or a class; this method is made already")
        return partial(copy.deepcopy, method)
    return partial(method, **options)


def _run(name: str, rule: Callable[[Make], str | None], make: Make) -> None:
    how = rule(make)
    if how is not None:
        raise ContractError(name, make(), how)


def _on(model: str, rule: Callable[[Make, TinyModel], str | None]) -> Callable[[Make], str | None]:
    return lambda make: rule(make, tiny_model(model))


def _in_llava(rule: Callable[[Make, TinyLlava], str | None]) -> Callable[[Make], str | None]:
    return lambda make: rule(make, tiny_llava())


def rules_of(
    method: str | Method | type[Method] | Make, models: Sequence[str] | None, options: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check) of every rule for a method; a check raises ContractError where the rule is broken."""
    return _rules(_factory(method, options), models)


def _rules(make: Make, models: Sequence[str] | None) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, rule in TENSOR_RULES.items():
        yield name, partial(_run, name, rule, make)
    if models is None:
        models = ("openclip",) if "encoder" in make().stages else ("llava",)
    for model in models:
        if model == "llava":
            for name, question in VLM_RULES.items():
                yield f"{name} [llava]", partial(_run, name, _in_llava(question), make)
            continue
        for name, check in MODEL_RULES.items():
            yield f"{name} [{model}]", partial(_run, name, _on(model, check), make)


def check_method(
    method: str | Method | type[Method] | Make, *, models: Sequence[str] | None = None, **options: Any
) -> None:
    """Check a method against every rule; ContractError names the first that it breaks.

    method: a registered name, a class or factory (with its options), or an instance.
    models: tiny models to attach it to (see `tiny_models`), or "llava"; none with (). None: the one of its stage.
    """
    for _, rule in rules_of(method, models, options):
        rule()


def contract_cases(
    method: str | Method | type[Method] | Make, *, models: Sequence[str] | None = None, **options: Any
) -> list[Any]:
    """One pytest parameter for each rule, to be called without arguments. Arguments as in `check_method`."""
    import pytest

    return [pytest.param(rule, id=name.replace(" ", "-")) for name, rule in rules_of(method, models, options)]
