"""What several tests of adapters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokensieve.adapters import few_rows


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where forms for few tokens apply, and to small layers too; no gradients."""
    monkeypatch.setattr(few_rows, "_SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)
