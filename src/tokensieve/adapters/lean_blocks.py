"""A whole block on a CPU without what lies between its products. Imports linear.

A product of matrices empties the caches. What comes right after it - a look at a module's attribute, a condition, an
operation on a few numbers - is fetched from memory again, which takes longer than the work itself where tokens are few,
and a block has hundreds of those between its products. So what a block consists of is gathered before, as views of the
weights, and between two products only that is done which the result needs. Only blocks without surprises run this way:
the usual layers in the usual order, and no hook that waits for one of them.

Figures: benchmarks/speed.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.adapters.linear import PARTS, ByParts, FastLinear, Way, Whole, is_large, is_plain

__all__ = ["LeanBlock", "Parts", "PartsBlock", "WholeBlock", "is_from", "lean_block"]

Step: TypeAlias = nn.Module | Tensor | None  # a module, a vector to scale by, or nothing
Layer: TypeAlias = tuple[Tensor, Tensor | None]  # weight (O, D) and bias (O,)
Source: TypeAlias = nn.Module | Layer
_LIBRARIES = ("torch", "open_clip", "timm", "transformers")
_NORMS = ("LayerNorm", "LayerNormFp32")
_SCALES = ("LayerScale", "Dinov2LayerScale", "Dinov2WithRegistersLayerScale")
# of which every number is computed by itself, whatever the shape
_ACTIVATIONS = (
    "GELU", "GELUActivation", "GELUTanh", "NewGELUActivation", "QuickGELU", "QuickGELUActivation", "ReLU", "SiLU"
)  # fmt: skip
_AT_ONCE = 1024  # rows of an MLP; as fast as all of them
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


class LeanBlock(ABC):
    """The stretches of a block between which the engine works, of views of the weights."""

    def __init__(self, parts: Parts) -> None:
        """Raises _SurpriseError."""
        _check_unwatched(parts)
        first, self.act, second = _three(parts.mlp)
        self.heads, self.scale = parts.heads, parts.scale
        self.norm1, self.norm2 = _norm(parts.norm1), _norm(parts.norm2)
        self.scale1, self.scale2 = _scale(parts.after_out), _scale(parts.after_mlp)
        self.tensors = _tensors(parts)  # all that it has views of
        self._gather([_plain(source) for source in parts.qkv], _plain(parts.out), _plain(first), _plain(second))

    @abstractmethod
    def _gather(self, qkv: list[Layer], out: Layer, first: Layer, second: Layer) -> None:
        """Make of the linear layers what it goes by. Raises _SurpriseError."""

    @abstractmethod
    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Block input (B, L, D) -> queries, keys and values, each (B, H, L, d)."""

    @abstractmethod
    def attended(self, x: Tensor, out: Tensor) -> Tensor:
        """Block input (B, L, D) and heads' output (B, H, L, d) -> the residual stream after attention."""

    @abstractmethod
    def mlp(self, x: Tensor) -> Tensor:
        """Residual stream at the cut (B, L, D) -> the block's output."""


class PartsBlock(LeanBlock):
    """Products by parts, for few tokens: activation and residual sum work on the parts that the products leave."""

    def _gather(self, qkv: list[Layer], out: Layer, first: Layer, second: Layer) -> None:
        if not is_large(first[0]):
            raise _SurpriseError
        pieces = self.heads * (3 if len(qkv) == 1 else 1)  # by parts each head lies in one piece
        self.projections = [_by_parts(layer, pieces) for layer in qkv]
        self.out, self.first, self.second = _by_parts(out, PARTS), _by_parts(first, PARTS), _summed(second, PARTS)
        self.scale1 = None if self.scale1 is None else self.scale1.view(PARTS, -1)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, length, width = x.shape
        rows = F.layer_norm(x, *self.norm1).view(-1, width)
        if len(self.projections) == 1:
            three = self.projections[0](rows)
            if batch == 1:  # every operation saved is seen
                return three.view(3, 1, self.heads, length, -1).unbind(0)
            return three.view(3, self.heads, batch, length, -1).transpose(1, 2).unbind(0)
        return tuple(p(rows).view(self.heads, batch, length, -1).transpose(0, 1) for p in self.projections)

    def attended(self, x: Tensor, out: Tensor) -> Tensor:
        parts = self.out(_rows(out)).transpose(0, 1)  # (rows, parts, D / parts)
        # one pass that scales, adds and lays the parts in rows: the result lies in memory as the first operand does
        return _add(x.reshape(parts.shape), parts, self.scale1).view(x.shape)

    def mlp(self, x: Tensor) -> Tensor:
        """Hidden units stay in the parts in which the first layer leaves them: the second adds up what each gives."""
        rows, (weight, bias) = x.reshape(-1, x.shape[-1]), self.second
        hidden = self.first(F.layer_norm(rows, *self.norm2))
        # a new tensor: torch 2.13's gelu writes to a strided `out=` wrongly
        hidden = F.gelu(hidden, approximate=self.act.approximate) if type(self.act) is nn.GELU else self.act(hidden)
        out, *others = torch.bmm(hidden, weight).unbind(0)
        for other in others if bias is None else (*others, bias):
            out.add_(other)
        return _add(rows, out, self.scale2).view(x.shape)


