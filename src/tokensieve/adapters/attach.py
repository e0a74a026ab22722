"""attach(model, method, ...) and the handle it returns. Imports engine, families and methods."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokensieve.adapters.engine import FusingTower, Run, SievedBlocks, sieved_class
from tokensieve.adapters.family import Family
from tokensieve.adapters.openclip import OpenClipFamily
from tokensieve.adapters.timm import TimmFamily
from tokensieve.adapters.transformers import ClipFamily, Dinov2Family
from tokensieve.core.budget import Keep, check_schedule, counts_for, counts_for_average
from tokensieve.core.cost import Cost, encoder_cost
from tokensieve.errors import BudgetError, OptionError, UnsupportedModelError, nearest
from tokensieve.methods.base import Method
from tokensieve.methods.registry import check_option_names, make_method

__all__ = ["FAMILIES", "Attachment", "attach", "attachment_of", "find_tower"]

FAMILIES: tuple[Family, ...] = (OpenClipFamily(), TimmFamily(), ClipFamily(), Dinov2Family())
_ROOMS = ("module", "_orig_mod", "visual", "trunk", "vision_model", "dinov2", "dinov2_with_registers", "base_model")
MODES = ("prune", "analyse", "fuse")
Mode = Literal["prune", "analyse", "fuse"]


def find_tower(model: nn.Module) -> tuple[nn.Module, Family]:
    """The vision tower inside a model, and its family. An unknown one is an error that says what is known."""
    queue: list[nn.Module] = [model]
    for module in queue:
        for family in FAMILIES:
            if family.matches(module):
                family.check(module)
                return module, family
        rooms = (getattr(module, name, None) for name in _ROOMS)
        # a room may lead back: the base_model of a bare transformers model is the model itself
        queue += [room for room in rooms if isinstance(room, nn.Module) and all(room is not seen for seen in queue)]
    inner = getattr(model, "visual", model)
    inner = getattr(inner, "trunk", inner)
    raise UnsupportedModelError(
        f"no token sequence to reduce in {type(model).__name__}"
        + (f" (its tower is {type(inner).__name__})" if inner is not model else "")
        + f". Supported: {'; '.join(f.name for f in FAMILIES)}. ResNet, ConvNeXt and Swin have no such sequence."
    )


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of a model that has one (also of its copies), else None."""
    for module in model.modules():
        found = module.__dict__.get("_sieve_attachment")  # of a vision-language model, or of one in mode="fuse"
        if isinstance(found, Attachment):
            return found
        if isinstance(module, SievedBlocks):
            return module.attachment
    return None


