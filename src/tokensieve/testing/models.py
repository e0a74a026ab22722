"""Tiny random models of every supported family, by name: 36 patches, width 32, four blocks, on 48-pixel images.

    tiny = tiny_model("openclip")
    feature = tiny.feature(tiny.model, tiny.images(2))

Weights are drawn anew, large enough that attention is peaked and patches differ: with a library's own initial values
every selection would be a tie. open_clip, timm and transformers are imported by the function that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import UnknownNameError, nearest
from tokensieve.utils.torchvision import declare_missing_schemas

__all__ = ["TinyModel", "tiny_model", "tiny_models"]

SIZE, PATCH, WIDTH, DEPTH, HEADS, OUT = 48, 8, 32, 4, 4, 16
PATCHES = (SIZE // PATCH) ** 2


@dataclass(frozen=True)
class TinyModel:
    """A model in eval mode and float32, and how to get its image feature.

    feature: (model, images (B, 3, 48, 48)) -> (B, E). Takes the model, so that copies and compiled ones can be asked.
    prefix: tokens before the patches. mlps: the MLP of each block, for hooks that look at real shapes.
    """

    name: str
    model: nn.Module
    feature: Callable[[nn.Module, Tensor], Tensor]
    prefix: int
    mlps: Callable[[nn.Module], list[nn.Module]]

    def images(self, batch: int, seed: int = 0) -> Tensor:
        """(batch, 3, 48, 48) from a seed; the first ones are the same for any batch."""
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([torch.randn(3, SIZE, SIZE, generator=generator) for _ in range(batch)])


def _randomise(model: nn.Module, seed: int) -> nn.Module:
    """Weights of unit gain, biases and scales a little off their start, embeddings of size about one half."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 0:
                continue
            if any(word in name for word in ("pos", "class_emb", "token", "latent", "probe", "query")) and p.dim() != 1:
                p.copy_(0.5 * noise)
            elif p.dim() == 1:
                p.add_(0.2 * noise)
            else:
                p.copy_(1.5 * noise * (p.numel() / p.shape[0]) ** -0.5)
    return model.eval().requires_grad_(True)


def _call(model: nn.Module, images: Tensor) -> Tensor:
    out = model(images)
    return out[0] if isinstance(out, tuple) else out


def _encode_image(model: nn.Module, images: Tensor) -> Tensor:
    return model.encode_image(images)  # type: ignore[operator]


def _pooled(model: nn.Module, images: Tensor) -> Tensor:
    return model(pixel_values=images).pooler_output


def _image_features(model: nn.Module, images: Tensor) -> Tensor:
    out = model.get_image_features(pixel_values=images)  # type: ignore[operator]
    return out if isinstance(out, Tensor) else out.pooler_output


def _mlps(*path: str) -> Callable[[nn.Module], list[nn.Module]]:
    """The `mlp` of every block of the list at `path`."""

    def find(model: nn.Module) -> list[nn.Module]:
        found: Any = model
        for name in path:
            found = getattr(found, name)
        return [block.mlp for block in found.children()]

    return find


# -- open_clip ----------------------------------------------------------------------------------------------------


def _openclip(**options: Any) -> nn.Module:
    declare_missing_schemas()
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(
        image_size=SIZE, patch_size=PATCH, width=WIDTH, layers=DEPTH, heads=HEADS, mlp_ratio=2.0, output_dim=OUT,
        **options,
    )  # fmt: skip


def _openclip_tower(name: str, seed: int, **options: Any) -> TinyModel:
    model = _randomise(_openclip(**options), seed)
    return TinyModel(name, model, _call, 1, _mlps("transformer", "resblocks"))


def _openclip_coca(name: str, seed: int) -> TinyModel:
    return _openclip_tower(name, seed, attentional_pool=True, attn_pooler_queries=6, attn_pooler_heads=HEADS)


def _openclip_custom(name: str, seed: int) -> TinyModel:
    return _openclip_tower(
        name, seed, qk_norm=True, scale_heads=True, scale_attn_inner=True, scale_attn=True, scale_fc=True
    )


def _openclip_whole(name: str, seed: int) -> TinyModel:
    declare_missing_schemas()
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(
        layers=DEPTH, width=WIDTH, head_width=WIDTH // HEADS, patch_size=PATCH, image_size=SIZE, mlp_ratio=2.0
    )
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=WIDTH, heads=HEADS, layers=2)
    model = _randomise(CLIP(OUT, vision, text), seed)
    return TinyModel(name, model, _encode_image, 1, _mlps("visual", "transformer", "resblocks"))


def _openclip_timm(name: str, seed: int, trunk: nn.Module) -> TinyModel:
    """open_clip's wrapper with a tiny trunk in place of the one it builds from a name."""
    declare_missing_schemas()
    from open_clip.timm_model import TimmModel

    model = TimmModel("vit_tiny_patch16_224", OUT, image_size=SIZE, pool="token", proj="linear")
    model.trunk = trunk
    model.head = nn.Sequential(nn.Dropout(0.0), nn.Linear(WIDTH, OUT, bias=False))
    prefix = int(trunk.num_prefix_tokens)  # type: ignore[arg-type]
    return TinyModel(name, _randomise(model, seed), _call, prefix, _mlps("trunk", "blocks"))


def _openclip_timm_cls(name: str, seed: int) -> TinyModel:
    return _openclip_timm(name, seed, _timm(num_classes=0))


