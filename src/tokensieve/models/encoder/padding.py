"""Batches of images of different sizes, padded to one length: padding is never chosen from, merged or pooled.

How it works. The mask that the blocks get says which patches are padding. A cut then asks the method for one image at a
time, showing it that image's own patches and budget, so that an image's result does not depend on its batch mates. The
images are put together again with as much padding as the shortest needs; every later block masks it.

Imports core and errors.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.core.reduction import Reduction

if TYPE_CHECKING:
    from tokensieve.models.encoder.run import Attended, Run, State

__all__ = ["MaskedHead", "MaskedPool", "PaddedCut", "last_origin", "padded_cut", "valid_patches"]

# (B, K) which patches left the last block of this thread's last padded forward: pools reduce their mask by it
last_origin: ContextVar[Tensor | None] = ContextVar("last_origin", default=None)


class PaddedCut(NamedTuple):
    """What `padded_cut` found: tokens (B, P+K+E, D) and their sizes, and the choice as in `Reduction`."""

    tokens: Tensor
    size: Tensor | None
    reduction: Reduction
    origin: Tensor  # (B, K) patches and padding
    kept: Tensor  # (B, K) patches, -1 for padding
    made: int


class _Image(NamedTuple):
    """One image's share of a cut; positions are among the tokens that entered it."""

    tokens: Tensor
    size: Tensor | None
    keep: Tensor  # (k,)
    drop: Tensor
    into: Tensor | None  # (d,) slots
    scores: Tensor | None  # (n,)
    made: int


