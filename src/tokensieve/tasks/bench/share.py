"""How much of the time goes into deciding, as the number of patches grows. Measured on one block of ViT-B's width."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.methods.registry import make_method
from tokensieve.models.attach import attach_encoder
from tokensieve.models.encoder.run import Run
from tokensieve.tasks.bench.config import BenchConfig
from tokensieve.tasks.bench.models import twin
from tokensieve.tasks.bench.sdpa import attach_fused
from tokensieve.tasks.bench.timing import interleave, quartiles
from tokensieve.utils.torchvision import declare_missing_schemas

__all__ = ["measure_share"]

WIDTH, HEADS, DEPTH, BATCH = 768, 12, 12, 1
_TARGETS = {"anchor": 0.05, "evit": 0.05}


def measure_share(config: BenchConfig, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each number of patches and method.

    share: of the time of an encoder of twelve such blocks, with the method's own number of cuts (every block, every
    second or third, one). block_share: of the time of the block it works in.

    Selection is the method's decision and applying it, on the queries and keys that the block's own attention made. A
    cut takes out its part of a budget of one half. All at the full number of patches: blocks after a cut cost less, but
    so do later selections.
    """
    rows = []
    for patches in config.share_sizes:
        calls = _candidates(patches, config)
        times = interleave(calls, config.rounds, config.device, partial(tick, f"share: {patches} patches"))
        block = quartiles(times["block"])[1]
        for method in config.share_methods:
            selection = quartiles(times[method])[1]
            cuts, target = _cuts(method), _TARGETS.get(method)
            share = cuts * selection / (cuts * selection + DEPTH * block)
            rows.append(
                {"part": "share", "patches": patches, "batch": BATCH, "method": method, "keep": _keep(method)}
                | {"block_ms": 1e3 * block, "selection_ms": 1e3 * selection, "cuts": cuts, "share": share}
                | {"block_share": selection / (selection + block)}
                | {"target": target, "met": None if target is None else share < target}
            )
    return rows


def _cuts(method: str) -> int:
    """Cuts that the method makes by default in an encoder of DEPTH blocks."""
    made = make_method(method)
    return len(made.blocks(DEPTH))


def _keep(method: str) -> float:
    return 1.0 - 0.5 / _cuts(method)


def _tower(patches: int, config: BenchConfig) -> nn.Module:
    """An open_clip tower of one block for a square image of that many patches (of one pixel each: none is embedded)."""
    declare_missing_schemas()
    from open_clip.transformer import VisionTransformer

    torch.manual_seed(config.seed)
    tower = VisionTransformer(
        image_size=math.isqrt(patches),
        patch_size=1,
        width=WIDTH,
        layers=1,
        heads=HEADS,
        mlp_ratio=4.0,
        output_dim=WIDTH,
    )
    return tower.eval().to(config.device)


def _candidates(patches: int, config: BenchConfig) -> dict[str, Callable[[], object]]:
    """The block by itself on fused attention, and each method's cut by itself."""
    tower = _tower(patches, config)
    x = torch.randn(BATCH, 1 + patches, WIDTH, device=config.device)
    whole = twin(tower)
    attach_fused(whole)
    blocks = cast(Any, whole).transformer.resblocks
    calls: dict[str, Callable[[], object]] = {"block": partial(blocks, x)}
    for method in config.share_methods:
        calls[method] = _cut_alone(twin(tower), method, x)
    return calls


def _cut_alone(tower: nn.Module, method: str, x: Tensor) -> Callable[[], object]:
    """The cut of a reduced block, given what its attention has computed for x (B, 1+N, D)."""
    handle = attach_encoder(tower, make_method(method), keep=_keep(method), at=0)
    block = cast(Any, handle.blocks)[0]
    run = Run(handle)
    with torch.inference_mode():
        state = run.enter(0, x)
        seen = block.sieve_attend(x, run, state)
    return partial(run.cut, 0, seen)