def _openclip_timm_siglip(name: str, seed: int) -> TinyModel:
    return _openclip_timm(name, seed, _timm(num_classes=0, class_token=False, global_pool="map"))


# -- timm ---------------------------------------------------------------------------------------------------------


def _timm(**options: Any) -> nn.Module:
    declare_missing_schemas()
    from timm.models.vision_transformer import VisionTransformer

    base = {"num_classes": OUT}
    return VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, mlp_ratio=2.0,
        **(base | options),
    )  # fmt: skip


def _timm_tower(name: str, seed: int, **options: Any) -> TinyModel:
    model = _randomise(_timm(**options), seed)
    return TinyModel(name, model, _call, int(model.num_prefix_tokens), _mlps("blocks"))  # type: ignore[arg-type]


def _timm_eva(name: str, seed: int) -> TinyModel:
    declare_missing_schemas()
    from timm.models.eva import Eva

    model = Eva(
        img_size=SIZE, patch_size=PATCH, num_classes=OUT, global_pool="token", embed_dim=WIDTH, depth=DEPTH,
        num_heads=HEADS, mlp_ratio=2.0, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True,
        ref_feat_shape=(SIZE // PATCH, SIZE // PATCH),
    )  # fmt: skip
    return TinyModel(name, _randomise(model, seed), _call, 1, _mlps("blocks"))


# -- transformers -------------------------------------------------------------------------------------------------


def _sizes(**more: Any) -> dict[str, Any]:
    base = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "image_size": SIZE}
    return base | {"patch_size": PATCH} | more


def _transformers_clip(name: str, seed: int) -> TinyModel:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = _randomise(CLIPVisionModel(CLIPVisionConfig(**_sizes(intermediate_size=2 * WIDTH))), seed)
    return TinyModel(name, model, _pooled, 1, _hf_mlps)


def _transformers_clip_whole(name: str, seed: int) -> TinyModel:
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": 64}
    text |= {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        text_config=text, vision_config=_sizes(intermediate_size=2 * WIDTH), projection_dim=OUT
    )  # fmt: skip
    return TinyModel(name, _randomise(CLIPModel(config), seed), _image_features, 1, _hf_mlps)


def _transformers_siglip(name: str, seed: int) -> TinyModel:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    model = _randomise(SiglipVisionModel(SiglipVisionConfig(**_sizes(intermediate_size=2 * WIDTH))), seed)
    return TinyModel(name, model, _pooled, 0, _hf_mlps)


def _transformers_dinov2(name: str, seed: int) -> TinyModel:
    from transformers import Dinov2Config, Dinov2Model

    model = _randomise(Dinov2Model(Dinov2Config(**_sizes(mlp_ratio=2))), seed)
    return TinyModel(name, model, _pooled, 1, _hf_mlps)


def _transformers_dinov2_registers(name: str, seed: int) -> TinyModel:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    config = Dinov2WithRegistersConfig(**_sizes(mlp_ratio=2, num_register_tokens=3))
    return TinyModel(name, _randomise(Dinov2WithRegistersModel(config), seed), _pooled, 4, _hf_mlps)


def _hf_mlps(model: nn.Module) -> list[nn.Module]:
    """The MLPs of the vision encoder, wherever the version puts it."""
    tower: Any = getattr(model, "vision_model", model)
    encoder = tower.encoder
    layers = getattr(encoder, "layers", None)
    return [block.mlp for block in (layers if layers is not None else encoder.layer).children()]


_BUILDERS: dict[str, tuple[Callable[..., TinyModel], dict[str, Any]]] = {
    "openclip": (_openclip_tower, {}),
    "openclip_layerscale": (_openclip_tower, {"ls_init_value": 1.0, "no_ln_pre": True}),
    "openclip_avg": (_openclip_tower, {"pool_type": "avg", "final_ln_after_pool": True}),
    "openclip_coca": (_openclip_coca, {}),
    "openclip_custom": (_openclip_custom, {}),
    "openclip_whole": (_openclip_whole, {}),
    "openclip_timm": (_openclip_timm_cls, {}),
    "openclip_timm_siglip": (_openclip_timm_siglip, {}),
    "timm": (_timm_tower, {}),
    "timm_registers": (
        _timm_tower,
        {"reg_tokens": 3, "init_values": 1.0, "no_embed_class": True, "dynamic_img_size": True},
    ),
    "timm_avg": (_timm_tower, {"global_pool": "avg"}),
    "timm_qknorm": (_timm_tower, {"qk_norm": True, "scale_attn_norm": True}),
    "timm_eva": (_timm_eva, {}),
    "transformers_clip": (_transformers_clip, {}),
    "transformers_clip_whole": (_transformers_clip_whole, {}),
    "transformers_siglip": (_transformers_siglip, {}),
    "transformers_dinov2": (_transformers_dinov2, {}),
    "transformers_dinov2_registers": (_transformers_dinov2_registers, {}),
}


def tiny_models() -> list[str]:
    """The names that `tiny_model` knows."""
    return list(_BUILDERS)


def tiny_model(name: str, seed: int = 0) -> TinyModel:
    """Build one by name; the same seed gives the same weights. ImportError where its library is absent."""
    if name not in _BUILDERS:
        raise UnknownNameError(f"unknown tiny model {name!r}.{nearest(name, _BUILDERS)}")
    build, options = _BUILDERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what is added to a library's own initial values counts too
        return build(name, seed, **options)
