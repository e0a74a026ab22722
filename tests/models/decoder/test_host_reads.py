"""What the host reads while a language model runs: each read waits for the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tokensieve
from tokensieve.tasks.bench.counting import Operations
from tokensieve.testing.vlm import tiny_llava

METHODS = [("fastv", {}), ("sieve", {}), ("random", {}), ("random", {"at": [2, 4]}), ("cdpruner", {})]


def decoding_reads(name: str | None, options: dict[str, Any], rows: list[tuple[int, int, int]]) -> list[int]:
    """Reads of two decoding steps as `generate` takes them, the second with positions."""
    tiny = tiny_llava()
    prompts = tiny.prompts(rows)
    reads = []
    with torch.no_grad(), tokensieve.attach(tiny.model, name, keep=12, **options) if name else nullcontext():
        cache, mask = tiny.model(**prompts).past_key_values, prompts["attention_mask"]
        for with_positions in (False, True):
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=mask.dtype)], dim=1)
            places = {"position_ids": mask.long().cumsum(-1)[:, -1:] - 1} if with_positions else {}
            token = torch.full((len(rows), 1), 5)
            with Operations() as seen:
                tiny.model(input_ids=token, attention_mask=mask, past_key_values=cache, **places)
            reads.append(seen.reads.total())
    return reads


@pytest.mark.parametrize(("name", "options"), METHODS)
@pytest.mark.parametrize("rows", [[(3, 1, 5), (4, 1, 4)], [(3, 1, 5), (4, 1, 3)]], ids=["even", "padded"])
def test_a_decoding_step_reads_no_more_than_the_untouched_model(name, options, rows) -> None:
    stock = decoding_reads(None, {}, rows)
    assert all(mine <= theirs for mine, theirs in zip(decoding_reads(name, options, rows), stock, strict=True))


def test_seconds_are_taken_only_when_asked_for() -> None:
    tiny = tiny_llava()
    with torch.no_grad(), tokensieve.attach(tiny.model, "fastv", keep=12) as handle:
        tiny.model(**tiny.prompts([(3, 1, 5)]))
        stats = handle.stats
        assert stats.prefill_seconds == stats.vision_seconds == stats.overhead_seconds == 0.0
        handle.timing = True
        tiny.model(**tiny.prompts([(3, 1, 5)]))
        assert 0.0 < handle.stats.overhead_seconds < handle.stats.prefill_seconds
