"""A tiny random LLaVA of the real classes, and prompts for it: 36 vision tokens an image, six decoder layers.

    tiny = tiny_llava()
    out = tiny.model.generate(**tiny.prompts([(3, 1, 5), (6, 2, 2)]), max_new_tokens=4)

transformers is imported when a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokensieve.testing.models import _randomise

__all__ = ["TinyLlava", "tiny_llava"]

IMAGE, PAD, VOCAB, PATCHES, LAYERS = 60, 0, 64, 36, 6


@dataclass(frozen=True)
class TinyLlava:
    """The model, in eval mode and float32, and what it is asked."""

    model: Any
    patches: int = PATCHES
    layers: int = LAYERS

    def prompts(self, rows: list[tuple[int, int, int]], seed: int = 0, pad: str = "left") -> dict[str, Tensor]:
        """input_ids, attention_mask and pixel_values of prompts (words before, images, words after), padded.

        A row's words and images depend on its own numbers and the seed: alone or in a batch it is the same prompt.
        """
        ids, pixels = [], []
        for before, images, after in rows:
            generator = torch.Generator().manual_seed(seed + 1000 * before + 100 * images + after)
            words = torch.randint(1, IMAGE, (before + after,), generator=generator)
            ids.append(torch.cat([words[:before], torch.full((images * self.patches,), IMAGE), words[before:]]))
            pixels += [torch.randn(3, 48, 48, generator=generator) for _ in range(images)]
        length = max(len(row) for row in ids)
        batch, mask = torch.full((len(ids), length), PAD), torch.zeros(len(ids), length, dtype=torch.int64)
        for i, row in enumerate(ids):
            where = slice(length - len(row), None) if pad == "left" else slice(0, len(row))
            batch[i, where], mask[i, where] = row, 1
        found = {"input_ids": batch, "attention_mask": mask}
        return found | ({"pixel_values": torch.stack(pixels)} if pixels else {})


def tiny_llava(
    attention: str = "sdpa",
    seed: int = 0,
    kv_heads: int = 2,
    kind: str = "llava",
    tower: str = "clip",
    text: str = "llama",
) -> TinyLlava:
    """Random weights of unit gain; the same seed gives the same.

    kind: "llava" or "llava_next". tower: "clip" or "siglip". text: "llama", "mistral" or "qwen2".
    """
    import transformers as hf

    seen: Any = {"clip": hf.CLIPVisionConfig, "siglip": hf.SiglipVisionConfig}[tower]
    vision = seen(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=48, patch_size=8
    )
    said: Any = {"llama": hf.LlamaConfig, "mistral": hf.MistralConfig, "qwen2": hf.Qwen2Config}[text]
    language = said(
        hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=kv_heads,
        intermediate_size=96, vocab_size=VOCAB, max_position_embeddings=512, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=2, **({"sliding_window": None} if text == "mistral" else {}),
    )  # fmt: skip
    options: dict[str, Any] = {"vision_config": vision, "text_config": language, "image_token_id": IMAGE}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options["vision_feature_select_strategy"] = "default" if tower == "clip" else "full"
        if kind == "llava_next":
            wide: Any = hf.LlavaNextConfig(**options, image_grid_pinpoints=[[48, 96], [96, 48]])
            model: Any = hf.LlavaNextForConditionalGeneration(wide)
        else:
            model = hf.LlavaForConditionalGeneration(hf.LlavaConfig(**options, image_seq_length=PATCHES))
        model.set_attn_implementation(attention)
        _randomise(model, seed)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return TinyLlava(model)
