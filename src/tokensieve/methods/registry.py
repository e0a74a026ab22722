"""Methods by name. Imports no torch until a method is made, so that `tokensieve --help` and `methods` start at once."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from tokensieve.errors import OptionError, UnknownNameError, nearest

if TYPE_CHECKING:
    from tokensieve.methods.base import Method

__all__ = ["list_methods", "make_method", "method_class", "method_options", "register_method"]

# name -> (module, class, one line)
_BUILT_IN: dict[str, tuple[str, str, str]] = {
    "random": ("random", "Random", "random patches, a draw for each image (the control every method must beat)"),
    "grid": ("grid", "Grid", "evenly spaced patches"),
    "anchor": ("anchor", "Anchor", "k anchors by CLS attention, then importance to them and diversity from them"),
    "evit": ("evit", "EViT", "top by CLS attention, the rest fused into one token (2202.07800)"),
    "tome": ("tome", "ToMe", "merge the most similar pairs of two alternating sets (2210.09461)"),
    "pitome": ("pitome", "PiToMe", "merge where the energy of redundancy is high, protect the rest (2405.16148)"),
    "divprune": ("divprune", "DivPrune", "greedy max-min diversity, one cut (2503.02175)"),
    "vispruner": ("vispruner", "VisPruner", "important by CLS attention, then duplicates removed (2412.01818)"),
    "cdpruner": ("cdpruner", "CDPruner", "determinantal choice conditioned on a text, one cut (2506.10967)"),
    "sieve": ("sieve", "SieveMethod", "ours: merge what a more important patch stands for already"),
    "learned": ("learned", "Learned", "ours: sieve with prices trained on a model, needs adapter=FILE"),
}
_registered: dict[str, type[Method]] = {}


def list_methods() -> dict[str, str]:
    """Every method's name with one line about it."""
    own = {name: (cls.__doc__ or "").strip().split("\n")[0] for name, cls in _registered.items()}
    return {name: line for name, (_, _, line) in _BUILT_IN.items()} | own


def register_method(name: str, cls: type[Method]) -> None:
    """Make a method of one's own available by name. A name that is taken is an error."""
    if name in _BUILT_IN or name in _registered:
        raise OptionError(f"a method named {name!r} exists already")
    _registered[name] = cls


def method_class(name: str) -> type[Method]:
    """The class behind a name, imported now."""
    if name in _registered:
        return _registered[name]
    if name not in _BUILT_IN:
        raise UnknownNameError(f"unknown method {name!r}.{nearest(name, list_methods())}")
    module, cls, _ = _BUILT_IN[name]
    found: type[Method] = getattr(importlib.import_module(f"tokensieve.methods.{module}"), cls)
    return found


def method_options(name: str) -> dict[str, Any]:
    """A method's options with their default values."""
    return {f.name: f.default for f in dataclasses.fields(method_class(name)) if f.init}


def make_method(name: str, **options: Any) -> Method:
    """A method by name. Unknown names and options are errors that name the nearest right one."""
    cls = method_class(name)
    known = method_options(name)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"method {name!r} has no option {option!r}.{nearest(option, known)}")
    return cls(**options)
