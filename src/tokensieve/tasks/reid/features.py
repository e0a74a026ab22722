"""Features of images: computed in batches, written to a file, read back and evaluated again.

    table = extract(model, samples)                        # (N, M * D), the modalities' blocks side by side
    save_features(Path("features.npz"), FeatureTable(...)) # or .safetensors
    table = load_features(Path("features.npz"))

May import: torch, numpy, safetensors; data and model beside it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from tokensieve.errors import DataError, OptionError
from tokensieve.records import write_whole
from tokensieve.tasks.reid.data import ReidImages, Sample
from tokensieve.tasks.reid.evaluate import Ranking, rank
from tokensieve.tasks.reid.model import ReidModel
from tokensieve.training.distributed import gather_in_turn, world_size
from tokensieve.training.distributed import rank as rank_of_run
from tokensieve.utils.tensor_files import load_npz, read_facts, read_tensors

__all__ = [
    "ENDINGS",
    "SPLITS",
    "FeatureTable",
    "check_ending",
    "extract",
    "extract_all",
    "load_features",
    "save_features",
    "selected",
    "table_of",
]

FORMAT = "tokensieve-features-1"
ENDINGS = (".npz", ".safetensors")
SPLITS = ("query", "gallery", "images")
_ARRAYS = ("features", "pids", "cameras", "scenes", "splits")


@dataclass(frozen=True)
class FeatureTable:
    """One row an image. features: (N, M * D) float32, not normalised. pids, cameras, scenes: -1 where unknown.

    splits: 0 query, 1 gallery, 2 images without labels. modalities: of the blocks, in order, each as wide as the
    others. about: where the features come from, plain JSON.
    """

    features: NDArray[np.float32]
    pids: NDArray[np.int64]
    cameras: NDArray[np.int64]
    scenes: NDArray[np.int64]
    splits: NDArray[np.int64]
    names: list[str]
    modalities: tuple[str, ...]
    by_scene: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.names)
        if self.features.ndim != 2 or any(len(getattr(self, name)) != rows for name in _ARRAYS):
            raise DataError(f"features of shape {self.features.shape}, and not one label and name for each row")
        if not self.modalities or self.features.shape[1] % len(self.modalities):
            raise DataError(f"features {self.features.shape[1]} wide cannot be {len(self.modalities)} equal blocks")

    def block(self, modality: str) -> NDArray[np.float32]:
        """(N, D): the part of one modality; zero where it was missing."""
        width = self.features.shape[1] // len(self.modalities)
        start = self.modalities.index(modality) * width
        return self.features[:, start : start + width]

    def rank(self, **options: Any) -> Ranking:
        """Query against gallery; options as `evaluate.rank` takes them."""
        rows = [self.splits == SPLITS.index(split) for split in ("query", "gallery")]
        if not all(part.any() for part in rows):
            raise DataError("these features have no query and gallery: they are of images without labels")
        apart = self.scenes if self.by_scene else self.cameras
        sides = [array[part] for part in rows for array in (self.features, self.pids, apart)]
        return rank(*sides, **options)


def table_of(
    features: Mapping[str, NDArray[np.float32]], samples: Mapping[str, Sequence[Sample]], model: ReidModel,
    by_scene: bool, about: Mapping[str, Any],
) -> FeatureTable:  # fmt: skip
    """Splits of features and their samples as one table."""
    every = [(sample, SPLITS.index(split)) for split, part in samples.items() for sample in part]

    def column(values: list[int]) -> NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    return FeatureTable(
        np.concatenate([features[split] for split in samples]),
        column([s.pid for s, _ in every]),
        column([s.camera for s, _ in every]),
        column([-1 if s.scene is None else s.scene for s, _ in every]),
        column([split for _, split in every]),
        [s.name for s, _ in every],
        model.modalities,
        by_scene,
        about,
    )


@torch.inference_mode()
def extract(
    model: ReidModel,
    samples: Sequence[Sample],
    *,
    missing: Sequence[str] = (),
    flip: bool = False,
    after_neck: bool = False,
    cameras: bool = True,
    batch_size: int = 64,
    workers: int = 0,
    tick: Callable[[int], None] = lambda images: None,
) -> NDArray[np.float32]:
    """(N, M * D) features in the samples' order.

    missing: modalities to leave out of all samples; their blocks are zero. flip: the mean of the features of the image
    and of its mirror image. after_neck: the embedding after the BNNeck. cameras: tell them to the model, where all are
    known (0 or more). tick: with the number of images, after each batch.
    """
    names = _left(model, missing)
    device = next(model.parameters()).device
    images = ReidImages(samples, names, model.size, train=False, mean=model.pixel_mean, std=model.pixel_std)
    known = cameras and all(sample.camera >= 0 for sample in samples)
    found = np.zeros((len(samples), model.neck.norm.num_features), dtype=np.float32)
    for batch in DataLoader(images, batch_size, num_workers=workers, generator=torch.Generator()):
        pixels = {name: x.to(device) for name, x in batch["images"].items()}
        present = {name: x.to(device) for name, x in batch["present"].items()}
        seen_by = batch["camera"].to(device) if known else None
        outs = [model(pixels, seen_by, present)]
        if flip:
            outs.append(model({name: x.flip(-1) for name, x in pixels.items()}, seen_by, present))
        feature = torch.stack([out.embedding if after_neck else out.feature for out in outs]).float().mean(dim=0)
        found[batch["index"].numpy()] = feature.cpu().numpy()
        tick(len(batch["index"]))
    return found


def extract_all(
    model: ReidModel, splits: Mapping[str, Sequence[Sample]], *, shared: bool = False, **options: Any
) -> dict[str, NDArray[np.float32]]:
    """Features of each split; an image that is in several, as query and gallery of RGBNT201, is computed once.

    shared: the processes of a run share the images out, and each gets the features of all.
    """
    place: dict[int, int] = {}
    unique: list[Sample] = []
    for sample in (sample for part in splits.values() for sample in part):
        if id(sample) not in place:
            place[id(sample)] = len(unique)
            unique.append(sample)
    if shared:
        found = np.stack(gather_in_turn(list(extract(model, unique[rank_of_run() :: world_size()], **options))))
    else:
        found = extract(model, unique, **options)
    return {split: found[[place[id(sample)] for sample in part]] for split, part in splits.items()}


@torch.inference_mode()
def selected(model: ReidModel, samples: Sequence[Sample], *, cameras: bool = True) -> list[dict[str, list[int]]]:
    """For each sample: modality -> the patches that were selected of it, row by row of the grid; {} where none are."""
    images = ReidImages(samples, model.modalities, model.size, train=False, mean=model.pixel_mean, std=model.pixel_std)
    device = next(model.parameters()).device
    found = []
    for i in range(len(samples)):
        item = images[i]
        pixels = {name: x[None].to(device) for name, x in item["images"].items() if item["present"][name]}
        seen_by = torch.tensor([item["camera"]], device=device) if cameras and item["camera"] >= 0 else None
        selections = model(pixels, seen_by).selections
        found.append({name: reduction.keep[0].tolist() for name, reduction in selections.items()})
    return found


def _left(model: ReidModel, missing: Sequence[str]) -> tuple[str, ...]:
    if unknown := [name for name in missing if name not in model.modalities]:
        raise OptionError(f"modality {unknown[0]!r} cannot be missing: the model has {', '.join(model.modalities)}")
    names = tuple(name for name in model.modalities if name not in missing)
    if not names:
        raise OptionError("all modalities missing: there is nothing to look at")
    return names


def check_ending(path: Path) -> Path:
    if path.suffix not in ENDINGS:
        raise OptionError(f"{path}: features are written to {' or '.join(ENDINGS)}")
    return path


def save_features(path: Path, table: FeatureTable) -> None:
    """Write .npz or .safetensors, whole or not at all."""
    arrays = {name: getattr(table, name) for name in _ARRAYS}
    facts = {"modalities": table.modalities, "by_scene": table.by_scene, "about": dict(table.about)}
    about = {"format": FORMAT, "facts": json.dumps(facts), "names": json.dumps(table.names)}
    if check_ending(path).suffix == ".npz":
        out = io.BytesIO()
        np.savez(out, allow_pickle=False, **arrays, **{name: np.array(text) for name, text in about.items()})
        write_whole(path, out.getvalue())
    else:
        from safetensors.numpy import save

        write_whole(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata=about))


def load_features(path: Path) -> FeatureTable:
    """Read them back. A file that is missing, cut short or something else is an error that names it."""
    check_ending(path)
    arrays, about = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    if about.get("format") != FORMAT or set(arrays) != set(_ARRAYS):
        raise DataError(f"{path} holds no features of `tokensieve extract reid` or `eval reid --export`")
    facts, names = (read_facts(about, key, f"features {path}") for key in ("facts", "names"))
    try:
        rest = {"modalities": tuple(facts["modalities"]), "by_scene": facts["by_scene"], "about": facts["about"]}
    except (KeyError, TypeError):
        raise DataError(f"features {path}: its header has no valid 'facts'") from None
    return FeatureTable(**arrays, names=names, **rest)


def _read_npz(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    found = load_npz(path, "features")
    arrays = {name: array for name, array in found.items() if name in _ARRAYS}
    return arrays, {name: str(found[name]) for name in ("format", "facts", "names") if name in found}


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    tensors, about = read_tensors(path, "features")
    return {name: tensor.numpy() for name, tensor in tensors.items()}, about
