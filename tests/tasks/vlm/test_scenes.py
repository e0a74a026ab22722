"""Generated scenes: what the truth says is what the pixels show, by a check that does not use the generator's masks."""

import numpy as np
import pytest

from tokensieve.errors import OptionError
from tokensieve.tasks.vlm.scenes import (
    COLOURS,
    GRID,
    HELD_OUT,
    HELD_OUT_DIGITS,
    PATCH,
    PLACES,
    SHAPES,
    SIDE,
    make_scenes,
    patch_labels,
)

NAMED = {
    "red": (235, 50, 50), "green": (50, 200, 70), "blue": (60, 90, 250), "yellow": (240, 215, 50),
    "purple": (190, 60, 215), "cyan": (60, 215, 230),
}  # fmt: skip


def nearest_colour(pixel: np.ndarray) -> str:
    return min(NAMED, key=lambda name: float(np.abs(pixel - np.array(NAMED[name])).sum()))


def test_every_object_has_its_colour_in_the_image() -> None:
    scenes = make_scenes(40, 3)
    for b, p in zip(*np.nonzero(scenes.is_object), strict=True):
        x, y = int(scenes.x[b, p]), int(scenes.y[b, p])
        middle = scenes.images[b, y - 1 : y + 2, x - 1 : x + 2].astype(float).mean((0, 1))
        assert nearest_colour(middle) == COLOURS[scenes.colour[b, p]]
        assert PLACES[p] == PLACES[(y // 32) * 3 + x // 32]


def covered_share(image: np.ndarray, x: float, y: float, r: float, colour: str) -> float:
    """How much of the box 2r x 2r around a thing has its colour: told from pixels alone."""
    box = image[max(0, int(y - r) - 1) : int(y + r) + 2, max(0, int(x - r) - 1) : int(x + r) + 2].astype(float)
    return float((np.abs(box - np.array(NAMED[colour])).max(-1) < 60).sum() / (4 * r * r))


def test_shapes_fill_their_box_as_such_shapes_do() -> None:
    scenes = make_scenes(200, 4)
    share: dict[str, list[float]] = {name: [] for name in SHAPES}
    for b, p in zip(*np.nonzero(scenes.is_object), strict=True):
        args = (scenes.x[b, p], scenes.y[b, p], scenes.radius[b, p], COLOURS[scenes.colour[b, p]])
        share[SHAPES[scenes.shape[b, p]]].append(covered_share(scenes.images[b], *args))
    mean = {name: float(np.mean(values)) for name, values in share.items()}
    # of the box 2r x 2r: disc pi/4, square 0.88^2, triangle a half, cross 1 - (1 - 0.32)^2
    expected = {"circle": np.pi / 4, "square": 0.88**2, "triangle": 0.5, "cross": 1 - 0.68**2}
    for name, value in expected.items():
        assert mean[name] == pytest.approx(value, abs=0.09), mean
    top, bottom = [], []
    for b, p in zip(*np.nonzero(scenes.is_object & (scenes.shape == SHAPES.index("triangle"))), strict=True):
        x, y, r = scenes.x[b, p], scenes.y[b, p], scenes.radius[b, p]
        colour = COLOURS[scenes.colour[b, p]]
        top.append(covered_share(scenes.images[b], x, y - r / 2, r / 2, colour))
        bottom.append(covered_share(scenes.images[b], x, y + r / 2, r / 2, colour))
    assert np.mean(bottom) > np.mean(top) + 0.2


def test_digits_are_white_and_differ() -> None:
    scenes = make_scenes(200, 5)
    pictures: dict[int, list[np.ndarray]] = {}
    for b, p in zip(*np.nonzero(scenes.is_digit), strict=True):
        x, y, r = scenes.x[b, p], scenes.y[b, p], scenes.radius[b, p]
        rows = (y - r + 2 * r * (np.arange(7) + 0.5) / 7).astype(int)
        columns = (x + 2 * r / 7 * (np.arange(5) - 2)).astype(int)
        pictures.setdefault(int(scenes.digit[b, p]), []).append(scenes.images[b][np.ix_(rows, columns)].min(-1) > 195)
    means = {d: np.mean(stack, 0) for d, stack in pictures.items()}
    assert sorted(means) == list(range(10))
    for d, stack in pictures.items():  # each digit looks most like the others of its kind
        for picture in stack[:5]:
            assert min(means, key=lambda e: float(np.abs(picture - means[e]).sum())) == d


def test_counts_and_kinds() -> None:
    scenes = make_scenes(400, 6)
    objects = scenes.is_object.sum(1)
    assert set(objects) == {2, 3, 4, 5}
    assert set(scenes.is_digit.sum(1)) == {0, 1}
    assert not (scenes.is_object & scenes.is_digit).any()
    assert (scenes.colour >= 0).tolist() == (scenes.shape >= 0).tolist() == scenes.is_object.tolist()
    assert scenes.images.shape == (400, SIDE, SIDE, 3)
    assert scenes.images.dtype == np.uint8
    crowded = make_scenes(20, 6, crowded=True)
    assert (crowded.is_object | crowded.is_digit).all()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not() -> None:
    first, again, other = make_scenes(5, 1), make_scenes(5, 1), make_scenes(5, 2)
    assert (first.images == again.images).all()
    assert (first.colour == again.colour).all()
    assert (first.images != other.images).any()
    assert (first.images != make_scenes(5, 1, "test").images).any()


def test_held_out_combinations_are_never_in_training_and_always_in_test() -> None:
    assert HELD_OUT.sum((2,)).tolist() == [[1] * 4] * 6  # each colour and shape misses one place
    assert (HELD_OUT.sum((0, 1)) > 0).all()
    for crowded in (False, True):
        train = make_scenes(500, 8, crowded=crowded)
        for b, p in zip(*np.nonzero(train.is_object), strict=True):
            assert (train.colour[b, p] + 2 * train.shape[b, p] + p) % 9 != 0
        b, p = np.nonzero(train.is_digit)
        assert not HELD_OUT_DIGITS[train.digit[b, p], p].any()
        assert not train.held_out().any()
    # every other combination does occur
    seen = np.zeros_like(HELD_OUT)
    b, p = np.nonzero(train.is_object)
    seen[train.colour[b, p], train.shape[b, p], p] = True
    assert (seen == ~HELD_OUT).all()
    test = make_scenes(150, 8, "test")
    assert (test.held_out() & test.is_object).any(1).all()


def test_patch_labels_by_a_loop_over_pixels() -> None:
    scenes = make_scenes(6, 9)
    labels = patch_labels(scenes)
    for b in range(len(scenes)):
        for patch in range(GRID * GRID):
            top, left = patch // GRID * PATCH, patch % GRID * PATCH
            place = (top // 32) * 3 + left // 32
            cover = scenes.cover[b, place][top % 32 : top % 32 + PATCH, left % 32 : left % 32 + PATCH]
            there = cover.mean() > 0.12
            assert labels["colour"][b, patch] == (scenes.colour[b, place] if there else -1)
            assert labels["shape"][b, patch] == (scenes.shape[b, place] if there else -1)
            assert labels["digit"][b, patch] == (scenes.digit[b, place] if there else -1)
            assert labels["place"][b, patch] == (place if there else -1)
            inside = left <= scenes.x[b, place] < left + PATCH and top <= scenes.y[b, place] < top + PATCH
            assert labels["middle"][b, patch] == inside
    assert (labels["middle"].sum(1) == (scenes.is_object | scenes.is_digit).sum(1)).all()


def test_wrong_wishes_are_refused() -> None:
    with pytest.raises(OptionError, match="validation"):
        make_scenes(2, 0, "validation")
    with pytest.raises(OptionError, match="at least 1"):
        make_scenes(0, 0)
