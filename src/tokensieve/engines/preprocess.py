"""How an image becomes the tensor that an exported model takes. Imports torch; torchvision when a photo comes.

Resize, centre crop and normalise: what a CLIP or ViT is trained with. It is stored in an exported file, so that the
file needs nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tokensieve.errors import MissingMaterialError, OptionError, UnsupportedModelError, nearest
from tokensieve.utils.torchvision import declare_missing_schemas

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["INTERPOLATIONS", "Preprocess", "find_preprocess"]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
RESIZE_MODES = ("shortest", "squash")
_PROBE = (90, 131)  # height and width of the picture that two preprocessings are compared on


@dataclass(frozen=True)
class Preprocess:
    """PIL image -> (3, H, W) float32.

    size: H and W of the result. resize: the shorter side before the crop, None for "squash", which resizes straight to
    `size`. mean, std: of values in [0, 1]. tensor: whether a tensor is resized and not a PIL image, whose roundings
    differ.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    resize: int | None = None
    tensor: bool = False

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise OptionError(
                f"unknown interpolation {self.interpolation!r}.{nearest(self.interpolation, INTERPOLATIONS)}"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise OptionError(f"mean={self.mean}, std={self.std}: three numbers each, and no deviation of 0")

    def __call__(self, image: Image.Image) -> Tensor:
        """(3, H, W), normalised."""
        try:
            declare_missing_schemas()
            from torchvision.transforms import v2
        except ModuleNotFoundError:
            raise MissingMaterialError('preparing photos needs torchvision: pip install "tokensieve[eval]"') from None

        mode = v2.InterpolationMode(self.interpolation)
        size = list(self.size) if self.resize is None else self.resize
        photo: Any = image.convert("RGB")
        if self.tensor:
            photo = v2.functional.pil_to_tensor(photo)
        photo = v2.functional.resize(photo, size, interpolation=mode, antialias=True)
        photo = v2.functional.center_crop(photo, list(self.size))
        pixels = photo if self.tensor else v2.functional.pil_to_tensor(photo)
        pixels = v2.functional.to_dtype(pixels, torch.float32, scale=True)
        return v2.functional.normalize(pixels, list(self.mean), list(self.std))

    def plain(self) -> dict[str, Any]:
        """As plain data, for a file."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Preprocess:
        """From what `plain` gave."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**fields)


def find_preprocess(model: nn.Module, given: object = None) -> Preprocess | None:
    """What is given (a `Preprocess`, or a transform of torchvision's), or what the model itself says, or None.

    open_clip's models and timm's know theirs; a transformers model does not: pass it.
    """
    if isinstance(given, Preprocess):
        return given
    if given is not None:
        return _of_transform(given)
    config = getattr(getattr(model, "visual", model), "preprocess_cfg", None)  # open_clip
    if isinstance(config, Mapping) and config.get("mean"):
        size = _two(config["size"])
        mode = config.get("resize_mode", "shortest")
        if mode not in RESIZE_MODES or (mode == "shortest" and size[0] != size[1]):
            return None
        resize = size[0] if mode == "shortest" else None
        return Preprocess(size, tuple(config["mean"]), tuple(config["std"]), config["interpolation"], resize)
    config = getattr(model, "pretrained_cfg", None)  # timm
    if isinstance(config, Mapping) and config.get("mean") and config.get("input_size"):
        size = tuple(config["input_size"][1:])
        resize = int(min(size) / (config.get("crop_pct") or 1.0))
        return Preprocess(size, tuple(config["mean"]), tuple(config["std"]), config["interpolation"], resize)
    return None


def _of_transform(transform: Any) -> Preprocess:
    """A torchvision transform taken apart, and compared with the original on a picture."""
    steps = {type(step).__name__: step for step in getattr(transform, "transforms", [])}
    resize, normalise = steps.get("Resize"), steps.get("Normalize")
    if resize is None or normalise is None:
        raise UnsupportedModelError(
            f"preprocess: {type(transform).__name__} is not a Compose of Resize, CenterCrop and Normalize; "
            f"give a tokensieve.engines.preprocess.Preprocess"
        )
    crop = steps.get("CenterCrop")
    size = _two(resize.size)
    short = isinstance(resize.size, int) or len(resize.size) == 1
    for tensor in (False, True):
        found = Preprocess(
            size=_two(crop.size) if crop is not None else size, mean=tuple(float(v) for v in normalise.mean),
            std=tuple(float(v) for v in normalise.std), interpolation=str(resize.interpolation.value),
            resize=size[0] if short else None, tensor=tensor,
        )  # fmt: skip
        if _same(transform, found):
            return found
    raise UnsupportedModelError("preprocess: this transform does more than resize, crop and normalise")


def _same(transform: Callable[..., Tensor], found: Preprocess) -> bool:
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*_PROBE, 3), dtype=np.uint8))
    wanted, got = transform(picture), found(picture)
    return wanted.shape == got.shape and torch.allclose(wanted, got, atol=1e-5)


def _two(size: int | Sequence[int]) -> tuple[int, int]:
    numbers = [size] if isinstance(size, int) else list(size)
    return int(numbers[0]), int(numbers[-1])
