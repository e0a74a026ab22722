"""The one reader of image files: which names are images, how large one may be, what is wrong with one.

Imports Pillow inside. A file that is not an image, is cut short, is too large or is not a regular file is a DataError
whose text begins with what the caller calls it.
"""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tokensieve.errors import DataError
from tokensieve.utils.files import open_regular

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ENDINGS", "MOST_PIXELS", "image_files", "is_image_name", "open_image", "read_image"]

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
MOST_PIXELS = 100_000_000  # 300 MB as RGB; a larger image is not decoded


def is_image_name(name: str | Path) -> bool:
    """Whether a file's ending is one of an image."""
    return Path(name).suffix.lower() in ENDINGS


def image_files(folder: str | Path, below: bool = False) -> list[Path]:
    """The files of a folder whose names are images', by name; `below`: in its sub-folders too. Hidden ones are not."""
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        found += [Path(where, name) for name in names if is_image_name(name) and not name.startswith(".")]
        if not below:
            break
    return sorted(found)


@contextmanager
def open_image(source: str | Path | bytes, what: str = "") -> Iterator[Image.Image]:
    """An image to be decoded inside the block, from a file or from the bytes of one; its size is checked before.

    what: begins the error (default: the file's name).
    """
    from PIL import Image

    name = what or ("image" if isinstance(source, bytes) else f"image {source}")
    try:
        _no_size_warnings()
        with _stream(source) as stream, Image.open(stream) as image:
            if image.width * image.height > MOST_PIXELS:
                size = f"{image.width:,} x {image.height:,} pixels"
                raise DataError(f"{name} is too large: {size}, at most {MOST_PIXELS:,} in all")
            yield image
    except (Image.DecompressionBombError, MemoryError):
        raise DataError(f"{name} is too large: at most {MOST_PIXELS:,} pixels") from None
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise DataError(f"{name} cannot be read: {_reason(error)}") from None


def read_image(source: str | Path | bytes, what: str = "", upright: bool = False) -> Image.Image:
    """A whole image as RGB. upright: turned as its camera says (EXIF)."""
    from PIL import ImageOps

    with open_image(source, what) as image:
        return (ImageOps.exif_transpose(image) if upright else image).convert("RGB")


@functools.cache
def _no_size_warnings() -> None:
    """Pillow warns of sizes below the limit here, and refuses those above twice its own; once is enough."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@contextmanager
def _stream(source: str | Path | bytes) -> Iterator[IO[bytes]]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    with os.fdopen(open_regular(source), "rb") as file:
        yield file


def _reason(error: Exception) -> str:
    if type(error).__name__ == "UnidentifiedImageError":  # its own words are about an object in memory
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    return "cut short" if "truncated" in text.lower() else text or "not an image"
