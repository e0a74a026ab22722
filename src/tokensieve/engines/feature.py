"""An image encoder as a module with tensors in and tensors out, and its captured graph. Imports models."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import OptionError, UnsupportedModelError, one_line
from tokensieve.models.attach import attachment_of
from tokensieve.models.decoder import is_vlm
from tokensieve.models.encoder.handle import EncoderHandle
from tokensieve.models.encoder.run import Run

__all__ = ["Feature", "capture", "image_size"]


class Feature(nn.Module):
    """(B, 3, H, W) -> (features (B, E),), and with `kept` also the patches (B, K) that remain at the end."""

    def __init__(self, model: nn.Module, kept: bool = False) -> None:
        super().__init__()
        handle = attachment_of(model)
        self.encoder = _image_part(model)
        self._handle = handle if kept and isinstance(handle, EncoderHandle) and handle.reduces else None
        if kept and self._handle is None:
            raise OptionError("with_kept: nothing is removed from this model's tokens, so no patches are left to name")

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        handle, runs = self._handle, list[Run]()
        if handle is None:
            return (_feature(self.encoder(images)),)
        before = handle.new_run

        def noted(attachment: EncoderHandle) -> Run:
            runs.append(before(attachment))
            return runs[-1]

        handle.new_run = noted
        try:
            feature = _feature(self.encoder(images))
        finally:
            handle.new_run = before
        run = next(run for run in runs if run.kept)
        return feature, run.kept[max(run.kept)]


class _Projected(nn.Module):
    """transformers' CLIPModel without its text tower."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision_model, self.visual_projection = model.vision_model, model.visual_projection

    def forward(self, images: Tensor) -> Tensor:
        return self.visual_projection(_feature(self.vision_model(images)))


def _image_part(model: Any) -> nn.Module:
    """The part of a model that makes the image feature: without a text tower, which would be written to the file."""
    if is_vlm(model):
        raise UnsupportedModelError(
            f"export takes an image encoder; {type(model).__name__} is a vision-language model: give its vision tower"
        )
    if hasattr(model, "encode_image") and isinstance(getattr(model, "visual", None), nn.Module):
        return model.visual  # open_clip: encode_image is visual
    if hasattr(model, "get_image_features"):
        if hasattr(model, "visual_projection"):
            return _Projected(model)
        if isinstance(getattr(model, "vision_model", None), nn.Module):
            return model.vision_model
    found: nn.Module = model
    return found


def _feature(out: Any) -> Tensor:
    """The image feature in what a model returns: a tensor, a tuple whose first it is, or transformers' output."""
    if isinstance(out, Tensor):
        return out
    for name in ("image_embeds", "pooler_output"):
        if isinstance(getattr(out, name, None), Tensor):
            found: Tensor = getattr(out, name)
            return found
    if isinstance(out, tuple) and isinstance(out[0], Tensor):
        return out[0]
    raise UnsupportedModelError(f"no image feature in a {type(out).__name__}: give a model that returns a tensor")


def image_size(model: nn.Module) -> tuple[int, int]:
    """Height and width of the images that a model takes."""
    for module in (model, *model.modules()):
        config = getattr(module, "config", None)
        for holder, name in ((module, "image_size"), (module, "img_size"), (config, "image_size")):
            found = getattr(holder, name, None)
            if isinstance(found, int):
                return found, found
            if isinstance(found, tuple | list) and len(found) == 2:
                return int(found[0]), int(found[1])
        inner = getattr(getattr(config, "vision_config", None), "image_size", None)
        if isinstance(inner, int):
            return inner, inner
    raise OptionError(f"{type(model).__name__} does not say how large its images are: give size=(height, width)")


def capture(feature: Feature, images: Tensor) -> torch.export.ExportedProgram:
    """The graph of one forward, for any number of images. images: (2, 3, H, W), an example."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on constants and pytrees: nothing that a user can change
        try:
            return torch.export.export(feature, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        except Exception as error:  # of whatever kind: the model's own code is traced
            raise UnsupportedModelError(
                f"{type(feature.encoder).__name__} cannot be exported with a free batch size: {one_line(error)}"
            ) from error
