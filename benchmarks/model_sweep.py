"""Which encoder classes work: random models of transformers, timm, open_clip and torchvision, each tried once.

    python benchmarks/model_sweep.py -o benchmarks/records/model_sweep.json

works: nothing removed through the real cut gives the untouched output, and half of the patches can go. refused: one
line says why. wrong: the output differs. traceback: another error. unbuilt: no random model could be made or run.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import TokensieveError
from tokensieve.utils.torchvision import declare_missing_schemas

SIZES: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 48, "patch_size": 8, "mlp_ratio": 2, "num_channels": 3, "crop_size": 48, "num_frames": 2,
    "frames_per_clip": 2, "tubelet_size": 1,
}  # fmt: skip
SMALL = ("test_", "atto", "femto", "pico", "nano", "tiny", "xxs", "xx_small", "xs", "_s", "small", "b0", "18")
OPEN_CLIP = (
    "RN50", "ViT-B-32", "coca_ViT-B-32", "convnext_base", "EVA02-B-16", "ViT-B-16-SigLIP", "MobileCLIP-S1",
    "MobileCLIP-B", "ViTamin-S", "PE-Core-B-16",
)  # fmt: skip
TORCHVISION = ("vit_b_32", "swin_t", "convnext_tiny", "resnet18", "maxvit_t", "efficientnet_b0")


class Everything(tokensieve.Method):
    """Asked for fewer, it keeps all: the cut runs and removes nothing."""

    def reduce(self, view: tokensieve.TokenView, keep: int) -> tokensieve.Reduction:
        return tokensieve.Reduction(keep=torch.arange(view.n).expand(view.batch, -1))


def first_tensor(out: Any) -> Tensor:
    """The pooled output where there is one, else the first tensor of any output."""
    for name in ("pooler_output", "last_hidden_state", "logits", "image_embeds"):
        if isinstance(getattr(out, name, None), Tensor):
            return getattr(out, name)
    if isinstance(out, Tensor):
        return out
    return first_tensor(next(iter(out.values() if isinstance(out, dict) else out)))


def fitting(config_class: Any) -> Any:
    """A small configuration: our sizes where the class has a number of that kind, lists kept lists."""
    default = config_class()
    chosen: dict[str, Any] = {}
    for name, value in SIZES.items():
        old = getattr(default, name, None)
        if isinstance(old, bool) or old is None:
            continue
        if isinstance(old, list | tuple) and name in ("image_size", "patch_size"):
            chosen[name] = [value] * len(old)
        elif isinstance(old, int | float):
            chosen[name] = type(old)(value)
    return config_class(**chosen)


def transformers_models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Bare vision models of every module of transformers that takes pixels and has a plain configuration."""
    import transformers
    from transformers import PreTrainedModel

    folders = list(importlib.import_module("transformers.models").__path__)
    for _, name, _ in pkgutil.iter_modules(folders):
        if not any((Path(folder) / name / f"modeling_{name}.py").exists() for folder in folders):
            continue
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except (ImportError, OSError, AttributeError):
            continue
        for cls_name, cls in vars(module).items():
            if not (inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__):
                continue
            takes = inspect.signature(cls.forward).parameters
            config = getattr(cls, "config_class", None)
            bare = cls_name.endswith(("Model", "VisionTransformer")) and "PreTrained" not in cls_name
            if not bare or config is None or not hasattr(transformers, cls_name):
                continue
            if not {"pixel_values", "pixel_values_videos"} & set(takes) or {"input_ids"} & set(takes):
                continue
            if any(key.endswith("_config") for key in config().to_dict() if key != "quantization_config"):
                continue  # several models in one, or a backbone that is fetched
            yield f"transformers.{cls_name}", partial(_small, cls, config)


def _small(cls: Any, config: Any) -> nn.Module:
    return cls(fitting(config))


def timm_models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """The smallest-looking model of every module of timm."""
    import timm

    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            name = min(names, key=lambda n: (next((i for i, s in enumerate(SMALL) if s in n), len(SMALL)), len(n), n))
            yield f"timm.{name}", partial(timm.create_model, name)
    for name in ("vit_dwee_patch16_reg1_gap_256", "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2"):
        yield f"timm.{name}", partial(timm.create_model, name)


