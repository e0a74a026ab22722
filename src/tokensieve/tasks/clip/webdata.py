"""Write labelled images as a local webdataset that clip-benchmark's `wds/` reader takes. Imports numpy and pillow."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tokensieve.errors import OptionError
from tokensieve.utils.files import whole_folder, write_whole

__all__ = ["write_webdataset"]


def write_webdataset(
    root: Path,
    split: str,
    images: np.ndarray,
    labels: Sequence[int],
    classes: Sequence[str],
    templates: Sequence[str],
    per_shard: int = 5000,
) -> Path:
    """Images (N, H, W, 3) uint8 as PNGs in `root/split/{0..}.tar`, with class names and prompts beside the split.

    A split is written under another name and renamed when it is whole. One that exists already is an error.
    """
    target = root / split
    if target.exists():
        raise OptionError(f"{target} exists already: remove it, or name another folder")
    if len(images) != len(labels) or not len(images):
        raise OptionError(f"{len(images)} images and {len(labels)} labels: give as many of both, and at least one")
    shards = -(-len(images) // per_shard)
    with whole_folder(target) as part:
        for shard in range(shards):
            with tarfile.open(part / f"{shard}.tar", "w") as tar:
                for i in range(shard * per_shard, min(len(images), (shard + 1) * per_shard)):
                    _add(tar, f"{i:06d}.cls", str(int(labels[i])).encode())
                    _add(tar, f"{i:06d}.png", _png(images[i]))
        (part / "nshards.txt").write_text(f"{shards}\n", encoding="utf-8")
        write_whole(root / "classnames.txt", ("\n".join(classes) + "\n").encode())
        write_whole(root / "zeroshot_classification_templates.txt", ("\n".join(templates) + "\n").encode())
        write_whole(root / "dataset_type.txt", b"classification\n")
    return target


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """One member without owner or time: the same data gives the same archive."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
