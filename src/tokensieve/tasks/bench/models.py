"""The benchmark's models by name: the real ViT-S/14, and open_clip's vision towers with random weights."""

from __future__ import annotations

import copy
import difflib
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import OptionError, UnknownNameError, nearest
from tokensieve.tasks.bench.config import MODELS
from tokensieve.utils.torchvision import declare_missing_schemas

__all__ = ["build_model", "check_device", "check_model", "images", "twin"]

_OPENCLIP = {"vit-b16": "ViT-B-16", "vit-l14-336": "ViT-L-14-336"}


def check_model(name: str) -> None:
    """Raise where there is no model of this name; the message has the nearest ones."""
    if name not in MODELS:
        _openclip_config(name)


def check_device(device: str) -> None:
    """Raise where the device is none, or not on this machine."""
    if device.partition(":")[0] == "meta":
        raise OptionError(f"device {device!r} computes nothing: there is no time to measure")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device {device!r} cannot be used: {reason}") from None


def build_model(name: str, device: str = "cpu", seed: int = 0) -> tuple[nn.Module, int]:
    """A vision tower in eval mode, and the side of the images it takes in pixels."""
    if name == "vit-s14":
        from tokensieve.zoo.vit_s14 import vit_s14_openclip

        return vit_s14_openclip().to(device), 224
    config = _openclip_config(name)
    from open_clip.model import _build_vision_tower

    vision = config["vision_cfg"] | {"timm_model_pretrained": False}  # random weights: nothing is downloaded
    torch.manual_seed(seed)
    tower = _build_vision_tower(config["embed_dim"], vision, config.get("quick_gelu", False))
    size = vision.get("image_size", 224)
    return tower.eval().to(device), size if isinstance(size, int) else size[0]


def _openclip_config(name: str) -> dict[str, Any]:
    declare_missing_schemas()
    import open_clip

    config: dict[str, Any] | None = open_clip.get_model_config(_OPENCLIP.get(name, name))
    if config is None:
        close = difflib.get_close_matches(name, open_clip.list_models(), n=3, cutoff=0.3)
        raise UnknownNameError(f"unknown model {name!r}.{nearest(name, [*MODELS, *close])[:-1]}, or any of open_clip.")
    return config


def images(batch: int, size: int | tuple[int, int], device: str = "cpu", seed: int = 0) -> Tensor:
    """(batch, 3, H, W) of noise: what is in them changes which tokens leave, not how many. size: one side, or both."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, 3, height, width, generator=generator).to(device)


def twin(model: nn.Module) -> nn.Module:
    """A copy with modules of its own that shares all weights: to attach to, at no cost in memory.

    Every candidate so reads the very same weights, at the same addresses.
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)