def valid_patches(mask: Tensor, prefix: int) -> Tensor | None:
    """(B, 1, 1 or L, L) -> (B, N) True for what some token may look at; None where that is everything."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    valid = seen.flatten(1, 2).any(dim=1)[:, prefix:]
    return None if bool(valid.all()) else valid


def budget(run: Run, valid: Tensor, block: int) -> list[int]:
    """Patches that each image keeps at `block`: the budget of its own size, at most what it has."""
    return [min(n, run.attachment.counts(n)[block]) if n else 0 for n in valid.sum(dim=1).tolist()]


def padded_cut(run: Run, block: int, seen: Attended, state: State, valid: Tensor) -> PaddedCut:
    """The cut at `block`, image by image. valid: (B, N) of the full grid."""
    batch, prefix = len(valid), run.attachment.prefix
    n = seen.tokens.shape[1] - prefix - state.made
    origin = torch.arange(n, device=valid.device).expand(batch, -1) if state.origin is None else state.origin
    here = valid.gather(1, origin)
    wanted = budget(run, valid, block)
    images = [_one(run, block, seen, state, i, here[i].nonzero().flatten(), wanted[i]) for i in range(batch)]
    longest = max(len(image.keep) for image in images)
    pads = [(~here[i]).nonzero().flatten() for i in range(batch)]
    short = [longest - len(image.keep) for image in images]
    keep = torch.stack([torch.cat([m.keep, pad[:s]]) for m, pad, s in zip(images, pads, short, strict=True)])
    drop = torch.stack([torch.cat([m.drop, pad[s:]]) for m, pad, s in zip(images, pads, short, strict=True)])
    into = None
    if any(image.into is not None for image in images):  # padding goes nowhere: slot 0 stands for that
        rows = [m.drop.new_zeros(0) if m.into is None else m.into for m in images]
        into = torch.stack([torch.cat([r, r.new_zeros(n - longest - len(r))]) for r in rows])
    parts, sizes = [], []
    for i, image in enumerate(images):
        split = prefix + len(image.keep)
        filling = seen.tokens[i : i + 1, prefix + pads[i][: short[i]]]
        parts.append(torch.cat([image.tokens[:, :split], filling, image.tokens[:, split:]], dim=1))
        one = image.tokens.new_ones(1, image.tokens.shape[1] - prefix, dtype=torch.float32)
        size = one if image.size is None else image.size
        k = len(image.keep)
        sizes.append(torch.cat([size[:, :k], one.new_ones(1, short[i]), size[:, k:]], dim=1))
    scores = None
    if all(image.scores is not None for image in images):
        scores = torch.stack([image.scores for image in images if image.scores is not None])
    chosen = origin.gather(1, keep)
    return PaddedCut(
        torch.cat(parts),
        torch.cat(sizes) if any(image.size is not None for image in images) else None,
        Reduction(keep=keep, drop=drop, into=into, scores=scores),
        chosen,
        chosen.masked_fill(~here.gather(1, keep), -1),
        max(image.made for image in images),
    )


def _one(run: Run, block: int, seen: Attended, state: State, i: int, rows: Tensor, wanted: int) -> _Image:
    """Image i, of whose patches `rows` (v,) are not padding."""
    prefix, made = run.attachment.prefix, state.made
    length = seen.tokens.shape[1]
    lead, tail = torch.arange(prefix, device=rows.device), torch.arange(length - made, length, device=rows.device)
    index = torch.cat([lead, rows + prefix, tail])
    tokens = seen.tokens[i : i + 1, index]
    among = index[prefix:] - prefix  # of patches and extra tokens
    size = None if state.size is None else state.size[i : i + 1, among]
    n = length - prefix - made
    if wanted >= len(rows):
        return _Image(tokens, size, rows, rows[:0], None, None, made)
    part = seen._replace(
        tokens=tokens, q=seen.q[i : i + 1, :, index], k=seen.k[i : i + 1, :, index],
        bias=None if seen.bias is None else seen.bias[i : i + 1, index],
        log_sum=None if seen.log_sum is None else seen.log_sum[i : i + 1, :, index],
    )  # fmt: skip
    whole = torch.arange(n, device=rows.device).unsqueeze(0) if state.origin is None else state.origin[i : i + 1]
    view = run.view(block, state._replace(size=size, origin=whole[:, rows]), part)
    reduction = run.attachment.method.reduce(view, wanted)
    out, size = reduction.apply(tokens, prefix, made, size)
    gone = torch.ones(len(rows), dtype=torch.bool, device=rows.device).scatter(0, reduction.keep[0], False)
    drop = gone.nonzero().flatten() if reduction.drop is None else reduction.drop[0]
    scores = None
    if reduction.scores is not None:
        scores = reduction.scores.new_full((n,), torch.nan).scatter(0, rows, reduction.scores[0])
    into = None if reduction.into is None else reduction.into[0]
    extra = made if reduction.extra is None else reduction.extra.shape[1]
    return _Image(out, size, rows[reduction.keep[0]], rows[drop], into, scores, extra)


def reduced_mask(mask: Tensor | None, length: int) -> Tensor | None:
    """A pool's mask (B, N) for the patches (B, K) that reached it; extra tokens behind them count."""
    origin = last_origin.get()
    if mask is None or origin is None or mask.shape[1] == length:
        return mask
    mask = mask.gather(1, origin)
    return torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], dim=1)


class MaskedHead:
    """Mixin for a pooling module (tokens, attention_mask (B, N)): its mask is reduced with the tokens."""

    def forward(self, hidden_state: Tensor, attention_mask: Tensor | None = None) -> Any:
        pool: Any = super()
        return pool.forward(hidden_state, reduced_mask(attention_mask, hidden_state.shape[1]))


class MaskedPool:
    """Mixin for timm's NaFlexVit, whose tower pools by itself, with `patch_valid` (B, N)."""

    num_prefix_tokens: int

    def _pool(self, x: Tensor, pool_type: str | None = None, patch_valid: Tensor | None = None) -> Any:
        pool: Any = super()
        valid = reduced_mask(patch_valid, x.shape[1] - self.num_prefix_tokens)
        return pool._pool(x, pool_type=pool_type, patch_valid=valid)
