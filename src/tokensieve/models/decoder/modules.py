"""What the instances of a LLaVA model become while attached: mixins put in front of their own classes.

Modifications against upstream: images are projected after stage 1; the prompt, its mask and its positions shrink with
them; a `Pass` travels to the decoder layers as an argument, and a layer that is a cut goes on with fewer tokens.
Imports run, stage1, memory and stats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.models.decoder.forward import Layout, Pass
from tokensieve.models.decoder.memory import Memory, join_keys, past_length
from tokensieve.models.decoder.stage1 import Encoded, Prompt, encode, images_of_rows, project, shorten
from tokensieve.models.decoder.stats import Stats, now

if TYPE_CHECKING:
    from tokensieve.models.decoder.handle import VlmAttachment

__all__ = ["SievedDecoderLayer", "SievedGenerator", "SievedLlava"]


class SievedDecoderLayer:
    """A Llama, Mistral or Qwen2 decoder layer that may be a cut."""

    if TYPE_CHECKING:  # transformers resolves the annotations of a model's class when it is made
        _sieve_index: int
        input_layernorm: Any
        self_attn: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        sieve: Pass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if sieve is None or position_embeddings is None:
            raise UnsupportedModelError(
                "a decoder layer of a reduced model was called by itself: call the whole model, or remove this"
            )
        kind = self.self_attn.config._attn_implementation
        index = self._sieve_index
        entered, stretch = sieve.enter(index, hidden_states, attention_mask, position_embeddings, past_key_values, kind)
        out = cast(nn.Module, super()).forward(
            entered,
            attention_mask=stretch.mask,
            # positions with gaps look like packed sequences to FlashAttention; cos and sin carry them
            position_ids=None if sieve.layout.gaps or stretch.base is not None else position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=stretch.rotary,
            **kwargs,
        )
        sieve.leave(index, self, entered, past_key_values)
        return cast(Tensor, out)

    def sieve_scale(self) -> float:
        """What logits are multiplied by."""
        return float(self.self_attn.scaling)

    def sieve_queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Block input (B, R, D) and its rotation (B, R, d) -> (B, H, R, d)."""
        return self._sieve_rotated(self.self_attn.q_proj, x, cos, sin)

    def sieve_keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Block input (B, L, D) -> (B, G, L, d), of G groups of heads."""
        return self._sieve_rotated(self.self_attn.k_proj, x, cos, sin)

    def _sieve_rotated(self, part: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = part(self.input_layernorm(x))
        out = out.view(*out.shape[:2], -1, self.self_attn.head_dim).transpose(1, 2)
        low, high = out.chunk(2, dim=-1)
        return cast(Tensor, out * cos.unsqueeze(1) + torch.cat([-high, low], dim=-1) * sin.unsqueeze(1))


class SievedLlava:
    """`LlavaModel` (and `LlavaNextModel`, whose images stay as they are until the decoder)."""

    if TYPE_CHECKING:
        _sieve_attachment: VlmAttachment
        config: Any

    def get_image_features(
        self,
        pixel_values: Tensor,
        vision_feature_layer: Any = None,
        vision_feature_select_strategy: str | None = None,
        image_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The untouched features, as ever: stage 1 happens in the forward. Only the time is taken."""
        timing = self._sieve_attachment.timing
        start = now(pixel_values.device, timing)
        more = {"vision_feature_layer": vision_feature_layer, "image_sizes": image_sizes} | kwargs
        more["vision_feature_select_strategy"] = vision_feature_select_strategy
        if not hasattr(self, "image_newline"):  # LLaVA-NeXT asks for image_sizes by position
            more = {name: value for name, value in more.items() if value is not None}
            out = cast(Any, super()).get_image_features(pixel_values, **more)
        else:
            out = cast(Any, super()).get_image_features(pixel_values, more.pop("image_sizes"), **more)
        if not isinstance(out, tuple):
            out.sieve_seconds = now(pixel_values.device, timing) - start
        return out

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        vision_feature_layer: Any = None,
        vision_feature_select_strategy: str | None = None,
        image_sizes: Any = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        sieve: Pass | None = None,
        **kwargs: Any,
    ) -> Any:
        run = sieve or self._sieve_attachment.new_pass(self._sieve_attachment)
        given = {
            "input_ids": input_ids, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask,
            "position_ids": position_ids,
        }  # fmt: skip
        options = (vision_feature_layer, vision_feature_select_strategy, image_sizes)
        images = (mm_encoder_outputs or {}).get("image")
        known = Memory.of(past_key_values)
        run.prefill = known is None or images is not None or pixel_values is not None
        run.memory = known or run.memory
        if run.prefill:
            run.memory.stats = Stats(batch=_length(given, 0))
            self._sieve_attachment.last = run
        if attention_mask is not None and attention_mask.dim() != 2:
            raise UnsupportedModelError("a reduced model takes a 2D attention mask")
        features = None
        if images is None and pixel_values is None:
            self._sieve_text(run, given, past_key_values, known)
            more: dict[str, Any] = {}
        elif self._sieve_attachment.first is None:
            more = self._sieve_whole(run, given, pixel_values, images, past_key_values, options)
        else:
            if images is None:
                images = encode(self, cast(Tensor, pixel_values), *options)
            features = self._sieve_shortened(run, given, images, past_key_values)
            more = {}
        out = cast(nn.Module, super()).forward(past_key_values=past_key_values, **given, **more, sieve=run, **kwargs)
        run.close()
        if features is not None and not isinstance(out, tuple):
            out.image_hidden_states = features.flatten(0, 1)
        if run.prefill and past_key_values is None:
            past_key_values = getattr(out, "past_key_values", None)
        if past_key_values is not None:
            run.stats.count_cache(past_key_values)
        return out

    # -- text alone, and decoding steps ---------------------------------------------------------------------------

    def _sieve_text(self, run: Pass, given: dict[str, Any], cache: Any, known: Memory | None) -> None:
        """No image in this call: nothing is reduced; but mask and positions must fit what the cache holds."""
        if known is None:
            self._sieve_attachment.warn_without_image(self._sieve_placeholders(given))
            run.layout = Layout(valid=_validity(given["attention_mask"], past_length(cache, 0), run, cache))
            run.stats.text_of_prompts = _lengths(_any_tensor(given), run.layout.valid)
            return
        here, before = _length(given, 1), past_length(cache, 0)
        mask = given["attention_mask"]
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
        self._sieve_positions(given, known, known.next(cache), here)

    def _sieve_positions(self, given: dict[str, Any], known: Memory, first: Tensor | None, here: int) -> None:
        """Positions go on where the prompt ended, not where a shortened cache does."""
        if first is None:
            return
        positions = given["position_ids"]
        if positions is None:
            positions = first + torch.arange(here, device=first.device)
        elif here == 1:
            positions = torch.maximum(positions, first)
        elif bool((positions[:, :1] < first).any()):
            raise OptionError(
                "these tokens were seen already: after stage 1 the cache is shorter than the prompt, so give only the "
                "new tokens (with the whole attention_mask)"
            )
        given["position_ids"] = positions if known.shift is None else positions - known.shift

    # -- prompts with images --------------------------------------------------------------------------------------

    def _sieve_placeholders(self, given: dict[str, Any]) -> Tensor:
        """(B, L) bool: where the prompt has image placeholders."""
        token = self.config.image_token_id
        if given["input_ids"] is not None:
            return cast(Tensor, given["input_ids"] == token)
        table = cast(Any, self).get_input_embeddings()
        mark = table(torch.tensor(token, device=given["inputs_embeds"].device))
        return cast(Tensor, (given["inputs_embeds"] == mark).all(dim=-1))

    def _sieve_whole(
        self, run: Pass, given: dict[str, Any], pixels: Tensor | None, images: Any, cache: Any, options: tuple[Any, ...]
    ) -> dict[str, Any]:
        """No stage 1: the model's own code puts the images in; `run` only learns where they are."""
        vision = self._sieve_placeholders(given)
        if images is None:
            images = self.get_image_features(cast(Tensor, pixels), *options, return_dict=True)
        sizes = [len(feature) for feature in images.pooler_output]
        run.stats.vision_seconds += getattr(images, "sieve_seconds", 0.0)
        if len(set(sizes)) == 1:
            rows = images_of_rows(vision, sizes[0], len(sizes))
        else:  # LLaVA-NeXT: images of different sizes; the budget goes by the prompt
            rows = [1] * vision.shape[0]
        totals = vision.sum(dim=1).tolist()
        run.layout = Layout(
            vision=vision, origin=(vision.cumsum(dim=1) - 1).clamp_min(0), left=totals,
            valid=_validity(given["attention_mask"], past_length(cache, 0), run, cache),
        )  # fmt: skip
        self._sieve_counts(run, rows, totals, totals, _lengths(vision, run.layout.valid))
        run.stats.images = len(sizes)
        return {"mm_encoder_outputs": {"image": images}}

    def _sieve_shortened(self, run: Pass, given: dict[str, Any], images: Any, cache: Any) -> Tensor:
        """Stage 1: select, project, and shorten the prompt. Changes `given`; returns the features (I, K, D)."""
        if not isinstance(images, Encoded):
            raise OptionError("stage 1 needs pixel_values: these image features have passed the projector already")
        if given["inputs_embeds"] is None:
            embeds = cast(Any, self).get_input_embeddings()(given["input_ids"])
        else:
            embeds = given["inputs_embeds"]
        vision = self._sieve_placeholders(given)
        mask, before = given["attention_mask"], past_length(cache, 0)
        valid = _validity(mask, before, run, cache)
        n = images.tokens.shape[1] - images.prefix
        rows = images_of_rows(vision, n, len(images.pooler_output))
        run.stats.vision_seconds += images.seconds
        features, size = project(run, self, images, embeds, vision, valid)
        positions = given["position_ids"]
        if positions is None:
            seen = run.memory.next(cache)
            start = before if seen is None else seen
            positions = start + torch.arange(vision.shape[1], device=vision.device).unsqueeze(0)
        following = positions[:, -1:] + 1
        renumber = self._sieve_attachment.positions == "renumber"
        if renumber:
            stay = torch.tensor(rows, device=vision.device).unsqueeze(1) * features.shape[1]
            gone = vision.sum(dim=1, keepdim=True) - stay
            earlier = 0 if run.memory.shift is None else run.memory.shift
            positions, run.memory.shift = positions - earlier, earlier + gone
        here = None if mask is None else mask[:, -vision.shape[1] :]
        prompt = shorten(run, Prompt(embeds, vision, here, positions), features, size, rows, n, renumber)
        run.layout.valid = _validity(prompt.attention, 0, run, None)
        run.memory.ahead = following - (before + prompt.embeds.shape[1])
        length = prompt.embeds.shape[1]
        whole = join_keys(run.memory.valid.get(0), run.layout.valid, len(rows), before, length, embeds, True)
        if whole is None:  # said even so: positions with gaps and no mask look like packed sequences
            whole = torch.ones(len(rows), before + prompt.embeds.shape[1], dtype=torch.bool, device=embeds.device)
        given.update(input_ids=None, inputs_embeds=prompt.embeds, attention_mask=whole.long(),
                     position_ids=prompt.positions)  # fmt: skip
        totals = [images_here * n for images_here in rows]
        self._sieve_counts(run, rows, totals, run.layout.left, _lengths(vision, valid))
        run.stats.images = sum(rows)
        return features

    def _sieve_counts(self, run: Pass, rows: list[int], totals: list[int], left: list[int], lengths: list[int]) -> None:
        """What each prompt may keep, and what it has."""
        attachment, stats = self._sieve_attachment, run.stats
        run.layout.counts = [
            attachment.stage2_counts(total, enters, number)
            for total, enters, number in zip(totals, left, rows, strict=True)
        ]
        stats.vision_of_prompts = totals
        stats.text_of_prompts = [length - total for length, total in zip(lengths, totals, strict=True)]


