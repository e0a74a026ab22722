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
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tokensieve.adapters.few_rows import PARTS, ByParts, FewRows, is_large

__all__ = ["LeanBlock", "LeanBlocks", "Parts", "is_from"]

Step: TypeAlias = nn.Module | Tensor | None  # a module, a vector to scale by, or nothing
Source: TypeAlias = nn.Module | tuple[Tensor, Tensor | None]  # a linear layer, or its weight and bias
_LIBRARIES = ("torch", "open_clip", "timm", "transformers")
_NORMS = ("LayerNorm", "LayerNormFp32")
_SCALES = ("LayerScale", "Dinov2LayerScale", "Dinov2WithRegistersLayerScale")
_SETTINGS = (bool, int, float, str, type(None))
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
        self.out, self.first, self.second = (_layer(source, PARTS) for source in (parts.out, first, second))
        self.scale1, self.scale2 = _scale(parts.after_out), _scale(parts.after_mlp)
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
        return _sum(x, self.out(out.transpose(1, 2).reshape(-1, heads * d)), self.scale1)

    def mlp(self, x: Tensor) -> Tensor:
        """Residual stream at the cut (B, L, D) -> the block's output."""
        hidden = self.first(F.layer_norm(x, *self.norm2).view(-1, x.shape[-1]))
        if type(self.act) is nn.GELU:
            # before the parts are laid in rows, not while: torch 2.13's gelu writes to a strided `out=` wrongly
            hidden = F.gelu(hidden, approximate=self.act.approximate).transpose(0, 1).flatten(1)
        else:
            hidden = self.act(hidden.transpose(0, 1).flatten(1))
        return _sum(x, self.second(hidden), self.scale2)


class LeanBlocks:
    """The lean blocks of a model, as the last forward left them. A copy starts empty: it has weights of its own."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_Snapshot, LeanBlock | None]] = {}

    def __reduce__(self) -> tuple[type[LeanBlocks], tuple[()]]:
        return LeanBlocks, ()

    def clear(self) -> None:
        """Let go of all weights."""
        self._known.clear()

    def get(self, index: int, block: HasParts) -> LeanBlock | None:
        """The lean form of a block, or None where it has to go its own way."""
        known = self._known.get(index)
        if known is None or not known[0].holds(block):
            now = _Snapshot(block)
            lean = _lean_block(block.sieve_parts())
            # a weight that is computed, or no parameter, may be another tomorrow without a sign
            known = now, lean if lean is not None and now.has(lean.tensors) else None
            self._known[index] = known
        return None if _has_any_global_hook() else known[1]


class HasParts(Protocol):
    """A block that says what it consists of."""

    def sieve_parts(self) -> Parts | None: ...

    def modules(self) -> Iterator[nn.Module]: ...


class _Snapshot:
    """All that a lean block depends on, apart from the numbers in the weights: modules, settings, hooks, parameters."""

    def __init__(self, block: HasParts) -> None:
        self._modules = [
            (
                module,
                type(module),
                _watched(module.__dict__),
                {key: value for key, value in module.__dict__.items() if isinstance(value, _SETTINGS)},
                dict(module._modules),
                _places(module._parameters),
            )
            for module in block.modules()
        ]

    def has(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these are parameters of its modules."""
        mine = {id(p) for module, *_ in self._modules for p in module._parameters.values()}
        return all(id(tensor) in mine for tensor in tensors)

    def holds(self, block: HasParts) -> bool:
        """Whether nothing has changed."""
        if self._modules[0][0] is not block:
            return False
        for module, cls, watched, settings, children, places in self._modules:
            inside = module.__dict__
            if (
                type(module) is not cls
                or _watched(inside) != watched
                or inside["_modules"] != children
                or not settings.items() <= inside.items()
                or _places(inside["_parameters"]) != places
            ):
                return False
        return True


def _watched(inside: dict[str, Any]) -> bool:
    """Whether somebody waits for a call of the module with these attributes, or has put a forward in its place."""
    return bool(inside["_forward_hooks"] or inside["_forward_pre_hooks"] or "forward" in inside)


def _places(parameters: dict[str, nn.Parameter | None]) -> list[object]:
    """Which tensors these are, and where they lie: `.data` may have been given another one, or moved."""
    return [fact for p in parameters.values() if p is not None for fact in (id(p), p.data_ptr(), p.shape, p.stride())]


def _lean_block(parts: Parts | None) -> LeanBlock | None:
    try:
        return None if parts is None else LeanBlock(parts)
    except _SurpriseError:
        return None


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
    if weight.shape[0] % parts or not weight.is_contiguous():
        raise _SurpriseError
    for part in (weight, bias):
        if part is not None and (
            type(part) not in (Tensor, nn.Parameter) or part.dtype != torch.float32 or part.device.type != "cpu"
        ):
            raise _SurpriseError
    return ByParts.of(weight, bias, parts)


def _sum(x: Tensor, parts: Tensor, scale: Tensor | None) -> Tensor:
    """x (B, L, D) + scale * parts (P, B * L, D / P): one pass that scales, adds and lays the parts in rows."""
    here, there = x.reshape(-1, PARTS, x.shape[-1] // PARTS), parts.transpose(0, 1)
    # the result lies in memory as the first operand does
    return (here + there if scale is None else torch.addcmul(here, there, scale)).view(x.shape)


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
    if len(busy) != 3:
        raise _SurpriseError
    return busy


def _scale(steps: tuple[Step, ...]) -> Tensor | None:
    """The vector that these steps multiply by, (P, D / P)."""
    busy = [step for step in steps if not _idle(step)]
    if not busy:
        return None
    (scale,) = busy if len(busy) == 1 else (None,)
    if isinstance(scale, nn.Module) and is_from(scale, *_SCALES) and len(scale._parameters) == 1:
        (scale,) = scale._parameters.values()
    if not isinstance(scale, Tensor):
        raise _SurpriseError
    return scale.view(PARTS, -1)


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
