"""Where re-identification sets keep their files: names -> samples. Nothing is opened here.

    rgbnt201   {train_171,test}/{RGB,NI,TI}/000258_cam1_0_02.jpg        query and gallery are both test
    rgbnt100   rgbir/{bounding_box_train,query,bounding_box_test}/0001_c1_0001.jpg    three images side by side
    msvr310    {bounding_box_train,query3,bounding_box_test}/0001/{vis,ni,th}/0001_s001_v1_001.jpg
    folder     {train,query,gallery}/MODALITY/0001_c1_anything.jpg      or test for query and gallery

May import: numpy and PIL below it, never torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tokensieve.errors import DataError, UnknownNameError, nearest
from tokensieve.utils.images import image_files, open_image

__all__ = [
    "LAYOUTS",
    "SPLITS",
    "Found",
    "Layout",
    "Problem",
    "Sample",
    "layout_named",
    "scan",
    "scan_images",
]

SPLITS = ("train", "query", "gallery")
THREE = ("rgb", "nir", "tir")


@dataclass(frozen=True)
class Sample:
    """One moment of one identity, seen in one or more modalities.

    paths: modality -> file. parts: modality -> (k, n) where the image is the k-th of n equal parts of the file's width.
    pid and camera are -1 where nothing is known (your own unlabelled images). name: unique inside its split.
    """

    paths: Mapping[str, Path]
    pid: int
    camera: int
    scene: int | None
    name: str
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def crop_box(self, modality: str, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the modality in its file, for a file of `size` (width, height)."""
        k, n = self.parts.get(modality, (0, 1))
        width, height = size
        return k * width // n, 0, (k + 1) * width // n, height

    def open(self, modality: str) -> Image.Image:
        """The image of one modality, RGB, turned as its camera says. An unreadable file is a DataError."""
        with open_image(self.paths[modality]) as image:
            whole = _eight_bit(ImageOps.exif_transpose(image)).convert("RGB")
        return whole.crop(self.crop_box(modality, whole.size)) if modality in self.parts else whole


@dataclass(frozen=True)
class Problem:
    """What is wrong with one file (or identity): its name, and the reason in a few words."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file} ({self.reason})"


@dataclass(frozen=True)
class Found:
    """Samples of one split that are complete by name, and the problems of the others."""

    samples: list[Sample]
    problems: list[Problem]


@dataclass(frozen=True)
class Name:
    """What a file name says."""

    pid: int
    camera: int
    scene: int | None = None


@dataclass(frozen=True)
class Layout:
    """How a set is stored. splits: split -> folder. size: (height, width) that its images are trained at.

    by_scene: matches of a query are dropped by scene instead of by camera. parse: file stem -> what it says, or None.
    """

    name: str
    splits: Mapping[str, str]
    size: tuple[int, int]
    example: str
    parse: Callable[[str], Name | None]
    by_scene: bool = False


_SIX_DIGITS = re.compile(r"(\d{6})_cam(\d+)(?:_.*)?")
_MARKET = re.compile(r"(-1|\d+)_c(\d+).*")
_MSVR = re.compile(r"(\d{4})_s(\d{3})_v(\d)(?:\D.*)?")
_PLAIN = re.compile(r"(\d+)_c(\d+)(?:_s(\d+))?(?:_.*)?")


def _parse_201(stem: str) -> Name | None:
    found = _SIX_DIGITS.fullmatch(stem)
    return Name(int(found[1]), int(found[2]) - 1) if found and int(found[2]) > 0 else None


def _parse_100(stem: str) -> Name | None:
    found = _MARKET.fullmatch(stem)
    return Name(int(found[1]), int(found[2]) - 1) if found and int(found[2]) > 0 else None


def _parse_310(stem: str) -> Name | None:
    found = _MSVR.fullmatch(stem)
    return Name(int(found[1]), int(found[3]), int(found[2])) if found else None


def _parse_plain(stem: str) -> Name | None:
    found = _PLAIN.fullmatch(stem)
    return Name(int(found[1]), int(found[2]), int(found[3]) if found[3] else None) if found else None


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("rgbnt201", {"train": "train_171", "query": "test", "gallery": "test"}, (256, 128),
               "000258_cam1_0_02.jpg", _parse_201),
        Layout("rgbnt100", {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"},
               (128, 256), "0001_c1_0001.jpg", _parse_100),
        Layout("msvr310", {"train": "bounding_box_train", "query": "query3", "gallery": "bounding_box_test"},
               (128, 256), "0001_s001_v1_001.jpg", _parse_310, by_scene=True),
        Layout("folder", {"train": "train", "query": "query", "gallery": "gallery"}, (256, 128),
               "0001_c1_anything.jpg", _parse_plain),
    )
}  # fmt: skip


def _eight_bit(image: Image.Image) -> Image.Image:
    """Thermal cameras write 16 bits, which PIL would cut off at 255 instead of scaling."""
    if not image.mode.startswith("I"):
        return image
    counts = np.asarray(image).astype(np.float64).clip(0, 65535)
    return Image.fromarray((counts / 257).round().astype(np.uint8))


def layout_named(name: str) -> Layout:
    if name not in LAYOUTS:
        raise UnknownNameError(f"unknown layout {name!r}.{nearest(name, LAYOUTS)}")
    return LAYOUTS[name]


def scan(layout: Layout, root: Path) -> tuple[tuple[str, ...], dict[str, Found]]:
    """The set's modalities, and what each split holds by name. A folder that is not there is an error that names it."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give the folder of a set in layout {layout.name}")
    base = root / "rgbir" if layout.name == "rgbnt100" and (root / "rgbir").is_dir() else root
    folders = _split_folders(layout, base)
    if layout.name == "folder":
        named = {p.name for folder in folders.values() for p in _subfolders(folder) if _images(p)}
        modalities = tuple(sorted(named, key=_order))
    else:
        modalities = THREE
    if not modalities:
        raise DataError(f"{root}: no modality folder with images, as {root}/train/rgb, in it")
    found: dict[Path, Found] = {}
    for folder in folders.values():
        if folder not in found:
            found[folder] = _scan_split(layout, folder, modalities)
    return modalities, {split: found[folder] for split, folder in folders.items()}


