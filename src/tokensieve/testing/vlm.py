"""Tiny random vision-language models of the real classes, one factory for all families, and prompts for them.

    tiny = tiny_vlm("qwen2_5_vl")
    out = tiny.model.generate(**tiny.prompts([(3, 1, 5), (6, 2, 2)]), max_new_tokens=4)

Six decoder layers, 36 vision tokens an image in LLaVA; families of any size have images of different sizes.
transformers is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokensieve.testing.models import _randomise

__all__ = ["VLM_KINDS", "TinyLlava", "TinyVlm", "tiny_llava", "tiny_vlm"]

IMAGE, PAD, VOCAB, PATCHES, LAYERS = 60, 0, 64, 36, 6
VIDEO = 61
_SIZES = ((4, 6), (6, 4), (4, 4), (8, 4))  # patches down and across, of images of any size

Extra = Callable[[Any, torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class TinyVlm:
    """The model, in eval mode and float32, and what it is asked.

    image: number of an image -> (its tokens in the prompt as ids, what the processor gives for it). joined: how the
    processor's parts of all images make the model's arguments. rows: arguments that depend on the prompt's ids. video:
    number of frames -> (a video's tokens as ids, the model's arguments); None: no videos.
    """

    model: Any
    image: Callable[[int, torch.Generator], tuple[Tensor, dict[str, Any]]]
    joined: Callable[[list[list[dict[str, Any]]]], dict[str, Any]]
    rows: Callable[[Tensor, Tensor], dict[str, Tensor]] = field(default=lambda ids, mask: {})
    patches: int = PATCHES
    layers: int = LAYERS
    video: Callable[[int, torch.Generator], tuple[Tensor, dict[str, Any]]] | None = None

    def video_prompts(self, frames: int = 2, seed: int = 0) -> dict[str, Any]:
        """One prompt of three words, a video and four words, for kinds that take videos."""
        assert self.video is not None
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(3, IMAGE - 10, (7,), generator=generator)
        tokens, more = self.video(frames, generator)
        ids = torch.cat([words[:3], tokens, words[3:]])[None]
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask} | self.rows(ids, mask) | more

    def prompts(self, rows: list[tuple[int, int, int]], seed: int = 0, pad: str = "left") -> dict[str, Any]:
        """What the model is called with, for prompts of (words before, images, words after), padded.

        A row's words and images depend on its own numbers and the seed: alone or in a batch it is the same prompt.
        """
        ids, parts = [], []
        for before, images, after in rows:
            generator = torch.Generator().manual_seed(seed + 1000 * before + 100 * images + after)
            words = torch.randint(3, IMAGE - 10, (before + after,), generator=generator)
            made = [self.image(number, generator) for number in range(images)]
            ids.append(torch.cat([words[:before], *(tokens for tokens, _ in made), words[before:]]))
            parts.append([part for _, part in made])
        length = max(len(row) for row in ids)
        batch, mask = torch.full((len(ids), length), PAD), torch.zeros(len(ids), length, dtype=torch.int64)
        for i, row in enumerate(ids):
            where = slice(length - len(row), None) if pad == "left" else slice(0, len(row))
            batch[i, where], mask[i, where] = row, 1
        found = {"input_ids": batch, "attention_mask": mask} | self.rows(batch, mask)
        return found | (self.joined(parts) if any(parts) else {})


TinyLlava = TinyVlm


def _text(kind: str, layers: int = LAYERS, **more: Any) -> Any:
    """The configuration of a language model of width 48 with four heads and two groups."""
    import transformers as hf

    made: Any = getattr(hf, kind)
    options: dict[str, Any] = {
        "hidden_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 512, "pad_token_id": PAD,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return made(**options | more)


def _built(made: Callable[[], Any], attention: str, seed: int) -> Any:
    """The model with random weights of unit gain, which stops at no word."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made()
        model.set_attn_implementation(attention)
        _randomise(model, seed)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model


