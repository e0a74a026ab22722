from __future__ import annotations

import numpy as np
import pytest

from tokensieve.errors import OptionError
from tokensieve.tasks.vlm.smol.photos import CLASSES, Photos
from tokensieve.tasks.vlm.smol.pictures import BACKDROP, LAYOUTS, SIGN, UNSEEN, make_picture


def pictures(photos: Photos, count: int, combinations: str = "seen", layout: str | None = None) -> list:
    return [make_picture(photos, np.random.default_rng([5, n]), layout, combinations) for n in range(count)]


def test_a_seed_is_a_picture(noise: Photos) -> None:
    one, same = (make_picture(noise, np.random.default_rng(3)) for _ in range(2))
    other = make_picture(noise, np.random.default_rng(4))
    assert np.array_equal(one.pixels, same.pixels)
    assert one.things == same.things
    assert not np.array_equal(one.pixels, other.pixels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_patches_are_what_their_middle_pixel_shows(noise: Photos, layout: str) -> None:
    for picture in pictures(noise, 12, layout=layout):
        for row in range(16):
            for column in range(16):
                x, y = column * 14 + 7, row * 14 + 7
                shown = BACKDROP
                for thing in picture.things:
                    left, top, side = thing.box
                    if left <= x < left + side and top <= y < top + side:
                        shown = thing.label
                found = picture.patches[row, column]
                assert found == shown or (found == SIGN and picture.sign is not None)


def test_things_do_not_overlap_and_lie_where_their_place_says(noise: Photos) -> None:
    for picture in pictures(noise, 60, layout="collage"):
        cover = np.zeros((224, 224), dtype=int)
        for thing in picture.things:
            left, top, side = thing.box
            cover[top : top + side, left : left + side] += 1
            middle = (left + side / 2) // 75, (top + side / 2) // 75
            assert middle == (thing.place % 3, thing.place // 3)
        assert cover.max() == 1


def test_unseen_pairs_are_never_in_seen_pictures_and_always_in_unseen_ones(noise: Photos) -> None:
    def pairs(picture: object) -> set:
        return {(thing.label, thing.place) for thing in picture.things} & UNSEEN

    assert not any(pairs(p) for p in pictures(noise, 150, "seen"))
    assert all(pairs(p) for p in pictures(noise, 60, "unseen"))
    assert any(pairs(p) for p in pictures(noise, 150, "all"))


def test_every_class_and_place_comes(noise: Photos) -> None:
    things = [thing for picture in pictures(noise, 150) for thing in picture.things]
    assert {thing.label for thing in things} == set(range(len(CLASSES)))
    assert {thing.place for thing in things} == {-1, *range(9)}


def test_unknown_words_are_named(noise: Photos) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(OptionError, match="combinations='some'"):
        make_picture(noise, rng, combinations="some")
    with pytest.raises(OptionError, match="layout='photo'"):
        make_picture(noise, rng, "photo", "unseen")
