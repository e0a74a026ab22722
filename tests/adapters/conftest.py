"""What several tests of adapters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokensieve.adapters import lean_blocks, linear
from tokensieve.adapters.lean_blocks import LeanBlock, PartsBlock, WholeBlock
from tokensieve.adapters.linear import Way

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def go(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks go this way, as if it were this processor's, whichever it is."""
    if way is Way.ONEDNN and not HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(linear, "_mkl_is_narrow", lambda: way is Way.ONEDNN)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where products go by parts, and small layers too; no gradients."""
    go(Way.PARTS, monkeypatch)
    monkeypatch.setattr(linear, "_SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(Way), ids=lambda way: way.value)
def way(request: pytest.FixtureRequest, two_threads: None, monkeypatch: pytest.MonkeyPatch) -> Way:
    """The same, and where blocks go by oneDNN."""
    go(request.param, monkeypatch)
    return request.param


@pytest.fixture
def runs(monkeypatch):
    """The tokens of each MLP that was run lean."""
    seen: list[int] = []
    for form in (PartsBlock, WholeBlock):
        mlp = form.mlp
        monkeypatch.setattr(form, "mlp", lambda block, x, mlp=mlp: seen.append(x.shape[1]) or mlp(block, x))
    return seen


@pytest.fixture
def gathered(monkeypatch):
    """The blocks that were gathered."""
    seen: list[lean_blocks.Parts] = []
    build = LeanBlock.__init__
    monkeypatch.setattr(LeanBlock, "__init__", lambda block, parts: seen.append(parts) or build(block, parts))
    return seen
