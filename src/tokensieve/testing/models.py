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
from tokensieve.models.encoder.form import part
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

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are rotated by place, so that an extra token has none."""
        return self.name in _ROTARY

    @property
    def placed(self) -> bool:
        """Whether attention itself tells places apart: two equal patches are not the same there."""
        return self.rotary or "relpos" in self.name or "beit" in self.name

    @property
    def late(self) -> bool:
        """Whether the MLP runs beside attention, so that a cut comes after both."""
        return self.name == "timm_parallel_scaling"

    @property
    def float_only(self) -> bool:
        """Whether the untouched model itself fails in half precision: timm's mixed rotary table mixes dtypes."""
        return self.name == "timm_rope_mixed"

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


def _timm_eva(name: str, seed: int, **options: Any) -> TinyModel:
    declare_missing_schemas()
    from timm.models.eva import Eva

    base = {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True}
    model = Eva(
        img_size=SIZE, patch_size=PATCH, num_classes=OUT, global_pool="token", embed_dim=WIDTH, depth=DEPTH,
        num_heads=HEADS, mlp_ratio=2.0, use_rot_pos_emb=True, ref_feat_shape=(SIZE // PATCH, SIZE // PATCH),
        **(base | options),
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


def _transformers(name: str, seed: int, cls: str, sizes: dict[str, Any], prefix: int, pooled: bool = True) -> TinyModel:
    """Any vision model of transformers, from its class and what its configuration takes beyond the usual sizes.

    pooled: whether it has a `pooler_output`; else the feature is CLS or, without one, the mean of the tokens.
    """
    import transformers

    model_class = getattr(transformers, cls)
    model = model_class(model_class.config_class(**_sizes(**sizes)))
    feature = _pooled if pooled else _first if prefix else _mean
    return TinyModel(name, _randomise(model, seed), feature, prefix, _hf_mlps)


def _first(model: nn.Module, images: Tensor) -> Tensor:
    return model(pixel_values=images).last_hidden_state[:, 0]


def _mean(model: nn.Module, images: Tensor) -> Tensor:
    return model(pixel_values=images).last_hidden_state.mean(dim=1)


def _hf_mlps(model: nn.Module) -> list[nn.Module]:
    """What meets every token first in each block's MLP, wherever the version puts it."""
    places = ("encoder.layers", "encoder.layer", "model.layer", "layers", "vision_model.encoder.layers")
    layers = next(found for path in places if (found := part(model, path)) is not None)
    names = ("mlp", "ffn", "intermediate")
    return [next(getattr(block, n) for n in names if hasattr(block, n)) for block in layers.children()]


_MLP: dict[str, Any] = {"intermediate_size": 2 * WIDTH}
_INTERN = _MLP | {"use_qk_norm": True, "image_size": [SIZE, SIZE], "patch_size": [PATCH, PATCH]}


def _vit_mae(name: str, seed: int) -> TinyModel:
    """With nothing masked, and its shuffle of the patches the identity."""
    from transformers import ViTMAEConfig, ViTMAEModel

    def feature(model: nn.Module, images: Tensor) -> Tensor:
        noise = torch.arange(PATCHES, dtype=torch.float32).expand(len(images), -1)
        return model(pixel_values=images, noise=noise).last_hidden_state[:, 0]

    model = _randomise(ViTMAEModel(ViTMAEConfig(**_sizes(**_MLP, mask_ratio=0.0))), seed)
    return TinyModel(name, model, feature, 1, _hf_mlps)


def patchified(images: Tensor) -> Tensor:
    """(B, 3, 48, 48) -> (B, 36, 192): flat patches, as NaFlex models take them."""
    parts = images.unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH))  # B, 3, rows, 8, columns, 8
    return parts.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _siglip2(name: str, seed: int) -> TinyModel:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    model = _randomise(
        Siglip2VisionModel(Siglip2VisionConfig(**sizes, num_patches=PATCHES, patch_size=PATCH, **_MLP)), seed
    )
    return TinyModel(name, model, _siglip2_feature, 0, _hf_mlps)


