"""ONNX files, and ONNX Runtime as an engine. Imports base."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensieve.engines.about import KEY, About
from tokensieve.engines.base import Engine, need
from tokensieve.errors import DataError, UnsupportedModelError, one_line

__all__ = ["LIMIT", "OnnxEngine", "load_onnx", "save_model", "write_onnx"]

LIMIT = 2_000_000_000  # bytes of weights in one file; a protobuf ends at 2 GiB
_WARNINGS_OFF = 3  # ONNX Runtime's levels: 3 is errors alone


class OnnxEngine(Engine):
    """An ONNX Runtime session on the CPU."""

    name = "onnxruntime"

    def __init__(self, session: Any, about: About, path: Path | None = None, threads: int | None = None) -> None:
        super().__init__(about, path, threads)
        self.session, self._input = session, session.get_inputs()[0].name

    def run(self, images: Tensor) -> tuple[Tensor, ...]:
        found = self.session.run(None, {self._input: images.contiguous().cpu().numpy()})
        return tuple(torch.from_numpy(out) for out in found)


def write_onnx(program: torch.export.ExportedProgram, path: Path, about: About) -> None:
    """Write a captured graph as ONNX; weights of 2 GB and more go to `path` with ".data" behind its name."""
    need("onnx", "onnx")
    need("onnxscript", "onnx")
    names = ["features", "kept"][: 1 + about.kept]
    log = logging.getLogger("onnxscript")
    level = log.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            log.setLevel(logging.ERROR)
            found = torch.onnx.export(
                program, (), dynamo=True, verbose=False, optimize=True, input_names=["images"], output_names=names
            )
    except Exception as error:  # an operator that ONNX has no word for
        raise UnsupportedModelError(f"{about.model} cannot be written as ONNX: {one_line(error)}") from error
    finally:
        log.setLevel(level)
    assert found is not None
    _tidy(found.model, about)
    found.save(str(path), external_data=_bytes(program) >= LIMIT, keep_initializers_as_inputs=False)


def _tidy(model: Any, about: About) -> None:
    """Metadata of ours, and none of the exporter's notes on every node, which hold paths of this machine."""
    for index, node in enumerate(model.graph.all_nodes()):
        scopes = re.findall(r"'([^']+)'", node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
        place = next((scope for scope in reversed(scopes) if scope.startswith("encoder.")), "encoder")
        node.name = f"{place.removeprefix('encoder.')}/{node.op_type}_{index}"  # where in the model it comes from
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*model.graph.initializers.values(), *model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props[KEY] = about.text()
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            value.shape[0] = "batch"


def save_model(model: Any, path: Path) -> None:
    """Write an onnx.ModelProto, its weights beside it where they are large."""
    import onnx

    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) >= LIMIT
    onnx.save(model, str(path), save_as_external_data=large, location=f"{path.name}.data")


def _bytes(program: torch.export.ExportedProgram) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())


def load_onnx(path: Path, threads: int | None = None) -> OnnxEngine:
    """An engine from a file of `write_onnx`."""
    runtime = need("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = _WARNINGS_OFF
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has a class for each status
        raise DataError(f"{path} is truncated, or not an ONNX model: {one_line(error)}") from None
    about = About.read(session.get_modelmeta().custom_metadata_map.get(KEY), path)
    return OnnxEngine(session, about, path, threads)
