"""A whole block for few tokens on a CPU. Imports few_rows.

A product of matrices empties the caches. What comes right after it - a look at a module's attribute, a condition, an
operation on a few numbers - is fetched from memory again, which takes longer than the work itself, and a block has
hundreds of those between its products. So a forward with few tokens gathers what its blocks consist of in one go, as
views of the weights, and between two products does only what the result needs. Only blocks without surprises run this
way: the usual layers in the usual order, and no hook that waits for one of them. What was gathered is used again by the
next forward where every module, setting and weight is still what it was.

Figures: benchmarks/speed.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from numbers import Number
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tokensieve.adapters.few_rows import PARTS, ByParts, FewRows, is_large, is_plain

__all__ = ["LeanBlock", "LeanBlocks", "Parts", "is_from"]

Step: TypeAlias = nn.Module | Tensor | None  # a module, a vector to scale by, or nothing
Source: TypeAlias = nn.Module | tuple[Tensor, Tensor | None]  # a linear layer, or its weight and bias
_LIBRARIES = ("torch", "open_clip", "timm", "transformers")
_NORMS = ("LayerNorm", "LayerNormFp32")
_SCALES = ("LayerScale", "Dinov2LayerScale", "Dinov2WithRegistersLayerScale")
_SETTINGS = (Number, str, tuple, type(None))
# of which every number is computed by itself, whatever the shape
_ACTIVATIONS = (
    "GELU", "GELUActivation", "GELUTanh", "NewGELUActivation", "QuickGELU", "QuickGELUActivation", "ReLU", "SiLU"
)  # fmt: skip
_DROPS = ("Dropout", "DropPath", "Dinov2DropPath", "Dinov2WithRegistersDropPath")


class Parts(NamedTuple):
    """What a pre-norm block consists of, in the order in which it runs."""

    norm1: nn.Module
    qkv: tuple[Source, ...]  # the three projections in one, or each
    heads: int
    scale: float  # of the logits
    out: nn.Module
    after_out: tuple[Step, ...]  # between the output projection and the residual sum
    norm2: nn.Module
    mlp: tuple[nn.Module, ...]
    after_mlp: tuple[Step, ...]
    around: tuple[nn.Module, ...]  # modules that hold these, and would be called otherwise


class _SurpriseError(Exception):
    """This block has to go its own way."""


class LeanBlock:
    """The stretches of a block between which the engine works, of views of the weights."""

    def __init__(self, parts: Parts) -> None:
        """Raises _SurpriseError."""
        _check_unwatched(parts)
        first, self.act, second = _three(parts.mlp)
        if not is_large(_plain(first)[0]):
            raise _SurpriseError
        pieces = parts.heads * (3 if len(parts.qkv) == 1 else 1)  # by parts each head lies in one piece
        self.heads, self.scale = parts.heads, parts.scale
        self.norm1, self.norm2 = _norm(parts.norm1), _norm(parts.norm2)
        self.projections = [_layer(source, pieces) for source in parts.qkv]
        self.out, self.first, self.second = _layer(parts.out, PARTS), _layer(first, PARTS), _summed(second, PARTS)
        scale, self.scale2 = _scale(parts.after_out), _scale(parts.after_mlp)
        self.scale1 = None if scale is None else scale.view(PARTS, -1)
        self.tensors = _tensors(parts)  # all that it has views of

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Block input (B, L, D) -> queries, keys and values, each (B, H, L, d)."""
        batch, length, width = x.shape
        rows = F.layer_norm(x, *self.norm1).view(-1, width)
        if len(self.projections) == 1:
            three = self.projections[0](rows)
            if batch == 1:  # every operation saved is seen
                return three.view(3, 1, self.heads, length, -1).unbind(0)
            return three.view(3, self.heads, batch, length, -1).transpose(1, 2).unbind(0)
        return tuple(p(rows).view(self.heads, batch, length, -1).transpose(0, 1) for p in self.projections)

    def attended(self, x: Tensor, out: Tensor) -> Tensor:
        """Block input (B, L, D) and heads' output (B, H, L, d) -> the residual stream after attention."""
        heads, d = out.shape[1], out.shape[3]
        parts = self.out(out.transpose(1, 2).reshape(-1, heads * d)).transpose(0, 1)  # (rows, parts, D / parts)
        # one pass that scales, adds and lays the parts in rows: the result lies in memory as the first operand does
        return _add(x.reshape(parts.shape), parts, self.scale1).view(x.shape)

    def mlp(self, x: Tensor) -> Tensor:
        """Residual stream at the cut (B, L, D) -> the block's output.

        Hidden units stay in the parts in which the first layer leaves them: the second adds up what each part gives.
        """
        rows, (weight, bias) = x.reshape(-1, x.shape[-1]), self.second
        hidden = self.first(F.layer_norm(rows, *self.norm2))
        # a new tensor: torch 2.13's gelu writes to a strided `out=` wrongly
        hidden = F.gelu(hidden, approximate=self.act.approximate) if type(self.act) is nn.GELU else self.act(hidden)
        out, *others = torch.bmm(hidden, weight).unbind(0)
        for other in others if bias is None else (*others, bias):
            out.add_(other)
        return _add(rows, out, self.scale2).view(x.shape)


