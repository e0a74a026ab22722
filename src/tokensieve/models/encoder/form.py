"""What a transformer block consists of, described by the names of its parts, and the one way every description runs.

A block is: norms, a projection to queries, keys and values, attention, what follows it, a residual sum; then the MLP
with its own norms, and a second sum. Modules are called and not read, so that hooks, LoRA and quantised layers count;
a bare parameter (LayerScale) is multiplied. Nothing here is trusted: `models.verify` compares every form with the
block's own forward before it is used.

Imports run and errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.wrappers import base_layer

__all__ = ["BlockForm", "Given", "Projected", "choose_form", "linear_macs", "part"]


class Projected(NamedTuple):
    """Queries, keys and values (B, H, L, d), and what else a block's projection gave, for after attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    rest: Tensor | None = None


Given = dict[str, Any]  # the arguments a block was called with, beside the residual stream
Rotate = Callable[[Any, Tensor, Any, "Tensor | None", int], Tensor]  # block, (B, H, L, d), table, origin, prefix

# arguments that change nothing in what a block computes
_HARMLESS = frozenset({"output_hidden_states", "return_dict", "interpolate_pos_encoding"})


def part(module: Any, path: str) -> Any:
    """The part at a dotted path, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return None
    return module


def linear_macs(module: nn.Module) -> int:
    """MACs a token in a module's linear layers: the entries of its matrices, quantised ones included."""
    packed: list[Any] = [
        m for m in module.modules() if callable(getattr(m, "weight", None)) and hasattr(m, "in_features")
    ]
    quantised = sum(int(m.in_features * m.out_features) for m in packed)
    return quantised + sum(p.numel() for p in module.parameters() if p.dim() == 2)


