"""Methods by name. Imports no torch until a method is made, so that `tokensieve --help` and `methods` start at once."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from tokensieve.errors import OptionError, UnknownNameError, nearest

if TYPE_CHECKING:
    from tokensieve.methods.base import Method

__all__ = [
    "check_option_names",
    "list_methods",
    "make_method",
    "method_class",
    "method_options",
    "method_stages",
    "register_method",
]

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
    "learned": (
        "trained.learned",
        "Learned",
        "ours: sieve, corrected and priced by training; needs adapter=FILE",
    ),
    "visionzip": ("visionzip", "VisionZip", "dominant by CLS attention, the rest into contextual tokens (2412.04467)"),
    "prumerge": ("prumerge", "PruMerge", "CLS-attention outliers, the rest merged into them by keys (2403.15388)"),
    "fastv": ("fastv", "FastV", "top by the last token's attention, before layer 2 (2403.06764)"),
    "pyramiddrop": ("pyramiddrop", "PyramidDrop", "top by the last token's attention, in steps (2410.17247)"),
    "sparsevlm": ("sparsevlm", "SparseVLM", "top by the text's attention, some dropped recycled (2410.04417)"),
    "merger": ("trained.merger", "Merger", "ours: learned centres that take in the rest, needs adapter=FILE"),
    "pruner": ("trained.pruner", "Pruner", "ours: learned heads that read the question, needs adapter=FILE"),
    "two_stage": ("two_stage", "TwoStage", "one method before the language model and one inside it"),
}
# Where a method can work, where that is not everywhere: said here too, so that the list needs no torch
_STAGES: dict[str, tuple[str, ...]] = {
    "evit": ("encoder",),
    "learned": ("encoder",),
    "visionzip": ("projector",),
    "prumerge": ("projector",),
    "fastv": ("decoder",),
    "pyramiddrop": ("decoder",),
    "sparsevlm": ("decoder",),
    "merger": ("projector",),
    "pruner": ("decoder",),
    "two_stage": ("projector", "decoder"),
}
_ALL = ("encoder", "projector", "decoder")
_registered: dict[str, type[Method]] = {}


def list_methods(stage: str | None = None) -> dict[str, str]:
    """Every method's name with one line about it. stage: only those that work there (see `method_stages`)."""
    own = {name: (cls.__doc__ or "").strip().split("\n")[0] for name, cls in _registered.items()}
    lines = {name: line for name, (_, _, line) in _BUILT_IN.items()} | own
    if stage is None:
        return lines
    if stage not in _ALL:
        raise UnknownNameError(f"unknown stage {stage!r}.{nearest(stage, _ALL)}")
    return {name: line for name, line in lines.items() if stage in method_stages(name)}


def method_stages(name: str) -> tuple[str, ...]:
    """Where a method can work: "encoder" (inside a vision encoder), "projector" (between it and a language model, stage
    1), "decoder" (between the language model's layers, stage 2)."""
    if name in _registered:
        return _registered[name].stages
    return _STAGES.get(name, _ALL)


def register_method(name: str, cls: type[Method]) -> None:
    """Make a method of one's own available by name. A name that is taken is an error."""
    from tokensieve.methods.base import Method

    if not isinstance(name, str) or not isinstance(cls, type) or not issubclass(cls, Method):
        raise OptionError(f"register_method takes a name and a class derived from Method, not {name!r} and {cls!r}")
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
    check_option_names(name, options)
    _check_kinds(cls, options)
    return cls(**options)


def check_option_names(name: str, options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise where a method has no such option; the message has the nearest one, `also` among what may be meant."""
    known = method_options(name)
    for option in options:
        if option not in known:
            raise UnknownNameError(f"method {name!r} has no option {option!r}.{nearest(option, [*known, *also])}")


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
