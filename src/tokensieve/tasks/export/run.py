"""Export one model, and measure the file: parity, size, and speed beside the untouched model on the same engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokensieve.engines.base import Engine
from tokensieve.engines.export import export, make_engine
from tokensieve.errors import MissingMaterialError, OptionError
from tokensieve.tasks.bench.models import images
from tokensieve.tasks.bench.timing import interleave, interval, quartiles, ratio, ratios
from tokensieve.tasks.clip.config import SieveConfig
from tokensieve.tasks.clip.load import Loader
from tokensieve.tasks.clip.session import Session
from tokensieve.tasks.viewer import find_photos, sample_photos

__all__ = ["ExportConfig", "Exported", "export_record", "run_export", "speed_on_engine"]

_PHOTOS = 20


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """model, pretrained: as open_clip names them, or the embedded one. batches, rounds: of the speed (0: none)."""

    model: str
    pretrained: str
    reduction: SieveConfig
    output: Path
    quantize: str | None = None
    calibrate: tuple[Path, ...] = ()
    with_kept: bool = False
    batches: tuple[int, ...] = (1, 8)
    rounds: int = 7
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 0 or min(self.batches) < 1:
            raise OptionError(f"--rounds {self.rounds} is at least 0, --batch {min(self.batches)} at least 1")


@dataclass(frozen=True)
class Exported:
    """engine: ready to call. files: all that was written. speed: a row for each batch. warnings: of attaching."""

    engine: Engine
    files: list[Path]
    speed: list[dict[str, Any]]
    warnings: list[str]


def run_export(config: ExportConfig, say: Callable[[str], None] = lambda line: None) -> Exported:
    """Write the file, then time it. say: called with what is done next."""
    loader = Loader()
    say("loading")
    session = Session(config.reduction, loader, "open_clip", speed_batches=0)
    loaded = session.load(config.model, config.pretrained, None, "cpu")
    name = f"{config.model} {config.pretrained}" if not Path(config.pretrained).is_file() else config.model
    common: dict[str, Any] = {
        "quantize": config.quantize, "calibrate": config.calibrate or _photos(), "preprocess": loaded.transform,
        "name": name, "threads": config.threads,
    }  # fmt: skip
    say("exporting")
    engine = export(loaded.model, config.output, with_kept=config.with_kept, **common)
    speed: list[dict[str, Any]] = []
    if config.rounds:
        full = None
        if session.handle is not None and session.handle.reduces:
            say("exporting the untouched model, to compare with")
            stock = loader.load("open_clip", config.model, config.pretrained, None, "cpu").model
            full = make_engine(stock, engine.name, **common)
        say("timing")
        speed = speed_on_engine(engine, full, config.batches, config.rounds)
    files = sorted(file for file in config.output.parent.iterdir() if _belongs(file, config.output))
    return Exported(engine, files, speed, session.warnings)


def _belongs(file: Path, output: Path) -> bool:
    return file.name in (output.name, f"{output.name}.data") or (
        output.suffix == ".xml" and file == output.with_suffix(".bin")
    )


def _photos() -> list[Path] | None:
    """ImageNet photos where they are installed; else the engine takes those of the package."""
    try:
        return find_photos([sample_photos()[0].parent], most=_PHOTOS)
    except MissingMaterialError:
        return None


def speed_on_engine(engine: Engine, full: Engine | None, batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each batch: both in milliseconds, interleaved, and what the MACs make possible. full None: alone."""
    rows = []
    about = engine.about
    for batch in batches:
        x = images(batch, about.size)
        both = {"reduced": engine} | ({} if full is None else {"full": full})
        times = interleave({name: partial(one, x) for name, one in both.items()}, rounds)
        row: dict[str, Any] = {"engine": engine.name, "quantize": about.quantize, "batch": batch}
        row |= {f"{name}_ms": 1e3 * quartiles(seconds)[1] for name, seconds in times.items()}
        if full is not None and about.mac_ratio:
            speedup = ratio(times["full"], times["reduced"])
            row |= {"speedup": speedup, "speedup_interval": interval(ratios(times["full"], times["reduced"]))}
            row |= {"mac_ratio": about.mac_ratio, "efficiency": speedup / about.mac_ratio}
        rows.append(row)
    return rows


def export_record(config: ExportConfig, exported: Exported) -> dict[str, Any]:
    """What was exported and measured, as plain data."""
    about = exported.engine.about
    parity = exported.engine.parity
    return {
        "model": about.model, "method": about.method, "settings": about.settings, "quantize": about.quantize,
        "float_ops": list(about.float_ops), "tokens_per_layer": about.tokens_per_layer, "macs": about.macs,
        "macs_full": about.macs_full, "files": {file.name: file.stat().st_size for file in exported.files},
        "parity": None if parity is None else asdict(parity), "speed": exported.speed, "threads": config.threads,
    }  # fmt: skip
