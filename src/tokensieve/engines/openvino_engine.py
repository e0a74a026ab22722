"""OpenVINO's files, and OpenVINO as an engine on the CPU. Imports base."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensieve.engines.about import KEY, About
from tokensieve.engines.base import Engine, need
from tokensieve.errors import DataError, one_line

__all__ = ["OpenVinoEngine", "load_openvino", "read_onnx", "write_openvino"]

_GROUP = 128  # channels of an activation that share a scale, where the weights alone were quantised


class OpenVinoEngine(Engine):
    """A compiled OpenVINO model. Float stays float32: by itself OpenVINO would take bfloat16 where the CPU has it."""

    name = "openvino"

    def __init__(self, model: Any, about: About, path: Path | None = None, threads: int | None = None) -> None:
        super().__init__(about, path, threads)
        core = need("openvino", "openvino").Core()
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        if about.quantize == "int8":
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _GROUP
        self._request = core.compile_model(model, "CPU", settings).create_infer_request()
        self._lock = threading.Lock()  # one request: calls from several threads take turns

    def run(self, images: Tensor) -> tuple[Tensor, ...]:
        with self._lock:
            found = self._request.infer([images.contiguous().cpu().numpy()], share_inputs=True)
            return tuple(torch.from_numpy(out.copy()) for out in found.values())


def read_onnx(path: Path) -> Any:
    """An OpenVINO model from an ONNX file."""
    return need("openvino", "openvino").Core().read_model(str(path))


def write_openvino(model: Any, path: Path, about: About) -> None:
    """Write .xml, and the weights in a .bin beside it."""
    model.set_rt_info(about.text(), [KEY])
    need("openvino", "openvino").save_model(model, str(path), compress_to_fp16=False)


def load_openvino(path: Path, threads: int | None = None) -> OpenVinoEngine:
    """An engine from files of `write_openvino`."""
    ov = need("openvino", "openvino")
    if not path.with_suffix(".bin").is_file():
        raise DataError(f"{path.with_suffix('.bin')} is missing: an OpenVINO model is two files, .xml and .bin")
    try:
        model = ov.Core().read_model(str(path))
    except Exception as error:  # OpenVINO raises plain RuntimeErrors
        raise DataError(f"{path} is truncated, or not an OpenVINO model: {one_line(error)}") from None
    text = str(model.get_rt_info([KEY]).astype(str)) if model.has_rt_info([KEY]) else None
    about = About.read(text, path)
    try:
        return OpenVinoEngine(model, about, path, threads)
    except RuntimeError as error:
        raise DataError(f"{path} cannot be compiled by OpenVINO: {one_line(error)}") from None
