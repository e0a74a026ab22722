"""The ReID model: one backbone for all modalities, tokens compressed, pooled, concatenated, BNNeck, classifier."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core.cost import Cost, encoder_cost
from tokensieve.core.reduction import Reduction
from tokensieve.errors import OptionError, RecordError, UnknownNameError, nearest, one_line
from tokensieve.tasks.reid.backbones import build_backbone, pixel_stats
from tokensieve.tasks.reid.compress import build_compressor
from tokensieve.tasks.reid.config import ReidConfig, parse_config
from tokensieve.tasks.reid.sdtps import SDTPS
from tokensieve.training.distributed import gather_with_gradient, own_rows
from tokensieve.utils.tensor_files import fill_module, read_facts, read_tensors, save_tensors

__all__ = ["BNNeck", "ReidModel", "ReidOutput", "load_checkpoint", "save_model"]

FORMAT = "tokensieve-reid-1"


@dataclass(frozen=True)
class ReidOutput:
    """feature: (B, M * D) before the BNNeck, what images are compared by; embedding: after it; logits: (B, C).

    The block of a missing modality is zero in both. selections: by modality, which patches were selected; empty where
    nothing was selected.
    """

    feature: Tensor
    embedding: Tensor
    logits: Tensor
    selections: dict[str, Reduction]


class BNNeck(nn.Module):
    """Batch norm without a trained bias, its statistics over the samples of all processes. On a CPU too."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.norm.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.norm(x)
        return own_rows(self.norm(gather_with_gradient(x)))


