"""Re-identification sets: load one whose files were checked first, feed it to a model, hold identities back.

    reid = load_set("rgbnt201", Path("data/RGBNT201"))
    images = ReidImages(reid.train, reid.modalities, reid.size, train=True, seed=0)

May import: torch, numpy, PIL; the layouts beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from tokensieve.errors import DataError, OptionError
from tokensieve.tasks.reid.augment import Augmentation, draw_augmentation
from tokensieve.tasks.reid.layouts import Found, Layout, Problem, Sample, layout_named, scan
from tokensieve.utils.images import open_image

__all__ = ["Problem", "ReidImages", "ReidSet", "Sample", "check_set", "load_set", "split_validation"]

MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ReidSet:
    """size: (height, width) to train at. skipped: what `skip_broken` left out. by_scene: see `evaluate`."""

    layout: str
    modalities: tuple[str, ...]
    train: list[Sample]
    query: list[Sample]
    gallery: list[Sample]
    size: tuple[int, int]
    skipped: tuple[Problem, ...] = ()

    @property
    def by_scene(self) -> bool:
        """Whether matches of the same scene, instead of the same camera, are dropped in evaluation."""
        return layout_named(self.layout).by_scene

    def summary(self) -> str:
        """ "train 40 identities, 640 images; query ..." """
        parts = ((name, getattr(self, name)) for name in ("train", "query", "gallery"))
        return "; ".join(f"{name} {len({s.pid for s in part})} identities, {len(part)} images" for name, part in parts)


def load_set(layout: str, root: str | Path, *, skip_broken: bool = False) -> ReidSet:
    """Read and check a whole set. Broken parts are one DataError that names the first files and counts the others.

    skip_broken: leave them out instead and go on; what was left out stands in `skipped`. Checked: names parse, every
    modality is there, every file decodes whole, every training identity has two cameras (two images where scenes rule,
    as vehicles of MSVR310 may be seen in one scene only), and every query has a match from another camera or scene.
    """
    found, problems = _checked(layout, Path(root))
    if problems and not skip_broken:
        raise DataError(_one_line(layout, Path(root), problems))
    for split in ("train", "query", "gallery"):
        if not getattr(found, split):
            raise DataError(f"{root}: no image is left in {split} ({len(problems)} broken)")
    return found


def check_set(layout: str, root: str | Path) -> list[Problem]:
    """Everything that is wrong with a set, file by file."""
    return _checked(layout, Path(root))[1]


def _one_line(layout: str, root: Path, problems: Sequence[Problem], most: int = 3) -> str:
    first = ", ".join(map(str, problems[:most]))
    more = f" and {len(problems) - most} more" if len(problems) > most else ""
    what = "1 broken entry" if len(problems) == 1 else f"{len(problems)} broken entries"
    return (
        f"{root} has {what}: {first}{more}. `tokensieve data reid-check {root} --layout {layout}` lists all; "
        "correct them, or leave them out: --skip_broken of eval, DATASETS.SKIP_BROKEN=True of train"
    )


def _checked(name: str, root: Path) -> tuple[ReidSet, list[Problem]]:
    layout = layout_named(name)
    modalities, splits = scan(layout, root)
    problems: dict[Problem, None] = {}
    whole: dict[int, list[Sample]] = {}  # query and gallery may be the same folder: decode once
    for found in splits.values():
        if id(found) not in whole:
            problems |= dict.fromkeys(found.problems)
            whole[id(found)], bad = _decodable(found)
            problems |= dict.fromkeys(bad)
    train, query, gallery = (whole[id(splits[split])] for split in ("train", "query", "gallery"))
    train, alone = _seen_twice(layout, train)
    query, lost = _with_match(layout, query, gallery)
    problems |= dict.fromkeys([*alone, *lost])
    size = layout.size if name != "folder" else _upright_or_wide(layout, [*train, *query])
    found_set = ReidSet(name, modalities, train, query, gallery, size, tuple(problems))
    return found_set, list(problems)


def _decodable(found: Found) -> tuple[list[Sample], list[Problem]]:
    """The samples whose files decode to the last row, and the files that do not."""
    files = list(dict.fromkeys(path for sample in found.samples for path in sample.paths.values()))
    strips = {path for sample in found.samples if sample.parts for path in sample.paths.values()}
    with ThreadPoolExecutor(max_workers=4) as pool:  # decoding leaves the interpreter lock
        reasons = dict(zip(files, pool.map(lambda path: _fault(path, path in strips), files), strict=True))
    problems = [Problem("/".join(path.parts[-3:]), reason) for path, reason in reasons.items() if reason]
    return [s for s in found.samples if not any(reasons[path] for path in s.paths.values())], problems


def _fault(path: Path, strip: bool) -> str:
    """Why a file cannot be used; empty where it can."""
    try:
        with open_image(path, "image") as image:
            image.load()
            if strip and (image.width % 3 or image.width < 3 * image.height // 2):
                return f"{image.width} x {image.height} is not a strip of three images"
    except DataError as error:
        return str(error).removeprefix("image ").removeprefix("is ").removeprefix("cannot be read: ")
    return ""


def _seen_twice(layout: Layout, train: list[Sample]) -> tuple[list[Sample], list[Problem]]:
    """Training identities that more than one camera saw; with scenes, that have more than one image."""
    groups = _by_pid(train)
    alone = {pid for pid, own in groups.items()
             if len(own) < 2 or (not layout.by_scene and len({s.camera for s in own}) < 2)}  # fmt: skip
    folder = layout.splits["train"]
    reason = "one image only" if layout.by_scene else "seen by one camera"
    problems = [Problem(f"{folder}: identity {pid}, {groups[pid][0].name}", reason) for pid in sorted(alone)]
    return [s for s in train if s.pid not in alone], problems


def _with_match(layout: Layout, query: list[Sample], gallery: list[Sample]) -> tuple[list[Sample], list[Problem]]:
    """Queries with a match in the gallery that is not dropped by camera or scene. One problem for each identity."""
    word = "scene" if layout.by_scene else "camera"
    seen = {pid: {getattr(s, word) for s in own} for pid, own in _by_pid(gallery).items()}
    kept = [s for s in query if seen.get(s.pid, set()) - {getattr(s, word)}]
    lost = _by_pid([s for s in query if not seen.get(s.pid, set()) - {getattr(s, word)}])
    folder = layout.splits["query"]
    problems = [Problem(f"{folder}: identity {pid}, {own[0].name}", f"no match from another {word}")
                for pid, own in lost.items()]  # fmt: skip
    return kept, problems


def _by_pid(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.pid].append(sample)
    return dict(groups)


def _upright_or_wide(layout: Layout, samples: Sequence[Sample]) -> tuple[int, int]:
    """The layout's size, turned where the first image is wider than high."""
    if not samples:
        return layout.size
    with open_image(next(iter(samples[0].paths.values()))) as image:
        wide = image.width > image.height
    return (layout.size[1], layout.size[0]) if wide else layout.size


