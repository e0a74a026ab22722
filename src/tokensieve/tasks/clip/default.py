"""The CLIP that is there without downloading one: real ViT-S/14, real MiniLM, projections aligned on CIFAR-10.

Image tower: `zoo.vit_s14` as open_clip's VisionTransformer. Text tower: `zoo.minilm` through open_clip's Hugging Face
text encoder. Both frozen; what was trained (LiT-style, `tokensieve train align`) is two projections and a temperature,
a small safetensors file beside this one. Imports zoo.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import MissingMaterialError
from tokensieve.utils.hub import quiet_transformers
from tokensieve.utils.tensor_files import read_tensors
from tokensieve.zoo import vit_s14
from tokensieve.zoo.minilm import minilm_folder

__all__ = ["EMBED", "MODEL", "build_default_clip", "default_dataset_root", "load_default_clip"]

MODEL = "vit-s14-minilm"
EMBED = 128
CONTEXT = 32  # tokens of a caption; prompts are short
TRAINED = ("visual.proj", "text.proj.weight", "logit_scale")


def build_default_clip() -> nn.Module:
    """The two towers as open_clip's CustomTextCLIP, projections still random."""
    from open_clip.model import CustomTextCLIP

    folder = str(minilm_folder())
    with quiet_transformers():
        model = CustomTextCLIP(
            EMBED,
            vision_cfg={
                "layers": vit_s14.DEPTH, "width": vit_s14.WIDTH, "head_width": vit_s14.WIDTH // vit_s14.HEADS,
                "patch_size": vit_s14.PATCH, "image_size": 224, "ls_init_value": 1.0, "no_ln_pre": True,
                "norm_kwargs": {"eps": vit_s14.EPS},
            },
            text_cfg={
                "hf_model_name": folder, "hf_tokenizer_name": folder, "hf_pooler_type": "mean_pooler",
                "hf_proj_type": "linear", "hf_model_pretrained": True,
            },
        )  # fmt: skip
    missing, unexpected = model.visual.load_state_dict(vit_s14.vit_s14_openclip().state_dict(), strict=False)
    assert missing == ["proj"], missing
    assert not unexpected, unexpected
    return model.eval()


def load_default_clip(device: str = "cpu") -> tuple[nn.Module, Callable[..., Tensor], Callable[..., Tensor]]:
    """(model, transform, tokenizer), as clip-benchmark's loaders return them."""
    path = _shipped("vit-s14-minilm.safetensors")
    model = build_default_clip()
    state, _ = read_tensors(path)
    if set(state) != set(TRAINED):
        raise MissingMaterialError(f"{path.name} holds {sorted(state)}, expected {sorted(TRAINED)}")
    model.load_state_dict(state, strict=False)
    return model.to(device), vit_s14.preprocess(), default_tokenizer()


def default_tokenizer() -> Any:
    """Captions -> (B, 32) token ids."""
    from open_clip.tokenizer import HFTokenizer

    return HFTokenizer(str(minilm_folder()), context_length=CONTEXT)


def trained_part(model: nn.Module) -> dict[str, Tensor]:
    """What `tokensieve train align` trains and the package ships."""
    state = model.state_dict()
    return {name: state[name].detach().to(torch.float32).cpu().contiguous() for name in TRAINED}


def default_dataset_root() -> Path:
    """A local webdataset of CIFAR-10 test images with class names and prompts, for clip-benchmark's `wds/` reader."""
    return _shipped("cifar10-sample")


def _shipped(name: str) -> Path:
    path = Path(str(resources.files("tokensieve.tasks.clip"))) / "data" / name
    if not path.exists():
        raise MissingMaterialError(
            f"{name} is missing from this installation: reinstall, or run `tokensieve train align`"
        )
    return path
