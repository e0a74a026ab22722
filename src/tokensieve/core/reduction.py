"""What a method decided, as plain tensors: which patches stay and how the others are folded in.

Applying, masking, scattering back to the grid, pictures and statistics all read the same object.
Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "CorrectedReduction",
    "Correction",
    "MixedReduction",
    "Reduction",
    "WeightedReduction",
    "cluster_sums",
    "complement",
    "flat_rows",
    "take_tokens",
]

Correction = Callable[[Tensor, Tensor, int], Tensor]  # tokens (B, P+K, D), sizes (B, K), P -> tokens


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (B, K) of x (B, L, D) -> (B, K, D). Copies rows; `torch.gather` reads an index a value."""
    batch, length, width = x.shape
    return x.reshape(batch * length, width).index_select(0, flat_rows(index, length)).view(batch, index.shape[1], width)


def flat_rows(index: Tensor, length: int) -> Tensor:
    """Rows `index` (B, K) of B images as rows (B * K,) of the B * length of a batch laid end to end."""
    batch = index.shape[0]
    if batch > 1:  # for one image every operation saved is seen in the time of a cut
        index = index + torch.arange(0, batch * length, length, device=index.device).unsqueeze(1)
    return index.flatten()


def complement(keep: Tensor, n: int) -> Tensor:
    """The indices of 0..n-1 that are not in keep (B, K) -> (B, n - K), ascending. Static shape, no loop over images."""
    # n, n - 1, ... 1 by position, 0 for the kept ones: the highest are the others, in order
    rank = torch.arange(n, 0, -1, device=keep.device).expand(keep.shape[0], -1).scatter(1, keep, 0)
    return rank.topk(n - keep.shape[1], dim=1).indices


