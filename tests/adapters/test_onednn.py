"""Blocks by oneDNN: for which processors, and what is particular to them. What they compute: test_lean."""

from __future__ import annotations

import pytest
import torch
from conftest import HAS_ONEDNN, go
from lean_parts import parts_of
from torch import nn

import tokensieve
from tokensieve.adapters import lean_blocks, linear
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


@pytest.mark.parametrize("bias", ["strided", "expanded"])
def test_a_bias_that_lies_scattered_in_memory(bias, runs):
    """oneDNN would read it as if its numbers lay side by side."""
    tiny = tiny_model("timm")
    x = tiny.images(2)
    fc1 = tiny.model.blocks[1].mlp.fc1
    values = torch.randn(2 * fc1.out_features, generator=torch.Generator().manual_seed(2))
    fc1.bias = nn.Parameter(values[::2] if bias == "strided" else values[:1].expand(fc1.out_features))
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        found = tiny.feature(tiny.model, x)
        assert len(runs) == handle.depth - 1
        with plain_linear():
            torch.testing.assert_close(found, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


def test_tokens_that_lie_scattered_in_memory():
    tiny = tiny_model("timm")
    x = torch.randn(21, 2, 32, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    heads = torch.randn(2, 21, 4, 8, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    wide = torch.randn(1, 32, 21, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    with tokensieve.attach(tiny.model, "random", keep=0.5):
        block = lean_block(parts_of(tiny.model)[1], Way.ONEDNN)
        for given, out in ((x, heads), (wide, heads[:1])):
            assert not given.is_contiguous()
            straight = given.contiguous()
            wanted = (*block.qkv(straight), block.attended(straight, out.contiguous()), block.mlp(straight))
            for one, other in zip(
                (*block.qkv(given), block.attended(given, out), block.mlp(given)), wanted, strict=True
            ):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_a_compiler_sees_the_blocks_own_way(monkeypatch, runs):
    tiny = tiny_model("openclip")
    x = tiny.images(2)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        with plain_linear():
            wanted = tiny.feature(tiny.model, x)
        monkeypatch.setattr(linear.Whole, "_product", lambda *_: pytest.fail("by oneDNN"))
        found = torch.compile(tiny.model, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert not runs


def test_whose_processors_want_onednn(monkeypatch):
    monkeypatch.undo()
    narrow = linear._mkl_is_narrow.__wrapped__
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for vendor, family, width, wanted in [
        ("AuthenticAMD", 26, "AVX512", HAS_ONEDNN),
        ("AuthenticAMD", 25, "AVX512", False),  # Zen 4
        ("AuthenticAMD", 26, "AVX2", False),
        ("GenuineIntel", 26, "AVX512", False),
        ("", 0, "AVX512", False),
    ]:
        monkeypatch.setattr(linear, "cpu_vendor", lambda vendor=vendor: vendor)
        monkeypatch.setattr(linear, "cpu_family", lambda family=family: family)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda width=width: width)
        assert narrow() == wanted
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(linear, "cpu_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(linear, "cpu_family", lambda: 26)
    assert not narrow()  # a torch without MKL goes by something else
