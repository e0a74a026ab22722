"""Webdataset shards and folders of images: found by name, read sample by sample. Nothing is unpacked to disk.

A shard is a .tar file whose consecutive members of one name and different endings are a sample. A folder of images is
cut into shards of as many files each. Imports the standard library and braceexpand.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokensieve.errors import DataError, MissingMaterialError, OptionError
from tokensieve.utils.files import open_regular
from tokensieve.utils.images import ENDINGS, is_image_name

__all__ = ["IMAGES", "MOST_SHARDS", "Sample", "Shard", "check_shard", "find_shards", "read_shard"]

# endings, in the order in which they are looked for in a sample: the first four as webdataset does
IMAGES = tuple(dict.fromkeys(("webp", "png", "jpg", "jpeg", *(ending[1:] for ending in ENDINGS))))
MOST_SHARDS = 100_000  # of a pattern
FILES = 1000  # images of a folder that make one shard
_BLOCK = 512  # of a tar file; its end is two of zeros
_ENDING = re.compile(r"^((?:.*/)?[^./][^/.]*)\.([^/]+)$")


@dataclass(frozen=True)
class Shard:
    """name: its own among the shards, for the file of its results. path: the .tar file, or the folder of `files`."""

    name: str
    path: Path
    files: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """Changes when what is in the shard does, as far as sizes and names show."""
        if not self.files:
            return f"{self.path.stat().st_size} bytes"
        facts = "\n".join(f"{name} {_size(self.path / name)}" for name in self.files)
        return f"{len(self.files)} files {hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


@dataclass(frozen=True)
class Sample:
    """parts: bytes by ending, in small letters. problem: why there are none."""

    key: str
    parts: dict[str, bytes]
    problem: str = ""


# -- finding -----------------------------------------------------------------------------------------------------------


def find_shards(words: Sequence[str]) -> list[Shard]:
    """.tar files, patterns such as data/{000000..000009}.tar, folders of .tar files, folders of images.

    In the order given, a folder's by name and number. What is not there is an error that names it.
    """
    tars: list[Path] = []
    folders: list[Shard] = []
    for word in words:
        path = Path(word)
        if "://" in word:
            raise OptionError(f"{word}: shards are read from this machine; fetch them first")
        if path.is_dir():
            inside = sorted((each for each in path.glob("*.tar") if each.is_file()), key=_natural)
            tars += inside
            folders += [] if inside else _image_shards(path, f"{len(folders):03d}-" if folders else "")
        elif "{" in word and not path.exists():
            tars += _expanded(word)
        elif path.suffix == ".tar":
            tars += _there([path], word)
        elif path.exists():
            raise OptionError(f"{word}: no .tar file and no folder")
        else:
            raise MissingMaterialError(f"{word}: there is no such file or folder")
    shards = [*_named(tars), *folders]
    twice = next((name for name, count in Counter(shard.name for shard in shards).items() if count > 1), None)
    if twice is not None:
        raise OptionError(f"two shards would be called {twice}: give each of them once")
    return shards


def _natural(path: Path) -> list[tuple[int, str]]:
    """2.tar before 10.tar."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _expanded(word: str) -> list[Path]:
    from braceexpand import braceexpand

    numbers = re.findall(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}", word)
    if math.prod(abs(int(last) - int(first)) + 1 for first, last in numbers) > MOST_SHARDS:  # before it makes them
        raise OptionError(f"{word}: the pattern stands for more than {MOST_SHARDS:,} shards")
    try:
        names = list(islice(braceexpand(word), MOST_SHARDS + 1))
    except ValueError as error:  # unbalanced
        raise OptionError(f"{word}: its braces are not a pattern ({error})") from None
    if len(names) > MOST_SHARDS:
        raise OptionError(f"{word}: the pattern stands for more than {MOST_SHARDS:,} shards")
    return _there([Path(each) for each in names], word)


