"""What a viewer hands on is what the model did, patch by patch, and the photo is the one the model saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tokensieve
from tokensieve.errors import MissingMaterialError
from tokensieve.tasks.viewer import Request, Viewer, compare, find_photos
from tokensieve.testing.models import tiny_model

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def _preprocess(photo: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.asarray(photo.resize((48, 48))).copy()).permute(2, 0, 1).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def _photos(count: int = 3) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 48, 48, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


@pytest.mark.parametrize("mode", ["prune", "analyse"])
def test_selections_are_the_models(mode: str) -> None:
    tiny = tiny_model("openclip")
    viewer = Viewer("tiny", tiny.model, _preprocess, MEAN, STD)
    photos = _photos()
    request = Request("anchor", keep=0.4, at=[1, 2], mode=mode, options={"alpha": 0.3})
    looks = viewer.look(photos, request)
    with (
        torch.inference_mode(),
        tokensieve.attach(tiny.model, "anchor", keep=0.4, at=[1, 2], mode=mode, alpha=0.3) as h,
    ):
        tiny.feature(tiny.model, torch.stack([_preprocess(photo) for photo in photos]))
        for i, look in enumerate(looks):
            assert set(look) == {1, 2}
            for block, selection in look.items():
                places = {(int(j) // 6, int(j) % 6) for j in h.kept[block][i]}
                assert {(int(a), int(b)) for a, b in np.argwhere(selection.kept)} == places
                assert selection.scores is not None
                for row in range(6):
                    expected = h.scores[block][i, 6 * row : 6 * row + 6].double().numpy()
                    assert np.array_equal(selection.scores[row], expected, equal_nan=True)
            assert look[2].some_left_before == (mode == "prune")
    assert tokensieve.attachment_of(tiny.model) is None


def test_a_budget_that_keeps_all_is_shown_whole() -> None:
    viewer = Viewer("tiny", tiny_model("openclip").model, _preprocess, MEAN, STD)
    (look,) = viewer.look(_photos(1), Request("tome", keep=1.0))
    assert look[max(look)].kept.all()


def test_shown_is_what_the_model_saw() -> None:
    viewer = Viewer("tiny", tiny_model("openclip").model, _preprocess, MEAN, STD)
    (photo,) = _photos(1)
    assert np.array_equal(np.asarray(viewer.shown(photo)), np.asarray(photo))


def test_labels_say_what_was_asked() -> None:
    assert Request("anchor", options={"k": 8, "fold": True}).label == "anchor, k=8, fold=True"
    assert Request("tome", keep_average=0.5).label == "tome, average 0.5"
    assert Request("tome", keep=60).label == "tome, keep 60"


def test_photos_from_files_and_folders(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "notes.txt", "c.webp"):
        (tmp_path / name).touch()
    extra = tmp_path / "notes.txt"
    assert [p.name for p in find_photos([tmp_path, extra], most=2)] == ["a.jpg", "b.PNG", "notes.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingMaterialError, match="empty"):
        find_photos([tmp_path / "empty"])


def test_a_comparison_shows_each_budget_and_leaves_the_model_alone() -> None:
    tiny = tiny_model("openclip")
    viewer = Viewer("tiny", tiny.model, _preprocess, MEAN, STD)
    (photo,) = _photos(1)
    requests = [Request("random", keep=keep) for keep in (0.75, 0.25)]
    found = compare(viewer, photo, requests, batch=2, rounds=2)
    assert [int(one.selection.kept.sum()) for one in found] == [27, 9]
    assert 1.0 < found[0].mac_ratio < found[1].mac_ratio
    assert all(one.speedup > 0 for one in found)
    assert tokensieve.attachment_of(tiny.model) is None
