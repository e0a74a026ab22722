"""Shards as batches, streamed: a worker of the loader reads whole shards, one batch in memory at a time.

Whatever cannot be read is counted and named; what was made of a shard is written whole when the shard is at its end
(`Parts`), so that a run that was interrupted repeats no finished shard. Imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokensieve.errors import DataError, OptionError, one_line
from tokensieve.records import check_writable, differences, read_json, write_whole
from tokensieve.tasks.clip.shards import IMAGES, Sample, Shard, read_shard
from tokensieve.utils.images import read_image

__all__ = ["Parts", "Piece", "Tally", "own_shards", "pieces", "this_device"]


@dataclass
class Piece:
    """A batch of one shard. place: of the shard among those that were asked for. pixels: (B, 3, H, W), None for B = 0.

    bad: samples that could not be read, with the reason. last: the shard is at its end. cut: it cannot be read on.
    """

    place: int
    keys: list[str] = field(default_factory=list)
    pixels: Tensor | None = None
    labels: list[int] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    last: bool = False
    cut: str = ""


class _Stream(IterableDataset[Piece]):
    def __init__(
        self, shards: Sequence[Shard], transform: Callable[[Any], Tensor], batch_size: int, classes: int | None
    ) -> None:
        self.shards, self.transform, self.batch_size, self.classes = shards, transform, batch_size, classes

    def __iter__(self) -> Iterator[Piece]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for place in range(first, len(self.shards), step):
            yield from self._pieces(place)

    def _pieces(self, place: int) -> Iterator[Piece]:
        piece, images = Piece(place), list[Tensor]()
        try:
            for sample in read_shard(self.shards[place]):
                try:
                    label, pixels = self._label(sample), self.transform(_image(sample))
                except Exception as error:  # decoders have errors of their own; it is counted and named
                    piece.bad.append((sample.key, _why(error)))
                    continue
                piece.keys.append(sample.key)
                piece.labels.append(label)
                images.append(pixels)
                if len(images) == self.batch_size:
                    piece.pixels = torch.stack(images)
                    yield piece
                    piece, images = Piece(place), []
        except (DataError, OSError) as error:
            yield Piece(place, cut=str(error))
            return
        piece.pixels = torch.stack(images) if images else None
        piece.last = True
        yield piece

    def _label(self, sample: Sample) -> int:
        """Its class; 0 where none is asked for."""
        if self.classes is None:
            return 0
        if "cls" not in sample.parts:
            raise DataError("it has no .cls")
        label = int(sample.parts["cls"])
        if not 0 <= label < self.classes:
            raise DataError(f"its class {label} is none of the {self.classes}")
        return label


def _image(sample: Sample) -> Any:
    if sample.problem:
        raise DataError(sample.problem)
    for ending in IMAGES:
        if ending in sample.parts:
            return read_image(sample.parts[ending], "image")
    raise DataError(f"it has no image ({', '.join(IMAGES)})")


def _why(error: Exception) -> str:
    return one_line(error, 120).removeprefix("image cannot be read: ")


def pieces(
    shards: Sequence[Shard],
    transform: Callable[[Any], Tensor],
    *,
    batch_size: int,
    workers: int = 0,
    classes: int | None = None,
) -> Iterator[Piece]:
    """Batches of all shards; with workers, of several shards in turn. classes: samples have a .cls below that."""
    if not shards:
        return iter(())
    stream = _Stream(shards, transform, batch_size, classes)
    loader: DataLoader[Piece] = DataLoader(
        stream, batch_size=None, num_workers=min(workers, len(shards)), collate_fn=_as_it_is
    )
    return iter(loader)


def _as_it_is(piece: Any) -> Any:
    return piece


def own_shards(shards: Sequence[Shard]) -> list[Shard]:
    """This process's, as torchrun and others number processes: every N-th. Nothing is said between processes."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return list(shards[rank::world])


def this_device() -> str:
    """The GPU of this process, from now on torch's "cuda" too, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)  # clip_benchmark knows devices by their kind alone
    return f"cuda:{index}"


@dataclass
class Tally:
    """What a run has met: images read, samples that could not be, shards that are cut short.

    strict: the first sample that cannot be read is an error.
    """

    strict: bool = False
    images: int = 0
    bad: int = 0
    cut: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda line: None
    most: int = 10  # bad samples that are said one by one

    def note(self, piece: Piece, shard: Shard) -> None:
        self.images += len(piece.keys)
        for key, why in piece.bad:
            if self.strict:
                raise DataError(f"{shard.name}: {key} cannot be read: {why}; without --strict it is left out and told")
            self.bad += 1
            if self.bad <= self.most:
                self.say(f"{shard.name}: {key} cannot be read: {why}")
        if piece.cut:
            if self.strict:
                raise DataError(piece.cut)
            self.cut.append(piece.cut)

    def end(self, done: int, all_: int) -> None:
        """Raise where shards are missing from what was to be done."""
        if self.cut:
            more = f", and {len(self.cut) - 1} more" if len(self.cut) > 1 else ""
            raise DataError(
                f"{self.cut[0]}{more}; {done} of {all_} shards are done, the same command goes on with the others"
            )


class Parts:
    """A folder with one file for each finished shard, and the settings that they were all made with.

    Made at first without a trace: `begin` it when nothing in the settings can turn out to be wrong any more.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], ending: str) -> None:
        self.folder, self.ending = folder, ending
        self._settings = json.loads(json.dumps(settings, default=str))
        self._file = folder / "settings"  # JSON, but not so called: folders of results are searched for *.json
        if self._file.exists():
            self._compare()
        else:
            check_writable(self._file)

    def begin(self) -> None:
        """Write the settings down, if they are not there. Another command may have begun since."""
        if not self._file.exists():
            write_whole(self._file, (json.dumps(self._settings, indent=2) + "\n").encode())
        self._compare()

    def _compare(self) -> None:
        was = read_json(self._file, "settings of a run")
        other = differences(was if isinstance(was, dict) else {}, self._settings)
        if other:
            raise OptionError(f"{self.folder} was begun with other settings: {'; '.join(other)}; name another folder")

    def path(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}{self.ending}"

    def finished(self, shard: Shard, mark: Callable[[Path], str]) -> bool:
        """Whether its file is there. mark: reads from that file what the shard was; another one is an error."""
        path = self.path(shard)
        if not path.exists():
            return False
        was = mark(path)
        if was != shard.mark:
            raise OptionError(
                f"{path} is of another {shard.name} (it had {was}, now {shard.mark}): delete it, or name another folder"
            )
        return True
