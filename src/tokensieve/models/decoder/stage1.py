"""Stage 1: fewer features between vision tower and projector, and a prompt with as many fewer placeholders.

Imports core, run and stats.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tokensieve.core.reduction import take_tokens
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.models.decoder.forward import Layout, Pass, louder_by, marked_places
from tokensieve.models.decoder.stats import now, timed

if TYPE_CHECKING:
    from tokensieve.models.decoder.handle import VlmAttachment

__all__ = ["Encoded", "Prompt", "encode", "images_of_rows", "inner_tower", "project", "shorten"]


@dataclass
class Encoded:
    """Images as the tower left them, projector still to come: generate encodes before it shows the prompt.

    tokens: (I, P+N, D) of the feature layer; entered: what entered that layer's block, for its attention.
    after: the block that takes `tokens`; None where their layer is not the one before it.
    pooler_output: for each image N times its number. generate repeats the list for beams and counts its lengths.
    """

    tokens: Tensor
    entered: Tensor | None
    block: nn.Module | None
    prefix: int
    has_cls: bool
    depth: float
    seconds: float
    pooler_output: list[Tensor]
    after: nn.Module | None = None

    def ordered(self) -> tuple[Tensor, Tensor | None]:
        """tokens and entered of every image that the prompts ask for, in their order."""
        order = [int(number[0]) for number in self.pooler_output]
        if order == list(range(self.tokens.shape[0])):
            return self.tokens, self.entered
        return self.tokens[order], None if self.entered is None else self.entered[order]


@dataclass
class Prompt:
    """What enters the language model: embeddings (B, L, D), and all that has a place for each of them."""

    embeds: Tensor
    vision: Tensor
    attention: Tensor | None
    positions: Tensor | None


def encode(model: Any, pixels: Tensor, layer: Any = None, strategy: str | None = None, sizes: Any = None) -> Encoded:
    """Run the tower and stop before the projector."""
    config = model.config
    layer = config.vision_feature_layer if layer is None else layer
    strategy = config.vision_feature_select_strategy if strategy is None else strategy
    has_cls = hasattr(inner_tower(model.vision_tower).embeddings, "class_embedding")
    if sizes is not None or (strategy != "default" and has_cls):
        raise UnsupportedModelError(
            f"stage 1 knows images of one size and features without CLS; here: strategy {strategy!r}, sizes {sizes!r}"
        )
    timing = model._sieve_attachment.timing
    start = now(pixels.device, timing)
    states = model.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
    layers = [layer] if isinstance(layer, int) else list(layer)
    tokens = states[layers[0]] if len(layers) == 1 else torch.cat([states[i] for i in layers], dim=-1)
    blocks = vision_blocks(model.vision_tower)
    deepest = max(i % len(states) for i in layers)
    prefix = 1 if strategy == "default" else 0
    number = [torch.full((tokens.shape[1] - prefix,), i) for i in range(tokens.shape[0])]
    return Encoded(
        tokens, states[deepest - 1] if deepest else None, blocks[deepest - 1] if deepest else None, prefix, has_cls,
        deepest / len(blocks), now(pixels.device, timing) - start, number,
        blocks[deepest] if len(layers) == 1 and deepest < len(blocks) else None,
    )  # fmt: skip


def inner_tower(tower: Any) -> Any:
    """The module that owns the embeddings and blocks of a CLIP-like tower, wherever this version puts it."""
    return getattr(tower, "vision_model", tower)


def vision_blocks(tower: Any) -> list[nn.Module]:
    """Its blocks."""
    return list(inner_tower(tower).encoder.layers)


def images_of_rows(vision: Tensor, patches: int, images: int) -> list[int]:
    """How many images each prompt has, from its placeholders (B, L). What does not fit is an error that says so."""
    counts = vision.sum(dim=1).tolist()
    if not sum(counts):
        raise OptionError(f"the prompt has no image placeholder, but {images} image(s) were given")
    if sum(counts) != images * patches or any(count % patches for count in counts):
        raise OptionError(
            f"{images} image(s) of {patches} tokens need {images * patches} image placeholders, the prompts have "
            f"{' + '.join(map(str, counts))}: give each image its own <image>, and each <image> an image"
        )
    return [count // patches for count in counts]


def project(
    run: Pass, model: Any, encoded: Encoded, embeds: Tensor, vision: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(I, K, D) the features that the language model gets, and (I, K) what each stands for, None where nothing was
    averaged; `run` notes which tokens they are."""
    attachment: VlmAttachment = run.attachment
    method = attachment.first
    assert method is not None
    tokens, entered = encoded.ordered()
    prefix, n = encoded.prefix, tokens.shape[1] - encoded.prefix
    keep = attachment.stage1_count(n)
    rows = images_of_rows(vision, n, tokens.shape[0])
    if keep >= n:
        _note(run, torch.arange(n, device=tokens.device).expand(tokens.shape[0], -1), None, rows, n)
        return model.multi_modal_projector(tokens[:, prefix:]), None
    with timed(run.stats, "overhead_seconds", tokens.device, attachment.timing):
        learns = method.differentiable and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            asked = run.asked(vision, valid) if method.reads_text else None
            text, text_valid = _questions(asked, embeds, rows)
            block = encoded.block
            if method.reads_next_layer:
                entered, block = (None if encoded.after is None else tokens), encoded.after
            view = _view(encoded, tokens, entered, block, text, text_valid, model.multi_modal_projector)
            reduction = method.reduce(view, keep)
        if reduction.extra is not None:
            raise OptionError(f"{type(method).__name__} makes extra tokens, which have no place in a prompt")
        out, size = reduction.apply(tokens, prefix)
    run.reductions[-1] = [reduction]
    _note(run, reduction.keep, reduction.scores, rows, n)
    return model.multi_modal_projector(out[:, prefix:]), size


