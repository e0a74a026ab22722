"""`tokensieve extract clip`: image features of shards or folders, one safetensors file a shard, reduced or not.

for name, keys, features in load_features(Path("features")):    # (N, E), in the shard's order
    ...
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import DataError, MissingMaterialError, OptionError, RecordError
from tokensieve.tasks.clip.config import SieveConfig
from tokensieve.tasks.clip.engine import refuse_amp
from tokensieve.tasks.clip.load import Loader, check_model
from tokensieve.tasks.clip.session import Session
from tokensieve.tasks.clip.shards import Shard
from tokensieve.tasks.clip.stream import Parts, Tally, own_shards, pieces, this_device
from tokensieve.utils.files import whole_file
from tokensieve.utils.tensor_files import read_header, read_tensors, save_tensors

__all__ = ["ExtractConfig", "Extraction", "extract_clip", "load_features", "merge_features", "totals"]

FORMAT = "tokensieve-clip-features-1"
ENDING = ".safetensors"
DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """model, pretrained: as open_clip names them, or the default. normalize: features of length 1. dtype: as written.

    engine_file: a file of `tokensieve export`, which is model and reduction at once. batch_size and workers change no
    feature; the batch size does where activations are quantised by their range in each batch.
    """

    model: str
    pretrained: str
    reduction: SieveConfig
    normalize: bool = False
    dtype: str = "float32"
    amp: bool = False
    batch_size: int = 64
    workers: int = 4
    engine_file: Path | None = None

    def __post_init__(self) -> None:
        refuse_amp(self.reduction, self.amp)
        if self.dtype not in DTYPES:
            raise OptionError(f"--dtype {self.dtype}: one of {', '.join(DTYPES)}")
        if self.batch_size < 1 or self.workers < 0:
            raise OptionError(f"--batch_size {self.batch_size} is at least 1, --num_workers {self.workers} at least 0")
        if self.engine_file is None:
            check_model(Namespace(model=self.model, pretrained=self.pretrained, model_type="open_clip"))

    def settings(self) -> dict[str, Any]:
        """What changes the features."""
        file = Path(self.pretrained)
        return {
            "format": FORMAT, "model": self.model,
            "pretrained": str(file.resolve()) if file.is_file() else self.pretrained,
            "pretrained_bytes": file.stat().st_size if file.is_file() else None,
            "reduction": self.reduction.plain(), "normalize": self.normalize, "dtype": self.dtype, "amp": self.amp,
            **self._engine(),
        }  # fmt: skip

    def _engine(self) -> dict[str, Any]:
        if self.engine_file is None:
            return {}
        return {"engine": str(self.engine_file.resolve()), "engine_bytes": self.engine_file.stat().st_size}


@dataclass(frozen=True)
class Extraction:
    """images, bad: of this run's own shards. done: shards of all that are finished. facts: what the reduction costs."""

    images: int
    bad: int
    done: int
    shards: int
    facts: dict[str, Any]
    warnings: list[str]


def extract_clip(
    config: ExtractConfig,
    shards: Sequence[Shard],
    folder: Path,
    *,
    strict: bool = False,
    loader: Loader | None = None,
    say: Callable[[str], None] = lambda line: None,
    tick: Callable[[int], None] = lambda images: None,
) -> Extraction:
    """Write the features of this process's shards, each file when it is whole; finished shards are left as they are.

    loader: one that may hold the model already. say: called with a line for samples that cannot be read; tick: with the
    number of images, after each batch.
    """
    parts = Parts(folder, config.settings(), ENDING)
    pending = [shard for shard in own_shards(shards) if not parts.finished(shard, _mark)]
    session = Session(config.reduction, loader or Loader(), "open_clip", speed_batches=0)
    tally = Tally(strict, say=say)
    if pending:
        _run(config, session, pending, parts, tally, tick)
    done = sum(parts.path(shard).exists() for shard in shards)
    tally.end(done, len(shards))
    return Extraction(tally.images, tally.bad, done, len(shards), _facts(config, session, pending), session.warnings)


def _facts(config: ExtractConfig, session: Session, pending: list[Shard]) -> dict[str, Any]:
    return session.facts() if pending and config.engine_file is None else {}


