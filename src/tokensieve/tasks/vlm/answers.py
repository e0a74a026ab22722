"""Ask a LLaVA model many questions in batches: what it answers, and what that costs, by one clock for every model.

Tokens, MACs and the method's own time come from the handle; times and the cache are measured the same way with a
method and without. Imports torch; transformers inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokensieve.errors import DataError, OptionError
from tokensieve.methods.trained.merger import Merger
from tokensieve.methods.trained.pruner import Pruner
from tokensieve.models.decoder import VlmAttachment
from tokensieve.models.decoder.handle import PROJECTOR
from tokensieve.models.decoder.stats import now
from tokensieve.models.families.base import linear_macs
from tokensieve.tasks.vlm.data import load_image

__all__ = ["PROMPT", "Answers", "Asked", "Asker", "check_prompt", "kept_patches", "learned_macs", "pictures_of"]

PROMPT = "USER: <image>\n{question} ASSISTANT:"


@dataclass(frozen=True)
class Asked:
    """One question. image: a file, or a picture (H, W, 3) uint8. name: of the image, which several questions may share.
    answers: all that people gave, at least one."""

    image: Path | np.ndarray
    name: str
    question: str
    answers: tuple[str, ...]
    kind: str = "any"


@dataclass
class Answers:
    """What a model answered, question by question, and what it cost; lists go by batch unless said otherwise.

    rows: questions of each batch. first: seconds from the call to the first token, tower included. decode: (tokens,
    seconds) of the steps after it. kv_bytes: of the cache after the prefill, padding included. text, vision (by
    question): tokens of the prompt before any reduction. macs, macs_tower: of one prompt's prefill, mean of the batch,
    without and with tower and projector; own_macs of a learned method's networks is in both. left: vision tokens of
    each layer, mean of the batch.
    """

    texts: list[str] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    vision: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    decode: list[tuple[int, float]] = field(default_factory=list)
    kv_bytes: list[int] = field(default_factory=list)
    macs: list[int] = field(default_factory=list)
    macs_tower: list[int] = field(default_factory=list)
    own_macs: list[int] = field(default_factory=list)
    left: list[list[float]] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)

    def mean(self, values: Sequence[float]) -> float:
        """Of figures of one prompt, one a batch: the mean over all questions."""
        return float(np.average(values, weights=self.rows))

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Over whole batches; None where every answer was one token."""
        tokens, seconds = (sum(part) for part in zip(*self.decode, strict=True))
        return tokens / seconds if seconds else None


def check_prompt(template: str) -> str:
    """The template, if questions can be put into it."""
    if template.count("{question}") != 1:
        raise OptionError(f"--prompt {template!r}: write {{question}} once, where the question goes")
    if template.count("<image>") != 1:
        count = template.count("<image>")
        raise OptionError(
            f"--prompt {template!r} has {count or 'no'} image placeholder{'s' * (count > 1)}, and each question comes "
            "with one image: write <image> once"
        )
    return template.replace("\\n", "\n")