def _split_folders(layout: Layout, base: Path) -> dict[str, Path]:
    folders = {split: base / name for split, name in layout.splits.items()}
    if layout.name == "folder" and (base / "test").is_dir() and not folders["gallery"].is_dir():
        folders["query"] = folders["gallery"] = base / "test"
    for folder in folders.values():
        if not folder.is_dir():
            wanted = ", ".join(sorted({path.name for path in folders.values()}))
            raise DataError(f"{folder} is not there: layout {layout.name} has {wanted} in {base}")
    return folders


def _scan_split(layout: Layout, folder: Path, modalities: tuple[str, ...]) -> Found:
    if layout.name == "rgbnt100":
        return _strips(layout, folder)
    if layout.name == "msvr310":
        parts = [_grouped(layout, vehicle, dict(zip(THREE, ("vis", "ni", "th"), strict=True)), folder)
                 for vehicle in _subfolders(folder)]  # fmt: skip
        return Found([s for part in parts for s in part.samples], [p for part in parts for p in part.problems])
    if layout.name == "rgbnt201":
        return _grouped(layout, folder, dict(zip(THREE, ("RGB", "NI", "TI"), strict=True)), folder)
    return _grouped(layout, folder, {modality: modality for modality in modalities}, folder)


def _grouped(layout: Layout, place: Path, folders: Mapping[str, str], split: Path) -> Found:
    """Files of the same stem in the modality folders of `place` are one sample."""
    files: dict[str, dict[str, Path]] = {}
    problems: list[Problem] = []
    for modality, name in folders.items():
        for path in _images(place / name):
            own = files.setdefault(path.stem, {})
            if modality in own:
                problems.append(Problem(_short(path, split), f"there is {own[modality].name} too"))
            else:
                own[modality] = path
    samples = []
    for stem, own in sorted(files.items()):
        first = _short(next(iter(own.values())), split)
        said = layout.parse(stem)
        if said is None:
            problems.append(Problem(first, f"name does not parse as {layout.example}"))
        elif missing := [folders[modality] for modality in folders if modality not in own]:
            problems.append(Problem(first, f"no {' and no '.join(missing)} image"))
        elif layout.name == "msvr310" and place.name.isdigit() and int(place.name) != said.pid:
            problems.append(Problem(first, f"lies in folder {place.name}"))
        else:
            samples.append(Sample(own, said.pid, said.camera, said.scene, stem))
    return Found(samples, problems)


def _strips(layout: Layout, folder: Path) -> Found:
    """One file a sample, the modalities side by side in it; pid -1 is junk by the set's own rule."""
    samples, problems = [], []
    parts = {modality: (k, len(THREE)) for k, modality in enumerate(THREE)}
    for path in _images(folder):
        said = layout.parse(path.stem)
        if said is None:
            problems.append(Problem(_short(path, folder), f"name does not parse as {layout.example}"))
        elif said.pid >= 0:
            samples.append(Sample(dict.fromkeys(THREE, path), said.pid, said.camera, None, path.stem, parts))
    return Found(samples, problems)


def scan_images(places: Iterable[Path], modalities: tuple[str, ...]) -> list[Sample]:
    """Your own images, without labels: a folder with one folder for each modality (not all are needed), or, for images
    of one modality, files and folders of files. Files of the same stem in the modality folders are one sample."""
    places = list(places)
    if len(places) == 1 and places[0].is_dir():
        present = [name for name in modalities if (places[0] / name).is_dir()]
        if present:
            files: dict[str, dict[str, Path]] = {}
            for modality in present:
                for path in _images(places[0] / modality):
                    files.setdefault(path.stem, {})[modality] = path
            return [Sample(own, -1, -1, None, stem) for stem, own in sorted(files.items())]
    if len(modalities) > 1:
        named = ", ".join(modalities)
        raise DataError(f"{places[0]}: no folder {named} in it; put images there, or say --modality for plain images")
    paths = [path for place in places for path in (_images(place) if place.is_dir() else [place])]
    return [Sample({modalities[0]: path}, -1, -1, None, path.stem) for path in paths]


def _images(folder: Path) -> list[Path]:
    """Image files by name; hidden files and other kinds (Thumbs.db, lists) are not part of a set."""
    if not folder.is_dir():
        return []
    return image_files(folder)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _order(modality: str) -> tuple[int, str]:
    """rgb, nir, tir first and in this order, others by name."""
    return (THREE.index(modality) if modality in THREE else len(THREE), modality)


def _short(path: Path, split: Path) -> str:
    """The file as seen from the folder of its split: enough to find it, short enough to list many."""
    return str(path.relative_to(split.parent))
