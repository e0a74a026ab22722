"""A method's class by reference: "package.module:Class" or "file.py:Class". Imports no torch by itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tokensieve.errors import OptionError, UnknownNameError, nearest, one_line

if TYPE_CHECKING:
    from tokensieve.methods.base import Method

__all__ = ["is_reference", "load_file", "load_reference", "methods_in"]


def is_reference(name: str) -> bool:
    """Whether this names a class by where it stands."""
    return ":" in name


def load_reference(reference: str) -> type[Method]:
    """The class; importing runs the code it stands in. What is wrong is one line that names the reference."""
    from tokensieve.methods.base import Method

    place, _, name = reference.rpartition(":")
    module = load_file(Path(place)) if place.endswith(".py") else _import(place, reference)
    found = getattr(module, name, None)
    if found is None:
        raise UnknownNameError(f"{place} has no class {name!r}.{nearest(name, methods_in(module) or dir(module))}")
    if not isinstance(found, type) or not issubclass(found, Method):
        raise OptionError(f"{reference} is not a class derived from tokensieve.Method or tokensieve.Selector")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise OptionError(f"{reference} is abstract: it does not define {missing}")
    return found


def load_file(path: Path) -> ModuleType:
    """A Python file as a module, run once in a process as long as it stays the same."""
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file; `tokensieve new method NAME` writes one to start from")
    resolved = path.resolve()
    content = zlib.crc32(resolved.read_bytes(), zlib.crc32(str(resolved).encode()))
    name = f"_tokensieve_{resolved.stem}_{content:08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise OptionError(f"{path} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    return module


def methods_in(module: ModuleType) -> dict[str, type[Method]]:
    """The method classes that a module defines, in its order."""
    from tokensieve.methods.base import Method

    return {
        name: value for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
    }  # fmt: skip


def _import(place: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise OptionError(f"{reference} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
