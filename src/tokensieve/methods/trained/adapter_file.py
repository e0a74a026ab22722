"""The file that `tokensieve train vlm` writes: merger, pruners or both, safetensors, their shapes in its header.

Tensors are named `token_merger.*` and `layer_pruners.*`; the header says what to build for them. Imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tokensieve.errors import OptionError
from tokensieve.utils.tensor_files import fill_module, read_facts, read_tensors

__all__ = ["BEST", "FORMAT", "about_adapter", "adapter_tensors", "fill", "read_adapter"]

FORMAT = "tokensieve-vlm-1"
BEST = "best.safetensors"


def adapter_tensors(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The parts' weights under the names they have in a file."""
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }


def about_adapter(shapes: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    """The header. shapes: part -> what its class is built with. facts: model, budget and so on, plain JSON."""
    return {"format": FORMAT, "shapes": json.dumps(dict(shapes)), "about": json.dumps(dict(facts))}


def read_adapter(path: str | Path, part: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """(shape, weights, facts) of one part of a file, or of the `best.safetensors` of a run's folder.

    A file that is missing, cut short, something else, or without that part is an error that names it.
    """
    path = Path(path)
    path = path / BEST if path.is_dir() else path
    found, header = read_tensors(path, "adapter", format=FORMAT, by="`tokensieve train vlm`")
    shapes, about = (read_facts(header, key, f"adapter {path}") for key in ("shapes", "about"))
    if part not in shapes:
        raise OptionError(f"adapter {path} has no {part} in it, only {', '.join(shapes)}")
    weights = {name.removeprefix(f"{part}."): value for name, value in found.items() if name.startswith(f"{part}.")}
    return shapes[part], weights, about


def fill(part: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Put a file's weights into a freshly built part; what does not fit names the file."""
    fill_module(part, weights, f"adapter {path}")
    part.requires_grad_(False).eval()