class _Clock:
    """Notes the time whenever logits are there; passes them on as they are. A logits processor of `generate`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(now(self.device))
        return scores


class Asker:
    """A processor, a prompt and a length, with which models are asked. Greedy decoding.

    A model other than LLaVA is asked by its processor's own chat template, unless a prompt is given.
    """

    def __init__(self, processor: Any, prompt: str = PROMPT, new_tokens: int = 16) -> None:
        self.processor, self.prompt, self.new_tokens = processor, check_prompt(prompt), new_tokens
        self.placeholder = getattr(processor, "image_token", "<image>")
        kind = type(processor).__name__
        self.nested = kind in ("Idefics3Processor", "SmolVLMProcessor", "Gemma3Processor")
        own = getattr(processor, "chat_template", None)
        self.chat = prompt == PROMPT and own is not None and kind != "LlavaProcessor"

    def batches(self, questions: Sequence[Asked], size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs of `size` questions at a time, padded on the left."""
        tokenizer = self.processor.tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        for start in range(0, len(questions), size):
            some = list(questions[start : start + size])
            texts = [self._text(asked) for asked in some]
            images = [
                load_image(asked.image) if isinstance(asked.image, Path) else Image.fromarray(asked.image)
                for asked in some
            ]
            given: Any = [[image] for image in images] if self.nested else images
            found = self.processor(images=given, text=texts, padding=True, return_tensors="pt")
            yield {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _text(self, asked: Asked) -> str:
        if self.placeholder in asked.question:
            more = asked.question.count(self.placeholder) + 1
            raise DataError(
                f"question {asked.question!r}: it has {self.placeholder} in it, so the prompt would have {more} "
                "placeholders for one image; the prompt's template has the one that counts"
            )
        if self.chat:  # as the model was taught
            said = [{"type": "image"}, {"type": "text", "text": asked.question}]
            chat = [{"role": "user", "content": said}]
            return cast(str, self.processor.apply_chat_template(chat, add_generation_prompt=True))
        return self.prompt.replace("<image>", self.placeholder).replace("{question}", asked.question)

    def _check_length(self, model: Any, prompt: int) -> None:
        """Raise where a prompt of that many tokens, with its answer, is longer than what the model was made for."""
        most = getattr(model.config.text_config, "max_position_embeddings", None)
        if most is not None and prompt + self.new_tokens > most:
            raise OptionError(
                f"a prompt of {prompt} tokens and an answer of {self.new_tokens} (--new_tokens) do not fit the model's "
                f"{most} positions: shorten the question, the prompt or the answer"
            )

    @torch.inference_mode()
    def ask(self, model: Any, inputs: dict[str, Tensor], into: Answers, handle: VlmAttachment | None = None) -> None:
        """One batch; what comes out is added to `into`. handle: of the model, where a method is attached."""
        from transformers import LogitsProcessorList

        self._check_length(model, inputs["input_ids"].shape[1])
        device = next(model.parameters()).device
        there = {name: x.to(device) for name, x in inputs.items()}
        there["pixel_values"] = there["pixel_values"].to(model.dtype)
        clock = _Clock(device)
        start = now(device)
        out = model.generate(
            **there, max_new_tokens=self.new_tokens, do_sample=False, num_beams=1, use_cache=True,
            logits_processor=LogitsProcessorList([clock]), return_dict_in_generate=True,
        )  # fmt: skip
        ids = out.sequences[:, there["input_ids"].shape[1] :]
        into.texts += [text.strip() for text in self.processor.batch_decode(ids, skip_special_tokens=True)]
        steps = len(clock.times) - 1
        rows = len(ids)
        into.rows.append(rows)
        into.first.append(clock.times[0] - start)
        into.decode.append((rows * steps, clock.times[-1] - clock.times[0]))
        into.kv_bytes.append(_prefill_bytes(out.past_key_values, steps))
        seen = there["input_ids"] == model.config.image_token_id
        into.vision += seen.sum(1).tolist()
        into.text += (there["attention_mask"].sum(1) - seen.sum(1)).tolist()
        if handle is not None:
            cost = handle.cost()
            after = seen.cumsum(1).eq(seen.sum(1, keepdim=True)) & ~seen & there["attention_mask"].bool()
            own = learned_macs(handle, round(float(after.sum(1).float().mean())))
            into.own_macs.append(own)
            into.macs.append(cost.macs + own)
            into.macs_tower.append(cost.with_tower.macs + own)
            into.left.append(list(cost.vision_tokens_per_layer))
            into.overhead.append(handle.stats.overhead_seconds)


def _prefill_bytes(cache: Any, steps: int) -> int:
    """Keys and values of all layers without the `steps` tokens that were generated and fed back."""
    total = 0
    for layer in cache.layers:
        length = layer.keys.shape[2]
        total += (layer.keys.nbytes + layer.values.nbytes) // length * (length - steps)
    return total


def learned_macs(handle: VlmAttachment, text: int) -> int:
    """MACs of the networks of `merger` and `pruner` on one image and `text` tokens of question; else 0."""
    counts = handle.counts(handle.patches)
    left = counts.get(PROJECTOR, handle.patches)
    total = 0
    if isinstance(handle.first, Merger) and left < handle.patches:
        projector = linear_macs(handle.inner.multi_modal_projector)
        total += handle.first.network.macs(handle.patches, text, left, projector)
    if isinstance(handle.second, Pruner):
        for layer in handle.at:
            if counts[layer] < left:
                total += handle.second.network.macs(layer, left, text)
            left = counts[layer]
    return total


def kept_patches(handle: VlmAttachment) -> list[list[int]]:
    """For each prompt of the last batch, the numbers of its patches that remain at the end; all where nothing left."""
    kept = handle.kept
    if not kept:
        return [list(range(n)) for n in handle.stats.vision_of_prompts]
    return [[n for n in row if n >= 0] for row in kept[max(kept)].tolist()]


def pictures_of(pixels: Tensor, processor: Any) -> list[Image.Image]:
    """(B, 3, H, W) as the processor gives them -> pictures as the model sees them, cut and scaled."""
    images = processor.image_processor
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (images.image_mean, images.image_std))
    shown = ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in shown]
