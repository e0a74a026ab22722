"""What several tests of adapters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokensieve.adapters import few_rows, lean
from tokensieve.adapters.lean import LeanBlock


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where forms for few tokens apply, and to small layers too; no gradients."""
    monkeypatch.setattr(few_rows, "_SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def runs(monkeypatch):
    """The tokens of each MLP that was run lean."""
    seen: list[int] = []
    mlp = LeanBlock.mlp
    monkeypatch.setattr(LeanBlock, "mlp", lambda block, x: seen.append(x.shape[1]) or mlp(block, x))
    return seen


@pytest.fixture
def gathered(monkeypatch):
    """The blocks that were gathered."""
    seen: list[lean.Parts] = []
    build = LeanBlock.__init__
    monkeypatch.setattr(LeanBlock, "__init__", lambda block, parts: seen.append(parts) or build(block, parts))
    return seen
