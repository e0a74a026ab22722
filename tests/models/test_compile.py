"""torch.compile gives the same features, and what it shows of the forward is right."""

from __future__ import annotations

import shutil

import pytest
import torch

import tokensieve
from tokensieve.testing import tiny_model


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


CASES = [("openclip", "anchor"), ("timm_avg", "tome"), ("transformers_clip", "evit")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), CASES)
def test_compiled_equals_eager(family: str, method: str) -> None:
    tiny = tiny_model(family)
    a, b = tiny.images(2), tiny.images(2, seed=1)
    with torch.no_grad(), tokensieve.attach(tiny.model, method, keep=14 if method != "tome" else 20, at=2) as handle:
        wanted, kept = [], []
        for images in (a, b):
            wanted.append(tiny.feature(tiny.model, images))
            kept.append(handle.kept[2])
        compiled = torch.compile(lambda x: tiny.feature(tiny.model, x), backend="eager")
        for images, feature, index in zip((a, b), wanted, kept, strict=True):
            assert torch.allclose(compiled(images), feature, atol=1e-5)
            assert torch.equal(handle.kept[2], index)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend calls a C++ compiler")
def test_the_default_backend_draws_the_same_patches() -> None:
    """Random numbers out of 64-bit products: the backend may not take them for indices of 32 bits."""
    tiny = tiny_model("openclip")
    with torch.inference_mode(), tokensieve.attach(tiny.model, "random", keep=14, at=0) as handle:
        wanted = tiny.model(tiny.images(2))
        kept = handle.kept[0]
        assert torch.allclose(torch.compile(tiny.model)(tiny.images(2)), wanted, atol=1e-5)
        assert torch.equal(handle.kept[0], kept)


@pytest.mark.slow
def test_compiled_fusing_equals_eager() -> None:
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", keep=14, at=1, mode="fuse"):
        wanted = tiny.feature(tiny.model, tiny.images(2))
        compiled = torch.compile(tiny.model, backend="eager")
        assert torch.allclose(compiled(tiny.images(2)), wanted, atol=1e-5)


@pytest.mark.slow
def test_attached_after_compiling() -> None:
    """A compiled model that gets a method, and loses it, follows."""
    tiny = tiny_model("openclip")
    images = tiny.images(2)
    compiled = torch.compile(tiny.model, backend="eager")
    with torch.no_grad():
        before = compiled(images)
        with tokensieve.attach(compiled, "grid", keep=9, at=1) as handle:
            wanted = tiny.model(images)
            assert torch.allclose(compiled(images), wanted, atol=1e-5)
            assert handle.tokens_per_layer == [37, 10, 10, 10]
        assert (before - wanted).abs().max() > 1e-3
        assert torch.allclose(compiled(images), before, atol=1e-5)
