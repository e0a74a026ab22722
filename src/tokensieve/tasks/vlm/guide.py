"""How much each vision token matters to what the untouched model answers: what merger and pruners are guided by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tokensieve.models.decoder.memory import attention_mask
from tokensieve.tasks.vlm.batches import Batch
from tokensieve.tasks.vlm.losses import answer_positions, margins

__all__ = ["answer_slopes"]


def answer_slopes(model: Any, embeds: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(A, D) the hidden states of the untouched model that say the answers, and (layers, B, L) slopes of the answers'
    margins, were a token seen a little more by all in one layer.

    A token that leaves before layer i is seen no more from it on: what that changes, the slopes from i on say together.
    """
    language = model.model.language_model
    bias = torch.zeros(len(language.layers), *batch.ids.shape, dtype=embeds.dtype, device=embeds.device)
    bias.requires_grad_(True)
    with torch.enable_grad(), _heard(language.layers, batch.mask.bool(), bias):
        out = language(inputs_embeds=embeds, attention_mask=batch.mask, use_cache=False)
        states = answer_positions(out.last_hidden_state, batch.answers)
        (slope,) = torch.autograd.grad(margins(model.lm_head(states), batch.answers).sum(), bias)
    return states.detach(), slope


@contextmanager
def _heard(layers: Any, valid: Tensor, bias: Tensor) -> Iterator[None]:
    """Layer i with bias[i] (B, L) on its keys, for every query that may see them; valid: (B, L)."""

    def hook(index: int) -> Any:
        def change(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            own, length = bias[index], bias.shape[2]
            mask = attention_mask(layer.self_attn.config._attn_implementation, valid, length, length, own, own)
            return args, kwargs | {"attention_mask": mask}

        return change

    handles = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
