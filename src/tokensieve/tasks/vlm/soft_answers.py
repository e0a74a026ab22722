"""Answers of a learned method as it is trained: tokens fade instead of leaving. Imports torch and the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokensieve.methods.trained.pruner import Pruner
from tokensieve.models.decoder import VlmAttachment
from tokensieve.models.decoder.soft import Softness, attach_soft
from tokensieve.tasks.bench.models import twin
from tokensieve.tasks.vlm.answers import Asked, Asker

__all__ = ["is_learned", "soft_answers"]


def is_learned(handle: VlmAttachment) -> bool:
    """Whether what is attached has a soft forward: pruners that were trained by one."""
    return isinstance(handle.second, Pruner)


@torch.inference_mode()
def soft_answers(
    asker: Asker, model: Any, handle: VlmAttachment, questions: Sequence[Asked], batch_size: int
) -> list[str]:
    """What the soft forward answers, greedily, with the budget of `handle`; model: untouched.

    Masks in the language model are attention biases, as in training, so there is no cache and every token is a forward
    of its own. The heads see the question only, never the answer so far.
    """
    counts = handle.counts(handle.patches)
    softness = Softness()
    soft: Any = twin(model)
    keep = [counts[layer] for layer in handle.at]
    attach_soft(soft, handle.method, softness, keep=keep, at=handle.at, positions=handle.positions)
    texts: list[str] = []
    ends = soft.generation_config.eos_token_id
    end = torch.tensor(ends if isinstance(ends, list) else [ends], device=soft.device)
    for inputs in asker.batches(questions, batch_size):
        ids, mask = inputs["input_ids"].to(soft.device), inputs["attention_mask"].to(soft.device)
        pixels = inputs["pixel_values"].to(soft.device, soft.dtype)
        start, done = ids.shape[1], torch.zeros(len(ids), dtype=torch.bool, device=soft.device)
        for _ in range(asker.new_tokens):
            softness.prompt = torch.arange(ids.shape[1], device=soft.device).expand(len(ids), -1) < start
            out = soft(input_ids=ids, attention_mask=mask, pixel_values=pixels, use_cache=False)
            token = out.logits[:, -1].argmax(-1).masked_fill(done, int(end[0]))
            ids = torch.cat([ids, token[:, None]], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            done |= torch.isin(token, end)
            if done.all():
                break
        found = asker.processor.batch_decode(ids[:, start:], skip_special_tokens=True)
        texts += [text.strip() for text in found]
    return texts