@dataclass(frozen=True, kw_only=True)
class BlockForm:
    """A description. A name may list alternatives, "ls1 | gamma_1": the first that a block has counts, and a part that
    it lacks altogether is left out. Paths start at the block, those of `qkv`, `norms`, `heads`, `scale`, `out`,
    `dropout` and `inner` at its attention.

    before: what the residual stream passes on its way to the projections; after: what attention's output passes, after
        `out`, before the sum; joined: what the sum passes (post-norm). mlp, mlp_joined: the same for the MLP.
    qkv: one fused projection, in the order q, k, v, or three; a bare weight ("in_proj_weight") is used with its bias.
    qkv_bias: three biases added after a fused projection. norms: of queries and keys, per head or over all heads.
    scale: an attribute; "" for 1 / sqrt(d). inner: what the heads' joined output passes before `out`. gate: a module
        on attention's input whose sigmoid multiplies that output.
    parallel: the MLP reads the block's input as attention does (`mlp` names the parts); the cut comes after both.
    mask: the argument that carries an attention mask (B, 1 or H, 1 or L, L); without one, a mask is refused.
    rotary: the argument with the rotary table, and rotate: how it turns a (B, H, L, d), told which patches are left
        and how many tokens lead; without an argument, the table is None.
    bias: the map (1 or B, H, L, L) that is added to the logits of all tokens, from the block and its arguments.
    reads: further arguments that `bias` looks at.
    tuple_out: how many things the block returns, the tokens first, where it returns a tuple.
    only: names of the block classes that are meant, where the same parts run in more than one order.
    """

    attn: str = "attn"
    before: tuple[str, ...] = ("norm1",)
    qkv: tuple[str, ...] = ("qkv",)
    qkv_bias: tuple[str, ...] = ()
    norms: tuple[str, ...] = ("q_norm", "k_norm")
    heads: str = "num_heads"
    scale: str = ""
    inner: tuple[str, ...] = ()
    gate: str = ""
    out: tuple[str, ...] = ("proj",)
    after: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ("norm2", "mlp")
    mlp_joined: tuple[str, ...] = ()
    dropout: str = "attn_drop"
    parallel: bool = False
    mask: str = ""
    rotary: str = ""
    rotate: Rotate | None = None
    bias: Callable[[Any, Given], Tensor | None] | None = None
    reads: tuple[str, ...] = ()
    tuple_out: int = 0
    only: tuple[str, ...] = ()
    # found out by `resolve`
    arguments: tuple[str, ...] = ()
    length_first: bool = False
    norm_all: bool = False

    # -- fitting the description to a block -----------------------------------------------------------------------

    def resolve(self, block: nn.Module) -> BlockForm | None:
        """This description with the names that the block uses; None where a part it cannot do without is absent."""

        def first(names: str, of: Any = block) -> str:
            listed = (name.strip() for name in names.split("|"))
            return next((name for name in listed if name and part(of, name) is not None), "")

        if self.only and not any(cls.__name__ in self.only for cls in type(block).__mro__):
            return None
        attn_name = first(self.attn)
        attn = part(block, attn_name) if attn_name else block
        if self.attn and not attn_name:
            return None
        found: dict[str, Any] = {
            field: tuple(name for names in getattr(self, field) if (name := first(names, attn)))
            for field in ("qkv", "qkv_bias", "norms", "inner", "out")
        }
        for field in ("before", "after", "joined", "mlp", "mlp_joined"):
            found[field] = tuple(name for names in getattr(self, field) if (name := first(names)))
        heads = first(self.heads, attn)
        whole = len(found["qkv"]) == len(self.qkv) and found["out"] and found["mlp"] and heads
        if not whole or len(found["qkv_bias"]) not in (0, 3) or len(found["norms"]) not in (0, 2):
            return None
        parameters = list(inspect.signature(type(block).forward).parameters.values())[2:]
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        form = replace(
            self, attn=attn_name, heads=heads, scale=first(self.scale, attn), gate=first(self.gate, attn),
            dropout=first(self.dropout, attn), arguments=tuple(names), **found,
            length_first=not getattr(attn, "batch_first", True),
        )  # fmt: skip
        return replace(form, norm_all=form._norms_all_heads(attn))

    def _norms_all_heads(self, attn: Any) -> bool:
        """Whether the norm of the queries is as wide as all heads together."""
        weight = part(attn, f"{self.norms[0]}.weight") if self.norms else None
        projected = part(attn, self.qkv[0])
        matrix = projected if isinstance(projected, Tensor) else getattr(projected, "weight", None)
        if weight is None or not isinstance(matrix, Tensor) or self.head_count(attn) == 1:
            return False
        return weight.numel() == matrix.shape[0] * len(self.qkv) // 3

    def head_count(self, attn: Any) -> int:
        return int(part(attn, self.heads))

    def given(self, args: Sequence[Any], kwargs: Given) -> Given:
        """The arguments of a call by name; what the form does not know must be None or False."""
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        for name, value in list(given.items()):
            if name in (self.mask, self.rotary, *self.reads) or name in _HARMLESS:
                continue
            if value is None or value is False:
                del given[name]
            elif "mask" in name:
                if not torch.compiler.is_exporting():  # there some models make one of ones
                    raise UnsupportedModelError("a reduced encoder of this kind takes no attention mask")
                del given[name]
            elif name == "output_attentions":
                raise UnsupportedModelError("fused attention has no attention maps: output_attentions is not supported")
            else:
                raise UnsupportedModelError(f"a reduced encoder of this kind does not take the argument {name!r}")
        return given

    def logit_map(self, block: Any, given: Given, like: Tensor) -> Tensor | None:
        """(1 or B, 1 or H, 1 or L, L) what is added to the logits of all tokens there were: position bias and mask."""
        found = None if self.bias is None else self.bias(block, given)
        mask = given.get(self.mask) if self.mask else None
        if mask is None:
            return found
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            raise UnsupportedModelError(
                f"an attention mask of this kind ({self.mask}) cannot be reduced: give (B, 1, L, L)"
            )
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        return mask if found is None else found + mask

    # -- running it -----------------------------------------------------------------------------------------------

    def project(self, block: Any, x: Tensor) -> Projected:
        """Block input (B, L, D) -> q, k, v (B, H, L, d), norms applied, not rotated."""
        attn, x = self.attention(block), _chain(block, x, self.before)
        heads = self.head_count(attn)
        if len(self.qkv) == 3:
            q, k, v = (_linear(attn, name, x) for name in self.qkv)
        else:
            fused = _linear(attn, self.qkv[0], x)
            if self.qkv_bias:
                fused = fused + torch.cat([part(attn, name) for name in self.qkv_bias])
            q, k, v = fused.chunk(3, dim=-1)
        if self.norms and self.norm_all:
            q, k = part(attn, self.norms[0])(q), part(attn, self.norms[1])(k)
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in (q, k, v))
        if self.norms and not self.norm_all:
            q, k = part(attn, self.norms[0])(q), part(attn, self.norms[1])(k)
        return Projected(q, k, v)

    def attended(self, block: Any, x: Tensor, out: Tensor, rest: Tensor | None = None) -> Tensor:
        """Block input (B, L, D) and the heads' output (B, H, L, d) -> the residual stream at the cut (B, L, D)."""
        attn = self.attention(block)
        out = _chain(attn, out.transpose(1, 2).flatten(2), self.inner)
        if self.gate:
            out = out * part(attn, self.gate)(_chain(block, x, self.before)).sigmoid()
        out = _chain(block, _chain(base_layer(attn), out, self.out), self.after)
        if self.parallel:
            return x + out + _chain(block, x, self.mlp)
        return _chain(block, x + out, self.joined)

    def finish(self, block: Any, x: Tensor) -> Tensor:
        """Residual stream at the cut -> the block's output, (B, L, D) both."""
        return x if self.parallel else _chain(block, x + _chain(block, x, self.mlp), self.mlp_joined)

    def attention(self, block: Any) -> Any:
        return part(block, self.attn) if self.attn else block

    def logit_scale(self, block: Any, d: int) -> float:
        return float(part(self.attention(block), self.scale)) if self.scale else d**-0.5

    def dropout_rate(self, block: Any) -> float:
        """Attention dropout in force now."""
        if not block.training or not self.dropout:
            return 0.0
        found = part(self.attention(block), self.dropout)
        return float(getattr(found, "p", found))

    def width(self, block: Any) -> int:
        """Width of the residual stream."""
        found = part(self.attention(block), self.qkv[0])
        return int(found.shape[1] if isinstance(found, Tensor) else found.in_features)

    # -- what it costs --------------------------------------------------------------------------------------------

    def shape(self, block: nn.Module) -> BlockShape:
        """MACs of the block. A parallel block's MLP runs before the cut, with attention."""
        attn = self.attention(block)
        linear = sum(_entries(part(attn, name)) for name in (*self.qkv, *self.out, *filter(None, (self.gate,))))
        mlp = sum(_entries(part(block, name)) for name in self.mlp)
        out = part(attn, self.out[0])
        width = int(getattr(out, "in_features", 0) or out.weight.shape[1])
        return BlockShape(linear + mlp, width, 0) if self.parallel else BlockShape(linear, width, mlp)


def choose_form(forms: Sequence[BlockForm], block: nn.Module) -> BlockForm:
    """The first description that finds all its parts in the block, with the block's own names in it."""
    for form in forms:
        found = form.resolve(block)
        if found is not None:
            return found
    raise UnsupportedModelError(f"{type(block).__name__} has parts that no description fits")


def _entries(found: Any) -> int:
    """MACs a token of a part: entries of its matrices; none for what is multiplied element by element."""
    if isinstance(found, nn.Module):
        return linear_macs(found)
    return found.numel() if isinstance(found, Tensor) and found.dim() == 2 else 0


def _chain(owner: Any, x: Tensor, names: Sequence[str]) -> Tensor:
    """Call one part after the other; multiply by those that are tensors."""
    for name in names:
        found = part(owner, name)
        x = x * found if isinstance(found, Tensor | float) else found(x)
    return x


def _linear(attn: Any, name: str, x: Tensor) -> Tensor:
    found = part(attn, name)
    if isinstance(found, Tensor):
        return F.linear(x, found, part(attn, name.replace("weight", "bias")))
    return cast(Tensor, found(x))
