"""attach(model, method, ...): check what is asked, find the tower, change it. Imports handles, families and methods."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

from tokensieve.core.budget import Keep, check_schedule
from tokensieve.errors import OptionError, UnsupportedModelError, nearest
from tokensieve.methods.base import Method
from tokensieve.methods.registry import check_option_names, make_method
from tokensieve.models.encoder.handle import EncoderHandle
from tokensieve.models.encoder.run import SievedBlocks
from tokensieve.models.families.base import Family
from tokensieve.models.families.registry import families
from tokensieve.models.handle import MODES, Attachment, Handle, Mode, listed_places
from tokensieve.models.wrappers import unwrapped

__all__ = ["Attachment", "attach", "attach_encoder", "attachment_of", "find_tower"]

_ROOMS = (
    "module", "_orig_mod", "visual", "trunk", "vision_model", "image_model", "dinov2", "dinov2_with_registers",
    "base_model", "backbone", "clip", "encoder", "transformer",
)  # fmt: skip


def find_tower(model: nn.Module) -> tuple[nn.Module, Family]:
    """The vision tower inside a model, and its family. An unknown one is an error that says what is known."""
    queue = [unwrapped(model)]
    for module in queue:
        for family in families():
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
        + f". Supported: {'; '.join(f.name for f in families())}. ResNet, ConvNeXt and Swin have no such sequence."
    )


def attachment_of(model: nn.Module) -> Handle | None:
    """The handle of a model that has one (also of its copies), else None."""
    for module in model.modules():
        found = module.__dict__.get("_sieve_attachment")  # of a vision-language model, or of one in mode="fuse"
        if isinstance(found, Handle):
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
    max_tokens: int | None = None,
    share: str | None = None,
    **options: Any,
) -> Handle:
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

    In a vision-language model tokens leave before the language model (stage 1), or before its layers `at` (stage 2), or
    both (`two_stage`); `keep` is what remains of each image's tokens, whatever its size; the handle has `stats`.
    positions: "original" (default) or "renumber", what the tokens that stage 1 keeps count as. See docs/vlm.md.
    max_tokens: the most vision tokens that a prompt keeps. share: its images share them by "size" (default) or "score".
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"attach takes a torch module, not {type(model).__name__}")
    made = _made(method, options)
    _check_request(mode, schedule, fuse_weight, text)
    if attachment_of(model) is not None:
        raise UnsupportedModelError("a method is attached to this model already: remove it first")
    from tokensieve.models import decoder as vlm

    if vlm.is_vlm(model):
        if mode != "prune" or text is not None:
            raise OptionError("a vision-language model takes mode='prune' and no text: the prompt has the question")
        return vlm.attach_vlm(
            model, made, keep=keep, at=at, keep_average=keep_average, schedule=schedule, positions=positions,
            max_tokens=max_tokens, share=share,
        )  # fmt: skip
    if max_tokens is not None or share is not None:
        raise OptionError("max_tokens and share: only a vision-language model has prompts of several images")
    if positions is not None:
        raise OptionError("positions: only a vision-language model has positions to renumber")
    return attach_encoder(
        model, made, keep=keep, at=at, keep_average=keep_average, schedule=schedule, mode=mode,
        fuse_weight=fuse_weight, text=text,
    )  # fmt: skip


def attach_encoder(
    model: nn.Module,
    method: Method,
    *,
    keep: Keep | None,
    at: int | Sequence[int] | None = None,
    keep_average: int | float | None = None,
    schedule: str | None = None,
    mode: Mode = "prune",
    fuse_weight: float = 0.2,
    text: Tensor | None = None,
) -> EncoderHandle:
    """`attach` for a model whose vision encoder is reduced: see there."""
    if text is not None and not method.reads_text:
        raise OptionError(f"text: {type(method).__name__} does not look at any; cdpruner does")
    tower, family = find_tower(model)
    if "encoder" not in method.stages:
        raise UnsupportedModelError(
            f"{type(method).__name__} works in a vision-language model (LLaVA), at its {' and '.join(method.stages)}; "
            f"{type(model).__name__} is a vision encoder: `tokensieve methods` says which methods work in one"
        )
    depth = len(list(family.blocks(tower).children()))
    if at is None and keep is None and keep_average is None:
        at = _half(depth)  # a budget of the method's own is one cut
    handle = EncoderHandle(
        unwrapped(model), tower, family, method, keep=keep, keep_average=keep_average, at=_places(at, method, depth),
        schedule=schedule or method.schedule, mode=mode, fuse_weight=fuse_weight, text=text,
    )  # fmt: skip
    handle.install()
    return handle


def _made(method: str | Method, options: dict[str, Any]) -> Method:
    """The method, made if it was named."""
    if isinstance(method, str):
        own = inspect.signature(attach).parameters.keys() - {"model", "method", "options"}
        check_option_names(method, options, also=own)  # or one of attach's own, misspelt
        return make_method(method, **options)
    if isinstance(method, type):
        raise OptionError(f"method is a name or a Method made already: {method.__name__}(), not the class")
    if not isinstance(method, Method):
        raise OptionError(f"method is a name or a Method, not {type(method).__name__}")
    if options:
        raise OptionError(f"options {', '.join(sorted(options))} go with a method's name; this one is made already")
    return method


def _check_request(mode: str, schedule: str | None, fuse_weight: float, text: object) -> None:
    """Raise where an argument is of the wrong kind, whatever the model is."""
    if mode not in MODES:
        raise OptionError(f"unknown mode {mode!r}.{nearest(str(mode), MODES)}")
    if schedule is not None:
        check_schedule(schedule)
    if not isinstance(fuse_weight, Real) or not 0.0 <= fuse_weight <= 1.0:
        raise OptionError(f"fuse_weight={fuse_weight!r}: a share in [0, 1]")
    if text is not None and not isinstance(text, Tensor):
        raise OptionError(f"text takes features (T, E) of a text tower, not {type(text).__name__}")
    if isinstance(text, Tensor) and not text.is_meta and not bool(text.isfinite().all()):
        raise OptionError("text has NaN or infinite features")


def _half(depth: int) -> int:
    return max(0, depth // 2 - 1)


def _places(at: int | Sequence[int] | None, method: Method, depth: int) -> tuple[int, ...]:
    """The blocks where tokens leave, ascending."""
    if at is None:
        return method.blocks(depth)
    places = listed_places(at, f"give a block of 0 to {depth - 1}, or several")
    for place in places:
        if not 0 <= place < depth:
            raise OptionError(f"at={place}: this encoder has blocks 0 to {depth - 1}")
    if not places or len(set(places)) != len(places):
        raise OptionError(f"at={list(places)}: give each block once, and at least one")
    return tuple(sorted(places))
