"""torch as an engine: the model itself, compiled, or read back from a .pt2 file. Imports base and feature."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensieve.engines.about import KEY, About
from tokensieve.engines.base import Engine
from tokensieve.engines.feature import Feature
from tokensieve.errors import DataError, UnsupportedModelError, one_line

__all__ = ["CompiledEngine", "TorchEngine", "load_program", "save_program"]

_EXTRA = f"{KEY}.json"


class TorchEngine(Engine):
    """A torch module called as it is. threads: of this process, since torch has one number for all."""

    name = "torch"

    def __init__(self, module: Any, about: About, path: Path | None = None, threads: int | None = None) -> None:
        super().__init__(about, path, threads)
        self.module = module
        if threads is not None:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def run(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module(images))


class CompiledEngine(TorchEngine):
    """torch.compile with its default backend, one graph. The first call of a batch size compiles."""

    name = "compile"

    def __init__(self, module: Feature, about: About, threads: int | None = None) -> None:
        super().__init__(torch.compile(module, fullgraph=True), about, None, threads)
        try:
            self.run(torch.zeros(2, 3, *about.size))
        except Exception as error:  # no compiler on this machine, or a graph break
            raise UnsupportedModelError(f"torch.compile cannot compile {about.model}: {one_line(error)}") from error


def save_program(program: torch.export.ExportedProgram, path: Path, about: About) -> None:
    """Write a .pt2 file."""
    torch.export.save(program, path, extra_files={_EXTRA: about.text()})


def load_program(path: Path, threads: int | None = None) -> TorchEngine:
    """Read a .pt2 file of `save_program`."""
    extra = {_EXTRA: ""}
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is truncated, or not a file of torch.export")
    try:
        program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        raise DataError(f"{path} cannot be read by torch.export: {one_line(error)}") from error
    return TorchEngine(program.module(), About.read(extra[_EXTRA], path), path, threads)
