"""Give an instance another class: the one way in which a model is changed. Imports torch and errors.

A swapped class is made of a mixin and the module's own class, once for each pair, and knows both for pickles.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from tokensieve.errors import UnsupportedModelError

__all__ = ["Swap", "calls_its_class", "swapped_class"]

_classes: dict[tuple[type, type, bool], Any] = {}
_NOTES = ("_sieve_index", "_sieve_form", "attachment", "last", "_sieve_attachment")  # what a swapped module carries


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


class Swap:
    """One module under another class, until `undo`.

    A `forward` in the instance hides the one of its class. accelerate puts one there, which calls `_old_forward`: that
    is pointed to the new class, so that its hooks go on working. accelerate's hooks, once removed, leave the class's
    own forward in the instance: that is set aside. Any other is refused.
    """

    def __init__(self, module: nn.Module, cls: type) -> None:
        own = module.__dict__.get("forward")
        self.module, self.before, self.hooked = module, type(module), "_old_forward" in module.__dict__
        self.aside = own if _is_bound(own, module) else None
        target = module.__dict__["_old_forward"] if self.hooked else own
        if target is not None and not _is_bound(target, module):
            raise UnsupportedModelError(
                f"{type(module).__name__} has a forward of its own in the instance ({_name_of(target)}), which hides "
                "the one of its class: delete it (del module.forward) and compile with module.compile() instead"
            )
        if self.aside is not None:
            del module.__dict__["forward"]
        module.__class__ = cls
        if self.hooked:
            module.__dict__["_old_forward"] = MethodType(cls.forward, module)  # type: ignore[attr-defined]

    def undo(self) -> None:
        """The class as before. Hooks that came or went meanwhile are respected."""
        module, own = self.module, self.module.__dict__
        left = _is_bound(own.get("forward"), module)  # by hooks that were added and removed meanwhile
        module.__class__ = self.before
        for name in _NOTES:
            own.pop(name, None)
        for name in ("_old_forward",) if "_old_forward" in own else ("forward",) if left else ():
            own[name] = MethodType(self.before.forward, module)
        if self.aside is not None and "forward" not in own:
            own["forward"] = self.aside


def calls_its_class(module: nn.Module) -> bool:
    """Whether calling the module ends in the forward of its class, wrapped by hooks or compiled perhaps."""
    own = module.__dict__.get("forward")
    if own is None:
        return True
    target = module.__dict__.get("_old_forward", getattr(own, "_torchdynamo_orig_callable", own))
    return _is_bound(target, module) and target.__func__ is type(module).forward


def _is_bound(function: Any, module: nn.Module) -> bool:
    """Whether this is a forward of one of the module's own classes, bound to it."""
    if not isinstance(function, MethodType) or function.__self__ is not module:
        return False
    return any(function.__func__ is vars(cls).get("forward") for cls in type(module).__mro__)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