def _questions(asked: Tensor | None, embeds: Tensor, rows: list[int]) -> tuple[Tensor | None, Tensor | None]:
    """(I, T, D) the question's embeddings for each image, and (I, T) which of them are there."""
    if asked is None:
        return None, None
    count = int(asked.sum(dim=1).max())
    if not count:
        warnings.warn("the prompt has no text: the choice of vision tokens goes without a question", stacklevel=2)
        return None, None
    place = marked_places(asked, count)
    row = torch.tensor([row for row, images in enumerate(rows) for _ in range(images)], device=embeds.device)
    return take_tokens(embeds, place)[row], asked.gather(1, place)[row]


def _view(
    encoded: Encoded, tokens: Tensor, entered: Tensor | None, block: Any, text: Tensor | None,
    text_valid: Tensor | None, projector: nn.Module,
) -> TokenView:  # fmt: skip
    """The feature layer's tokens; queries and keys that `block` makes of `entered` are worked out when asked for."""

    def part(name: str, row: int | None) -> Tensor:
        if entered is None:
            raise OptionError("the features are the tower's input, or its output: there is no such layer's attention")
        x = entered if row is None else entered[:, row : row + 1]
        out = getattr(block.self_attn, name)(block.layer_norm1(x))
        return cast(Tensor, out.view(*out.shape[:2], block.self_attn.num_heads, -1).transpose(1, 2))

    return TokenView(
        tokens, lambda row: part("q_proj", row), lambda row: part("k_proj", row),
        scale=1.0 if block is None else float(block.self_attn.scale), prefix=encoded.prefix, has_cls=encoded.has_cls,
        depth=encoded.depth, text=text, text_valid=text_valid, project=projector,
        stage="projector",
    )  # fmt: skip


def _note(run: Pass, keep: Tensor, scores: Tensor | None, rows: list[int], n: int) -> None:
    """What stage 1 kept, as numbers among each prompt's vision tokens: image i of a prompt starts at i * N."""
    widest, k = max(rows), keep.shape[1]
    kept = torch.full((len(rows), widest * k), -1, dtype=torch.int64, device=keep.device)
    noted = torch.full((len(rows), widest * n), torch.nan, device=keep.device)
    first = 0
    for row, images in enumerate(rows):
        for i in range(images):
            kept[row, i * k : (i + 1) * k] = keep[first + i] + i * n
            if scores is not None:
                noted[row, i * n : (i + 1) * n] = scores[first + i].detach().float()
        first += images
    run.kept[-1] = kept
    if scores is not None:
        run.scores[-1] = noted


def shorten(
    run: Pass, prompt: Prompt, features: Tensor, size: Tensor | None, rows: list[int], patches: int, renumber: bool
) -> Prompt:
    """Take the placeholders out of the prompt that stage 1 left no feature for, and put the features in.

    Rows with fewer images lose fewer: the others are filled up with tokens that nothing sees. Sets run.layout.
    """
    vision, length = prompt.vision, prompt.vision.shape[1]
    kept = run.kept[-1]
    k = features.shape[1]
    origin = (vision.cumsum(dim=1) - 1).clamp_min(0)
    stays = torch.zeros(vision.shape[0], max(rows) * patches + 1, dtype=torch.bool, device=vision.device)
    stays = stays.scatter(1, kept.masked_fill(kept < 0, max(rows) * patches), True)
    keep = ~vision | stays.gather(1, origin)
    each = [length - images * (patches - k) for images in rows]
    index = marked_places(keep, max(each))
    real = keep.gather(1, index)
    left = vision.gather(1, index) & real
    embeds = take_tokens(prompt.embeds, index)
    embeds = embeds.masked_scatter(left.unsqueeze(-1), features.to(embeds.dtype))
    attention = prompt.attention
    attention = real.long() if attention is None else attention.gather(1, index) * real
    assert prompt.positions is not None
    positions = prompt.positions.expand(vision.shape[0], -1)
    if renumber:
        positions = positions - (~keep).cumsum(dim=1)
    run.layout = Layout(
        vision=left, origin=origin.gather(1, index), left=[images * k for images in rows], place=index,
        gaps=not renumber,
    )  # fmt: skip
    if size is not None:
        assert run.attachment.first is not None
        run.layout.size = torch.ones(left.shape, device=left.device).masked_scatter(left, size.float())
        run.layout.louder = louder_by(run.attachment.first, run.layout.size)
    return Prompt(embeds, left, attention, positions.gather(1, index))
