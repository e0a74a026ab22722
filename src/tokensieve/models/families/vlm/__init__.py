"""Families of vision-language models, one short file each. `vlm_parts` finds the family of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.families.vlm.base import VlmFamily
from tokensieve.models.families.vlm.llava import Llava
from tokensieve.models.families.vlm.llava_next import LlavaNext, LlavaOnevision
from tokensieve.models.families.vlm.llava_towers import LlavaTower, Mistral3, Pixtral
from tokensieve.models.families.vlm.qwen import Glm4v, Qwen
from tokensieve.models.families.vlm.shuffled import AyaVision, Gemma3, Idefics2, Idefics3, InternVl, PaliGemma, VipLlava
from tokensieve.models.wrappers import unwrapped

__all__ = ["VLM_FAMILIES", "vlm_parts"]

VLM_FAMILIES: tuple[VlmFamily, ...] = (
    Llava(), Pixtral(), LlavaTower(), LlavaNext(), LlavaOnevision(), VipLlava(), Qwen(), Glm4v(), InternVl(),
    AyaVision(), Idefics2(), Idefics3(), Gemma3(), PaliGemma(), Mistral3(),
)  # fmt: skip

# class of the model without its head, or with it -> why its vision tokens cannot be reduced
_REFUSED = {
    "MllamaModel": "its images are seen through cross-attention layers, not as tokens of the prompt",
    "Llama4": "its experts and chunked attention are not known here",
    "Blip2": "its query transformer leaves 32 tokens an image, whatever the image",
    "InstructBlip": "its query transformer leaves 32 tokens an image, whatever the image",
    "Florence2": "its language model is an encoder and a decoder",
    "Qwen3_5": "its linear attention keeps a state that every token has changed, so a drop is not a mask",
    "Qwen3Next": "its linear attention keeps a state that every token has changed, so a drop is not a mask",
    "Fuyu": "it has no vision tower: patches of pixels are its tokens",
}


def vlm_parts(model: nn.Module) -> tuple[Any, Any, VlmFamily] | None:
    """(the model past wrappers, the model without its head, its family); None where it has no language model.

    One that is a vision-language model but is not known: an error that names what is.
    """
    whole: Any = unwrapped(model)
    for module in (whole, getattr(whole, "model", None)):
        for family in VLM_FAMILIES:
            if isinstance(module, nn.Module) and family.matches(module):
                return whole, module, family
    _refuse(whole)
    return None


def _refuse(whole: Any) -> None:
    """Raise where a model has vision and language, but no family knows it."""
    names = [type(module).__name__ for module in (whole, getattr(whole, "model", None)) if module is not None]
    for start, reason in _REFUSED.items():
        if any(name.startswith(start) and "Vision" not in name for name in names):
            raise UnsupportedModelError(f"{names[0]} is not supported: {reason}")
    modalities = getattr(whole, "input_modalities", ())
    config = getattr(whole, "config", None)
    if "image" in modalities and "text" in modalities and hasattr(config, "text_config"):
        inner = getattr(whole, "model", whole)
        if any(hasattr(inner, part) for part in ("language_model", "text_model", "qformer", "decoder")) and not any(
            hasattr(whole, part) for part in ("logit_scale", "text_projection", "clip", "owlvit", "owlv2")
        ):
            known = ", ".join(family.name for family in VLM_FAMILIES if type(family) is not LlavaTower)
            raise UnsupportedModelError(
                f"{names[0]} is not supported: of vision-language models {known} are. Its vision tower alone may be: "
                "attach to it"
            )
