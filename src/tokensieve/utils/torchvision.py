"""Make `import torchvision` work beside a CPU build of torch.

The registry's torchvision wheel is a CUDA build. With a CPU torch its C++ library does not load, and its Python side
then fails on import because the schemas of `nms` and `qnms` are unknown. open_clip, timm and clip-benchmark import
torchvision for transforms only, so declaring the two schemas is enough. Nothing happens where the library does load.

`import tokensieve` arranges that this is done when torchvision is imported, not before: torch is not loaded early.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[Any] = []  # a torch Library withdraws its schemas when it is collected


class _BeforeTorchvision(MetaPathFinder):
    """Declares the schemas when torchvision is asked for the first time, then steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_schemas()
        return None


def arrange() -> None:
    """Have the schemas declared on the first import of torchvision. Costs nothing until then."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _BeforeTorchvision) for f in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def declare_missing_schemas() -> bool:
    """Declare torchvision's two schemas if its own library does not load. Returns whether anything was declared."""
    spec = importlib.util.find_spec("torchvision")
    if _kept or "torchvision" in sys.modules or spec is None or _library_loads(spec):
        return False
    import torch

    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call,unused-ignore]
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _kept.append(library)
    return True


def _library_loads(spec: ModuleSpec) -> bool:
    """Whether torchvision's compiled library loads beside this torch."""
    import torch

    for folder in spec.submodule_search_locations or []:
        for path in (*Path(folder).glob("_C*.so"), *Path(folder).glob("_C*.pyd")):
            try:
                torch.ops.load_library(str(path))
            except OSError:
                return False
            return True
    return False
