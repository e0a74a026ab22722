"""Stage 1: fewer vision tokens before the language model, and a prompt that is as much shorter.

Which image fills which places of which prompt, what the method keeps of each, and what belongs to the tokens that stay.
Imports forward and stats.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokensieve.core.reduction import take_tokens
from tokensieve.errors import OptionError
from tokensieve.models.decoder.forward import Pass, key_bias_of, marked_places
from tokensieve.models.decoder.stats import timed
from tokensieve.models.families.vlm.base import Encoded

if TYPE_CHECKING:
    from tokensieve.models.decoder.handle import VlmAttachment

__all__ = ["Images", "choose", "images_of", "tile_groups"]


@dataclass
class Images:
    """Which image fills which places. Everything is by modality ("image", "video").

    masks: (B, L) bool placeholders. lengths: tokens of each image. rows: the prompt that each image is in.
    """

    masks: dict[str, Tensor]
    lengths: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)

    @property
    def vision(self) -> Tensor:
        """(B, L) bool: all placeholders."""
        masks = list(self.masks.values())
        found = masks[0]
        for mask in masks[1:]:
            found = found | mask
        return found

    def of_rows(self) -> list[list[int]]:
        """For each prompt the lengths of its images."""
        found: list[list[int]] = [[] for _ in range(self.vision.shape[0])]
        for modality, rows in self.rows.items():
            for row, length in zip(rows, self.lengths[modality], strict=True):
                found[row].append(length)
        return found

    def spread(self, modality: str, values: list[Tensor], empty: Tensor) -> Tensor:
        """One (n,) for each image of a modality -> (B, L), `empty` where none of them stands."""
        return empty.masked_scatter(self.masks[modality], torch.cat(values).to(empty.dtype))


def images_of(masks: dict[str, Tensor], lengths: dict[str, list[int]]) -> Images:
    """Match images to placeholders, in order. What does not fit is an error that says so."""
    found = Images(masks, lengths)
    for modality, own in lengths.items():
        counts = masks[modality].sum(dim=1).tolist()
        if not sum(counts):
            raise OptionError(f"the prompt has no {modality} placeholder, but {len(own)} {modality}(s) were given")
        rows, row, room, fits = [], 0, counts[0], sum(counts) == sum(own)
        for length in own:
            while fits and not room and row + 1 < len(counts):
                row, room = row + 1, counts[row + 1]
            room -= length
            fits = fits and room >= 0
            rows.append(row)
        if not fits:
            each = f" of {own[0]} tokens" if len(set(own)) == 1 else f" of {', '.join(map(str, own))} tokens"
            raise OptionError(
                f"{len(own)} {modality}(s){each} need {sum(own)} {modality} placeholders, the prompts have "
                f"{' + '.join(map(str, counts))}: give each {modality} its own <{modality}>, and each <{modality}> "
                f"{'an image' if modality == 'image' else 'a video'}"
            )
        found.rows[modality] = rows
    return found


def tile_groups(mask: Tensor, lengths: list[int]) -> list[list[int]]:
    """Tiles that fill one run of placeholders in mask (B, L) are an image: for each, their places in `lengths`."""
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    run = starts.flatten().cumsum(0)[mask.flatten()]
    runs = torch.bincount(run)[1:].tolist() if len(run) else []
    groups: list[list[int]] = []
    place = 0
    for room in runs:
        group = []
        while room > 0 and place < len(lengths):
            group.append(place)
            room, place = room - lengths[place], place + 1
        groups.append(group)
    whole = all(sum(lengths[p] for p in group) == room for group, room in zip(groups, runs, strict=True))
    return groups if whole and place == len(lengths) else [[p] for p in range(len(lengths))]


@dataclass
class _Chosen:
    """Of one image: (n,) which tokens stay, (n, E) features with zeros for the others, (n,) scores, (n,) sizes."""

    stays: Tensor
    features: Tensor
    scores: Tensor | None
    size: Tensor | None


def choose(
    run: Pass, images: Images, encoded: dict[str, Encoded], embeds: Tensor, valid: Tensor | None
) -> dict[str, Any]:
    """Let the method choose among the tokens of each image: what the model's own code is to put into the prompt, zeros
    where nothing stays. `run` notes what stays: `stays`, `kept`, `scores`, and sizes in its layout."""
    attachment: VlmAttachment = run.attachment
    method = attachment.first
    assert method is not None
    outputs: dict[str, Any] = {}
    found: dict[str, list[_Chosen]] = {}
    run.reductions[-1] = []
    with timed(run.stats, "overhead_seconds", embeds.device, attachment.timing):
        asked = run.asked(images.vision, valid) if method.reads_text else None
        counts = _counts(run, images, encoded)
        if attachment.max_tokens is not None and attachment.share == "score":
            tried = {m: _of_modality(run, own, images.rows[m], counts[m], asked, embeds) for m, own in encoded.items()}
            counts = _counts(run, images, encoded, _weights(run, images, tried))
            run.reductions[-1] = []
        for modality, own in encoded.items():
            found[modality] = _of_modality(run, own, images.rows[modality], counts[modality], asked, embeds)
            outputs[modality] = own.output([chosen.features for chosen in found[modality]])
    if not run.reductions[-1]:
        del run.reductions[-1]
    _note(run, images, found)
    return outputs


def _choosable(encoded: Encoded, image: int) -> int:
    """How many tokens of an image a method chooses among."""
    allowed = encoded.choosable(image)
    return encoded.lengths[image] if allowed is None else int(allowed.sum())


def _counts(
    run: Pass, images: Images, encoded: dict[str, Encoded], weights: dict[str, list[float]] | None = None
) -> dict[str, list[int]]:
    """What each image keeps; those of one prompt share its cap, by size or by weights."""
    found: dict[str, list[int]] = {modality: [0] * len(own.order()) for modality, own in encoded.items()}
    for row in range(images.vision.shape[0]):
        here = [(m, i) for m, rows in images.rows.items() for i, own_row in enumerate(rows) if own_row == row]
        sizes = [_choosable(encoded[m], encoded[m].order()[i]) for m, i in here]
        shares = None if weights is None else [weights[m][i] for m, i in here]
        for (m, i), count in zip(here, run.attachment.stage1_counts(sizes, shares), strict=True):
            found[m][i] = count
    return found


def _weights(run: Pass, images: Images, tried: dict[str, list[_Chosen]]) -> dict[str, list[float]]:
    """How many tokens of each image are among the best of its prompt, as many as the cap allows. A token is as good as
    its score is above the mean of its image, in standard deviations: attention sums to one in each image."""
    cap, weights = run.attachment.max_tokens, {m: [0.0] * len(own) for m, own in tried.items()}
    assert cap is not None
    for row in range(images.vision.shape[0]):
        here = [(m, i) for m, rows in images.rows.items() for i, own_row in enumerate(rows) if own_row == row]
        if len(here) < 2:
            continue
        scores, owner = [], []
        for number, (m, i) in enumerate(here):
            found = tried[m][i].scores
            if found is None:
                raise OptionError('share="score": this method has no scores, or keeps all of an image; give "size"')
            found = found[~found.isnan()]
            scores.append((found - found.mean()) / found.std().clamp_min(1e-12))
            owner.append(torch.full((len(found),), number))
        best = torch.cat(scores).topk(min(cap, sum(map(len, scores)))).indices.cpu()
        for number, count in enumerate(torch.bincount(torch.cat(owner)[best], minlength=len(here)).tolist()):
            m, i = here[number]
            weights[m][i] = float(count)
    return weights


def _of_modality(
    run: Pass, encoded: Encoded, rows: list[int], counts: list[int], asked: Tensor | None, embeds: Tensor
) -> list[_Chosen]:
    """Images of equally many tokens, and as many to keep, are chosen among together."""
    order = encoded.order()
    groups: dict[tuple[int, int], list[int]] = {}
    for place, image in enumerate(order):
        n = _choosable(encoded, image)
        groups.setdefault((n, min(n, counts[place])), []).append(place)
    chosen: dict[int, _Chosen] = {}
    for (n, keep), places in groups.items():
        text, valid = _questions(asked, embeds, [rows[place] for place in places]) if keep < n else (None, None)
        chosen |= dict(
            zip(places, _of_group(run, encoded, [order[p] for p in places], n, keep, text, valid), strict=True)
        )
    return [chosen[place] for place in range(len(order))]


def _of_group(
    run: Pass, encoded: Encoded, images: list[int], n: int, keep: int, text: Tensor | None, valid: Tensor | None
) -> list[_Chosen]:
    method = run.attachment.first
    assert method is not None
    view = encoded.view(images, text, valid, method.reads_next_layer and keep < n)
    scores = size = None
    if keep >= n:
        index = torch.arange(n, device=view.tokens.device).expand(len(images), -1)
        features = encoded.features(view.x)
    else:
        learns = method.differentiable and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            reduction = method.reduce(view, keep)
        if reduction.extra is not None:
            raise OptionError(f"{type(method).__name__} makes extra tokens, which have no place in a prompt")
        out, size = reduction.apply(view.tokens, view.prefix)
        features = encoded.features(out[:, view.prefix :])
        index, scores = reduction.keep, reduction.scores
        run.reductions[-1].append(reduction)
    return [
        _placed(encoded, image, n, index[i], features[i], None if scores is None else scores[i].detach().float(),
                None if size is None else size[i])
        for i, image in enumerate(images)
    ]  # fmt: skip


def _placed(
    encoded: Encoded, image: int, n: int, index: Tensor, features: Tensor, scores: Tensor | None, size: Tensor | None
) -> _Chosen:
    """What a method left of one image's choosable tokens, among all its tokens."""
    allowed, device = encoded.choosable(image), features.device
    whole = encoded.lengths[image]
    numbers = torch.arange(n, device=device) if allowed is None else allowed.nonzero().flatten().to(device)
    place = numbers[index]
    chosen = torch.zeros(whole, dtype=torch.bool, device=device).index_fill(0, place, True)
    stays = encoded.follows(image, chosen)
    spread = encoded.blank(image, features).index_copy(0, place, features)
    noted = weights = None
    if scores is not None:
        noted = torch.full((whole,), torch.nan, device=device).index_copy(0, numbers, scores)
    if size is not None:
        weights = torch.ones(whole, device=device).index_copy(0, place, size.float())
    return _Chosen(stays, spread, noted, weights)


