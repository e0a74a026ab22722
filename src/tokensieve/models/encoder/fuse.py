"""mode="fuse": the image feature as a mean of CLS and the selected patches. Imports run and core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from tokensieve.core.reduction import take_tokens
from tokensieve.models.encoder.run import Run, fusing_runs

if TYPE_CHECKING:
    from tokensieve.models.encoder.handle import EncoderHandle

__all__ = ["FusingTower"]


class FusingTower:
    """Mixin for mode="fuse": feature = (1 - w) * cls + w * the selected patches, both sides of unit length.

    The patches go through the same last norm and projection as CLS; their weights are the softmax of their scores.
    """

    _sieve_attachment: EncoderHandle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runs: list[Run] = []
        token = fusing_runs.set(runs)
        try:
            out = cast(nn.Module, super()).forward(*args, **kwargs)
        finally:
            fusing_runs.reset(token)
        (run,) = runs
        at, chosen = run.attachment, run.reductions[max(run.reductions)]
        assert run.tail is not None
        tail, run.tail = run.tail, None
        # built from this module and not taken from the attachment: a replica has weights of its own
        project = at.family.feature_projector(cast(nn.Module, self))
        patches = project(take_tokens(tail, chosen.keep + at.prefix))
        if chosen.scores is None:
            weight = torch.full(chosen.keep.shape, 1.0 / chosen.keep.shape[1], device=patches.device)
        else:
            weight = chosen.scores.gather(1, chosen.keep).softmax(dim=1)
        pooled = (patches * weight.unsqueeze(-1).to(patches.dtype)).sum(dim=1)
        feature = out[0] if isinstance(out, tuple) else out
        w = at.fuse_weight
        fused = (1.0 - w) * F.normalize(feature, dim=-1) + w * F.normalize(pooled, dim=-1)
        return (fused, *out[1:]) if isinstance(out, tuple) else fused
