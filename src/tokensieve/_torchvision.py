"""Make `import torchvision` work beside a CPU build of torch.

The registry's torchvision wheel is a CUDA build. With a CPU torch its C++ library does not load, and its Python side
then fails on import because the schemas of `nms` and `qnms` are unknown. open_clip, timm and clip-benchmark import
torchvision for transforms only, so declaring the two schemas is enough. Nothing happens where the library did load.

Imported before any of those packages; imports torch alone.
"""

from __future__ import annotations

import importlib.util

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None  # kept alive: a Library withdraws its schemas when it is collected


def declare_missing_schemas() -> bool:
    """Declare torchvision's two schemas if its own library did not. Returns whether anything was declared."""
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None:
        return False
    import sys

    if "torchvision" in sys.modules or _native_library_loads():
        return False
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(name + _SCHEMA)
    return True


def _native_library_loads() -> bool:
    """Whether torchvision's compiled library loads beside this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    from pathlib import Path

    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("_C*.so")) + sorted(Path(folder).glob("_C*.pyd")):
            try:
                torch.ops.load_library(str(path))
            except OSError:
                return False
            return True
    return False
