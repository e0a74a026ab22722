"""Padded batches of images of different sizes: no image's result depends on its batch mates, padding never counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tokensieve.testing import tiny_model

SHAPES = [(6, 6), (4, 5), (2, 3)]  # of three images, in patches
METHODS = {"grid": {}, "sieve": {}, "tome": {}, "evit": {"fuse": False}, "divprune": {}}


def padded(length: int, shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Random flat patches (B, length, 192), which of them are there (B, length), and the shapes (B, 2)."""
    patches, valid = torch.zeros(len(shapes), length, 192), torch.zeros(len(shapes), length, dtype=torch.bool)
    for i, (down, across) in enumerate(shapes):
        generator = torch.Generator().manual_seed(100 * down + across)
        patches[i, : down * across] = torch.randn(down * across, 192, generator=generator)
        patches[i, down * across :] = 7.0  # whatever: it must not be seen
        valid[i, : down * across] = True
    return patches, valid, torch.tensor(shapes)


def siglip2(model: Any, length: int, shapes: list[tuple[int, int]]) -> Tensor:
    patches, valid, sizes = padded(length, shapes)
    return model(pixel_values=patches, pixel_attention_mask=valid.long(), spatial_shapes=sizes).pooler_output


def naflex(model: Any, length: int, shapes: list[tuple[int, int]]) -> Tensor:
    patches, valid, _ = padded(length, shapes)
    coord = torch.zeros(len(shapes), length, 2, dtype=torch.int64)
    for i, (down, across) in enumerate(shapes):
        coord[i, : down * across] = torch.cartesian_prod(torch.arange(down), torch.arange(across))
    return model({"patches": patches, "patch_valid": valid, "patch_coord": coord})


MODELS: dict[str, Callable[..., Tensor]] = {
    "transformers_siglip2": siglip2, "timm_naflex": naflex, "timm_naflex_map": naflex,
}  # fmt: skip


@pytest.mark.parametrize("keep", [0.5, 12], ids=["ratio", "count"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", MODELS)
def test_a_batch_equals_its_singles_without_padding(family: str, method: str, keep: int | float) -> None:
    model, run = tiny_model(family).model, MODELS[family]
    options = METHODS[method]
    with torch.no_grad(), tokensieve.attach(model, method, keep=keep, at=[0, 2], **options) as handle:
        together, kept = run(model, 36, SHAPES), handle.kept
        for i, shape in enumerate(SHAPES):
            n = shape[0] * shape[1]
            alone = run(model, n, [shape])
            mine = kept[2][i][kept[2][i] >= 0]
            wanted = round(n * keep) if isinstance(keep, float) else min(keep, n)
            assert len(mine) == max(1, wanted)
            assert (mine < n).all(), "padding was kept as a patch"
            if handle.kept:  # an image smaller than the budget is not cut at all
                assert torch.equal(handle.kept[2][0], mine)
            assert torch.allclose(alone[0], together[i], atol=2e-5), (alone[0] - together[i]).abs().max()


@pytest.mark.parametrize("family", MODELS)
def test_while_untouched_the_model_agrees(family: str) -> None:
    """Nothing removed through the cut: padded batches are what the model itself makes of them."""
    model, run = tiny_model(family).model, MODELS[family]
    with torch.no_grad():
        wanted = run(model, 40, SHAPES)
        with tokensieve.attach(model, "grid", keep=[35, 35], at=[0, 2]) as handle:
            got = run(model, 40, SHAPES)
            assert handle.kept[0].shape == (3, 35)
    assert torch.allclose(got[1:], wanted[1:], atol=2e-5), "these images have fewer patches than the budget"
    assert (got[0] - wanted[0]).abs().max() > 1e-5


@pytest.mark.parametrize("family", MODELS)
def test_what_stands_in_the_padding_is_never_seen(family: str) -> None:
    model, run = tiny_model(family).model, MODELS[family]
    with torch.no_grad(), tokensieve.attach(model, "tome", keep=0.6, at=[0, 2]):
        short, long = run(model, 36, SHAPES), run(model, 50, SHAPES)
    assert torch.allclose(short, long, atol=2e-5)


def test_scores_and_modes_of_a_padded_batch() -> None:
    model = tiny_model("transformers_siglip2").model
    with torch.no_grad():
        wanted = siglip2(model, 36, SHAPES)
        with tokensieve.attach(model, "sieve", keep=0.5, at=1, mode="analyse") as handle:
            assert torch.equal(siglip2(model, 36, SHAPES), wanted)
            kept = handle.kept[1]
        with tokensieve.attach(model, "sieve", keep=0.5, at=1) as handle:
            siglip2(model, 36, SHAPES)
            assert torch.equal(handle.kept[1], kept)
            assert handle.scores[1].shape == (3, 36)
            assert handle.scores[1][2, 6:].isnan().all()
