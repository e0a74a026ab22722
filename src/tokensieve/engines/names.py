"""The engines by name. No torch: command lines are checked before anything heavy is loaded."""

from __future__ import annotations

from tokensieve.errors import OptionError, UnknownNameError, nearest

__all__ = ["ENDINGS", "ENGINES", "QUANTIZE", "check_engine"]

ENGINES = ("torch", "compile", "onnxruntime", "openvino")
ENDINGS = {".onnx": "onnxruntime", ".xml": "openvino", ".pt2": "torch"}
QUANTIZE = ("int8", "int8-static")  # weights int8, activations by their range in each batch or by calibration


def check_engine(name: str, quantize: str | None, threads: int | None) -> None:
    """Raise where there is no such engine, or it cannot quantise."""
    if name not in ENGINES:
        raise UnknownNameError(f"unknown engine {name!r}.{nearest(name, ENGINES)}")
    if quantize is not None and quantize not in QUANTIZE:
        raise UnknownNameError(f"unknown quantize {quantize!r}.{nearest(quantize, QUANTIZE)}")
    if quantize is not None and name in ("torch", "compile"):
        raise OptionError(f"quantize={quantize}: for the engines onnxruntime and openvino, not for {name}")
    if threads is not None and threads < 1:
        raise OptionError(f"threads={threads}: at least 1")
