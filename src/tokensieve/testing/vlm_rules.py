"""The contract's rules on a tiny LLaVA, for methods that work between tower and projector or between decoder layers.

Imports adapters and methods.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tokensieve.methods.base import Method
from tokensieve.models.attach import attach
from tokensieve.testing.model_rules import snapshot
from tokensieve.testing.vlm import TinyLlava

__all__ = ["VLM_RULES"]

Make = Callable[[], Method]
ROWS = [(3, 1, 5), (5, 1, 2), (2, 1, 3)]


def _places(method: Method) -> list[Any]:
    """`at` for each stage where it works; the cuts as it would make them itself."""
    stages = [None] if "projector" in method.stages else []
    return stages + ([[2, 4]] if "decoder" in method.stages else [])


def _budget(method: Method, tiny: TinyLlava) -> int:
    """Half of an image, or what the method can reach in one cut."""
    return max(tiny.patches // 2, method.floor(tiny.patches, 1))


def _lengths(make: Make, tiny: TinyLlava) -> str | None:
    """The MLPs of the decoder see as many tokens as the budget says."""
    for at in _places(make()):
        seen: list[int] = []

        def look(_: Any, args: Any, __: Any, seen: list[int] = seen) -> None:
            seen.append(args[0].shape[1])

        hooks = [layer.mlp.register_forward_hook(look) for layer in tiny.model.model.language_model.layers]
        try:
            with torch.no_grad(), attach(tiny.model, make(), keep=_budget(make(), tiny), at=at) as handle:
                tiny.model(**tiny.prompts([(3, 1, 5)]))
                planned = [8 + round(n) for n in handle.vision_tokens_per_layer]
                counts, kept = handle.counts(tiny.patches), handle.kept
        finally:
            for hook in hooks:
                hook.remove()
        if seen != planned or seen[-1] != 8 + _budget(make(), tiny):
            return f"at={at}: the MLPs saw {seen} tokens, the budget says {planned}"
        for place, numbers in kept.items():
            if numbers.shape[1] != counts[place] or (numbers.diff(dim=1) <= 0).any():
                return f"at={at}: kept at {place} are {numbers.tolist()}, not {counts[place]} ascending ones"
    return None


def _batch(make: Make, tiny: TinyLlava) -> str | None:
    """A left-padded batch of different lengths gives what each prompt gives alone."""
    for at in _places(make()):
        with torch.no_grad(), attach(tiny.model, make(), keep=_budget(make(), tiny), at=at) as handle:
            together = tiny.model(**tiny.prompts(ROWS)).logits[:, -1]
            kept = handle.kept
            for i, row in enumerate(ROWS):
                alone = tiny.model(**tiny.prompts([row]), position_ids=None).logits[0, -1]
                if any(not torch.equal(handle.kept[place][0], kept[place][i]) for place in kept):
                    return f"at={at}: prompt {i} keeps other tokens alone than in a batch"
                shifted = (alone - together[i]).abs().max()
                if shifted > 1e-3 * together[i].abs().max():
                    return f"at={at}: the logits of prompt {i} differ by {shifted:.1e} in a batch"
    return None


def _keep_all(make: Make, tiny: TinyLlava) -> str | None:
    prompts = tiny.prompts(ROWS)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = tiny.model(**prompts).logits
        for at in _places(make()):
            with attach(tiny.model, make(), keep=1.0, at=at):
                after = tiny.model(**prompts).logits
            if not torch.equal(before, after):
                return f"at={at}: keep=1.0 changes the logits by {(after - before).abs().max():.1e}"
    return None


def _halves(make: Make, tiny: TinyLlava) -> str | None:
    model = copy.deepcopy(tiny.model).bfloat16()
    prompts = tiny.prompts(ROWS)
    prompts["pixel_values"] = prompts["pixel_values"].bfloat16()
    for at in _places(make()):
        with torch.no_grad(), attach(model, make(), keep=_budget(make(), tiny), at=at):
            if not model(**prompts).logits[:, -1].isfinite().all():
                return f"at={at}: the logits are not finite in bfloat16"
    return None


def _gradients(make: Make, tiny: TinyLlava) -> str | None:
    prompts = tiny.prompts([(3, 1, 5), (3, 1, 4)])
    prompts["pixel_values"].requires_grad_()
    for at in _places(make()):
        with attach(tiny.model, make(), keep=_budget(make(), tiny), at=at):
            out = tiny.model(**prompts).logits[:, -1]
        (grad,) = torch.autograd.grad(out.square().sum(), [prompts["pixel_values"]])
        if not grad.isfinite().all() or not (grad.abs().sum(dim=(1, 2, 3)) > 0).all():
            return f"at={at}: gradients of the images are absent or not finite"
    return None


def _restored(make: Make, tiny: TinyLlava) -> str | None:
    prompts = tiny.prompts(ROWS)
    with torch.no_grad():
        before, was = tiny.model(**prompts).logits, snapshot(tiny.model)
        state = {k: v.clone() for k, v in tiny.model.state_dict().items()}
        for at in _places(make()):
            with attach(tiny.model, make(), keep=_budget(make(), tiny), at=at):
                during = tiny.model(**prompts).logits
            after = tiny.model(**prompts).logits
            if snapshot(tiny.model) != was:
                return f"at={at}: something of the attachment is left after removal"
            if any(not torch.equal(v, state[k]) for k, v in tiny.model.state_dict().items()):
                return f"at={at}: a weight has another value after removal"
            if not torch.equal(before, after):
                return f"at={at}: after removal the logits differ by {(after - before).abs().max():.1e}"
            if during.shape == before.shape:
                return f"at={at}: as many tokens left the model while attached, so nothing was reduced"
    return None


VLM_RULES: dict[str, Callable[[Make, TinyLlava], str | None]] = {
    "tokens in each decoder layer": _lengths,
    "a padded batch of prompts equals its singles": _batch,
    "keep-all leaves the language model alone": _keep_all,
    "the logits are finite in bfloat16": _halves,
    "gradients reach the images through the language model": _gradients,
    "the whole model restored on removal": _restored,
}
