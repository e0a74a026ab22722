"""Half precision: close to float32, the same patches, nothing infinite."""

from __future__ import annotations

import copy

import pytest
import torch

import tokensieve
from tokensieve import list_methods
from tokensieve.testing import tiny_model, tiny_models

LOOSE = {torch.bfloat16: 0.06, torch.float16: 0.01}


@pytest.mark.parametrize("dtype", list(LOOSE))
@pytest.mark.parametrize("family", [name for name in tiny_models() if not tiny_model(name).float_only])
@pytest.mark.parametrize("options", [{}, {"fold": True}], ids=["drop", "fold"])
def test_a_fixed_selection_is_close_to_float32(family: str, dtype: torch.dtype, options: dict) -> None:
    """grid keeps the same patches whatever the rounding, so that only the arithmetic is compared."""
    tiny = tiny_model(family)
    half = copy.deepcopy(tiny.model).to(dtype)
    images = tiny.images(2)
    with torch.no_grad():
        with tokensieve.attach(tiny.model, "grid", keep=[20, 12], at=[0, 2], **options):
            wanted = tiny.feature(tiny.model, images)
        with tokensieve.attach(half, "grid", keep=[20, 12], at=[0, 2], **options) as handle:
            got = tiny.feature(half, images.to(dtype))
            assert handle.sizes is None or handle.sizes.dtype == torch.float32
        full = tiny.feature(half, images.to(dtype))
        error_full = (full.float() - tiny.feature(tiny.model, images)).norm() / full.float().norm()
    assert got.dtype == dtype
    error = (got.float() - wanted).norm() / wanted.norm()
    # folding goes by nearest keys, where rounding may choose another
    allowed = 3.0 * max(float(error_full), LOOSE[dtype]) * (5.0 if options else 1.0)
    assert error < allowed, (float(error), allowed)


@pytest.mark.parametrize("dtype", list(LOOSE))
@pytest.mark.parametrize("name", [name for name in list_methods("encoder") if name != "learned"])  # needs training
def test_every_method_runs_in_half_precision(name: str, dtype: torch.dtype) -> None:
    for family in ("openclip", "openclip_timm_siglip"):
        tiny = tiny_model(family)
        model = tiny.model.to(dtype)
        with torch.no_grad(), tokensieve.attach(model, name, keep=18, at=[0, 2]) as handle:
            out = tiny.feature(model, tiny.images(2).to(dtype))
            assert handle.kept[2].shape == (2, 18)
        assert out.dtype == dtype
        assert out.isfinite().all()


@pytest.mark.parametrize("name", ["anchor", "tome", "evit"])
def test_autocast(name: str) -> None:
    tiny = tiny_model("openclip")
    images = tiny.images(2)
    with torch.no_grad(), tokensieve.attach(tiny.model, name, keep=18):
        wanted = tiny.feature(tiny.model, images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = tiny.feature(tiny.model, images)
    assert got.isfinite().all()
    assert torch.cosine_similarity(got.float(), wanted).min() > 0.8


@pytest.mark.parametrize("name", ["tome", "anchor"])
def test_double_precision(name: str) -> None:
    tiny = tiny_model("timm")
    images = tiny.images(2)
    with torch.no_grad(), tokensieve.attach(tiny.model, name, keep=18):
        wanted = tiny.feature(tiny.model, images)
        got = tiny.feature(tiny.model.double(), images.double())
    assert torch.allclose(got.float(), wanted, atol=1e-4)
