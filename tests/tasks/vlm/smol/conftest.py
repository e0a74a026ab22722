from __future__ import annotations

import numpy as np
import pytest

from tokensieve.tasks.vlm.smol import features
from tokensieve.tasks.vlm.smol.photos import CLASSES, Photos


@pytest.fixture(scope="session")
def noise() -> Photos:
    """Three photos of noise of each class."""
    rng = np.random.default_rng(0)
    small, large = (
        rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8) for count, side in ((30, 32), (18, 40))
    )
    return Photos(small, np.repeat(np.arange(10), 3), large, np.repeat(np.arange(10, len(CLASSES)), 3))


@pytest.fixture
def noisy(noise: Photos, monkeypatch: pytest.MonkeyPatch) -> Photos:
    """Pictures are drawn from the noise."""
    monkeypatch.setattr(features, "load_photos", lambda split: noise)
    return noise
