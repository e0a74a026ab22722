"""A tiny LLaVA of the real classes, and its processor, shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokensieve.tasks.vlm.processor import build_processor
from tokensieve.tasks.vlm.small import SmallSizes, build_small_llava

TINY = SmallSizes(width=32, heads=2, vision_layers=3, text_layers=2, vision_mlp=48, text_mlp=48)


@pytest.fixture(scope="session")
def processor() -> Any:
    return build_processor()


@pytest.fixture
def tiny(processor: Any) -> Any:
    """Weights large enough that every layer matters, so that a wrong mask or position shows."""
    model = build_small_llava(TINY, processor.tokenizer, seed=1).eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
