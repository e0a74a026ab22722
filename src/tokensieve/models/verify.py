"""Check by numbers that our form of a block equals the block's own forward, before anything is attached to it.

A block is known by the names of its parts, and a class of another library may use the same names for something else.
So its own forward and our form, without a cut, run on a few random tokens, and a block whose outputs differ by more
than rounding is refused. They run on a copy that shares the large matrices, has no hooks, and whose small parameters
(biases, norms, LayerScale, position tables) are random: weights that start at zero hide nothing, and the model itself
is not touched. Blocks of the same class and configuration are checked once in a process.

Imports errors only.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError

__all__ = ["module_key", "on_meta", "random_like", "skip_on_meta", "verification_copy", "verify_forms"]

_SMALL = 1 << 16  # entries up to which a parameter is drawn anew
_EVERY_LAYER = frozenset(
    {"training", "layer_idx", "layer_index", "layer_id", "drop_prob", "drop_path", "drop_path_rate"}
)
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_results: dict[Hashable, str | None] = {}  # what a check said, by kind of block; None: equal


def verify_forms(
    name: str,
    reference: Callable[..., Tensor],
    ours: Callable[..., Tensor],
    inputs: Sequence[Any],
    key: Hashable | None = None,
) -> None:
    """Raise UnsupportedModelError, naming `name` and the difference, unless reference(*inputs) equals ours(*inputs).

    inputs: the first is the residual stream (B, L, D); the difference is measured against what the reference changes
        in it, so that a small branch beside a large residual is still seen.
    key: what stands for this kind of block, see `module_key`: the result is kept. None: checked every time.
    The tolerance follows the output's dtype. Runs without gradients and leaves the random state as it was.
    """
    if key is None or key not in _results:
        said = _difference(reference, ours, inputs)
        if key is not None:
            _results[key] = said
    else:
        said = _results[key]
    if said is not None:
        raise UnsupportedModelError(f"{name} is not computed as its parts suggest: {said}")


def _difference(reference: Callable[..., Tensor], ours: Callable[..., Tensor], inputs: Sequence[Any]) -> str | None:
    x = cast(Tensor, inputs[0])
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), torch.autocast(x.device.type, enabled=False):
        outputs = []
        for what, form in (("its own forward", reference), ("our form of it", ours)):
            try:
                outputs.append(form(*inputs))
            except UnsupportedModelError:
                raise
            except Exception as error:  # whatever it is, this block cannot be checked, so it is refused
                return f"{what} fails on random tokens ({type(error).__name__}: {_first_line(error)})"
        wanted, got = outputs
        if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
            return f"its forward returns {type(wanted).__name__}, not a tensor"
        if wanted.shape != got.shape:
            return f"its forward returns {tuple(wanted.shape)}, our form of it {tuple(got.shape)}"
        apart = (wanted.double() - got.double()).abs().max().item()
        change = (wanted.double() - x.double()).abs().max().item() if wanted.shape == x.shape else 0.0
        change = change or wanted.double().abs().max().item()
        rounding = 4.0 * torch.finfo(wanted.dtype).eps * x.abs().max().item()
        loose = 20.0 if x.device.type == "cuda" and wanted.dtype == torch.float32 else 1.0  # TF32
    if apart <= _TOLERANCE.get(wanted.dtype, 1e-4) * loose * change + rounding:  # False for NaN
        return None
    return f"our form of it differs by {apart:.2g}, where the block changes its input by {change:.2g}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def verification_copy(module: nn.Module, seed: int = 0) -> Any:
    """A copy in eval mode that shares the large weights: no hooks, cloned buffers, small parameters drawn anew.

    float16 and bfloat16 become float32 (the large weights too, in the copy only). What is not a parameter, a
    quantised weight for one, is shared as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, Any] = {}

    def copied(old: Any) -> Any:
        if id(old) in memo or isinstance(old, torch.jit.ScriptModule):
            return memo.get(id(old), old)
        new: Any = old.__new__(type(old))
        memo[id(old)] = new
        new.__dict__ = old.__dict__.copy()
        for name, value in old.__dict__.items():
            if name.endswith("_hooks") or "_hooks_" in name:
                new.__dict__[name] = OrderedDict() if isinstance(value, dict) else value
        new.__dict__.pop("forward", None)  # bound to the original
        new.__dict__["_compiled_call_impl"] = None
        new.__dict__["training"] = False
        new.__dict__["_parameters"] = {n: _parameter(p, generator) for n, p in old._parameters.items()}
        new.__dict__["_buffers"] = {
            n: b if b is None else _widened(b.detach().clone()) for n, b in old._buffers.items()
        }
        new.__dict__["_modules"] = {n: m if m is None else copied(m) for n, m in old._modules.items()}
        return new

    return copied(module)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _parameter(p: nn.Parameter | None, generator: torch.Generator) -> nn.Parameter | None:
    if p is None or not p.is_floating_point() or p.device.type == "meta":
        return p
    value = p.detach()
    zero = p.numel() > _SMALL and not value.flatten()[:: max(1, p.numel() // 4096)].any()
    if p.numel() > _SMALL and not zero:
        return p if p.dtype not in (torch.float16, torch.bfloat16) else nn.Parameter(value.float(), False)
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu")
    noise *= 0.2 if p.dim() < 2 else 0.5 * (p.shape[-1]) ** -0.5
    value = _widened(value)
    return nn.Parameter(value + noise.to(value), False)


def random_like(module: nn.Module, *shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    """(shape) normal numbers in the dtype and on the device of the module's first floating-point parameter."""
    generator = torch.Generator().manual_seed(seed)
    noise = scale * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    return noise if first is None else noise.to(first)


def module_key(module: nn.Module, *more: Hashable) -> Hashable:
    """What stands for a module's kind: classes, plain attributes and shapes of all its parts; not its weights."""
    parts: list[Hashable] = [*more]
    for name, part in module.named_modules():
        plain = tuple(
            (key, said)
            for key, value in part.__dict__.items()
            if not key.startswith("_") and key not in _EVERY_LAYER and (said := _said(value)) is not None
        )
        tensors = (*part._parameters.items(), *part._buffers.items())
        shapes = tuple((key, tuple(t.shape), t.dtype, t.device.type) for key, t in tensors if t is not None)
        parts.append((name, type(part), plain, shapes))
    return tuple(parts)


def _said(value: Any) -> Hashable | None:
    """A plain attribute as it stands in a key; None for what says nothing about the computation."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list) and all(isinstance(v, bool | int | float | str) for v in value):
        return tuple(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return getattr(value, "_attn_implementation", None)


def on_meta(module: nn.Module) -> bool:
    """Whether some weight of the module has a shape but no numbers."""
    return any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers()))


def skip_on_meta(module: nn.Module) -> bool:
    """Whether a module cannot be checked because it is on the meta device; if so, a warning says it."""
    if not on_meta(module):
        return False
    warnings.warn(
        f"{type(module).__name__} has weights on the meta device: its blocks were not verified against their own "
        "forward; attach again once the weights are loaded",
        stacklevel=6,
    )
    return True
