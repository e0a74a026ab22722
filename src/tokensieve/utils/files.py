"""Files written whole or not at all, and one run to a folder. A leaf: imports the standard library and errors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokensieve.errors import OptionError, RecordError, TokensieveError

__all__ = ["check_folder", "check_writable", "only_run", "open_regular", "read_text", "system_errors", "whole_file",
           "whole_folder", "write_whole"]  # fmt: skip


def check_writable(path: str | Path) -> Path:
    """Make sure, before hours of measuring, that a file can be written there; missing folders are made."""
    path = Path(path)
    if path.is_dir():
        raise RecordError(f"cannot write {path}: it is a folder")
    try:
        if path.exists() and not path.is_file():  # renaming over a device or a pipe would remove it
            raise RecordError(f"cannot write {path}: it is not a regular file")
        _make_folder(path.parent, path)
        probe = _beside(path)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def check_folder(path: str | Path) -> Path:
    """Make sure that a folder is there and that files can be written into it."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise RecordError(f"cannot write into {path}: it is a file, not a folder")
    check_writable(path / "probe")
    return path


def _make_folder(folder: Path, path: Path) -> None:
    above = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if above is not None and not above.is_dir():
        raise RecordError(f"cannot write {path}: {above} is a file, not a folder")
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to, renamed to it at the end of the block.

    If the block raises, the temporary file is deleted and what was at `path` before stays. An OSError, such as a full
    disk, becomes a RecordError that names `path`.
    """
    path = check_writable(path)
    part = _beside(path)
    try:
        with system_errors(f"cannot write {path}"):
            yield part
            with part.open("rb") as written:
                os.fsync(written.fileno())
            part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file whole or not at all: under another name in the same folder first, then renamed."""
    with whole_file(path) as part:
        part.write_bytes(data)


def _beside(path: Path) -> Path:
    """A temporary name in the same folder, of this process alone."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def only_run(place: str | Path, *, file: bool = False) -> Iterator[None]:
    """Held while a run writes to `place`, a folder (file: the file of its result); a second run there is refused.

    The lock belongs to the process and ends with it, however it ends: a run that was killed leaves none behind.
    """
    from filelock import FileLock, Timeout

    place = Path(place)
    mark = place.with_name(f".{place.name}.lock") if file else place / ".lock"
    check_folder(mark.parent)
    lock = FileLock(str(mark), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OptionError(f"{place} is in use by another training: wait for it, or name another output") from None
    try:
        yield
    finally:
        lock.release()


def open_regular(path: str | Path) -> int:
    """A file descriptor to read a regular file. Opening a named pipe would wait for a writer for ever: it is an OSError
    like any other file that cannot be read."""
    found = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return found


def read_text(path: str | Path) -> str:
    """The UTF-8 text in a regular file."""
    with os.fdopen(open_regular(path), encoding="utf-8") as file:
        return file.read()


@contextlib.contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `folder` at the end of the block; what was there before is replaced.

    If the block raises, `folder` is as it was.
    """
    folder = Path(folder)
    check_folder(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        part, old = Path(scratch) / "new", Path(scratch) / "old"
        part.mkdir(mode=0o755)
        with system_errors(f"cannot write {folder}"):
            yield part
            if folder.exists():
                folder.rename(old)
            part.rename(folder)


@contextlib.contextmanager
def system_errors(what: str) -> Iterator[None]:
    """What the system says, such as of a full disk, as a RecordError that begins with `what`. Libraries that wrap it,
    as safetensors and torch do, are unwrapped.
    """
    try:
        yield
    except TokensieveError:
        raise
    except OSError as error:
        raise RecordError(f"{what}: {error.strerror or error}") from None
    except Exception as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is not None:
            raise RecordError(f"{what}: {os.strerror(int(found[1]))}") from None
        if type(error) is RuntimeError and "PytorchStreamWriter failed" in str(error):
            raise RecordError(f"{what}: {os.strerror(errno.ENOSPC)}") from None
        raise