@torch.inference_mode()
def _run(
    config: ExtractConfig,
    session: Session,
    pending: list[Shard],
    parts: Parts,
    tally: Tally,
    tick: Callable[[int], None],
) -> None:
    device = this_device()
    transform, encode = _encoder(config, session, device)
    parts.begin()
    open_: dict[int, tuple[list[str], list[Tensor], list[tuple[str, str]]]] = {}
    for piece in pieces(pending, transform, batch_size=config.batch_size, workers=config.workers):
        keys, found, bad = open_.setdefault(piece.place, ([], [], []))
        shard = pending[piece.place]
        tally.note(piece, shard)
        keys += piece.keys
        bad += piece.bad
        if piece.pixels is not None:
            with torch.autocast(torch.device(device).type, enabled=config.amp):
                feature = encode(piece.pixels.to(device)).float()
            if config.normalize:
                feature = F.normalize(feature, dim=-1)
            found.append(feature.to("cpu", DTYPES[config.dtype]))
            tick(len(feature))
        if piece.cut or piece.last:
            del open_[piece.place]
        if piece.last:
            _write(parts.path(shard), shard, keys, found, bad)


def _encoder(config: ExtractConfig, session: Session, device: str) -> tuple[Any, Any]:
    """How a photo is prepared, and what makes features (B, E) of prepared ones."""
    if config.engine_file is None:
        model, transform, _ = session.load(config.model, config.pretrained, None, device)
        return transform, model.encode_image
    from tokensieve.engines.load import load_engine

    engine = load_engine(config.engine_file, config.reduction.threads)
    return engine.preprocess, lambda pixels: engine.run(pixels)[0]


def _write(path: Path, shard: Shard, keys: list[str], found: list[Tensor], bad: list[tuple[str, str]]) -> None:
    features = torch.cat(found) if found else torch.zeros(0, 0)
    about = {
        "format": FORMAT,
        "shard": shard.name,
        "mark": shard.mark,
        "keys": json.dumps(keys),
        "bad": json.dumps(bad),
    }
    save_tensors(path, {"features": features}, about)


# -- reading back ------------------------------------------------------------------------------------------------------


def _about(path: Path) -> dict[str, str]:
    """The header of a shard's file."""
    about = read_header(path, "features")
    if about.get("format") != FORMAT or not {"shard", "mark", "keys", "bad"} <= about.keys():
        raise RecordError(f"{path} is not a file of `tokensieve extract clip` (no format {FORMAT!r} in it)")
    return about


def _mark(path: Path) -> str:
    return _about(path)["mark"]


def load_features(folder: Path) -> Iterator[tuple[str, list[str], Tensor]]:
    """(shard, keys, features (N, E)) of each file, by name; one in memory at a time."""
    files = sorted(folder.glob(f"*{ENDING}"))
    if not files:
        raise MissingMaterialError(f"{folder}: no features are in it")
    for path in files:
        about = _about(path)
        yield about["shard"], json.loads(about["keys"]), _features(path)


def totals(folder: Path, shards: Sequence[Shard]) -> tuple[int, int]:
    """Images, and samples that could not be read, of finished shards."""
    images = bad = 0
    for shard in shards:
        about = _about(folder / f"{shard.name}{ENDING}")
        images += len(json.loads(about["keys"]))
        bad += len(json.loads(about["bad"]))
    return images, bad


def merge_features(folder: Path, shards: Sequence[Shard], path: Path) -> int:
    """All shards' features in one .npy file, in the shards' order, and their keys beside it, a JSON text a line.

    Shard by shard: what is in memory does not grow with their number. Returns the rows.
    """
    if path.suffix != ".npy":
        raise OptionError(f"--merge {path}: a name that ends in .npy")
    files = [folder / f"{shard.name}{ENDING}" for shard in shards]
    lengths = [len(json.loads(_about(file)["keys"])) for file in files]
    if not any(lengths):
        raise DataError(f"--merge {path}: not one image of these shards could be read")
    like = next(_features(file) for file, rows in zip(files, lengths, strict=True) if rows)
    about = {"descr": np.lib.format.dtype_to_descr(like.numpy().dtype), "fortran_order": False}
    with (
        whole_file(path.with_suffix(".keys.jsonl")) as keys_part,
        whole_file(path) as part,
        keys_part.open("w", encoding="utf-8") as lines,
        part.open("wb") as out,
    ):
        np.lib.format.write_array_header_1_0(out, {**about, "shape": (sum(lengths), like.shape[1])})
        for shard, file, rows in zip(shards, files, lengths, strict=True):
            if rows:
                out.write(np.ascontiguousarray(_features(file).numpy()).data)
            lines.writelines(json.dumps([shard.name, key]) + "\n" for key in json.loads(_about(file)["keys"]))
    return sum(lengths)


def _features(path: Path) -> Tensor:
    return read_tensors(path, "features", finite=False)[0]["features"]
