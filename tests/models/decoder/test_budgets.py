"""Budgets for images of any size: ratios and counts of each, and a cap that the images of a prompt share."""

from __future__ import annotations

import pytest
import torch

import tokensieve
from tokensieve.core.budget import share_out
from tokensieve.errors import BudgetError, OptionError
from tokensieve.testing.vlm import tiny_vlm

ROW = [(3, 3, 4)]


@pytest.fixture(scope="module")
def tiny():
    return tiny_vlm("qwen2_5_vl")


def kept_of_images(tiny, prompts, **options):
    """(tokens of each image, what stage 1 left of each)."""
    with torch.no_grad(), tokensieve.attach(tiny.model, "divprune", **options) as handle:
        tiny.model(**prompts)
        kept = handle.kept[-1][0]
    sizes = (prompts["image_grid_thw"].prod(-1) // 4).tolist()
    ends = torch.tensor(sizes).cumsum(0)
    return sizes, torch.bincount(torch.bucketize(kept, ends, right=True), minlength=len(sizes)).tolist()


def test_a_ratio_and_a_count_are_of_each_image_whatever_its_size(tiny) -> None:
    prompts = tiny.prompts(ROW)
    sizes, kept = kept_of_images(tiny, prompts, keep=0.5)
    assert len(set(sizes)) > 1
    assert kept == [max(1, round(0.5 * n)) for n in sizes]
    sizes, kept = kept_of_images(tiny, prompts, keep=5)
    assert kept == [min(5, n) for n in sizes]


def test_a_cap_is_shared_by_size(tiny) -> None:
    prompts = tiny.prompts(ROW)
    sizes, kept = kept_of_images(tiny, prompts, max_tokens=9)
    assert sum(kept) == 9
    assert all(abs(k - 9 * n / sum(sizes)) <= 1 for k, n in zip(kept, sizes, strict=True))
    _, kept = kept_of_images(tiny, prompts, max_tokens=9, keep=2)
    assert kept == [2, 2, 2]
    sizes, kept = kept_of_images(tiny, prompts, max_tokens=999)
    assert kept == sizes


def test_a_cap_shared_by_score_follows_the_scores(tiny) -> None:
    prompts = tiny.prompts(ROW)
    with torch.no_grad():
        with tokensieve.attach(tiny.model, "vispruner", keep=1) as handle:
            tiny.model(**prompts)
            scores = handle.scores[-1][0]
        with tokensieve.attach(tiny.model, "vispruner", max_tokens=9, share="score") as handle:
            tiny.model(**prompts)
            kept = handle.kept[-1][0]
    sizes = (prompts["image_grid_thw"].prod(-1) // 4).tolist()
    parts = [(part - part.mean()) / part.std() for part in scores.split(sizes)]
    best = torch.cat(parts).topk(9).indices
    ends = torch.tensor(sizes).cumsum(0)
    wanted = torch.bincount(torch.bucketize(best, ends, right=True), minlength=3).tolist()
    found = torch.bincount(torch.bucketize(kept, ends, right=True), minlength=3).tolist()
    assert sum(found) == 9
    assert found == share_out(9, sizes, wanted)


def test_a_cap_inside_the_language_model(tiny) -> None:
    with torch.no_grad(), tokensieve.attach(tiny.model, "fastv", max_tokens=7) as handle:
        tiny.model(**tiny.prompts([(3, 3, 4), (2, 1, 3)]))
        assert handle.stats.vision_left[-1] == [7, min(7, handle.stats.vision_of_prompts[1])]


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"max_tokens": 0}, BudgetError, "max_tokens=0"), ({"max_tokens": 2}, BudgetError, "3 images"),
    ({"max_tokens": 5, "keep_average": 0.5}, BudgetError, "keep_average"),
    ({"share": "size", "keep": 2}, OptionError, "max_tokens"),
    ({"max_tokens": 5, "share": "scores"}, OptionError, "score"),
])  # fmt: skip
def test_caps_that_cannot_be(tiny, options, error, words) -> None:
    with torch.no_grad(), pytest.raises(error, match=words), tokensieve.attach(tiny.model, "divprune", **options):
        tiny.model(**tiny.prompts(ROW))


def test_shares_are_exact_and_bounded() -> None:
    assert share_out(10, [3, 4]) == [3, 4]
    assert share_out(10, [20, 20]) == [5, 5]
    assert share_out(10, [2, 100]) == [1, 9]
    assert share_out(10, [4, 100], [9.0, 1.0]) == [4, 6]
    assert share_out(5, [9, 9, 9], [0.0, 0.0, 0.0]) in ([2, 2, 1], [2, 1, 2], [1, 2, 2])
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        wanted = torch.randint(1, 40, (5,), generator=generator).tolist()
        cap = int(torch.randint(5, 120, (1,), generator=generator))
        found = share_out(cap, wanted)
        assert sum(found) == min(cap, sum(wanted))
        assert all(1 <= k <= n for k, n in zip(found, wanted, strict=True))