def _siglip2_feature(model: nn.Module, images: Tensor) -> Tensor:
    shapes = torch.full((len(images), 2), SIZE // PATCH)
    mask = torch.ones(len(images), PATCHES, dtype=torch.int64)
    return model(pixel_values=patchified(images), pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output


def _clips(images: Tensor) -> Tensor:
    """(B, 3, 48, 48) -> (B, 4, 3, 24, 24): the four quarters of an image as frames."""
    return images.unflatten(2, (2, -1)).unflatten(4, (2, -1)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def _videomae(name: str, seed: int) -> TinyModel:
    from transformers import VideoMAEConfig, VideoMAEModel

    sizes = _sizes(**_MLP) | {"image_size": SIZE // 2, "num_frames": 4, "tubelet_size": 1, "use_mean_pooling": False}
    model = _randomise(VideoMAEModel(VideoMAEConfig(**sizes)), seed)
    return TinyModel(name, model, lambda m, x: m(pixel_values=_clips(x)).last_hidden_state.mean(1), 0, _hf_mlps)


def _vjepa2(name: str, seed: int) -> TinyModel:
    from transformers import VJEPA2Config, VJEPA2Model

    sizes = _sizes(mlp_ratio=2.0, crop_size=SIZE // 2, frames_per_clip=4, tubelet_size=1, pred_num_hidden_layers=1)
    sizes |= {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_mlp_ratio": 2.0}

    def feature(model: nn.Module, images: Tensor) -> Tensor:
        return model(pixel_values_videos=_clips(images), skip_predictor=True).last_hidden_state.mean(dim=1)

    return TinyModel(name, _randomise(VJEPA2Model(VJEPA2Config(**sizes)), seed), feature, 0, _hf_mlps)


# -- torch --------------------------------------------------------------------------------------------------------


def _torchvision(name: str, seed: int) -> TinyModel:
    declare_missing_schemas()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(SIZE, PATCH, DEPTH, HEADS, WIDTH, 2 * WIDTH, num_classes=OUT)
    return TinyModel(name, _randomise(model, seed), _call, 1, _mlps("encoder", "layers"))


class TorchEncoderViT(nn.Module):
    """A ViT as many write it: a convolution, a CLS token, positions, nn.TransformerEncoder, a linear head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(torch.zeros(1, 1 + PATCHES, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


def _torch_encoder(name: str, seed: int, norm_first: bool) -> TinyModel:
    def mlps(model: nn.Module) -> list[nn.Module]:
        encoder: Any = model.encoder
        return [layer.linear1 for layer in encoder.layers.children()]

    return TinyModel(name, _randomise(TorchEncoderViT(norm_first), seed), _call, 1, mlps)


# -- timm's other blocks ------------------------------------------------------------------------------------------


def _timm_block(name: str, seed: int, block: str, **options: Any) -> TinyModel:
    declare_missing_schemas()
    from timm.models import vision_transformer

    model = _randomise(_timm(block_fn=getattr(vision_transformer, block), **options), seed)

    def mlps(model: nn.Module) -> list[nn.Module]:
        parts = ("mlp", "ffns.0.mlp", "mlp_act")
        blocks: Any = model.blocks
        return [next(found for path in parts if (found := part(block, path))) for block in blocks.children()]

    return TinyModel(name, model, _call, 1, mlps)


def _timm_beit(name: str, seed: int, **options: Any) -> TinyModel:
    declare_missing_schemas()
    from timm.models.beit import Beit

    model = Beit(
        img_size=SIZE, patch_size=PATCH, num_classes=OUT, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, mlp_ratio=2.0,
        qkv_bias=True, **options,
    )  # fmt: skip
    return TinyModel(name, _randomise(model, seed), _call, 1, _mlps("blocks"))


def _timm_relpos(name: str, seed: int, **options: Any) -> TinyModel:
    declare_missing_schemas()
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    model = VisionTransformerRelPos(
        img_size=SIZE, patch_size=PATCH, num_classes=OUT, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, mlp_ratio=2.0,
        **options,
    )  # fmt: skip
    return TinyModel(name, _randomise(model, seed), _call, int(model.num_prefix_tokens), _mlps("blocks"))


def _timm_naflex(name: str, seed: int, **options: Any) -> TinyModel:
    declare_missing_schemas()
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    config = NaFlexVitCfg(
        patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, mlp_ratio=2.0,
        pos_embed_grid_size=(SIZE // PATCH, SIZE // PATCH), **options,
    )  # fmt: skip
    model = NaFlexVit(config, num_classes=OUT, img_size=SIZE)
    return TinyModel(name, _randomise(model, seed), _call, int(model.num_prefix_tokens), _mlps("blocks"))


_ROTARY = frozenset((
    "timm_eva", "timm_eva_post", "timm_rope_mixed", "timm_naflex", "transformers_mlcd", "transformers_dinov3",
    "transformers_vjepa2",
))  # fmt: skip
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
    "transformers_dinov2": (_transformers, {"cls": "Dinov2Model", "sizes": {"mlp_ratio": 2}, "prefix": 1}),
    "transformers_dinov2_registers": (
        _transformers,
        {"cls": "Dinov2WithRegistersModel", "sizes": {"mlp_ratio": 2, "num_register_tokens": 3}, "prefix": 4},
    ),
    "transformers_vit": (_transformers, {"cls": "ViTModel", "sizes": _MLP, "prefix": 1}),
    "transformers_deit": (_transformers, {"cls": "DeiTModel", "sizes": _MLP, "prefix": 2}),
    "transformers_vit_mae": (_vit_mae, {}),
    "transformers_ijepa": (_transformers, {"cls": "IJepaModel", "sizes": _MLP, "prefix": 0, "pooled": False}),
    "transformers_blip": (_transformers, {"cls": "BlipVisionModel", "sizes": _MLP, "prefix": 1}),
    "transformers_blip2": (_transformers, {"cls": "Blip2VisionModel", "sizes": _MLP, "prefix": 1}),
    "transformers_aimv2": (_transformers, {"cls": "Aimv2VisionModel", "sizes": _MLP, "prefix": 0}),
    "transformers_internvit": (
        _transformers,
        {"cls": "InternVLVisionModel", "sizes": _INTERN, "prefix": 1, "pooled": False},
    ),
    "transformers_flava": (_transformers, {"cls": "FlavaImageModel", "sizes": _MLP, "prefix": 1}),
    "transformers_mlcd": (_transformers, {"cls": "MLCDVisionModel", "sizes": _MLP, "prefix": 1}),
    "transformers_dinov3": (
        _transformers,
        {"cls": "DINOv3ViTModel", "sizes": _MLP | {"num_register_tokens": 2}, "prefix": 3},
    ),
    "transformers_beit": (
        _transformers,
        {"cls": "BeitModel", "sizes": _MLP | {"use_relative_position_bias": True}, "prefix": 1},
    ),
    "transformers_beit_shared": (
        _transformers,
        {"cls": "BeitModel", "sizes": _MLP | {"use_shared_relative_position_bias": True}, "prefix": 1},
    ),
    "transformers_siglip2": (_siglip2, {}),
    "transformers_owlvit": (_transformers, {"cls": "OwlViTVisionModel", "sizes": _MLP, "prefix": 1}),
    "transformers_clipseg": (_transformers, {"cls": "CLIPSegVisionModel", "sizes": _MLP, "prefix": 1}),
    "transformers_videomae": (_videomae, {}),
    "transformers_vjepa2": (_vjepa2, {}),
    "torchvision": (_torchvision, {}),
    "torch_encoder": (_torch_encoder, {"norm_first": True}),
    "torch_encoder_post": (_torch_encoder, {"norm_first": False}),
    "timm_respost": (_timm_block, {"block": "ResPostBlock", "init_values": 1.0}),
    "timm_parallel": (_timm_block, {"block": "ParallelThingsBlock"}),
    "timm_parallel_scaling": (_timm_block, {"block": "ParallelScalingBlock", "qk_norm": True}),
    "timm_rope_mixed": (_timm_eva, {"rope_type": "mixed", "qkv_fused": True}),
    "timm_eva_post": (_timm_eva, {"use_post_norm": True, "qkv_fused": True}),
    "timm_beit": (_timm_beit, {"use_rel_pos_bias": True, "init_values": 1.0}),
    "timm_beit_shared": (_timm_beit, {"use_shared_rel_pos_bias": True}),
    "timm_relpos": (_timm_relpos, {"rel_pos_type": "bias", "class_token": True, "global_pool": "token"}),
    "timm_relpos_shared": (_timm_relpos, {"rel_pos_type": "bias", "shared_rel_pos": True}),
    "timm_naflex": (_timm_naflex, {"rope_type": "axial", "class_token": True, "global_pool": "token"}),
    "timm_naflex_map": (_timm_naflex, {"global_pool": "map"}),
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
