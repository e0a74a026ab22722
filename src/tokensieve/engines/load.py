"""load_engine(path). Imports all engines."""

from __future__ import annotations

from pathlib import Path

from tokensieve.engines.base import Engine
from tokensieve.engines.names import ENDINGS, check_engine
from tokensieve.engines.onnx_engine import load_onnx
from tokensieve.engines.openvino_engine import load_openvino
from tokensieve.engines.torch_engine import load_program
from tokensieve.errors import MissingMaterialError, OptionError

__all__ = ["load_engine"]

_LOADERS = {".onnx": load_onnx, ".xml": load_openvino, ".pt2": load_program}


def load_engine(path: str | Path, threads: int | None = None) -> Engine:
    """An engine from a file of `export`. threads: of the engine; None: as many as it takes by itself.

    A .pt2 file can hold pickles: load one only from a source you trust.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise OptionError(f"{path}: an engine's file ends in {', '.join(ENDINGS)}")
    if not path.is_file():
        raise MissingMaterialError(f"{path}: there is no such file")
    check_engine(ENDINGS[path.suffix], None, threads)
    return _LOADERS[path.suffix](path, threads)