def _length(given: dict[str, Any], axis: int) -> int:
    return int(_any_tensor(given).shape[axis])


def _lengths(like: Tensor, valid: Tensor | None) -> list[int]:
    """How many tokens of each row count. like: (B, L, ...)."""
    return [like.shape[1]] * like.shape[0] if valid is None else cast("list[int]", valid.sum(dim=1).tolist())


def _any_tensor(given: dict[str, Any]) -> Tensor:
    found = given["input_ids"] if given["input_ids"] is not None else given["inputs_embeds"]
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


class SievedGenerator:
    """`LlavaForConditionalGeneration`: takes the time, aligns labels, and encodes images for `generate`."""

    if TYPE_CHECKING:
        _sieve_attachment: VlmAttachment
        model: Any
        config: Any
        loss_function: Any

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """`generate` encodes before the prefill. With a stage 1 the projector has to wait until the prompt is there."""
        if self._sieve_attachment.first is None or model_kwargs.get("pixel_values") is None:
            return cast(
                "dict[str, Any]", cast(Any, super())._prepare_multimodal_encoder_kwargs_for_generation(model_kwargs)
            )
        names = ("pixel_values", "vision_feature_layer", "vision_feature_select_strategy", "image_sizes")
        images = encode(self.model, *(model_kwargs.pop(name, None) for name in names))
        outputs = dict(model_kwargs.get("mm_encoder_outputs") or {})
        return model_kwargs | {"mm_encoder_outputs": outputs | {"image": images}}

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        vision_feature_layer: Any = None,
        vision_feature_select_strategy: str | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        image_sizes: Any = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(logits_to_keep, Tensor):
            raise OptionError("logits_to_keep: tokens leave on the way, so give a number of last ones, not places")
        run = self._sieve_attachment.new_pass(self._sieve_attachment)
        device = cast(Tensor, input_ids if input_ids is not None else inputs_embeds).device
        timing = self._sieve_attachment.timing
        start = now(device, timing)
        if image_sizes is not None:
            kwargs["image_sizes"] = image_sizes
        out = cast(nn.Module, super()).forward(
            input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, vision_feature_layer=vision_feature_layer,
            vision_feature_select_strategy=vision_feature_select_strategy, logits_to_keep=logits_to_keep,
            mm_encoder_outputs=mm_encoder_outputs, sieve=run, **kwargs,
        )  # fmt: skip
        spent = now(device, timing) - start
        if run.prefill:
            encoded_here = run.stats.vision_seconds if mm_encoder_outputs is None else 0.0
            run.stats.prefill_seconds = spent - encoded_here
        else:
            run.stats.decode_seconds += spent
            run.stats.decode_steps += 1
        if labels is None:
            return out
        loss = self._sieve_loss(run, out, labels)
        if isinstance(out, tuple):
            return (loss, *out)
        out.loss = loss
        return out

    def _sieve_loss(self, run: Pass, out: Any, labels: Tensor) -> Any:
        """The model's own loss, on the labels of the tokens that are left."""
        place = run.final_places()
        if place is not None:
            labels = labels.gather(1, place.clamp_min(0)).masked_fill(place < 0, -100)
        logits = out[0] if isinstance(out, tuple) else out.logits
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size)
