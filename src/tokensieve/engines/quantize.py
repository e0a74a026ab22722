"""int8 for ONNX and OpenVINO files, by ONNX Runtime's and NNCF's own tools. Imports the two engines.

"int8": weights by channel beforehand, activations by their range when they come. "int8-static": activations by ranges
measured on calibration photos. Only products with weights are quantised. Products whose own int8 error is largest stay
in float until the features agree with float.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tokensieve.engines.about import About
from tokensieve.engines.base import Engine, need
from tokensieve.engines.onnx_engine import LIMIT, load_onnx, save_model
from tokensieve.engines.openvino_engine import OpenVinoEngine, read_onnx

__all__ = ["AGREE", "op_errors", "quantize"]

AGREE = 0.99  # mean cosine to the float features, at which no more operations are kept in float
_MOST = 16  # operations kept in float at most
_PHOTOS = 8  # on which the errors of single operations are measured

Build = Callable[[tuple[str, ...]], tuple[Engine, Any]]


def quantize(source: Path, about: About, photos: Tensor, engine: str, threads: int | None) -> tuple[Any, About]:
    """The quantised model (ONNX's or OpenVINO's object), and its facts with the operations that stayed float.

    source: a float ONNX file. photos: (P, 3, H, W), real ones: errors and, for "int8-static", ranges are theirs.
    """
    reference = load_onnx(source, threads).run(photos)[0]
    ranked: list[str] | None = None
    best: tuple[float, Any, About] | None = None
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            floats = tuple((ranked or [])[:count])
            facts = dataclasses.replace(about, float_ops=floats)
            make = _onnx if engine == "onnxruntime" else _openvino
            ready, model = make(source, facts, photos, Path(folder, f"{count}.onnx"), threads)
            agree = float(F.cosine_similarity(ready.run(photos)[0], reference, dim=-1).mean())
            if best is None or agree > best[0]:
                best = (agree, model, facts)
            if agree >= AGREE or count >= _MOST:
                return best[1], best[2]
            if ranked is None:
                errors = op_errors(source, photos[:_PHOTOS])
                ranked = sorted(errors, key=lambda name: -errors[name])
            count = 2 * count or 1


def _onnx(source: Path, about: About, photos: Tensor, target: Path, threads: int | None) -> tuple[Engine, Any]:
    """By ONNX Runtime's quantiser."""
    tools, onnx = need("onnxruntime.quantization", "onnx"), need("onnx", "onnx")
    common: dict[str, Any] = {
        "op_types_to_quantize": ["MatMul", "Gemm"], "per_channel": True, "weight_type": tools.QuantType.QInt8,
        "nodes_to_exclude": list(about.float_ops), "use_external_data_format": source.stat().st_size >= LIMIT,
    }  # fmt: skip
    with _quiet():
        if about.quantize == "int8":
            tools.quantize_dynamic(str(source), str(target), extra_options={"MatMulConstBOnly": True}, **common)
        else:
            graph = onnx.load(str(source), load_external_data=False).graph
            weighted = _products(graph)
            common["nodes_to_exclude"] += [node.name for node in graph.node if node.name not in weighted]
            tools.quantize_static(
                str(source), str(target), _reader(photos), activation_type=tools.QuantType.QUInt8, **common
            )
    model = onnx.load(str(target))
    for prop in model.metadata_props:
        if prop.key == "tokensieve":
            prop.value = about.text()
    save_model(model, target)
    return load_onnx(target, threads), model


def _reader(photos: Tensor) -> Any:
    base = need("onnxruntime.quantization", "onnx").CalibrationDataReader

    class Reader(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self._photos = iter(photos.numpy())

        def get_next(self) -> dict[str, Any] | None:
            photo = next(self._photos, None)
            return None if photo is None else {"images": photo[None]}

    return Reader()


def _openvino(source: Path, about: About, photos: Tensor, target: Path, threads: int | None) -> tuple[Engine, Any]:
    """By NNCF."""
    nncf = need("nncf", "openvino")
    scope = nncf.IgnoredScope(names=list(about.float_ops), validate=False)
    with _quiet():
        if about.quantize == "int8":
            mode = nncf.CompressWeightsMode.INT8_SYM
            model = nncf.compress_weights(read_onnx(source), mode=mode, ignored_scope=scope)
        else:
            data = nncf.Dataset([photo[None] for photo in photos.numpy()])
            model = nncf.quantize(
                read_onnx(source), data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(photos),
                ignored_scope=scope,
            )  # fmt: skip
    return OpenVinoEngine(model, about, None, threads), model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the quantisers' advice and progress bars."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("nncf", "onnxruntime")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        root.setLevel(level)
        for one, was in zip(loggers, before, strict=True):
            one.setLevel(was)


def _products(graph: Any) -> dict[str, tuple[str, str]]:
    """name -> (activation, weight) of every product of activations with a constant matrix."""
    constant = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    return {
        node.name: (node.input[0], node.input[1])
        for node in graph.node
        if node.op_type in ("MatMul", "Gemm") and constant.get(node.input[1]) == 2
    }


def op_errors(source: Path, photos: Tensor) -> dict[str, float]:
    """For each product with weights its relative error in int8, everything before it in float: |y8 - y| / |y|."""
    onnx, runtime = need("onnx", "onnx"), need("onnxruntime", "onnx")
    model = onnx.load(str(source))
    products = _products(model.graph)
    gemms = {n.name: any(a.name == "transB" and a.i for a in n.attribute) for n in model.graph.node}
    weights = {t.name: t for t in model.graph.initializer}
    inputs = sorted({activation for activation, _ in products.values()})
    for name in inputs:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probed.onnx")
        save_model(model, path)
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found = dict(zip(inputs, session.run(inputs, {session.get_inputs()[0].name: photos.numpy()}), strict=True))
    errors = {}
    for name, (activation, weight) in products.items():
        w = onnx.numpy_helper.to_array(weights[weight])
        x = found[activation].reshape(-1, found[activation].shape[-1])
        errors[name] = _error(x, w.T if gemms[name] else w)
    return errors


def _error(x: NDArray[np.float32], w: NDArray[np.float32]) -> float:
    """x (N, I) as 8 bits with one range, w (I, O) as 8 bits with a scale for each column."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = (high - low) / 255 or 1.0
    x8 = np.clip(np.round((x - low) / step), 0, 255) * step + low
    scale = np.maximum(np.abs(w).max(axis=0), 1e-12) / 127
    w8 = np.round(w / scale) * scale
    wanted = x @ w
    return float(np.linalg.norm(x8 @ w8 - wanted) / max(float(np.linalg.norm(wanted)), 1e-12))
