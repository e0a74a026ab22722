"""Give an instance another class: the one way in which a model is changed. Imports the standard library only.

A swapped class is made of a mixin and the module's own class, once for each pair, and knows both for pickles.
"""

from __future__ import annotations

from typing import Any

__all__ = ["swapped_class"]

_classes: dict[tuple[type, type, bool], Any] = {}


def swapped_class(mixin: type, base: type, disguised: bool = False) -> Any:
    """`base` with `mixin` in front. One class for each pair, so that equal models have equal types.

    disguised: under the name of `base`, for classes that saving writes down or that a library looks up by name.
    """
    parts = (mixin, base, disguised)
    if parts not in _classes:
        body: dict[str, Any] = {"__reduce_ex__": _reduce, "_sieve_parts": parts}
        if disguised:
            body["__module__"] = base.__module__
        _classes[parts] = type(base.__name__ if disguised else f"Sieved{base.__name__}", (mixin, base), body)
    return _classes[parts]


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy: the class is made on the fly, so it is named by its parts."""
    return _revive, type(module)._sieve_parts, module.__dict__.copy()


def _revive(mixin: type, base: type, disguised: bool = False) -> Any:
    cls = swapped_class(mixin, base, disguised)
    return cls.__new__(cls)
