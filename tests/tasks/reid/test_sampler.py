"""PK batches: what is in them, and that they depend on seed, epoch and step alone."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from tokensieve.errors import DataError, OptionError
from tokensieve.tasks.reid.sampler import PKSampler

LABELS = [0] * 9 + [1] * 4 + [2] * 2 + [3] * 12 + [4] * 5 + [5]


def test_batches_hold_p_identities_of_k_images():
    sampler = PKSampler(LABELS, 12, 4, seed=1)
    for batch in sampler.epoch(0) + sampler.epoch(1):
        assert len(batch) == 12
        assert sorted(Counter(LABELS[i] for i in batch).values()) == [4, 4, 4]


def test_no_image_comes_twice_in_an_epoch_where_there_are_enough():
    counts = Counter(i for batch in PKSampler(LABELS, 8, 4, seed=1).epoch(0) for i in batch)
    assert all(times == 1 for i, times in counts.items() if LABELS[i] in (0, 1, 3, 4))


def test_an_identity_with_few_images_repeats_them():
    batches = [batch for e in range(10) for batch in PKSampler(LABELS, 24, 4).epoch(e)]
    of_two = [[i for i in batch if LABELS[i] == 2] for batch in batches]
    assert all(set(found) == {13, 14} for found in of_two)  # both, before either comes again
    assert all([i for i in batch if LABELS[i] == 5] == [len(LABELS) - 1] * 4 for batch in batches)


def test_every_image_is_seen_in_time():
    seen = {i for e in range(30) for batch in PKSampler(LABELS, 8, 4).epoch(e) for i in batch}
    assert seen == set(range(len(LABELS)))


def test_epochs_differ_and_repeat():
    sampler = PKSampler(LABELS, 8, 4, seed=1)
    assert sampler.epoch(0) == PKSampler(LABELS, 8, 4, seed=1).epoch(0)
    assert sampler.epoch(0) != sampler.epoch(1)
    assert sampler.epoch(0) != PKSampler(LABELS, 8, 4, seed=2).epoch(0)


def steps(sampler, start, count):
    return list(islice(((e, batch) for e, batches in sampler.epochs(start) for batch in batches), count))


@pytest.mark.parametrize("start", [0, 1, 3, 7])
def test_starting_late_goes_on_where_starting_early_would_be(start):
    sampler = PKSampler(LABELS, 8, 4, seed=1)
    assert steps(sampler, start, 9) == steps(sampler, 0, start + 9)[start:]


def test_processes_share_the_batches_of_one():
    one = steps(PKSampler(LABELS, 8, 4, seed=1), 0, 6)
    shares = [steps(PKSampler(LABELS, 8, 4, seed=1, rank=rank, world=2), 0, 6) for rank in range(2)]
    assert [(e, a + b) for (e, a), (_, b) in zip(*shares, strict=True)] == one


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [((10, 4), OptionError, "cannot hold"), ((8, 4, 0, 0, 3), OptionError, "3 processes"),
     ((28, 4), DataError, "wants 7 identities, there are 6")],
)  # fmt: skip
def test_what_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        PKSampler(LABELS, *options)
