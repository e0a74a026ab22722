"""Methods by name. Imports no torch until a method is made, so that `tokensieve --help` and `methods` start at once.

A name is a built-in one, one that `register_method` was given, one of the entry points group "tokensieve.methods" of an
installed package, or a reference to a class: "package.module:Class" or "file.py:Class".
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from tokensieve.errors import OptionError, UnknownNameError, nearest, one_line
from tokensieve.methods.built_in import BUILT_IN, STAGES
from tokensieve.methods.reference import is_reference, load_reference

if TYPE_CHECKING:
    from tokensieve.methods.base import Method

__all__ = [
    "check_method_name",
    "check_option_names",
    "list_methods",
    "make_method",
    "method_class",
    "method_options",
    "method_paper",
    "method_stages",
    "register_method",
]

GROUP = "tokensieve.methods"  # entry points: name = "package.module:Class"
_registered: dict[str, type[Method]] = {}


def list_methods(stage: str | None = None) -> dict[str, str]:
    """Every method's name with one line about it. stage: only those that work there (see `method_stages`)."""
    lines = {name: facts.summary for name, facts in BUILT_IN.items()}
    lines |= {name: f"from {point.value}" for name, point in _plugins().items()}
    lines |= {name: _first_line(cls) for name, cls in _registered.items()}
    if stage is None:
        return lines
    if stage not in STAGES:
        raise UnknownNameError(f"unknown stage {stage!r}.{nearest(stage, STAGES)}")
    return {name: line for name, line in lines.items() if stage in method_stages(name)}


def method_stages(name: str) -> tuple[str, ...]:
    """Where a method can work: "encoder" (inside a vision encoder), "projector" (between it and a language model, stage
    1), "decoder" (between the language model's layers, stage 2)."""
    return BUILT_IN[name].stages if name in BUILT_IN else method_class(name).stages


def method_paper(name: str) -> str:
    """The arXiv id of the paper that a method is from; empty where there is none."""
    return BUILT_IN[name].paper if name in BUILT_IN else method_class(name).paper


def register_method(name: str, cls: type[Method]) -> None:
    """Make a method of your own available by name. A name that is taken is an error."""
    from tokensieve.methods.base import Method

    if not isinstance(name, str) or not isinstance(cls, type) or not issubclass(cls, Method):
        raise OptionError(f"register_method takes a name and a class derived from Method, not {name!r} and {cls!r}")
    if name in list_methods():
        raise OptionError(f"a method named {name!r} exists already")
    _registered[name] = cls


def check_method_name(name: str, also: Iterable[str] = ()) -> None:
    """Raise where there is no such method; the message has the nearest name, `also` among what may be meant."""
    if is_reference(name):
        load_reference(name)
    elif name not in list_methods():
        raise UnknownNameError(f"unknown method {name!r}.{nearest(name, [*also, *list_methods()])}")


def method_class(name: str) -> type[Method]:
    """The class behind a name, imported now."""
    check_method_name(name)
    if name in BUILT_IN:
        facts = BUILT_IN[name]
        found: type[Method] = getattr(importlib.import_module(f"tokensieve.methods.{facts.module}"), facts.cls)
        return found
    if name in _registered:
        return _registered[name]
    if is_reference(name):
        return load_reference(name)
    point = _plugins()[name]
    try:
        return load_reference(point.value)
    except OptionError as error:
        package = point.dist.name if point.dist is not None else "an installed package"
        raise OptionError(f"method {name!r} of {package}: {one_line(error)}") from error


def method_options(name: str) -> dict[str, Any]:
    """A method's options with their default values."""
    return {f.name: _default(f) for f in dataclasses.fields(method_class(name)) if f.init}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def make_method(name: str, **options: Any) -> Method:
    """A method by name. Unknown names and options are errors that name the nearest right one."""
    cls = method_class(name)
    check_option_names(name, options)
    _check_kinds(cls, options)
    return cls(**options)


def check_option_names(name: str, options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise where a method has no such option; the message has the nearest one, `also` among what may be meant."""
    known = method_options(name)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"method {name!r} has no option {option!r}.{nearest(option, [*known, *also])}")


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Methods of other installed packages. A built-in name stays what it is."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def _first_line(cls: type[Method]) -> str:
    return vars(cls).get("summary") or (inspect.getdoc(cls) or "").split("\n")[0]


def _check_kinds(cls: type[Method], options: dict[str, Any]) -> None:
    """Raise where an option that is a plain number or a switch is given something else."""
    kinds = {field.name: field.type for field in dataclasses.fields(cls)}
    for option, value in options.items():
        kind = getattr(kinds[option], "__name__", kinds[option])  # a name, where annotations are not evaluated
        number = isinstance(value, Real) and math.isfinite(value)  # True and False are 1 and 0
        if kind == "bool" and not isinstance(value, bool):
            raise OptionError(f"{option}={value!r}: give True or False")
        if kind == "int" and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise OptionError(f"{option}={value!r}: give a whole number")
        if kind == "float" and not number:
            raise OptionError(f"{option}={value!r}: give a number")
