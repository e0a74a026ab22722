"""An untouched model in which tokens are masked with -inf from a layer on: the referee for tokens that leave.

Nothing of the library is used: hooks on the model's own layers take columns out of the model's own masks, so windows,
blocks that see each other both ways, positions and added features are the model's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layers_of(model):
    inner = model.model
    return (getattr(inner, "language_model", None) or inner.text_model).layers


def vision_places(model, input_ids: Tensor, video: bool = False) -> Tensor:
    """(n,) places of one prompt's vision tokens."""
    config = model.config
    ids = [getattr(config, name) for name in ("image_token_id", "video_token_id") if getattr(config, name, None)]
    return torch.isin(input_ids[0], torch.tensor(ids)).nonzero().flatten()


def gone_of(kept: dict[int, Tensor], places: Tensor, row: int = 0) -> dict[int, Tensor]:
    """A handle's `kept`, as places that are gone from each layer on: stage 1 (-1) from layer 0."""
    found: dict[int, Tensor] = {}
    for layer, numbers in sorted(kept.items()):
        stay = set(numbers[row][numbers[row] >= 0].tolist())
        found[max(layer, 0)] = places[[i for i in range(len(places)) if i not in stay]]
    return found


def masked_logits(model, prompt: dict, gone: dict[int, Tensor]) -> Tensor:
    """(L, V) of one prompt without padding, whose tokens gone[layer] are invisible from that layer on. Rows of tokens
    that are gone mean nothing."""

    def hook(layer_number):
        lost = [places for layer, places in gone.items() if layer <= layer_number]
        columns = torch.cat(lost) if lost else torch.empty(0, dtype=torch.int64)

        def change(module, args, kwargs):
            mask, length = kwargs.get("attention_mask"), args[0].shape[1]
            if mask is None:
                mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
            seen = mask.clone() if mask.dtype == torch.bool else mask == 0
            seen[..., columns] = False
            seen |= torch.eye(length, dtype=torch.bool)  # a row that is gone needs something to look at
            if mask.dtype != torch.bool:
                seen = torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
            return args, kwargs | {"attention_mask": seen}

        return change

    hooks = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers_of(model))]
    try:
        with torch.no_grad():
            return model(**prompt, use_cache=False).logits[0]
    finally:
        for each in hooks:
            each.remove()


def with_words(prompt: dict, words: Tensor, suffix: bool = False) -> dict:
    """The prompt with generated words (n,) behind it, as the processor would hand it. suffix: they are of type 1."""
    longer = dict(prompt)
    for name, value in prompt.items():
        if name == "input_ids":
            longer[name] = torch.cat([value, words[None]], dim=1)
        elif name == "attention_mask":
            longer[name] = torch.cat([value, torch.ones(1, len(words), dtype=value.dtype)], dim=1)
        elif name in ("token_type_ids", "mm_token_type_ids"):
            longer[name] = torch.cat([value, torch.full((1, len(words)), int(suffix), dtype=value.dtype)], dim=1)
    return longer