@dataclass(frozen=True)
class Reduction:
    """N patches (and M extra tokens of earlier cuts) become K patches (and E or M extra tokens).

    keep: (B, K) int64, ascending, into the N patches the method was shown.
    drop: (B, N - K), the others; needed where `into` is given.
    into: (B, N - K), for each dropped patch the slot 0..K-1 of the kept one that it is averaged into. None: it is gone.
    extra: (B, E, N + M), each row the weights (summing to 1) of a token that is made of the patches and of the tokens
        made earlier, which it replaces. None: extra tokens of earlier cuts stay as they are.
    scores: (B, N), what the choice was made by, higher = rather kept. None where a method has no such number.
    """

    keep: Tensor
    drop: Tensor | None = None
    into: Tensor | None = None
    extra: Tensor | None = None
    scores: Tensor | None = None

    def apply(
        self, x: Tensor, prefix: int = 0, made: int = 0, size: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, P+N+M, D) -> (B, P+K+E, D) and the new sizes.

        size: (B, N+M), how many patches each token stands for; None means one each. Averages are weighted by it. The
        sizes come back None as long as nothing was ever merged, so that plain dropping costs one gather.
        """
        batch, length, _ = x.shape
        n = length - prefix - made
        if self.into is not None and size is None:
            size = torch.ones(batch, n + made, dtype=torch.float32, device=x.device)
        stays = 0 if self.extra is not None else made
        index = self._rows(batch, prefix, n, stays)
        out = take_tokens(x, index)
        new_size = None
        if size is not None:
            new_size = size.gather(1, index[:, prefix:] - prefix if stays else self.keep)
            if self.into is not None:
                out, new_size = self._fold(x, out, prefix, size, new_size)
        if self.extra is not None:
            token = torch.bmm(self.extra.to(x.dtype), x[:, prefix:])
            out = torch.cat([out, token], dim=1)
            if new_size is not None and size is not None:
                # extra tokens stand for all that is in no kept one, in equal parts
                rest = size.sum(dim=1, keepdim=True) - new_size.sum(dim=1, keepdim=True)
                new_size = torch.cat([new_size, (rest / self.extra.shape[1]).expand(-1, self.extra.shape[1])], dim=1)
        return out, new_size

    def detached(self) -> Reduction:
        """The same without gradients."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: part.detach() for name, part in parts.items() if isinstance(part, Tensor)})

    def _rows(self, batch: int, prefix: int, n: int, made: int) -> Tensor:
        """(B, P+K+M) rows of the full sequence that survive: the prefix, the kept patches, the earlier extra tokens."""
        if prefix == 1 and not made:
            return F.pad(self.keep + 1, (1, 0))  # one operation where most towers are
        parts = [self.keep + prefix]
        if prefix:
            parts.insert(0, torch.arange(prefix, device=self.keep.device).expand(batch, -1))
        if made:
            parts.append(torch.arange(prefix + n, prefix + n + made, device=self.keep.device).expand(batch, -1))
        return torch.cat(parts, dim=1)

    def _fold(self, x: Tensor, out: Tensor, prefix: int, size: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Add the dropped patches to the kept ones they belong to, as means weighted by size."""
        assert self.drop is not None
        assert self.into is not None
        _, length, width = out.shape
        gone = size.gather(1, self.drop)
        total = kept.scatter_add(1, self.into, gone)
        share = (gone / total.gather(1, self.into)).unsqueeze(-1)
        slot = self.into + prefix
        # a mean is the kept one and a share of the way to each dropped one: only rows that change are touched
        wide = torch.promote_types(x.dtype, share.dtype)  # float32 where x is half
        way = (take_tokens(x, self.drop + prefix).to(wide) - take_tokens(out, slot).to(wide)) * share
        acc = out.to(wide).view(-1, width).index_add_(0, flat_rows(slot, length), way.view(-1, width))
        return acc.view(out.shape).to(x.dtype), total

    def slots(self, n: int) -> Tensor:
        """(B, n): for each of the n patches the slot it ended in, -1 where it was dropped for good."""
        batch, k = self.keep.shape
        slot = torch.full((batch, n), -1, dtype=torch.int64, device=self.keep.device)
        slot = slot.scatter(1, self.keep, torch.arange(k, device=slot.device).expand(batch, -1))
        if self.into is not None and self.drop is not None:
            slot = slot.scatter(1, self.drop, self.into)
        return slot

    def mask(self, n: int) -> Tensor:
        """(B, n) bool: True for the patches that stay."""
        empty = torch.zeros(self.keep.shape[0], n, dtype=torch.bool, device=self.keep.device)
        return empty.scatter(1, self.keep, True)


@dataclass(frozen=True)
class CorrectedReduction(Reduction):
    """correct: what happens to the tokens once the dropped ones are folded in; nothing where nothing was merged."""

    correct: Correction | None = None

    def apply(
        self, x: Tensor, prefix: int = 0, made: int = 0, size: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, new_size = super().apply(x, prefix, made, size)
        if self.correct is not None and new_size is not None:
            out = self.correct(out, new_size, prefix)
        return out, new_size


def cluster_sums(values: Tensor, goal: Tensor, slots: int) -> Tensor:
    """Sum values (B, R) by the slot they go to, goal (B, R): (B, slots)."""
    empty = torch.zeros(values.shape[0], slots, dtype=values.dtype, device=values.device)
    return empty.scatter_add(1, goal, values)


@dataclass(frozen=True)
class WeightedReduction(Reduction):
    """Kept token k becomes own[k] * x[k] + the sum of weight[j] * x[j] over the dropped j that go to it.

    drop: (B, R) tokens that go somewhere; goal: (B, R) the slots 0..K-1 they go to; weight: (B, R); own: (B, K). What
    is in neither keep nor drop is gone. For methods whose mean is not weighted by size (EViT sums, PruMerge weighs by
    attention, SparseVLM recycles only some); `into` stays None, and sizes are not kept.
    """

    goal: Tensor | None = None
    weight: Tensor | None = None
    own: Tensor | None = None

    def apply(
        self, x: Tensor, prefix: int = 0, made: int = 0, size: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, new_size = super().apply(x, prefix, made, size)
        if self.drop is None or self.goal is None or self.weight is None or self.own is None:
            return out, new_size
        batch, _, width = out.shape
        k = self.keep.shape[1]
        share = take_tokens(x, self.drop + prefix) * self.weight.unsqueeze(-1)  # float32 where x is half
        rows = self.goal + torch.arange(batch, device=x.device).unsqueeze(1) * k
        mixed = (out[:, prefix : prefix + k] * self.own.unsqueeze(-1)).to(share.dtype).reshape(-1, width)
        mixed = mixed.index_add(0, rows.flatten(), share.reshape(-1, width)).view(batch, k, width).to(x.dtype)
        return torch.cat([out[:, :prefix], mixed, out[:, prefix + k :]], dim=1), new_size

    def slots(self, n: int) -> Tensor:
        slot = super().slots(n)
        if self.drop is not None and self.goal is not None:
            slot = slot.scatter(1, self.drop, self.goal)
        return slot


@dataclass(frozen=True)
class MixedReduction(Reduction):
    """Slot k gets the sum over all N tokens of mix[k, j] * x[j].

    mix: (B, K, N), or (B, K, P + N) where prefix tokens take part; gradients flow through it. Slots are in any order
        that the method likes, `keep` says their places only. `into` stays None.
    share: (B, K, N), columns sum to 1: how far each of the N belongs to each kept one, whatever its part in the mean.
        Sizes follow it, with gradients. None: sizes are not kept.
    """

    mix: Tensor | None = None
    share: Tensor | None = None

    def apply(
        self, x: Tensor, prefix: int = 0, made: int = 0, size: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, new_size = super().apply(x, prefix, made, size)
        if self.mix is None:
            return out, new_size
        k, n = self.mix.shape[1], x.shape[1] - prefix - made
        first = prefix + n - self.mix.shape[2]  # where the tokens that take part begin
        mixed = torch.bmm(self.mix.to(x.dtype), x[:, first : prefix + n])
        if self.share is not None:
            stands = self.share.sum(dim=-1) if size is None else torch.einsum("bkn,bn->bk", self.share, size[:, :n])
            new_size = stands if new_size is None else torch.cat([stands, new_size[:, k:]], dim=1)
        return torch.cat([out[:, :prefix], mixed, out[:, prefix + k :]], dim=1), new_size

    def slots(self, n: int) -> Tensor:
        """As ever, with each dropped token in the slot that takes most of it, -1 where none does."""
        slot = super().slots(n)
        if self.mix is None:
            return slot
        part, goal = self.mix[:, :, -n:].max(dim=1)
        return torch.where(slot >= 0, slot, goal.masked_fill(part == 0, -1))