class WholeBlock(LeanBlock):
    """Products by oneDNN, for any number of tokens; GELU in the same pass as the product before it."""

    def _gather(self, qkv: list[Layer], out: Layer, first: Layer, second: Layer) -> None:
        self.projections = [Whole(*layer) for layer in qkv]
        self.out, self.first, self.second = Whole(*out), Whole(*first), Whole(*second)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, length, width = x.shape
        rows = F.layer_norm(x, *self.norm1).view(-1, width)
        if len(self.projections) == 1:
            return self.projections[0](rows).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return tuple(p(rows).view(batch, length, self.heads, -1).transpose(1, 2) for p in self.projections)

    def attended(self, x: Tensor, out: Tensor) -> Tensor:
        return _add(x, self.out(_rows(out)).view(x.shape), self.scale1)

    def mlp(self, x: Tensor) -> Tensor:
        """Some rows after the others: hidden units are four times as wide as tokens, and the peak of a block."""
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        for part, goal in zip(rows.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
            normed = F.layer_norm(part, *self.norm2)
            if type(self.act) is nn.GELU:
                hidden = self.first.gelu(normed, self.act.approximate)
            else:
                hidden = self.act(self.first(normed))
            _add(part, self.second(hidden), self.scale2, out=goal)
        return out.view(x.shape)


_FORMS: dict[Way, type[LeanBlock]] = {Way.PARTS: PartsBlock, Way.ONEDNN: WholeBlock}


def lean_block(parts: Parts | None, way: Way) -> LeanBlock | None:
    """The lean form of a block of these parts; None where it has to go its own way."""
    try:
        return None if parts is None else _FORMS[way](parts)
    except _SurpriseError:
        return None


def _tensors(parts: Parts) -> list[Tensor]:
    found: list[Tensor | None] = []
    for given in (parts.norm1, *parts.qkv, parts.out, parts.norm2, *parts.mlp):
        found += given if isinstance(given, tuple) else (getattr(given, "weight", None), getattr(given, "bias", None))
    for step in (*parts.after_out, *parts.after_mlp):
        found += step._parameters.values() if isinstance(step, nn.Module) else (step,)
    return [tensor for tensor in found if tensor is not None]


def _plain(source: Source) -> Layer:
    """Weight and bias of a linear layer that does nothing else, where they can be read as they lie."""
    if isinstance(source, nn.Module):
        if not isinstance(source, FastLinear):
            raise _SurpriseError
        source = source.weight, source.bias
    if not all(is_plain(part) and part.is_contiguous() for part in source if part is not None):
        raise _SurpriseError
    return source


def _by_parts(layer: Layer, parts: int) -> ByParts:
    if layer[0].shape[0] % parts:
        raise _SurpriseError
    return ByParts.of(*layer, parts)


def _summed(layer: Layer, parts: int) -> Layer:
    """A linear layer (O, D) by parts of its inputs: weight (parts, D / parts, O) and bias (O,)."""
    weight, bias = layer
    if weight.shape[1] % parts:
        raise _SurpriseError
    return weight.view(weight.shape[0], parts, -1).permute(1, 2, 0), bias


def _rows(out: Tensor) -> Tensor:
    """Heads' output (B, H, L, d) -> (B * L, H * d)."""
    return out.transpose(1, 2).reshape(-1, out.shape[1] * out.shape[3])


def _add(x: Tensor, y: Tensor, scale: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x + scale * y."""
    return torch.add(x, y, out=out) if scale is None else torch.addcmul(x, y, scale, out=out)


def is_from(module: object, *names: str) -> bool:
    """Whether the class of this module is one of the known libraries' with such a name, not one derived from it."""
    cls = type(module)
    return cls.__name__ in names and cls.__module__.partition(".")[0] in _LIBRARIES


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


def _watched(inside: dict[str, Any]) -> bool:
    """Whether somebody waits for a call of the module with these attributes, or has put a forward in its place."""
    return bool(inside["_forward_hooks"] or inside["_forward_pre_hooks"] or "forward" in inside)


def _check_unwatched(parts: Parts) -> None:
    """A hook waits for a call, and a forward of one instance's own would be passed by: here nothing is called."""
    given = (parts.norm1, *parts.qkv, parts.out, *parts.after_out, parts.norm2, *parts.mlp, *parts.after_mlp)
    for module in (*given, *parts.around):
        if isinstance(module, nn.Module) and _watched(module.__dict__):
            raise _SurpriseError