def attach(
    model: nn.Module,
    method: str | Method,
    *,
    keep: Keep | None = None,
    at: int | Sequence[int] | None = None,
    keep_average: int | float | None = None,
    schedule: str | None = None,
    mode: Mode = "prune",
    fuse_weight: float = 0.2,
    text: Tensor | None = None,
    positions: str | None = None,
    **options: Any,
) -> Attachment:
    """Let `method` reduce the tokens of a model's vision encoder, until the returned handle is removed.

    method: a name (see `list_methods`) with its options, or an instance.
    keep: patches that remain at the end. An int is a count, a float a ratio, a list the patches after each block of
        `at`. None: what the method's own options say (anchor's k + m).
    at: the 0-based block or blocks where tokens leave, between attention and MLP. None: the method's default: spread
        over the depth (every block, every second or every third), half depth for methods with one cut and for anchor's
        k + m.
    keep_average: instead of `keep`, the patches leaving a block averaged over all blocks, solved for.
    schedule: "constant", "linear", "geometric" or "early": how the removal is spread over `at`. None: the method's own.
    mode: "prune"; "analyse" (the encoder runs whole, bit for bit, and the selection is only noted); "fuse" (the feature
        becomes (1 - fuse_weight) * cls + fuse_weight * the selected patches).
    text: (T, E) or (B, T, E) text features, for methods that select by a text.

    In a LLaVA model tokens leave between vision tower and projector (stage 1), or before the decoder layers `at` (stage
    2), or both (`two_stage`); `keep` is what remains of an image's vision tokens, and the handle has `stats`.
    positions: "original" (default) or "renumber", what the tokens that stage 1 keeps count as. See docs/vlm.md.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"attach takes a torch module, not {type(model).__name__}")
    if isinstance(method, str):
        own = inspect.signature(attach).parameters.keys() - {"model", "method", "options"}
        check_option_names(method, options, also=own)  # or one of attach's own, misspelt
        method = make_method(method, **options)
    elif isinstance(method, type):
        raise OptionError(f"method is a name or a Method made already: {method.__name__}(), not the class")
    elif not isinstance(method, Method):
        raise OptionError(f"method is a name or a Method, not {type(method).__name__}")
    elif options:
        raise OptionError(f"options {', '.join(sorted(options))} go with a method's name; this one is made already")
    if mode not in MODES:
        raise OptionError(f"unknown mode {mode!r}.{nearest(str(mode), MODES)}")
    if schedule is not None:
        check_schedule(schedule)
    if not isinstance(fuse_weight, Real) or not 0.0 <= fuse_weight <= 1.0:
        raise OptionError(f"fuse_weight={fuse_weight!r}: a share in [0, 1]")
    if text is not None and not isinstance(text, Tensor):
        raise OptionError(f"text takes features (T, E) of a text tower, not {type(text).__name__}")
    if attachment_of(model) is not None:
        raise UnsupportedModelError("a method is attached to this model already: remove it first")
    from tokensieve.adapters import vlm

    if vlm.is_vlm(model):
        if mode != "prune" or text is not None:
            raise OptionError("a vision-language model takes mode='prune' and no text: the prompt has the question")
        return vlm.attach_vlm(
            model, method, keep=keep, at=at, keep_average=keep_average, schedule=schedule, positions=positions
        )
    if positions is not None:
        raise OptionError("positions: only a vision-language model has positions to renumber")
    if text is not None and not method.reads_text:
        raise OptionError(f"text: {type(method).__name__} does not look at any; cdpruner does")
    tower, family = find_tower(model)
    if "encoder" not in method.stages:
        raise UnsupportedModelError(
            f"{type(method).__name__} works in a vision-language model (LLaVA), at its {' and '.join(method.stages)}; "
            f"{type(model).__name__} is a vision encoder: `tokensieve methods` says which methods work in one"
        )
    if keep is None and keep_average is None:
        keep = method.own_keep()
        if keep is None:
            raise BudgetError("no budget: give keep=0.5 (a ratio), keep=60 (a count) or keep_average=0.5")
        at = at if at is not None else _half(family, tower)
    elif keep is not None and keep_average is not None:
        raise BudgetError("keep and keep_average are two ways to say one thing: give one")
    handle = Attachment(
        model, tower, family, method, keep=keep, keep_average=keep_average, at=_places(at, method, family, tower),
        schedule=schedule or method.schedule, mode=mode, fuse_weight=fuse_weight, text=text,
    )  # fmt: skip
    handle._install()
    return handle


def _half(family: Family, tower: nn.Module) -> int:
    return max(0, len(list(family.blocks(tower).children())) // 2 - 1)


def _places(at: int | Sequence[int] | None, method: Method, family: Family, tower: nn.Module) -> tuple[int, ...]:
    depth = len(list(family.blocks(tower).children()))
    if at is None:
        return (_half(family, tower),) if method.one_cut else tuple(range(0, depth, method.spacing()))
    given = tuple(at) if isinstance(at, Iterable) else (at,)
    if not all(isinstance(place, Integral) and not isinstance(place, bool) for place in given):
        raise OptionError(f"at={at!r}: give a block of 0 to {depth - 1}, or several")
    places = tuple(map(int, given))  # numpy's integers are some too
    for place in places:
        if not 0 <= place < depth:
            raise OptionError(f"at={place}: this encoder has blocks 0 to {depth - 1}")
    if not places or len(set(places)) != len(places):
        raise OptionError(f"at={list(places)}: give each block once, and at least one")
    return tuple(sorted(places))


class Attachment:
    """A method at work in one model. A context manager; `.remove()` puts everything back bit for bit.

    What it shows (`kept`, `scores`, `tokens_per_layer`) is of the last forward.
    """

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
        self.method, self.at, self.keep, self.keep_average = method, at, keep, keep_average
        self.schedule, self.mode, self.fuse_weight, self.text = schedule, mode, fuse_weight, text
        self.tower, self.blocks = tower, family.blocks(tower)
        self.prefix, self.has_cls, self.grid = family.prefix(tower), family.has_cls(tower), family.grid(tower)
        self.pools_patches = family.pools_patches(model, tower)
        blocks = list(self.blocks.children())
        self.depth = len(blocks)
        self.shapes = [family.shape(block) for block in blocks]
        self.rest_macs = family.rest_macs(tower, self.grid[0] * self.grid[1])
        self.family = family
        self.project = family.projector(model, tower)  # patches of the residual stream -> the joint space, if any
        self._feature = family.feature_module(model, tower) if mode == "fuse" else None
        self._before: list[tuple[nn.Module, type]] = []
        self._seen: Run | None = None  # the last forward before the removal
        self.new_run: Callable[[Attachment], Run] = Run  # how a forward goes; otherwise where a selection is trained
        if not 0.0 <= method.proportional <= 2.0:
            raise OptionError(f"proportional={method.proportional!r}: how much of log(size) counts lies in [0, 2]")
        if method.makes() and family.turns(tower) and mode == "prune":
            raise UnsupportedModelError(
                f"{type(method).__name__} makes a token, which has no place in a rotary tower: use evit with fuse=False"
            )
        method.check_encoder(self.depth, self.shapes[0].attention_width)
        if mode == "fuse" and self.project is None:
            raise UnsupportedModelError(f'mode="fuse": {family.name} has no projection for single patches')
        if text is not None and text.dim() not in (2, 3):
            raise OptionError(f"text of shape {tuple(text.shape)}: give features (T, E), or (B, T, E) for each image")
        if text is not None and self.project is None:
            raise UnsupportedModelError(f"text: {family.name} has no joint space for single patches")

    # -- budget ---------------------------------------------------------------------------------------------------

    def counts(self, patches: int) -> dict[int, int]:
        """Patches after the cut of each block of `at`, for an image of so many patches."""

        def floor(n: int) -> int:
            return self.method.floor(n, self.prefix)

        if self.keep_average is not None:
            listed = counts_for_average(patches, self.at, self.depth, self.keep_average, self.schedule, floor)
        else:
            assert self.keep is not None
            listed = counts_for(patches, len(self.at), self.keep, self.schedule, floor)
        return dict(zip(self.at, listed, strict=True))

    @property
    def reduces(self) -> bool:
        """Whether this budget removes anything from an image of the usual size."""
        return self.mode == "prune" and min(self.counts(self.patches).values()) < self.patches

    @property
    def patches(self) -> int:
        """Patches of the usual image."""
        return self.grid[0] * self.grid[1]

    # -- in and out -----------------------------------------------------------------------------------------------

    def _install(self) -> None:
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
                stacklevel=3,
            )
        blocks = list(self.blocks.children())
        for index, block in enumerate(blocks):
            if self._touches(index):
                block.__dict__["_sieve_index"] = index
                self._swap(block, sieved_class(self.family.block_mixin, type(block)))
        self.blocks.__dict__["attachment"] = self
        self.blocks.__dict__["last"] = None
        self._swap(self.blocks, SievedBlocks)
        if self._feature is not None:
            self._feature.__dict__["_sieve_attachment"] = self
            self._swap(self._feature, sieved_class(FusingTower, type(self._feature)))

    def _touches(self, index: int) -> bool:
        """Blocks that must run our way. Where nothing is reduced, none: the model stays as fast as it was."""
        if self.mode == "prune":
            return self.reduces
        return index in self.at or (self.mode == "fuse" and index == self.depth - 1)

    def _swap(self, module: nn.Module, cls: type) -> None:
        self._before.append((module, type(module)))
        module.__class__ = cls

    def remove(self) -> None:
        """Put the model back as it was. Calling it again does nothing. What was seen of the last forward stays."""
        self._seen = self._last_run
        for module, cls in reversed(self._before):
            module.__class__ = cls
            for name in ("_sieve_index", "attachment", "last", "_sieve_attachment"):
                module.__dict__.pop(name, None)
        self._before = []

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # -- what the user asks ---------------------------------------------------------------------------------------

    @property
    def _last_run(self) -> Run | None:
        """The last forward, if there was one."""
        return self.blocks.__dict__.get("last") if self._before else self._seen

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
                origin = run.kept[block]
        return out

    @property
    def sizes(self) -> Tensor | None:
        """(B, K) patches that each remaining token stands for; None where nothing was merged."""
        return self._last.states[self.depth].size if self.reduces else None

    def restore(self, tokens: Tensor) -> Tensor:
        """(B, P+K, D) -> (B, P+N, D), back on the grid: dropped patches 0, merged ones copies of what they went into.

        Tokens that were made (fused, extra) are left out. (B, K, D) without the prefix works alike.
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
        """Tokens that leave each block, prefix and made ones included: of the last forward, before it as planned."""
        run = self._last_run
        if run is not None and len(run.leaving) == self.depth:
            return [run.leaving[i] for i in range(self.depth)]
        counts = self.counts(self.patches) if self.mode == "prune" else {}
        out, current, made = [], self.patches, 0
        for block in range(self.depth):
            if counts.get(block, current) < current:
                current, made = counts[block], self.method.makes()
            out.append(self.prefix + current + made)
        return out

    def cost(self) -> Cost:
        """MACs of one image with and without, the speed-up they make possible, and the tokens for each layer."""
        run = self._last_run
        patches = run.patches if run is not None and run.patches else self.patches
        rest = self.rest_macs * patches // self.patches if self.patches else 0
        cost = encoder_cost(self.shapes, self.prefix + patches, self.tokens_per_layer, rest)
        pooled = run.pooled if run is not None and run.pooled else cost.tokens_per_layer[-1]
        return Cost(
            macs=cost.macs + self.family.pool_macs(self.tower, pooled),
            macs_full=cost.macs_full + self.family.pool_macs(self.tower, self.prefix + patches),
            tokens_per_layer=cost.tokens_per_layer,
        )
