"""Pictures: which pixels are dimmed, which colours scores get, and what is not a photo."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tokensieve.errors import DataError
from tokensieve.report.pictures import (
    COLOURS,
    Panel,
    Selection,
    draw_kept,
    draw_photo,
    draw_scores,
    jpeg_uri,
    png_bytes,
    read_photo,
    score_range,
    sheet,
)


def _photo(size: tuple[int, int] = (64, 64)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_kept_patches_are_untouched_and_the_others_faint_and_grey() -> None:
    kept = np.zeros((4, 6), dtype=bool)
    kept[1, 2] = kept[3, 5] = True
    photo = np.asarray(draw_photo(_photo((96, 64)), (4, 6)))
    drawn = np.asarray(draw_kept(_photo((96, 64)), kept))
    cell = photo.shape[0] // 4
    assert drawn.shape == photo.shape == (4 * cell, 6 * cell, 3)
    for row in range(4):
        for column in range(6):
            place = np.s_[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
            if kept[row, column]:
                assert np.array_equal(drawn[place], photo[place])
            else:
                assert drawn[place].min() >= 180
                assert np.ptp(drawn[place], axis=2).max() == 0


def test_scores_run_over_the_colour_scale_and_missing_ones_are_grey() -> None:
    scores = np.linspace(0, 1, 16).reshape(4, 4)
    scores[3, 3] = np.nan
    black = Image.new("RGB", (64, 64))
    drawn = np.asarray(draw_scores(black, scores), dtype=float)
    cell = drawn.shape[0] // 4
    centres = drawn[cell // 2 :: cell, cell // 2 :: cell]
    low, high = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (COLOURS[0], COLOURS[-1]))
    assert np.allclose(centres[0, 0], 0.7 * np.array(low), atol=1)
    assert np.allclose(centres[3, 2], 0.7 * np.array(high), atol=1)
    assert np.ptp(centres[3, 3]) < 10
    brightness = centres.reshape(-1, 3)[:15] @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(brightness) >= -1).all()


def test_score_range_is_of_what_is_known() -> None:
    scores = np.array([[np.nan, 1.0], [2.0, np.inf]])
    low, high = score_range(scores)
    assert 1.0 <= low < high <= 2.0
    assert score_range(np.full((2, 2), np.nan)) == (0.0, 0.0)
    draw_scores(_photo(), np.full((2, 2), 3.0))  # all equal: no division by zero


def test_a_sheet_has_room_for_every_panel_and_cuts_long_labels() -> None:
    image = Image.new("RGB", (100, 100), "red")
    panels = [Panel("a" * 200, image), Panel("scores", image, (0.0, 1.0))]
    page = sheet([panels, [None, panels[1]]], title="t" * 500)
    assert page.width < 300
    pixels = np.asarray(page)
    red = (pixels == (255, 0, 0)).all(axis=2)
    assert red.sum() == 3 * 100 * 100
    margin = np.concatenate([pixels[:, :15], pixels[:, -15:]], axis=1)
    assert (margin == 255).all()


def test_encodings_decode() -> None:
    photo = _photo()
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png_bytes(photo)))), np.asarray(photo))
    head, _, body = jpeg_uri(photo).partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(body))).size == photo.size


def test_a_selection_counts() -> None:
    kept = np.zeros((4, 4), dtype=bool)
    kept[0] = True
    assert Selection("a", 3, kept).count == "4 of 16"
    assert not Selection("a", 3, kept).some_left_before
    assert Selection("a", 3, kept, np.where(kept, 1.0, np.nan)).some_left_before


def test_photos_are_turned_and_what_is_none_is_named(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    _photo((40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_photo(tmp_path / "turned.jpg").size == (20, 40)
    Image.new("LA", (5, 5)).save(tmp_path / "grey.png")
    assert read_photo(tmp_path / "grey.png").mode == "RGB"
    whole = png_bytes(_photo())
    bad = {"cut.png": whole[: len(whole) // 2], "text.jpg": b"no image", "empty.png": b""}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    for name in (*bad, "absent.jpg", "."):
        with pytest.raises(DataError, match="cannot be read") as caught:
            read_photo(tmp_path / name)
        assert "\n" not in str(caught.value)