class LeanBlocks:
    """The lean blocks of a model, as the last forward left them. A copy starts empty: it has weights of its own.

    All that forwards, and threads, have in common. It is replaced as a whole, and used only after it was compared with
    the model as it is.
    """

    def __init__(self) -> None:
        self._known: tuple[_Snapshot, dict[int, LeanBlock]] | None = None

    def __reduce__(self) -> tuple[type[LeanBlocks], tuple[()]]:
        return LeanBlocks, ()

    def clear(self) -> None:
        """Let go of all weights."""
        self._known = None

    def check(self, blocks: list[HasParts]) -> bool:
        """Gather the lean forms of these blocks anew, if anything has changed. Whether they may be used now."""
        known = self._known
        if known is None or not known[0].holds(blocks):
            now = _Snapshot(blocks)
            found = {block._sieve_index: _lean_block(block.sieve_parts(), now) for block in blocks}
            self._known = now, {index: lean for index, lean in found.items() if lean is not None}
        return not _has_any_global_hook()

    def get(self, index: int) -> LeanBlock | None:
        """The lean form of the block at this place; None where it has to go its own way."""
        known = self._known
        return None if known is None else known[1].get(index)


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


def _watched(inside: dict[str, Any]) -> bool:
    """Whether somebody waits for a call of the module with these attributes, or has put a forward in its place."""
    return bool(inside["_forward_hooks"] or inside["_forward_pre_hooks"] or "forward" in inside)


def _lean_block(parts: Parts | None, now: _Snapshot) -> LeanBlock | None:
    try:
        lean = None if parts is None else LeanBlock(parts)
    except _SurpriseError:
        return None
    # a weight that is computed, or no parameter, may be another tomorrow without a sign
    return lean if lean is not None and now.has(lean.tensors) else None


def _tensors(parts: Parts) -> list[Tensor]:
    found: list[Tensor | None] = []
    for given in (parts.norm1, *parts.qkv, parts.out, parts.norm2, *parts.mlp):
        found += given if isinstance(given, tuple) else (getattr(given, "weight", None), getattr(given, "bias", None))
    for step in (*parts.after_out, *parts.after_mlp):
        found += step._parameters.values() if isinstance(step, nn.Module) else (step,)
    return [tensor for tensor in found if tensor is not None]


def _layer(source: Source, parts: int) -> ByParts:
    """A linear layer by parts, where that can be seen in its weights."""
    weight, bias = source if isinstance(source, tuple) else _plain(source)
    if not all(is_plain(part) for part in (weight, bias) if part is not None):
        raise _SurpriseError
    if weight.shape[0] % parts or not weight.is_contiguous():
        raise _SurpriseError
    return ByParts.of(weight, bias, parts)


def _summed(module: nn.Module, parts: int) -> tuple[Tensor, Tensor | None]:
    """A linear layer (O, D) by parts of its inputs: weight (parts, D / parts, O) and bias (O,)."""
    _layer(module, 1)
    weight, bias = _plain(module)
    if weight.shape[1] % parts:
        raise _SurpriseError
    return weight.view(weight.shape[0], parts, -1).permute(1, 2, 0), bias


def _add(x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor:
    """x + scale * y."""
    return x + y if scale is None else torch.addcmul(x, y, scale)


def is_from(module: object, *names: str) -> bool:
    """Whether the class of this module is one of the known libraries' with such a name, not one derived from it."""
    cls = type(module)
    return cls.__name__ in names and cls.__module__.partition(".")[0] in _LIBRARIES


def _plain(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer that does nothing else."""
    if not isinstance(module, FewRows):
        raise _SurpriseError
    return module.weight, module.bias


def _norm(module: nn.Module) -> tuple[tuple[int, ...], Tensor, Tensor, float]:
    """What F.layer_norm takes after its input."""
    if not isinstance(module, nn.LayerNorm) or not is_from(module, *_NORMS):
        raise _SurpriseError
    return module.normalized_shape, module.weight, module.bias, module.eps


def _three(mlp: tuple[nn.Module, ...]) -> list[nn.Module]:
    """First layer, activation and second layer, if there is nothing else that does anything."""
    busy = [module for module in mlp if not _idle(module)]
    if len(busy) != 3 or not is_from(busy[1], *_ACTIVATIONS):
        raise _SurpriseError
    return busy


def _scale(steps: tuple[Step, ...]) -> Tensor | None:
    """The vector (D,) that these steps multiply by."""
    busy = [step for step in steps if not _idle(step)]
    if not busy:
        return None
    (scale,) = busy if len(busy) == 1 else (None,)
    if isinstance(scale, nn.Module) and is_from(scale, *_SCALES) and len(scale._parameters) == 1:
        (scale,) = scale._parameters.values()
    if not isinstance(scale, Tensor):
        raise _SurpriseError
    return scale.view(-1)


def _idle(step: Step) -> bool:
    """Whether this gives back what it is given."""
    if step is None or type(step) is nn.Identity:
        return True
    return isinstance(step, nn.Module) and not step.training and is_from(step, *_DROPS)


def _check_unwatched(parts: Parts) -> None:
    """A hook waits for a call, and a forward of one instance's own would be passed by: here nothing is called."""
    given = (parts.norm1, *parts.qkv, parts.out, *parts.after_out, parts.norm2, *parts.mlp, *parts.after_mlp)
    for module in (*given, *parts.around):
        if isinstance(module, nn.Module) and _watched(module.__dict__):
            raise _SurpriseError