ROOM = 256 * 2**20  # bytes of decoded images that one set of samples may hold


class ReidImages(Dataset[dict[str, Any]]):
    """Samples as tensors.

    An item: {"images": {modality: (3, H, W)}, "present": {modality: bool}, "label", "pid", "camera", "index"}. A
    modality that a sample has no file for is a zero image with present False. label: the place of the pid among the
    sorted pids of these samples, 0..C-1.

    train: augment. What is drawn comes from (seed, epoch, index) alone, so that it does not depend on the number of
    workers, on what was read before, or on whether a run was interrupted; call `set_epoch` before each epoch, and
    before the loader's workers start.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        modalities: Sequence[str],
        size: tuple[int, int],
        *,
        train: bool,
        seed: int = 0,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
    ) -> None:
        self.samples, self.modalities, self.size, self.train, self.seed = (
            list(samples),
            tuple(modalities),
            size,
            train,
            seed,
        )
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]
        self.identities = sorted({sample.pid for sample in self.samples})
        self._labels = {pid: label for label, pid in enumerate(self.identities)}
        self.epoch = 0
        self._held: dict[tuple[int, str], Tensor] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        change = draw_augmentation((self.seed, self.epoch, index), self.size) if self.train else None
        images = {modality: self._image(index, modality, change) for modality in self.modalities}
        return {
            "images": images,
            "present": {modality: modality in sample.paths for modality in self.modalities},
            "label": self._labels[sample.pid],
            "pid": sample.pid,
            "camera": sample.camera,
            "index": index,
        }

    def _image(self, index: int, modality: str, change: Augmentation | None) -> Tensor:
        if modality not in self.samples[index].paths:
            return torch.zeros(3, *self.size)
        pixels = self._pixels(index, modality).permute(2, 0, 1).float().div_(255)
        pixels = (pixels - self.mean) / self.std
        return pixels if change is None else change.apply(pixels)

    def _pixels(self, index: int, modality: str) -> Tensor:
        """(H, W, 3) uint8, decoded once as long as there is room: reading takes a third of a small model's step."""
        held = self._held.get((index, modality))
        if held is not None:
            return held
        sample, (height, width) = self.samples[index], self.size
        image = sample.open(modality).resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(image).copy())
        if (len(self._held) + 1) * pixels.numel() <= ROOM:
            self._held[index, modality] = pixels
        return pixels


def split_validation(
    samples: Sequence[Sample], share: float, seed: int
) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """(train, validation query, validation gallery), apart by identity: a share of the identities is held out.

    The gallery holds all of their images, the query one image of each identity and camera. At least two identities
    stay on either side.
    """
    if not 0 < share < 1:
        raise OptionError(f"validation share {share}: a number between 0 and 1, both excluded")
    groups = _by_pid(sorted(samples, key=lambda s: (s.pid, s.camera, s.name)))
    if len(groups) < 4:
        raise DataError(f"{len(groups)} training identities are too few to hold some back: at least 4 are needed")
    count = min(max(2, round(share * len(groups))), len(groups) - 2)
    held = set(np.random.default_rng(seed).permutation(sorted(groups))[:count].tolist())
    gallery = [s for pid in sorted(held) for s in groups[pid]]
    query = list({(s.pid, s.camera): s for s in reversed(gallery)}.values())[::-1]
    return [s for s in samples if s.pid not in held], query, gallery
