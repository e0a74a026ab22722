"""What the instances of a vision-language model become while attached: mixins put in front of their own classes.

`SievedGenerator` has the head: it opens the `Pass`, takes the time and aligns labels. `SievedModel` encodes images,
lets stage 1 choose, and gives the model's own code a prompt of full length with zeros where nothing stays. `SievedText`
is the language model: it takes those places out of the sequence, its positions and its mask. Imports stage1 and memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tokensieve.core.reduction import take_tokens
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.models.decoder.forward import Layout, Pass, marked_places
from tokensieve.models.decoder.memory import Memory, join_keys, past_length
from tokensieve.models.decoder.stage1 import Images, choose, images_of, tile_groups
from tokensieve.models.decoder.stats import Stats, now
from tokensieve.models.families.vlm.base import Encoded

if TYPE_CHECKING:
    from tokensieve.models.decoder.handle import VlmAttachment

__all__ = ["SievedGenerator", "SievedModel", "SievedText"]


class _Signed:
    """A mixin whose `forward(**given)` looks like that of the class behind it: transformers reads signatures."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if len(cls.__bases__) == 2 and issubclass(cls.__bases__[0], _Signed):
            mixin, base = cls.__bases__
            cls.forward = _signed(mixin.forward, base.forward)  # type: ignore[attr-defined]


