"""Blocks by oneDNN: for which processors, for how many rows. What they compute: test_lean."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import HAS_ONEDNN, go
from lean_parts import parts_of

import tokensieve
from tokensieve.adapters import lean, lean_blocks, linear
from tokensieve.adapters.lean_blocks import lean_block
from tokensieve.adapters.linear import Way, plain_linear
from tokensieve.testing.models import tiny_model


@pytest.fixture(autouse=True)
def onednn(monkeypatch, two_threads):
    go(Way.ONEDNN, monkeypatch)


@pytest.mark.parametrize("act", ["gelu", "quick"])
def test_many_rows_by_onednn(act, monkeypatch):
    """An MLP takes some rows after the others, the last ones fewer: none is left out, none twice."""
    tiny = tiny_model("openclip" if act == "gelu" else "transformers_clip")
    x = torch.randn(2, 45, 32, generator=torch.Generator().manual_seed(1))
    with tokensieve.attach(tiny.model, "random", keep=0.5):
        block = lean_block(parts_of(tiny.model)[1], Way.ONEDNN)
        whole = block.mlp(x)
        for at_once in (7, 45, 89, 90):
            monkeypatch.setattr(lean_blocks, "_AT_ONCE", at_once)
            torch.testing.assert_close(block.mlp(x), whole, atol=1e-6, rtol=1e-6)


def test_onednn_is_asked_for_as_many_numbers_of_rows_as_it_is_worth(runs, monkeypatch):
    monkeypatch.setattr(lean, "_MADE_FOR", 2)
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", keep=[20, 20, 10, 10], at=[0, 1, 2, 3]) as handle:
        for images, lean_ones in ((1, 3), (2, 0), (1, 3)):  # 37, 22, 22, 12 tokens enter blocks; 12 are too few
            x = tiny.images(images)
            runs.clear()
            found = tiny.feature(tiny.model, x)
            assert len(runs) == lean_ones
            with plain_linear():
                torch.testing.assert_close(found, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)
        twin = copy.deepcopy(tiny.model)
        runs.clear()
        tiny.feature(twin, tiny.images(2))
        assert len(runs) == handle.depth - 1  # a copy counts anew: 74, 44, 44 rows, but not 24


def test_whose_processors_want_onednn(monkeypatch):
    monkeypatch.undo()
    narrow = linear._mkl_is_narrow.__wrapped__
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for vendor, width, wanted in [
        ("AuthenticAMD", "AVX512", HAS_ONEDNN),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ]:
        monkeypatch.setattr(linear, "cpu_vendor", lambda vendor=vendor: vendor)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda width=width: width)
        assert narrow() == wanted
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(linear, "cpu_vendor", lambda: "AuthenticAMD")
    assert not narrow()  # a torch without MKL goes by something else
