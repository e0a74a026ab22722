"""Flags of one meaning have one name; what they were called before still works."""

from __future__ import annotations

import pytest

from tokensieve.tasks.clip.flags import eval_parser, parse
from tokensieve.tasks.reid.flags import eval_parser as reid_parser


@pytest.mark.parametrize("words", ["--at 3,6,9", "--at 3 6 9", "--prune_layer 3 6 9", "--prune_layer 3,6 9"])
def test_where_tokens_leave(words: str) -> None:
    own, _ = parse(eval_parser(), ["--method", "evit", *words.split()])
    assert own.prune_layer == [3, 6, 9]


@pytest.mark.parametrize("flag", ["-o", "--output"])
def test_the_output(flag: str) -> None:
    assert parse(eval_parser(), [flag, "a.json"])[1].output == "a.json"


@pytest.mark.parametrize("flag", ["--num_workers", "--workers"])
def test_processes_that_read(flag: str) -> None:
    assert reid_parser().parse(["--checkpoint", "a", flag, "2"]).workers == 2
    assert reid_parser().parse(["--checkpoint", "a"]).workers == 0