def _signed(mine: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    names = [name for name in inspect.signature(own).parameters if name != "self"]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mine(self, dict(zip(names, args, strict=False)) | kwargs)

    return forward


class SievedText(_Signed):
    """The language model: where stage 1 left less, its sequence is shortened before its first layer."""

    if TYPE_CHECKING:
        _sieve_attachment: VlmAttachment

    def forward(self, given: dict[str, Any]) -> Any:
        run: Pass | None = given.get("sieve")
        embeds = given.get("inputs_embeds")
        if run is None or embeds is None:
            raise UnsupportedModelError(
                "the language model of a reduced model was called by itself: call the whole model, or remove this"
            )
        run.layout.streams = self._sieve_streams(given, embeds)
        self._sieve_place(run, given, embeds)
        if run.stays is not None:
            self._sieve_shorten(run, given)
        return cast(nn.Module, super()).forward(**given)

    @staticmethod
    def _sieve_place(run: Pass, given: dict[str, Any], embeds: Tensor) -> None:
        """Note how long the sequence is and where its positions end; where an earlier turn lost tokens, give them."""
        cache, positions = given.get("past_key_values"), given.get("position_ids")
        run.length = embeds.shape[1]
        run.columns = run.memory.columns(cache) + run.length
        if run.following is not None:  # a decoding step: known already
            return
        if positions is None:
            first = run.memory.next(cache)
            if first is not None:
                here = torch.arange(run.length, device=embeds.device)
                given["position_ids"] = positions = (first + here).expand(embeds.shape[0], -1)
        if positions is None:
            run.following = torch.full((1, 1), run.columns, device=embeds.device)
            return
        latest = positions if positions.dim() == 2 else positions[-3:].amax(dim=0)
        run.following = latest.amax(dim=1, keepdim=True) + 1

    @staticmethod
    def _sieve_streams(given: dict[str, Any], embeds: Tensor) -> list[Tensor]:
        """(B, L, D) for each of the first layers: the features that the tower adds to the visual places after it."""
        features, mask = given.pop("deepstack_visual_embeds", None), given.pop("visual_pos_masks", None)
        if features is None or mask is None:
            return []
        where = mask.to(embeds.device).unsqueeze(-1)
        return [torch.zeros_like(embeds).masked_scatter(where, part.to(embeds)) for part in features]

    def _sieve_shorten(self, run: Pass, given: dict[str, Any]) -> None:
        """Gather all that has a place for each token of the prompt. Rows that lose more are filled up with tokens that
        nothing sees."""
        at, embeds, cache = run.layout, given["inputs_embeds"], given.get("past_key_values")
        assert at.vision is not None
        assert run.stays is not None
        keep = ~at.vision | run.stays
        counts = keep.sum(dim=1).tolist()
        index = marked_places(keep, max(counts))
        real = keep.gather(1, index)
        valid = real if at.valid is None else at.valid.gather(1, index) & real
        positions, before = given.get("position_ids"), past_length(cache, 0)
        if positions is None:
            positions = run.columns - run.length + torch.arange(run.length, device=embeds.device).unsqueeze(0)
        renumber = self._sieve_attachment.positions == "renumber"
        if renumber:
            earlier = 0 if run.memory.shift is None else run.memory.shift
            gone = (~keep).cumsum(dim=1)
            positions = positions - gone - earlier
            run.memory.shift = gone[:, -1:] + earlier
        shape = (*positions.shape[:-2], embeds.shape[0], embeds.shape[1])
        given["position_ids"] = positions.expand(shape).gather(-1, index.expand(*shape[:-1], -1))
        given["inputs_embeds"] = take_tokens(embeds, index)
        at.valid = None if bool(valid.all()) else valid
        at.vision, at.place, at.gaps = at.vision.gather(1, index) & real, index, not renumber
        at.streams = [take_tokens(stream, index) for stream in at.streams]
        for name in ("origin", "size", "key_bias", "blocks"):
            found = getattr(at, name)
            setattr(at, name, None if found is None else found.gather(1, index))
        length, mask = index.shape[1], given.get("attention_mask")
        at.own_mask = isinstance(mask, dict) or (mask is not None and mask.dim() == 4)
        at.own_mask = at.own_mask or at.blocks is not None or self._sieve_attachment.windowed
        if isinstance(mask, dict):
            given["attention_mask"] = dict.fromkeys(mask)
            return
        whole = join_keys(run.memory.valid.get(0), at.valid, len(counts), before, length, embeds, True)
        if whole is None:  # said even so: positions with gaps and no mask look like packed sequences
            whole = torch.ones(len(counts), before + length, dtype=torch.bool, device=embeds.device)
        given["attention_mask"] = whole.long()


class SievedModel(_Signed):
    """The model without its head."""

    if TYPE_CHECKING:
        _sieve_attachment: VlmAttachment
        config: Any

    def forward(self, given: dict[str, Any]) -> Any:
        attachment = self._sieve_attachment
        run: Pass = given.pop("sieve", None) or attachment.new_pass(attachment)
        cache, mask = given.get("past_key_values"), given.get("attention_mask")
        outputs = {m: found for m, found in (given.get("mm_encoder_outputs") or {}).items() if found is not None}
        seen = bool(outputs) or any(given.get(name) is not None for name in attachment.family.pixels.values())
        known = Memory.of(cache)
        run.prefill = known is None or seen
        run.memory = known or run.memory
        if run.prefill:
            run.memory.stats = Stats(batch=_length(given, 0))
            attachment.last = run
        if mask is not None and (isinstance(mask, dict) or mask.dim() != 2):
            raise UnsupportedModelError("a reduced model takes a 2D attention mask")
        if seen:
            self._sieve_images(run, given, outputs)
        else:
            self._sieve_text(run, given, cache, known)
        out = cast(nn.Module, super()).forward(**given, sieve=run)
        if run.prefill and cache is None:
            cache = getattr(out, "past_key_values", None)
        run.close(cache)
        if cache is not None:
            run.stats.count_cache(cache)
        return out

    # -- text alone, and decoding steps ---------------------------------------------------------------------------

    def _sieve_text(self, run: Pass, given: dict[str, Any], cache: Any, known: Memory | None) -> None:
        """No image in this call: nothing is reduced; but mask and positions must fit what the cache holds."""
        if known is None:
            for modality, places in self._sieve_placeholders(given).items():
                self._sieve_attachment.check_absent(modality, places)
            run.layout = Layout(valid=_validity(given.get("attention_mask"), past_length(cache, 0), run, cache))
            run.stats.text_of_prompts = _lengths(_any_tensor(given), run.layout.valid)
            return
        here, before = _length(given, 1), past_length(cache, 0)
        mask = given.get("attention_mask")
        new = None if mask is None else mask[:, -here:].bool()
        # a single new token is one that was just written: asking whether it counts would wait for the device
        if new is not None and (here == 1 or bool(new.all())):
            new = None
        run.layout = Layout(valid=new)
        joined = join_keys(known.valid.get(0), new, _length(given, 0), before, here, _any_tensor(given), True)
        if joined is not None:
            given["attention_mask"] = joined.long()
        elif mask is not None and mask.shape[1] != before + here:
            given["attention_mask"] = torch.ones(mask.shape[0], before + here, dtype=mask.dtype, device=mask.device)
        first = known.next(cache)
        self._sieve_positions(given, known, first, here)
        if first is not None:
            run.following = first + here

    def _sieve_positions(self, given: dict[str, Any], known: Memory, first: Tensor | None, here: int) -> None:
        """Positions go on where the prompt ended, not where a shortened cache does."""
        if first is None:
            return
        positions = given.get("position_ids")
        if positions is None:
            batch = _length(given, 0)
            positions = (first + torch.arange(here, device=first.device)).expand(batch, -1)
        elif here == 1:
            positions = torch.maximum(positions, first)
        elif bool((positions[..., :1] < first).any()):
            raise OptionError(
                "these tokens were seen already: after stage 1 the cache is shorter than the prompt, so give only the "
                "new tokens (with the whole attention_mask)"
            )
        given["position_ids"] = positions if known.shift is None else positions - known.shift

    # -- prompts with images --------------------------------------------------------------------------------------

    def _sieve_placeholders(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """For each modality (B, L) bool: where the prompt has placeholders."""
        family, found = self._sieve_attachment.family, {}
        for modality in family.pixels:
            token = family.token_id(self, modality)
            if given.get("input_ids") is not None:
                found[modality] = given["input_ids"] == token
                continue
            table = cast(Any, self).get_input_embeddings()
            mark = table(torch.tensor(token, device=given["inputs_embeds"].device))
            found[modality] = (given["inputs_embeds"] == mark).all(dim=-1)
        return found

    def _sieve_images(self, run: Pass, given: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Encode what is not encoded yet, find the places of each image, and let stage 1 choose."""
        attachment, cache = self._sieve_attachment, given.get("past_key_values")
        family, first = attachment.family, attachment.first
        device, timing = _any_tensor(given).device, attachment.timing
        start = now(device, timing)
        for modality, name in family.pixels.items():
            if given.get(name) is not None and modality not in outputs:
                work = family.own_features if first is None else family.encode
                outputs[modality] = work(self, modality, given)
            given.pop(name, None)
        run.stats.vision_seconds += now(device, timing) - start
        run.stats.vision_seconds += sum(getattr(output, "sieve_seconds", 0.0) for output in outputs.values())
        if first is not None and not all(isinstance(output, Encoded) for output in outputs.values()):
            raise OptionError("stage 1 needs pixel_values: these image features have passed the projector already")
        masks = self._sieve_placeholders(given)
        lengths = {modality: _image_lengths(family, output) for modality, output in outputs.items()}
        used = {family.token_id(self, modality) for modality in outputs}
        for modality in [m for m in masks if m not in outputs]:
            mask = masks.pop(modality)
            if family.token_id(self, modality) not in used:
                attachment.check_absent(modality, mask, warn=False)
        if family.joins_tiles:
            for modality, output in outputs.items():
                groups = tile_groups(masks[modality], lengths[modality])
                lengths[modality] = [sum(lengths[modality][tile] for tile in group) for group in groups]
                outputs[modality] = output.joined(groups) if isinstance(output, Encoded) else output
        images = images_of(masks, lengths)
        vision = images.vision
        valid = _validity(given.get("attention_mask"), past_length(cache, 0), run, cache)
        run.layout = Layout(
            vision=vision,
            origin=(vision.cumsum(dim=1) - 1).clamp_min(0),
            valid=valid,
            blocks=family.blocks(self, given),
        )
        if first is not None:
            table = cast(Any, self).get_input_embeddings()
            embeds = given["inputs_embeds"] if given.get("inputs_embeds") is not None else table(given["input_ids"])
            outputs = choose(run, images, outputs, embeds, valid)
        given["mm_encoder_outputs"] = outputs
        self._sieve_counts(run, images, _lengths(vision, valid))

    def _sieve_counts(self, run: Pass, images: Images, lengths: list[int]) -> None:
        """What each prompt may keep, and what it has."""
        attachment, stats, vision = self._sieve_attachment, run.stats, images.vision
        of_rows = images.of_rows()
        totals = vision.sum(dim=1).tolist()
        run.layout.left = totals if run.stays is None else cast("list[int]", run.stays.sum(dim=1).tolist())
        run.layout.counts = [
            attachment.stage2_counts(total, enters, len(own))
            for total, enters, own in zip(totals, run.layout.left, of_rows, strict=True)
        ]
        stats.images = sum(len(own) for own in of_rows)
        stats.vision_of_prompts = totals
        stats.text_of_prompts = [length - total for length, total in zip(lengths, totals, strict=True)]


def _image_lengths(family: Any, output: Any) -> list[int]:
    return [len(number) for number in output.pooler_output] if isinstance(output, Encoded) else family.lengths(output)


def _length(given: dict[str, Any], axis: int) -> int:
    return int(_any_tensor(given).shape[axis])


def _lengths(like: Tensor, valid: Tensor | None) -> list[int]:
    """How many tokens of each row count. like: (B, L, ...)."""
    return [like.shape[1]] * like.shape[0] if valid is None else cast("list[int]", valid.sum(dim=1).tolist())


def _any_tensor(given: dict[str, Any]) -> Tensor:
    found = given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
    if found is None:
        raise OptionError("give input_ids or inputs_embeds")
    return cast(Tensor, found)


def _validity(mask: Tensor | None, before: int, run: Pass, cache: Any) -> Tensor | None:
    """(B, L) which of the new tokens count, None where all do. Of a foreign cache's keys the mask speaks too."""
    if mask is None:
        return None
    valid = mask.bool()
    past, new = valid[:, :before], valid[:, before:]
    if before and 0 not in run.memory.valid and not bool(past.all()):
        run.memory.valid = dict.fromkeys((0, *run.attachment.at), past)
    return None if bool(new.all()) else new


class SievedGenerator(_Signed):
    """The model with its head: takes the time, aligns labels, and encodes images for `generate`."""

    if TYPE_CHECKING:
        _sieve_attachment: VlmAttachment
        model: Any
        config: Any
        loss_function: Any

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """`generate` encodes before the prefill. With a stage 1 the projector has to wait until the prompt is there."""
        attachment = self._sieve_attachment
        inner, outputs = attachment.inner, dict(model_kwargs.get("mm_encoder_outputs") or {})
        pixels = {m: name for m, name in attachment.family.pixels.items() if model_kwargs.get(name) is not None}
        if not pixels:
            return model_kwargs | {"mm_encoder_outputs": outputs}
        device, timing = model_kwargs[next(iter(pixels.values()))].device, attachment.timing
        start = now(device, timing)
        work = attachment.family.own_features if attachment.first is None else attachment.family.encode
        for modality in pixels:
            outputs[modality] = work(inner, modality, model_kwargs)
            outputs[modality].sieve_seconds = now(device, timing) - start
            start = now(device, timing)
        used = {name for m, name in pixels.items() for name in (name, *attachment.family.arguments(inner, m))}
        return {name: value for name, value in model_kwargs.items() if name not in used} | {
            "mm_encoder_outputs": outputs
        }

    def forward(self, given: dict[str, Any]) -> Any:
        if isinstance(given.get("logits_to_keep"), Tensor):
            raise OptionError("logits_to_keep: tokens leave on the way, so give a number of last ones, not places")
        run = self._sieve_attachment.new_pass(self._sieve_attachment)
        labels = given.pop("labels", None)
        encoded_here = not given.get("mm_encoder_outputs")
        device, timing = _any_tensor(given).device, self._sieve_attachment.timing
        start = now(device, timing)
        out = cast(nn.Module, super()).forward(**given, sieve=run)
        spent = now(device, timing) - start
        if run.prefill:
            run.stats.prefill_seconds = spent - (run.stats.vision_seconds if encoded_here else 0.0)
        else:
            run.stats.decode_seconds += spent
            run.stats.decode_steps += 1
        if labels is None:
            return out
        loss = self._sieve_loss(run, out, labels, given)
        if isinstance(out, tuple):
            return (loss, *out)
        out.loss = loss
        return out

    def _sieve_loss(self, run: Pass, out: Any, labels: Tensor, given: dict[str, Any]) -> Any:
        """The model's own loss, on the labels of the tokens that are left."""
        place = run.final_places()
        if place is not None:
            labels = labels.gather(1, place.clamp_min(0)).masked_fill(place < 0, -100)
        logits = out[0] if isinstance(out, tuple) else out.logits
        more = {name: given[name] for name in ("num_items_in_batch",) if given.get(name) is not None}
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size, **more)