def other_models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    import open_clip
    import torchvision

    for name in OPEN_CLIP:
        config = open_clip.get_model_config(name)
        if config is not None:
            tower = open_clip.model._build_vision_tower
            yield f"open_clip.{name}", partial(tower, config["embed_dim"], config["vision_cfg"])
    for name in TORCHVISION:
        yield f"torchvision.{name}", getattr(torchvision.models, name)


def runner(model: Any) -> Callable[[], Tensor]:
    """A forward on two random images (or clips) of the size that the model says."""
    config = getattr(model, "config", None)
    size: Any = getattr(config, "crop_size", None) or getattr(config, "image_size", None)
    size = size or getattr(model, "image_size", None) or (getattr(model, "default_cfg", None) or {}).get("input_size")
    side = size[-1] if isinstance(size, list | tuple) else size or 224
    takes = inspect.signature(model.forward).parameters
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    clips = images.unsqueeze(1).expand(-1, frames, -1, -1, -1).contiguous() if frames else images
    if "pixel_values_videos" in takes:
        skip = {"skip_predictor": True} if "skip_predictor" in takes else {}
        return lambda: first_tensor(model(pixel_values_videos=clips, **skip))
    if "spatial_shapes" in takes:
        n, width = model.config.num_patches, model.config.patch_size**2 * 3
        down = int(n**0.5)
        given = {"pixel_attention_mask": torch.ones(2, n).long(), "spatial_shapes": torch.full((2, 2), down)}
        return lambda: first_tensor(model(pixel_values=torch.ones(2, n, width), **given))
    if "pixel_values" in takes:
        noise = {"noise": torch.arange(36.0).expand(2, -1)} if "noise" in takes else {}
        return lambda: first_tensor(model(pixel_values=clips, **noise))
    return lambda: first_tensor(model(images))


def tried(build: Callable[[], nn.Module]) -> tuple[str, str]:
    """What happened, and why."""
    try:
        torch.manual_seed(0)
        model: Any = build().eval()
        for p in model.parameters():
            if p.dim() < 2:
                p.data += 0.1 * torch.randn_like(p)
    except Exception as error:
        return "unbuilt", f"{type(error).__name__}: {str(error)[:120]}"
    try:
        tokensieve.attach(model, "grid", keep=0.5).remove()
    except TokensieveError as error:
        return "refused", str(error)[:200]
    except Exception as error:
        return "traceback", f"attach: {type(error).__name__}: {str(error)[:120]}"
    run = runner(model)
    try:
        wanted = run()
    except Exception as error:
        return "unbuilt", f"forward: {type(error).__name__}: {str(error)[:120]}"
    try:
        handle = tokensieve.attach(model, "grid", keep=0.5)
        patches = handle.patches
        with handle:
            run()
        with tokensieve.attach(model, Everything(), keep=patches - 1, at=0):
            got = run()
    except TokensieveError as error:
        return "refused", f"in the forward: {str(error)[:200]}"
    except Exception as error:
        return "traceback", f"forward: {type(error).__name__}: {str(error)[:120]}"
    apart = (got - wanted).abs().max().item() / max(1e-6, wanted.abs().max().item())
    return ("works", handle.family.name) if apart < 1e-4 else ("wrong", f"differs by {apart:.1e}")  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/records/model_sweep.json"))
    args = parser.parse_args()
    declare_missing_schemas()
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, str]] = {}
    with torch.no_grad():
        for source in (transformers_models, timm_models, other_models):
            for name, build in source():
                result, why = tried(build)
                rows[name] = {"result": result, "why": why}
                print(f"{result:<10} {name}: {why}", flush=True)
                counts = dict(Counter(row["result"] for row in rows.values()))
                record = {"tokensieve": tokensieve.__version__, "torch": torch.__version__, "counts": counts}
                args.output.write_text(json.dumps(record | {"models": rows}, indent=1) + "\n")
    print(counts)


if __name__ == "__main__":
    main()