def _questions(asked: Tensor | None, embeds: Tensor, rows: list[int]) -> tuple[Tensor | None, Tensor | None]:
    """(I, T, D) the question's embeddings for each image, and (I, T) which of them are there."""
    if asked is None:
        return None, None
    count = int(asked.sum(dim=1).max())
    if not count:
        warnings.warn("the prompt has no text: the choice of vision tokens goes without a question", stacklevel=2)
        return None, None
    place = marked_places(asked, count)
    row = torch.tensor(rows, device=embeds.device)
    return take_tokens(embeds, place)[row], asked.gather(1, place)[row]


def _note(run: Pass, images: Images, found: dict[str, list[_Chosen]]) -> None:
    """What stage 1 kept, as numbers among each prompt's vision tokens."""
    vision = images.vision
    origin = (vision.cumsum(dim=1) - 1).clamp_min(0)
    stays = torch.zeros_like(vision)
    size = torch.ones(vision.shape, device=vision.device)
    scores = torch.full(vision.shape, torch.nan, device=vision.device)
    scored = sized = False
    for modality, chosen in found.items():
        stays = images.spread(modality, [c.stays for c in chosen], stays)
        if any(c.size is not None for c in chosen):
            ones = [torch.ones(len(c.stays), device=vision.device) if c.size is None else c.size for c in chosen]
            size, sized = images.spread(modality, ones, size), True
        if any(c.scores is not None for c in chosen):
            blank = [torch.full((len(c.stays),), torch.nan, device=vision.device) for c in chosen]
            noted = [b if c.scores is None else c.scores for b, c in zip(blank, chosen, strict=True)]
            scores, scored = images.spread(modality, noted, scores), True
    run.stays = stays
    counts = stays.sum(dim=1).tolist()
    place = marked_places(stays, max(counts))
    run.kept[-1] = origin.gather(1, place).masked_fill(~stays.gather(1, place), -1)
    if scored:
        place = marked_places(vision, int(vision.sum(dim=1).max()))
        run.scores[-1] = scores.gather(1, place).masked_fill(~vision.gather(1, place), torch.nan)
    if sized:
        assert run.attachment.first is not None
        run.layout.size, run.layout.key_bias = size, key_bias_of(run.attachment.first, size)
