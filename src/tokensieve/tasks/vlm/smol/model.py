"""SmolLaVA: transformers' LlavaForConditionalGeneration of ViT-S/14, a two-layer projector and SmolLM2-135M.

256 vision tokens. Tower and language model come from their packages, frozen; what was trained is the projector and a
LoRA of the language model's linear layers, one safetensors file, which is merged into the weights as they are loaded.
Imports zoo and torch; transformers inside functions.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import MissingMaterialError, UnsupportedModelError
from tokensieve.tasks.vlm.smol.features import LAYERS, TOKENS
from tokensieve.utils.hub import quiet_transformers
from tokensieve.utils.tensor_files import read_tensors
from tokensieve.zoo.smollm2 import load_smollm2
from tokensieve.zoo.vit_s14 import MEAN, PATCH, STD, vit_s14_dinov2

__all__ = [
    "ADAPTER",
    "IMAGE",
    "LORA_LINEARS",
    "SMOL",
    "build_smol_llava",
    "load_smol_llava",
    "merge_adapter",
    "shipped_adapter",
]

SMOL = "smol"
IMAGE = "<image>"
ADAPTER = "smol-llava.safetensors"
SIDE = 224
LORA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LORA = re.compile(r"lora\.(.+)\.([AB])$")


def build_smol_llava() -> tuple[Any, Any]:
    """(model, processor) in evaluation mode, float32; the projector is untrained."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    with quiet_transformers():
        language, tokenizer = load_smollm2()
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
        language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tower: Any = vit_s14_dinov2(SIDE)
    text = language.config
    text.quantization_config = None  # its weights are floats by now
    config = LlavaConfig(
        vision_config=tower.config, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=TOKENS, vision_feature_layer=list(LAYERS), vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    inner = model.model
    inner.vision_tower, inner.language_model = tower, language.model
    inner.multi_modal_projector = inner.multi_modal_projector.to_empty(device="cpu")
    for parameter in inner.multi_modal_projector.parameters():
        nn.init.zeros_(parameter) if parameter.ndim == 1 else nn.init.xavier_uniform_(parameter)
    model.lm_head = language.lm_head
    model.generation_config = language.generation_config
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), _processor(tokenizer)


def _processor(tokenizer: Any) -> Any:
    """Images become 224 x 224, 256 patches; each <image> in a text becomes 256 placeholders."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer.padding_side = "left"
    images = CLIPImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_convert_rgb=True,
        image_mean=list(MEAN), image_std=list(STD),
    )  # fmt: skip
    return LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def shipped_adapter() -> Path:
    """Where the trained part lies that comes with the package."""
    return Path(str(resources.files("tokensieve.tasks.vlm") / "data" / ADAPTER))


def load_smol_llava(adapter: Path | None = None) -> tuple[Any, Any]:
    """(model, processor): LlavaForConditionalGeneration in evaluation mode, float32, and its LlavaProcessor.

    adapter: what `tokensieve train smol` wrote; None for the shipped one.
    """
    path = adapter or shipped_adapter()
    if not path.is_file():
        raise MissingMaterialError(f"{path} is not there; make it with `tokensieve train smol`")
    model, processor = build_smol_llava()
    merge_adapter(model, read_tensors(path, "adapter")[0])
    return model, processor


@torch.no_grad()
def merge_adapter(model: Any, tensors: dict[str, Tensor]) -> None:
    """Put trained tensors into a model from `build_smol_llava`.

    projector.NAME replace the projector's; lora.MODULE.A (r, in) and .B (out, r): B @ A is added to the weight of that
    module of the language model.
    """
    inner = model.model
    parts = {name.removeprefix("projector."): x.float() for name, x in tensors.items() if name.startswith("projector.")}
    inner.multi_modal_projector.load_state_dict(parts)
    found = {(match[1], match[2]) for name in tensors if (match := _LORA.fullmatch(name))}
    if len(parts) + len(found) != len(tensors):
        raise UnsupportedModelError("not an adapter of SmolLaVA: it has tensors other than projector.* and lora.*")
    for module in sorted({name for name, _ in found}):
        weight = inner.language_model.get_submodule(module).weight
        weight += tensors[f"lora.{module}.B"].float() @ tensors[f"lora.{module}.A"].float()