def _stacked(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Images of one size: (I, C, H, W)."""
    return {"pixel_values": torch.stack([part["pixel_values"] for row in parts for part in row])}


_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}), "mistral": ("MistralConfig", {"sliding_window": None}), "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 12}), "phi3": ("Phi3Config", {}), "smollm3": ("SmolLM3Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 12, "sliding_window": 24}), "glm": ("GlmConfig", {"head_dim": 12}),
    "gemma": ("GemmaConfig", {"head_dim": 12}), "mistral-window": ("MistralConfig", {"sliding_window": 24}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 12, "sliding_window": 24}),
}  # fmt: skip
_TOWERS = {"clip": "CLIPVisionConfig", "siglip": "SiglipVisionConfig"}


def tiny_llava(
    attention: str = "sdpa",
    seed: int = 0,
    kv_heads: int = 2,
    kind: str = "llava",
    tower: str = "clip",
    text: str = "llama",
) -> TinyVlm:
    """A LLaVA; the same seed gives the same.

    kind: "llava" or "llava_next". tower: "clip" or "siglip". text: one of `_TEXTS`.
    """
    import transformers as hf

    vision: Any = getattr(hf, _TOWERS[tower])(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=48, patch_size=8
    )
    name, more = _TEXTS[text]
    language = _text(name, **{"num_key_value_heads": kv_heads} | more)
    options: dict[str, Any] = {"vision_config": vision, "text_config": language, "image_token_id": IMAGE}
    options["vision_feature_select_strategy"] = "default" if tower == "clip" else "full"

    def made() -> Any:
        if kind == "llava_next":
            wide: Any = hf.LlavaNextConfig(**options, image_grid_pinpoints=[[48, 96], [96, 48]])
            return hf.LlavaNextForConditionalGeneration(wide)
        return hf.LlavaForConditionalGeneration(hf.LlavaConfig(**options, image_seq_length=PATCHES))

    def image(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        return torch.full((PATCHES,), IMAGE), {"pixel_values": torch.randn(3, 48, 48, generator=generator)}

    return TinyVlm(_built(made, attention, seed), image, _stacked)


def _qwen(kind: str) -> Callable[[str, int], TinyVlm]:
    """Qwen2-VL and its like: images of any size, packed in one row of patches."""
    names: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen2_vl": ("Qwen2VL", {"depth": 3, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}),
        "qwen2_5_vl": ("Qwen2_5_VL", {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 48,
                                      "fullatt_block_indexes": [1], "window_size": 32}),
        "qwen3_vl": ("Qwen3VL", {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 48,
                                 "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}),
        "glm4v": ("Glm4v", {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 48,
                            "image_size": 64}),
    }  # fmt: skip
    name, more = names[kind]

    def build(attention: str, seed: int) -> TinyVlm:
        import transformers as hf

        vision = {"num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
        rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
        text = _text(f"{name}TextConfig", rope_parameters=rope, head_dim=12).to_dict()
        config: Any = getattr(hf, f"{name}Config")(
            vision_config=vision | more, text_config=text, image_token_id=IMAGE, video_token_id=VIDEO,
            vision_start_token_id=58, vision_end_token_id=59,
        )  # fmt: skip
        model = _built(lambda: getattr(hf, f"{name}ForConditionalGeneration")(config), attention, seed)

        def image(number: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            h, w = _SIZES[(number + int(torch.randint(4, (1,), generator=generator))) % 4]
            pixels = torch.randn(h * w, 3 * 2 * 8 * 8, generator=generator)
            ids = torch.tensor([58, *[IMAGE] * (h * w // 4), 59])
            return ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor([1, h, w])}

        def joined(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
            every = [part for row in parts for part in row]
            return {
                "pixel_values": torch.cat([part["pixel_values"] for part in every]),
                "image_grid_thw": torch.stack([part["image_grid_thw"] for part in every]),
            }

        def rows(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}

        def video(frames: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            pixels = torch.randn(frames * 24, 3 * 2 * 8 * 8, generator=generator)
            one = [VIDEO] * 6
            ids = (
                [58, *one * frames, 59] if kind != "qwen3_vl" else [n for _ in range(frames) for n in (7, 58, *one, 59)]
            )
            return torch.tensor(ids), {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, 4, 6]])}

        return TinyVlm(model, image, joined, rows, patches=6, video=None if kind == "glm4v" else video)

    return build


Image = Callable[[int, torch.Generator], tuple[Tensor, dict[str, Any]]]
_VISION: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
                           "image_size": 48, "patch_size": 8}  # fmt: skip
_WINDOW: dict[str, Any] = {"head_dim": 12, "sliding_window": 24}


def _every(parts: list[list[dict[str, Any]]], name: str) -> list[Any]:
    return [part[name] for row in parts for part in row]


def _tiled(name: str, tower: str) -> Callable[[str, int], TinyVlm]:
    """LLaVA-NeXT and its like: a base image and two tiles, unpadded."""

    def build(attention: str, seed: int) -> TinyVlm:
        import transformers as hf

        config: Any = getattr(hf, f"{name}Config")(
            vision_config=getattr(hf, tower)(**_VISION), text_config=_text("Qwen2Config"), image_token_id=IMAGE,
            video_token_id=VIDEO, image_token_index=IMAGE, video_token_index=VIDEO,
            image_grid_pinpoints=[[48, 96], [96, 48]],
            vision_feature_select_strategy="default" if "CLIP" in tower else "full",
        )  # fmt: skip
        model = _built(lambda: getattr(hf, f"{name}ForConditionalGeneration")(config), attention, seed)

        def image(number: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            pixels = torch.randn(3, 3, 48, 48, generator=generator)
            size = torch.tensor([[40, 96], [96, 48]][(number + int(torch.randint(2, (1,), generator=generator))) % 2])
            with torch.no_grad():
                found = model.model.get_image_features(pixels[None], size[None], return_dict=True).pooler_output
            return torch.full((len(found[0]),), IMAGE), {"pixel_values": pixels, "image_sizes": size}

        def joined(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
            return {key: torch.stack(_every(parts, key)) for key in ("pixel_values", "image_sizes")}

        def video(frames: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            pixels = torch.randn(1, frames, 3, 48, 48, generator=generator)
            with torch.no_grad():
                found = model.model.get_video_features(pixels, return_dict=True).pooler_output[0]
            return torch.full((found.shape[:-1].numel(),), VIDEO), {"pixel_values_videos": pixels}

        return TinyVlm(model, image, joined, video=None if name == "LlavaNext" else video)

    return build


def _one_size(
    name: str, text: Callable[[], Any], tower: str = "SiglipVisionConfig", tokens: int = 9, between: bool = True,
    kinds: Callable[[Tensor], Tensor] | None = None, vision: dict[str, Any] | None = None, **more: Any,
) -> Callable[[str, int], TinyVlm]:  # fmt: skip
    """Images of one size, `tokens` features each. between: a word before and after each; kinds: token_type_ids."""

    def build(attention: str, seed: int) -> TinyVlm:
        import transformers as hf

        config: Any = getattr(hf, f"{name}Config")(
            vision_config=getattr(hf, tower)(**_VISION | (vision or {})), text_config=text(), image_token_id=IMAGE,
            image_token_index=IMAGE, **more,
        )  # fmt: skip
        model = _built(lambda: getattr(hf, f"{name}ForConditionalGeneration")(config), attention, seed)

        def image(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            ids = [58, *[IMAGE] * tokens, 59] if between else [IMAGE] * tokens
            return torch.tensor(ids), {"pixel_values": torch.randn(3, 48, 48, generator=generator)}

        def rows(ids: Tensor, _: Tensor) -> dict[str, Tensor]:
            return {} if kinds is None else {"token_type_ids": kinds(ids)}

        return TinyVlm(model, image, _stacked, rows, patches=tokens)

    return build


def _internvl(attention: str, seed: int) -> TinyVlm:
    """One or two tiles an image, each 6 x 6 patches shuffled into 9 features."""
    tiny = _one_size(
        "InternVL", lambda: _text("Qwen2Config"), "InternVLVisionConfig", vision={"image_size": [48, 48],
        "patch_size": [8, 8], "layer_scale_init_value": 1.0}, image_seq_length=9, downsample_ratio=0.5,
    )(attention, seed)  # fmt: skip

    def image(number: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        tiles = 1 + (number + int(torch.randint(2, (1,), generator=generator))) % 2
        pixels = torch.randn(tiles, 3, 48, 48, generator=generator)
        return torch.tensor([58, *[IMAGE] * 9 * tiles, 59]), {"pixel_values": pixels}

    def joined(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat(_every(parts, "pixel_values"))}

    return TinyVlm(tiny.model, image, joined, patches=9)


def _idefics3(name: str) -> Callable[[str, int], TinyVlm]:
    """Two tiles an image with a word before each; prompts with fewer images are filled up with empty ones."""

    def build(attention: str, seed: int) -> TinyVlm:
        tiny = _one_size(name, lambda: _text("LlamaConfig"), f"{name}VisionConfig", scale_factor=2)(attention, seed)

        def image(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            pixels = torch.randn(2, 3, 48, 48, generator=generator)
            return torch.tensor([57, *[IMAGE] * 9, 58, *[IMAGE] * 9]), {"pixel_values": pixels}

        def joined(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
            rows = [torch.cat([part["pixel_values"] for part in row]) for row in parts]
            pixels = torch.zeros(len(rows), max(map(len, rows)), 3, 48, 48)
            for i, row in enumerate(rows):
                pixels[i, : len(row)] = row
            return {"pixel_values": pixels}

        return TinyVlm(tiny.model, image, joined, patches=9)

    return build


def _idefics2(attention: str, seed: int) -> TinyVlm:
    """One tile an image, resampled into 9 tokens."""
    perceiver = {"resampler_n_latents": 9, "resampler_depth": 1, "resampler_n_heads": 4, "resampler_head_dim": 12,
                 "num_key_value_heads": 2, "hidden_size": 48}  # fmt: skip
    tiny = _one_size(
        "Idefics2", lambda: _text("MistralConfig", sliding_window=None), "Idefics2VisionConfig",
        perceiver_config=perceiver,
    )(attention, seed)  # fmt: skip

    def joined(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
        pixels = torch.zeros(len(parts), max(map(len, parts)), 3, 48, 48)
        for i, row in enumerate(parts):
            pixels[i, : len(row)] = torch.stack([part["pixel_values"] for part in row])
        return {"pixel_values": pixels}

    return TinyVlm(tiny.model, tiny.image, joined, patches=9)


def _pixtral(name: str, merge: int, **more: Any) -> Callable[[str, int], TinyVlm]:
    """Images of any size in one row; a word ends each row of features."""

    def build(attention: str, seed: int) -> TinyVlm:
        tiny = _one_size(
            name, lambda: _text("MistralConfig", sliding_window=None), "PixtralVisionConfig",
            vision={"image_size": 64, "head_dim": 8}, vision_feature_layer=-1, **more,
        )(attention, seed)  # fmt: skip

        def image(number: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            h, w = _SIZES[(number + int(torch.randint(4, (1,), generator=generator))) % 4]
            pixels = torch.zeros(3, 64, 64)
            pixels[:, : 8 * h, : 8 * w] = torch.randn(3, 8 * h, 8 * w, generator=generator)
            ids = torch.tensor([*[IMAGE] * (w // merge), 57] * (h // merge))
            return ids, {"pixel_values": pixels, "image_sizes": torch.tensor([8 * h, 8 * w])}

        def joined(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
            return {key: torch.stack(_every(parts, key)) for key in ("pixel_values", "image_sizes")}

        return TinyVlm(tiny.model, image, joined, patches=24 // merge**2)

    return build


def _llava_with(text: str) -> Callable[[str, int], TinyVlm]:
    """Gemma 2's softcap is only in eager attention."""
    return lambda attention, seed: tiny_llava("eager" if text == "gemma2" else attention, seed, text=text)


VLM_KINDS: dict[str, Callable[[str, int], TinyVlm]] = {
    "llava": lambda attention, seed: tiny_llava(attention, seed),
    "llava-siglip": lambda attention, seed: tiny_llava(attention, seed, tower="siglip"),
    **{f"llava-{text}": _llava_with(text) for text in _TEXTS},
    **{kind: _qwen(kind) for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")},
    "llava_next": _tiled("LlavaNext", "CLIPVisionConfig"),
    "llava_next_video": _tiled("LlavaNextVideo", "CLIPVisionConfig"),
    "llava_onevision": _tiled("LlavaOnevision", "SiglipVisionConfig"),
    "internvl": _internvl,
    "aya_vision": _one_size(
        "AyaVision",
        lambda: _text("Cohere2Config", **_WINDOW),
        downsample_factor=2,
        vision_feature_select_strategy="full",
    ),
    "idefics2": _idefics2,
    "idefics3": _idefics3("Idefics3"),
    "smolvlm": _idefics3("SmolVLM"),
    "gemma3": _one_size(
        "Gemma3",
        lambda: _text("Gemma3TextConfig", **_WINDOW),
        mm_tokens_per_image=9,
        kinds=lambda ids: (ids == IMAGE).long(),
    ),
    "paligemma": _one_size(
        "PaliGemma",
        lambda: _text("GemmaConfig", head_dim=12),
        tokens=36,
        projection_dim=48,
        kinds=torch.zeros_like,
        between=False,
    ),
    "vipllava": _one_size(
        "VipLlava", lambda: _text("LlamaConfig"), "CLIPVisionConfig", tokens=36, vision_feature_layers=[-2, -1, 2]
    ),
    "llava-dinov2": _one_size(
        "Llava",
        lambda: _text("LlamaConfig"),
        "Dinov2Config",
        tokens=36,
        between=False,
        vision_feature_select_strategy="default",
    ),
    "llava-pixtral": _pixtral("Llava", 1, vision_feature_select_strategy="full"),
    "mistral3": _pixtral("Mistral3", 2, spatial_merge_size=2),
}


def tiny_vlm(kind: str, attention: str = "sdpa", seed: int = 0) -> TinyVlm:
    """A tiny model of one of `VLM_KINDS`, such as "qwen2_5_vl" or "llava-gemma2"; the same seed gives the same."""
    tiny = VLM_KINDS[kind](attention, seed)
    tiny.model.generation_config.suppress_tokens = list(range(IMAGE - 10, VOCAB))  # words alone are said
    return tiny