def _there(paths: list[Path], word: str) -> list[Path]:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        names = ", ".join(path.name for path in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise MissingMaterialError(f"{word}: {len(missing)} of {len(paths)} shards are not there ({names})")
    return paths


def _named(tars: list[Path]) -> list[Shard]:
    """Called by their file's name; where two have the same, by their folders' names too."""
    stems = Counter(path.stem for path in tars)
    common = os.path.commonpath([path.resolve().parent for path in tars]) if tars else ""
    shards = []
    for path in tars:
        stem = path.stem
        if stems[stem] > 1:
            stem = "-".join(path.resolve().relative_to(common).with_suffix("").parts)
        shards.append(Shard(stem, path))
    return shards


def _image_shards(folder: Path, lead: str) -> list[Shard]:
    """The images in a folder and below, by name, FILES to a shard."""
    found: list[str] = []
    for where, below, names in os.walk(folder):
        below.sort()
        inside = [name for name in names if is_image_name(name) and not name.startswith(".")]
        found += [Path(where, name).relative_to(folder).as_posix() for name in inside]
    if not found:
        raise MissingMaterialError(f"{folder}: neither .tar files nor images ({', '.join(IMAGES)}) are in it")
    found.sort()
    return [
        Shard(f"{lead}images-{number:05d}", folder, tuple(found[start : start + FILES]))
        for number, start in enumerate(range(0, len(found), FILES))
    ]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_shard(shard: Shard, contents: bool = True) -> Iterator[Sample]:
    """Its samples, one in memory at a time. An archive that is damaged or cut short is an error that names it.

    contents: read the members' bytes; without, they are empty.
    """
    if shard.files:
        yield from _read_files(shard)
        return
    _check_end(shard.path)
    try:
        with tarfile.open(shard.path, "r:") as tar:
            yield from _grouped(_members(tar, shard.path, contents))
    except tarfile.TarError as error:
        raise DataError(
            f"shard {shard.path} is truncated or not a tar file ({error}): fetch or write it again"
        ) from None


def check_shard(path: Path) -> None:
    """Raise where an archive is damaged, cut short, or claims more than it holds. Its headers alone are read."""
    for _ in read_shard(Shard(path.stem, path), contents=False):
        pass


def _read_files(shard: Shard) -> Iterator[Sample]:
    for name in shard.files:
        try:
            with os.fdopen(open_regular(shard.path / name), "rb") as file:
                yield Sample(name, {name.rpartition(".")[2].lower(): file.read()})
        except OSError as error:
            yield Sample(name, {}, error.strerror or str(error))


def _check_end(path: Path) -> None:
    """A tar file ends with two blocks of zeros. Without them it was cut off, perhaps just between two members."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(-min(size, 2 * _BLOCK), os.SEEK_END)
        end = file.read()
    if size % _BLOCK or len(end) < 2 * _BLOCK or any(end):
        raise DataError(f"shard {path} is cut short ({size:,} bytes without an end): fetch or write it again")


def _members(tar: tarfile.TarFile, path: Path, contents: bool) -> Iterator[tuple[str, bytes]]:
    """Names and contents of its regular files, as they come."""
    size = path.stat().st_size
    while True:
        info = tar.next()
        if info is None:
            break
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all otherwise
        if info.isreg():
            if info.issparse() or info.offset_data + info.size > size:  # tiny on the disk, huge in memory
                raise DataError(f"shard {path}: {info.name} claims {info.size:,} bytes, more than the file holds")
            reader = tar.extractfile(info)
            assert reader is not None
            yield info.name, reader.read() if contents else b""
    with path.open("rb") as file:  # tarfile takes a damaged header for the end
        file.seek(tar.offset)
        while block := file.read(1 << 20):
            if any(block):
                raise DataError(f"shard {path} is damaged at byte {tar.offset:,}: fetch or write it again")


def _grouped(members: Iterator[tuple[str, bytes]]) -> Iterator[Sample]:
    """Consecutive members of one name, up to its first dot, are a sample. Names without an ending are left out."""
    key, parts = None, dict[str, bytes]()
    for name, data in members:
        match = _ENDING.match(name)
        if match is None:
            continue
        if match[1] != key:
            if key is not None:
                yield Sample(key, parts)
            key, parts = match[1], {}
        parts[match[2].lower()] = data
    if key is not None:
        yield Sample(key, parts)
