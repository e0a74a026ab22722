"""The handle of an attached vision encoder: budget, tokens, cost. Imports run, fuse, families and methods."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokensieve.core.budget import Keep, counts_for, counts_for_average
from tokensieve.core.cost import Cost, encoder_cost
from tokensieve.errors import BudgetError, OptionError, UnsupportedModelError
from tokensieve.methods.base import Method
from tokensieve.models.encoder.block import SievedBlock
from tokensieve.models.encoder.dense import dense_mixin
from tokensieve.models.encoder.fuse import FusingTower
from tokensieve.models.encoder.hooks import warn_of_hooks
from tokensieve.models.encoder.run import Run, SievedBlocks
from tokensieve.models.families.base import Family
from tokensieve.models.grid import grid_of
from tokensieve.models.handle import Handle, Mode
from tokensieve.models.swap import swapped_class
from tokensieve.models.verify import skip_on_meta

__all__ = ["EncoderHandle", "EncoderStats"]


@dataclass(frozen=True)
class EncoderStats:
    """What the last forward ran on: images of the batch, tokens that left each block, and the seconds of the blocks.

    seconds: None where `handle.timing` was not set.
    """

    images: int
    tokens_per_layer: tuple[int, ...]
    seconds: float | None


def _grid(family: Family, tower: nn.Module) -> tuple[int, ...]:
    """Patches down and across; in a video model frames, down and across."""
    rows, columns = family.grid(tower)
    frames = family.frames(tower)
    return (rows, columns) if frames == 1 else (frames, rows // frames, columns)


class EncoderHandle(Handle):
    """A method at work in one vision encoder: see `Handle`."""

    def __init__(
        self,
        model: nn.Module,
        tower: nn.Module,
        family: Family,
        method: Method,
        *,
        at: tuple[int, ...],
        keep: Keep | None,
        keep_average: int | float | None,
        schedule: str,
        mode: Mode,
        fuse_weight: float,
        text: Tensor | None,
    ) -> None:
        super().__init__(method, keep=keep, keep_average=keep_average, mode=mode, fuse_weight=fuse_weight, text=text)
        self.at, self.schedule = at, schedule
        self.tower, self.blocks = tower, family.blocks(tower)
        self.prefix, self.has_cls, self.grid = family.prefix(tower), family.has_cls(tower), _grid(family, tower)
        self.pools_patches = family.pools_patches(model, tower)
        blocks = list(self.blocks.children())
        self.depth = len(blocks)
        self.shapes = [family.shape(block) for block in blocks]
        self.rest_macs = family.rest_macs(tower, self.patches)
        self.family = family
        self.masked_pools = family.masked_pools(tower)
        self.project = family.projector(model, tower)  # patches of the residual stream -> the joint space, if any
        self._feature = family.feature_module(model, tower) if mode == "fuse" else None
        self._seen: Run | None = None  # the last forward before the removal
        self.new_run: Callable[[EncoderHandle], Run] = Run  # how a forward goes; otherwise where a selection is trained
        # without CLS importance is the attention received, and with each row's sum that needs one pass
        self.needs_log_sum = method.needs_log_sum or (method.reads_importance and not self.has_cls)
        self.warned: set[str] = set()  # of hooks that are not called
        self._check()

    def _check(self) -> None:
        """Refuse what this tower cannot do."""
        method, family, text = self.method, self.family, self.text
        if not 0.0 <= method.proportional <= 2.0:
            raise OptionError(f"proportional={method.proportional!r}: how much of log(size) counts lies in [0, 2]")
        if method.extra_tokens() and family.turns(self.tower) and self.mode == "prune":
            raise UnsupportedModelError(f"{type(method).__name__} adds a token, which has no place in a rotary tower")
        method.check_encoder(self.depth, self.shapes[0].attention_width)
        if self.mode == "fuse" and self.project is None:
            raise UnsupportedModelError(f'mode="fuse": {family.name} has no projection for single patches')
        if text is None:
            return
        if text.dim() not in (2, 3):
            raise OptionError(f"text of shape {tuple(text.shape)}: give features (T, E), or (B, T, E) for each image")
        if self.project is None:
            raise UnsupportedModelError(f"text: {family.name} has no joint space for single patches")

    # -- budget ---------------------------------------------------------------------------------------------------

    def counts(self, patches: int) -> dict[int, int]:
        """Patches after the cut of each block of `at`, for an image of `patches`."""

        def floor(n: int) -> int:
            return self.method.floor(n, self.prefix)

        if self.keep_average is not None:
            listed = counts_for_average(patches, self.at, self.depth, self.keep_average, self.schedule, floor)
        else:
            assert self.keep is not None
            listed = counts_for(patches, len(self.at), self.keep, self.schedule, floor)
        return dict(zip(self.at, listed, strict=True))

    @property
    def patches(self) -> int:
        """Patches of the usual image."""
        return math.prod(self.grid)

    # -- in and out -----------------------------------------------------------------------------------------------

    def _change(self) -> None:
        counts = self.counts(self.patches)
        floor = self.method.floor(self.patches, self.prefix)
        if self.mode != "prune" and min(counts.values()) < floor:
            raise BudgetError(
                f'mode="{self.mode}" chooses from all {self.patches} patches at every block, and this method cannot go '
                f"under {floor} of them in one step: keep at least {floor}"
            )
        if self.mode != "analyse" and min(counts.values()) >= self.patches:
            asked = f"keep={self.keep}" if self.keep_average is None else f"keep_average={self.keep_average}"
            warnings.warn(
                f"nothing is reduced: the budget keeps {min(counts.values())} ({asked}) and the image has "
                f"{self.patches} patches",
                stacklevel=5,
            )
        touched = [(i, block) for i, block in enumerate(self.blocks.children()) if self._touches(i)]
        if touched and not skip_on_meta(self.tower):
            self.family.verify(self.tower, [block for _, block in touched])
        for index, block in touched:
            block.__dict__["_sieve_index"] = index
            form = block.__dict__["_sieve_form"] = self.family.form(block)
            self.swap(block, swapped_class(SievedBlock, type(block)))
            if self.mode == "prune":
                warn_of_hooks(form, block, index, self.warned)
        for module, mixin in self.masked_pools if touched and self.mode == "prune" else ():
            self.swap(module, swapped_class(mixin, type(module)))
        self.blocks.__dict__["attachment"] = self
        self.blocks.__dict__["last"] = None
        self.swap(self.blocks, SievedBlocks)
        if self.mode == "prune" and self.reduces:
            self.swap(self.tower, swapped_class(dense_mixin(self.tower), type(self.tower), disguised=True))
        if self._feature is not None:
            self._feature.__dict__["_sieve_attachment"] = self
            self.swap(self._feature, swapped_class(FusingTower, type(self._feature)))

    def _touches(self, index: int) -> bool:
        """Blocks that must run our way. Where nothing is reduced, none: the model stays as fast as it was."""
        if self.mode == "prune":
            return self.reduces
        return index in self.at or (self.mode == "fuse" and index == self.depth - 1)

    def remove(self) -> None:
        self._seen = self._last_run
        super().remove()

    # -- what the user asks ---------------------------------------------------------------------------------------

    @property
    def _last_run(self) -> Run | None:
        """The last forward, if there was one."""
        return self.blocks.__dict__.get("last") if self.installed else self._seen

    @property
    def _last(self) -> Run:
        run = self._last_run
        if run is None or (not run.leaving and self.reduces):
            raise RuntimeError("no forward yet: run the model first")
        return run

    @property
    def kept(self) -> dict[int, Tensor]:
        """block -> (B, K) original indices of the patches that remain after it, ascending."""
        return dict(self._last.kept)

    def _grid_now(self) -> tuple[int, ...]:
        run = self._last
        return grid_of(run.patches or self.patches, self.grid, run.image or ())

    @property
    def scores(self) -> dict[int, Tensor]:
        """block -> (B, N) scores on the full grid, higher = rather kept; NaN where a patch had left before.

        Blocks whose method has no scores are not in it.
        """
        run, out = self._last, {}
        origin: Tensor | None = None
        for block, reduction in sorted(run.reductions.items()):
            if reduction.scores is not None:
                score = reduction.scores.float()
                if origin is not None:
                    empty = torch.full((score.shape[0], run.patches), torch.nan, device=score.device)
                    score = empty.scatter(1, origin, score)
                out[block] = score
            if self.mode == "prune":
                origin = run.states[block + 1].origin
        return out

    @property
    def sizes(self) -> Tensor | None:
        """(B, K) patches that each remaining token stands for; None where nothing was merged."""
        return self._last.states[self.depth].size if self.reduces else None

    def restore(self, tokens: Tensor) -> Tensor:
        """(B, P+K, D) -> (B, P+N, D), back on the grid: dropped patches 0, merged ones copies of what they went into.

        Extra tokens (fused, extra) are left out. (B, K, D) without the prefix works alike.
        """
        run = self._last
        if not run.reductions or self.mode != "prune":
            return tokens
        made = run.states[self.depth].made
        kept = run.kept[max(run.kept)].shape[1]
        prefix = tokens.shape[1] - kept - made
        if prefix < 0:
            prefix, made = tokens.shape[1] - kept, 0
        if prefix not in (0, self.prefix):
            raise OptionError(
                f"restore: {tokens.shape[1]} tokens given, but the last forward left {self.prefix} + {kept} (+ {made})"
            )
        slots = run.slots()
        if slots.shape[0] != tokens.shape[0]:
            raise OptionError(f"restore: {tokens.shape[0]} images given, but the last forward had {slots.shape[0]}")
        index = slots.clamp_min(0).unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
        patches = tokens[:, prefix : prefix + kept].gather(1, index)
        return torch.cat([tokens[:, :prefix], patches * (slots >= 0).unsqueeze(-1)], dim=1)

    @property
    def tokens_per_layer(self) -> list[int]:
        """Tokens that leave each block, prefix and extra ones included: of the last forward, before it as planned.

        A forward that stopped early counts the blocks that ran.
        """
        return [self.prefix + patches + made for patches, made in self._leaving()]

    @property
    def vision_tokens_per_layer(self) -> list[float]:
        return [float(patches) for patches, _ in self._leaving()]

    def _leaving(self) -> list[tuple[int, int]]:
        """Patches and extra tokens that leave each block."""
        run = self._last_run
        if run is not None and run.leaving and self.mode == "prune":
            made = {block: run.states[block + 1].made for block in run.leaving}
            return [(n - self.prefix - made[block], made[block]) for block, n in sorted(run.leaving.items())]
        counts = self.counts(self.patches) if self.mode == "prune" else {}
        out, current, extra = [], self.patches, 0
        if run is not None and run.patches:
            current = run.patches
        for block in range(self.depth):
            if counts.get(block, current) < current:
                current, extra = counts[block], self.method.extra_tokens()
            out.append((current, extra))
        return out

    @property
    def stats(self) -> EncoderStats:
        """Tokens of the last forward, and its seconds where `timing` is set. Raises before there was one."""
        run = self._last
        return EncoderStats(run.images, tuple(self.tokens_per_layer), run.seconds)

    def cost(self) -> Cost:
        """MACs of one image with and without, the speed-up they make possible, and the tokens for each layer."""
        run = self._last_run
        patches = run.patches if run is not None and run.patches else self.patches
        rest = self.rest_macs * patches // self.patches if self.patches else 0
        leaving = self.tokens_per_layer
        cost = encoder_cost(self.shapes[: len(leaving)], self.prefix + patches, leaving, rest)
        pooled = run.pooled if run is not None and run.pooled else cost.tokens_per_layer[-1]
        return Cost(
            macs=cost.macs + self.family.pool_macs(self.tower, pooled),
            macs_full=cost.macs_full + self.family.pool_macs(self.tower, self.prefix + patches),
            tokens_per_layer=cost.tokens_per_layer,
        )
