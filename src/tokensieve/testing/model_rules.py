"""The contract's rules on a tiny model of an encoder family. Imports adapters and methods."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tokensieve.methods.base import Method
from tokensieve.models.attach import attach
from tokensieve.testing.models import TinyModel

__all__ = ["MODEL_RULES", "snapshot"]

Make = Callable[[], Method]


def _attached(make: Make, tiny: TinyModel, keep: int | float, at: Sequence[int] | None = None) -> Any:
    return attach(tiny.model, make(), keep=keep, at=at)


def _model_budget(make: Make, tiny: TinyModel) -> int:
    n = 36
    method = make()
    low = n
    for _ in range(2):
        low = max(1, method.floor(low, tiny.prefix))
    return max(low, n // 2)


def _lengths(make: Make, tiny: TinyModel) -> str | None:
    """Sequence lengths inside each block are what the budget says: real shapes at the MLPs, with extra tokens."""
    seen: list[int] = []
    hooks = [m.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1])) for m in tiny.mlps(tiny.model)]
    keep = _model_budget(make, tiny)
    try:
        with torch.no_grad(), _attached(make, tiny, keep, at=[0, 2]) as handle:
            tiny.feature(tiny.model, tiny.images(2))
            counts, run = handle.counts(36), handle.blocks.last
            planned, left = [], 36
            for block in range(len(seen)):
                before, left = left, counts.get(block, left)
                count, state = (before, block) if tiny.late else (left, block + 1)  # a late MLP sees what enters
                planned.append(tiny.prefix + count + run.states[state].made)
            kept = handle.kept
    finally:
        for hook in hooks:
            hook.remove()
    if seen != planned:
        return f"{tiny.name}: the MLPs saw {seen} tokens, the budget says {planned}"
    if planned[-1] >= 36 + tiny.prefix:
        return f"{tiny.name}: nothing was reduced"
    if kept[2].shape != (2, keep) or (kept[2].diff(dim=1) <= 0).any():
        return f"{tiny.name}: the patches kept at the end are {kept[2].tolist()}, not {keep} ascending ones"
    for early, late in zip(kept[0], kept[2], strict=True):
        if not set(late.tolist()) <= set(early.tolist()):
            return f"{tiny.name}: a patch is there after block 2 that had left at block 0"
    return None


def _batch(make: Make, tiny: TinyModel) -> str | None:
    images, keep = tiny.images(4), _model_budget(make, tiny)
    with torch.no_grad(), _attached(make, tiny, keep, at=[0, 2]) as handle:
        together = tiny.feature(tiny.model, images)
        kept = handle.kept[2]
        for i in range(len(images)):
            alone = tiny.feature(tiny.model, images[i : i + 1])
            if not torch.equal(handle.kept[2][0], kept[i]):
                return f"{tiny.name}: image {i} keeps other patches alone than in a batch"
            if not torch.allclose(alone[0], together[i], atol=1e-4):
                return f"{tiny.name}: the feature of image {i} differs by {(alone[0] - together[i]).abs().max():.1e}"
    return None


def _keep_all(make: Make, tiny: TinyModel) -> str | None:
    images = tiny.images(2)
    with torch.no_grad():
        before = tiny.feature(tiny.model, images)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _attached(make, tiny, 1.0):
                after = tiny.feature(tiny.model, images)
    if not torch.equal(before, after):
        return f"{tiny.name}: keep=1.0 changes the feature by {(after - before).abs().max():.1e}"
    return None


def _halves(make: Make, tiny: TinyModel) -> str | None:
    if tiny.float_only:
        return None
    model = copy.deepcopy(tiny.model).bfloat16()
    with torch.no_grad(), attach(model, make(), keep=_model_budget(make, tiny), at=[0, 2]):
        out = tiny.feature(model, tiny.images(2).bfloat16())
    return None if out.isfinite().all() else f"{tiny.name}: the feature is not finite in bfloat16"


def _gradients(make: Make, tiny: TinyModel) -> str | None:
    images = tiny.images(2).requires_grad_()
    with _attached(make, tiny, _model_budget(make, tiny), at=[0, 2]):
        out = tiny.feature(tiny.model, images)
        (grad,) = torch.autograd.grad(out.square().sum(), [images])
    if not grad.isfinite().all() or not (grad.abs().sum(dim=(1, 2, 3)) > 0).all():
        return f"{tiny.name}: gradients of the images are absent or not finite"
    return None


def snapshot(model: nn.Module) -> list[Any]:
    """All that attaching could leave behind: classes, attributes, hooks, keys of the state."""
    out: list[Any] = [list(model.state_dict())]
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks") and v is not None]
        out.append((name, type(module), sorted(vars(module)), hooks))
    return out


def _restored(make: Make, tiny: TinyModel) -> str | None:
    images = tiny.images(2)
    with torch.no_grad():
        before, was = tiny.feature(tiny.model, images), snapshot(tiny.model)
        state = {k: v.clone() for k, v in tiny.model.state_dict().items()}
        with _attached(make, tiny, _model_budget(make, tiny), at=[0, 2]):
            during = tiny.feature(tiny.model, images)
        after = tiny.feature(tiny.model, images)
    for a, b in zip(was, snapshot(tiny.model), strict=True):
        if a != b:
            return f"{tiny.name}: after removal {b} is not what was there before: {a}"
    if any(not torch.equal(v, state[k]) for k, v in tiny.model.state_dict().items()):
        return f"{tiny.name}: a weight has another value after removal"
    if not torch.equal(before, after):
        return f"{tiny.name}: after removal the feature differs by {(after - before).abs().max():.1e}"
    if torch.equal(before, during):
        return f"{tiny.name}: the feature was the same while attached, so nothing was reduced"
    return None


MODEL_RULES: dict[str, Callable[[Make, TinyModel], str | None]] = {
    "sequence lengths": _lengths,
    "a batch of images equals its singles": _batch,
    "keep-all leaves the model alone": _keep_all,
    "the feature is finite in bfloat16": _halves,
    "gradients reach the images": _gradients,
    "restored bit for bit on removal": _restored,
}
