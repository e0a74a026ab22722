"""Lean blocks that are kept from one forward to the next, as long as the model is what it was. Imports lean_blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from numbers import Number
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tokensieve.adapters.lean_blocks import LeanBlock, Parts, lean_block
from tokensieve.adapters.linear import Way

__all__ = ["LeanBlocks"]

_SETTINGS = (Number, str, tuple, type(None))


class LeanBlocks:
    """The lean blocks of a model, as the last forward left them. A copy starts empty: it has weights of its own.

    All that forwards, and threads, have in common. It is replaced as a whole, and used only after it was compared with
    the model as it is.
    """

    def __init__(self) -> None:
        self._known: tuple[_Snapshot, Way, dict[int, LeanBlock]] | None = None

    def __reduce__(self) -> tuple[type[LeanBlocks], tuple[()]]:
        return LeanBlocks, ()

    def clear(self) -> None:
        """Let go of all weights."""
        self._known = None

    def check(self, blocks: list[HasParts], way: Way) -> bool:
        """Gather the lean forms of these blocks anew, if anything has changed. Whether they may be used now."""
        known = self._known
        if known is None or known[1] is not way or not known[0].holds(blocks):
            now = _Snapshot(blocks)
            found = {block._sieve_index: lean_block(block.sieve_parts(), way) for block in blocks}
            # a weight that is computed, or no parameter, may be another tomorrow without a sign
            kept = {i: lean for i, lean in found.items() if lean is not None and now.has(lean.tensors)}
            self._known = now, way, kept
        return not _has_any_global_hook()

    def get(self, index: int) -> LeanBlock | None:
        """The lean form of the block at this place; None where it has to go its own way."""
        known = self._known
        return None if known is None else known[2].get(index)


class HasParts(Protocol):
    """A block that says what it consists of."""

    _sieve_index: int

    def sieve_parts(self) -> Parts | None: ...

    def modules(self) -> Iterator[nn.Module]: ...


class _Snapshot:
    """All that lean blocks depend on, apart from the numbers in the weights: modules, settings, hooks, parameters.

    It is compared at every forward, with cold caches: so all is read in a few loops of C. Compared is what is the same
    object, never what is equal: an attribute may be anything.
    """

    def __init__(self, blocks: list[HasParts]) -> None:
        self._blocks = blocks
        self._modules = [module for block in blocks for module in block.modules()]
        self._insides = [module.__dict__ for module in self._modules]
        settings = [
            (inside, name)
            for inside in self._insides
            for name in ("forward", *(key for key, value in inside.items() if isinstance(value, _SETTINGS)))
            if name[0] != "_"
        ]
        self._holders, self._names = [inside for inside, _ in settings], [name for _, name in settings]
        self._held = [*map(dict.get, self._holders, self._names)]  # or their ids may be given to others
        self._facts = self._read()

    def has(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these are parameters of its modules."""
        mine = {id(p) for inside in self._insides for p in inside["_parameters"].values()}
        return all(id(tensor) in mine for tensor in tensors)

    def holds(self, blocks: list[HasParts]) -> bool:
        """Whether nothing has changed."""
        return blocks == self._blocks and self._read() == self._facts

    def _read(self) -> tuple[object, ...]:
        children, parameters, after, before = (
            map(dict.__getitem__, self._insides, repeat(name))
            for name in ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")
        )
        weights = chain.from_iterable(map(dict.values, parameters))
        stored = [p for p in weights if p is not None and p.layout is torch.strided]  # others have no address
        return (
            [*map(type, self._modules)],
            [*map(id, map(dict.get, self._holders, self._names))],
            [*map(bool, after)],
            [*map(bool, before)],
            [*map(id, chain.from_iterable(map(dict.values, children)))],
            # what memory, and how it is seen: views of it are then still right, whichever tensor it is
            [*map(Tensor.data_ptr, stored)],
            [*map(Tensor.stride, stored)],
            [*map(Tensor.numel, stored)],
        )