class ReidModel(nn.Module):
    """size: (height, width) of the images. cameras: the largest camera id + 1. classes: training identities."""

    def __init__(
        self,
        config: ReidConfig,
        size: tuple[int, int],
        modalities: Sequence[str],
        classes: int,
        cameras: int,
        *,
        pretrained: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.size, self.modalities = config, (size[0], size[1]), tuple(modalities)
        self.classes, self.cameras, self.at = classes, cameras, config.MODEL.SDTPS_AT
        mean, std = pixel_stats(config.MODEL.TRANSFORMER_TYPE)
        self.pixel_mean, self.pixel_std = config.INPUT.PIXEL_MEAN or mean, config.INPUT.PIXEL_STD or std
        self.backbone = build_backbone(config.MODEL, self.size, pretrained=pretrained)
        if self.at is not None and self.at >= self.backbone.depth:
            raise OptionError(f"MODEL.SDTPS_AT {self.at}: the backbone has blocks 0 to {self.backbone.depth - 1}")
        dim = self.backbone.dim if self.at is None else self.backbone.width
        self.compressor = build_compressor(config.MODEL, dim, self.backbone.patches, self.modalities)
        self.camera = nn.Embedding(cameras, self.backbone.width) if config.MODEL.SIE_CAMERA else None
        if self.camera is not None:
            nn.init.trunc_normal_(self.camera.weight, std=0.02)
        self.neck = BNNeck(len(self.modalities) * self.backbone.dim)
        self.classifier = nn.Linear(len(self.modalities) * self.backbone.dim, classes, bias=False)
        nn.init.normal_(self.classifier.weight, std=0.001)

    def forward(
        self, images: Mapping[str, Tensor], cameras: Tensor | None = None, present: Mapping[str, Tensor] | None = None
    ) -> ReidOutput:
        """images: (B, 3, H, W) by modality; one that is missing is left out. cameras: (B,), None where unknown.

        present: (B,) bool by modality, where single samples lack one; its image is then not looked at. Samples are
        grouped by what they have, and `selections` holds the modalities that all of them have.
        """
        self._check(images, cameras)
        if present is None or all(bool(present[name].all()) for name in images):
            feature, selections = self.features(images, cameras)
            there = torch.ones(len(feature), len(self.modalities), dtype=torch.bool, device=feature.device)
            there &= torch.tensor([name in images for name in self.modalities], device=feature.device)
        else:
            feature, selections, there = self._by_pattern(images, cameras, present)
        mask = there.to(feature.dtype).repeat_interleave(self.backbone.dim, dim=1)
        embedding = self.neck(feature) * mask
        return ReidOutput(feature, embedding, self.classifier(embedding), selections)

    def features(self, images: Mapping[str, Tensor], cameras: Tensor | None) -> tuple[Tensor, dict[str, Reduction]]:
        """(B, M * D) features of samples that all have the same modalities, and what was selected."""
        names = [name for name in self.modalities if name in images]
        selections: dict[str, Reduction] = {}
        # one batch of all modalities: their blocks run in step, and one large product is faster than three
        camera = None
        if self.camera is not None and cameras is not None:
            camera = self.camera(cameras).repeat(len(names), 1)
        x = self.backbone.embed(torch.cat([images[name] for name in names]), camera)
        for block in range(self.backbone.depth):
            x = self.backbone.attend(block, x)
            if block == self.at:
                x, selections = self._compress(x, names)
            x = self.backbone.feed(block, x)
        x = self.backbone.finish(x)
        if self.at is None:
            x, selections = self._compress(x, names)
        pooled = dict(zip(names, x[:, 1:].mean(dim=1).chunk(len(names)), strict=True))
        nothing = torch.zeros_like(pooled[names[0]])
        return torch.cat([pooled.get(name, nothing) for name in self.modalities], dim=1), selections

    def _compress(self, x: Tensor, names: list[str]) -> tuple[Tensor, dict[str, Reduction]]:
        if self.compressor is None:
            return x, {}
        parts = dict(zip(names, x.chunk(len(names)), strict=True))
        tokens, selections = self.compressor(
            {name: part[:, 1:] for name, part in parts.items()}, {name: part[:, 0] for name, part in parts.items()}
        )
        return torch.cat([torch.cat([parts[name][:, :1], tokens[name]], dim=1) for name in names]), selections

    def _by_pattern(
        self, images: Mapping[str, Tensor], cameras: Tensor | None, present: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Reduction], Tensor]:
        """Features of samples that have different modalities, each group of alike ones apart."""
        first = next(iter(images.values()))
        columns = [present[n].bool() if n in images else first.new_zeros(len(first), dtype=torch.bool)
                   for n in self.modalities]  # fmt: skip
        there = torch.stack(columns, dim=1).to(first.device)  # (B, M)
        if not bool(there.any(dim=1).all()):
            raise OptionError("a sample has none of the modalities")
        parts, rows, kept = [], [], []
        for pattern in there.unique(dim=0):
            row = (there == pattern).all(dim=1).nonzero().squeeze(1)
            group = {n: images[n][row] for n, has in zip(self.modalities, pattern.tolist(), strict=True) if has}
            feature, found = self.features(group, None if cameras is None else cameras[row])
            parts.append(feature)
            rows.append(row)
            kept.append(found)
        back = torch.cat(rows).argsort()
        shared = {
            name: Reduction(torch.cat([found[name].keep for found in kept])[back])
            for name in self.modalities if all(name in found for found in kept)
        }  # fmt: skip
        return torch.cat(parts)[back], shared, there

    def _check(self, images: Mapping[str, Tensor], cameras: Tensor | None) -> None:
        if not images:
            raise OptionError(f"no modality is there; give images of at least one of {', '.join(self.modalities)}")
        for name, batch in images.items():
            if name not in self.modalities:
                raise UnknownNameError(f"unknown modality {name!r}.{nearest(name, self.modalities)}")
            if tuple(batch.shape[1:]) != (3, *self.size):
                raise OptionError(
                    f"{name} images are {tuple(batch.shape)}, expected (B, 3, {self.size[0]}, {self.size[1]})"
                )
        if self.camera is not None and cameras is not None:
            low, high = int(cameras.min()), int(cameras.max())
            if low < 0 or high >= self.cameras:
                raise OptionError(
                    f"camera {low if low < 0 else high}: the model knows cameras 0 to {self.cameras - 1}; "
                    "leave the cameras out for images of another one"
                )

    # -- what it costs -------------------------------------------------------------------------------------------------

    def tokens_out(self) -> int:
        """Patch tokens of one modality that are pooled."""
        return self.backbone.patches if self.compressor is None else self.compressor.out_tokens

    def cost(self) -> Cost:
        """MACs of the backbone for one sample of all modalities, with compression and without; not the compressor's."""
        b = self.backbone
        full, out = b.patches + b.prefix, self.tokens_out() + b.prefix
        cut = b.depth if self.at is None else self.at
        leaving = [full if block < cut else out for block in range(b.depth)]
        one = encoder_cost([b.shape()] * b.depth, full, leaving)
        m = len(self.modalities)
        return Cost(
            m * (one.macs + b.outside_macs(leaving[-1])), m * (one.macs_full + b.outside_macs(full)), tuple(leaving)
        )

    def compressor_macs(self) -> int:
        """MACs of SDTPS itself for one sample of all modalities; random choice and averaging have none to speak of."""
        if not isinstance(self.compressor, SDTPS):
            return 0
        c, m = self.compressor, len(self.modalities)
        n, d, hidden = c.tokens, c.dim, int(round(c.dim * 0.2, 6))
        score = n * (d * (d // 4) + d // 4) + m * n * d
        aggregate = c.selected * (d * hidden + hidden * c.aggregated) + c.selected * c.aggregated * d
        return m * (score + aggregate + (n - c.selected) * d)


def save_model(model: ReidModel, path: Path) -> None:
    """The weights, with all that is needed to build the model again."""
    shape = {"size": model.size, "modalities": model.modalities, "classes": model.classes, "cameras": model.cameras}
    about = {"format": FORMAT, "config": model.config.model_dump_json(), "shape": json.dumps(shape)}
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_tensors(path, tensors, about)


def load_checkpoint(path: str | Path) -> tuple[ReidModel, ReidConfig]:
    """The model in a file, in evaluation mode, and its configuration. Another file is an error that names it."""
    name = f"ReID model {path}"
    state, about = read_tensors(path, "ReID model", format=FORMAT, by="`tokensieve train reid`")
    try:
        config = parse_config(read_facts(about, "config", name))
        shape: dict[str, Any] = read_facts(about, "shape", name)
        model = ReidModel(
            config, tuple(shape["size"]), shape["modalities"], shape["classes"], shape["cameras"], pretrained=False
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{name}: its header does not describe a model ({one_line(error, 200)})") from None
    fill_module(model, state, name)
    return model.eval(), config
