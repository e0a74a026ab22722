"""attach(model, method, ...) and the handle it returns. Imports engine, families and methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn

from tokensieve.core.budget import Keep, check_schedule
from tokensieve.errors import BudgetError, OptionError, UnsupportedModelError, nearest
from tokensieve.methods.base import Method
from tokensieve.methods.registry import check_option_names, make_method
from tokensieve.models.encoder.run import SievedBlocks
from tokensieve.models.families.base import Family
from tokensieve.models.families.openclip import OpenClipFamily
from tokensieve.models.families.timm import TimmFamily
from tokensieve.models.families.transformers import ClipFamily, Dinov2Family
from tokensieve.models.handle import MODES, Attachment, Mode

__all__ = ["FAMILIES", "Attachment", "attach", "attachment_of", "find_tower"]

FAMILIES: tuple[Family, ...] = (OpenClipFamily(), TimmFamily(), ClipFamily(), Dinov2Family())
_ROOMS = ("module", "_orig_mod", "visual", "trunk", "vision_model", "dinov2", "dinov2_with_registers", "base_model")


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
    from tokensieve.models import decoder as vlm

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
