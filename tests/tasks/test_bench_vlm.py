"""The benchmark of a vision-language model on a tiny one: what it runs, its arithmetic, its table."""

from __future__ import annotations

import io
import statistics

import pytest
import torch
from rich.console import Console

from tokensieve.errors import UnknownNameError
from tokensieve.tasks.bench import vlm
from tokensieve.tasks.bench.config import BenchConfig
from tokensieve.tasks.bench.run import run_bench
from tokensieve.tasks.bench.table import bench_tables


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"WIDTH": 16, "LAYERS": 4, "HEADS": 2, "MLP": 32, "SIDE": 48, "PATCH": 8, "TEXT": 20, "IMAGE": 90}
    for name, value in (sizes | {"VOCAB": 100, "STEPS": 3}).items():
        monkeypatch.setattr(vlm, name, value)


def config(**changes: object) -> BenchConfig:
    base = {"parts": ("vlm",), "vlm_methods": ("fastv", "two_stage"), "batches": (1, 2), "keep": (0.25,), "rounds": 3}
    return BenchConfig(**(base | changes))  # type: ignore[arg-type]


@pytest.mark.usefixtures("tiny")
def test_every_candidate_is_measured_and_its_cache_is_as_planned() -> None:
    ticks: list[str] = []
    rows = run_bench(config(), ticks.append).rows
    assert len(ticks) == config().steps
    assert [(r["batch"], r["method"]) for r in rows] == [
        (batch, name) for batch in (1, 2) for name in ("stock", "keep-all", "fastv", "two_stage")
    ]
    for row in rows:
        assert row["kv_exact"]
        assert len(row["ms_rounds"]) == 3
    stock, whole, fastv, both = rows[:4]
    assert fastv["tokens_per_layer"] == [56, 56, 29, 29]
    assert both["tokens_per_layer"][0] == 38  # half of the 36, and 20 words
    assert stock["kv_bytes"] == whole["kv_bytes"] == 4 * 56 * 2 * 16 * 4
    assert fastv["kv_bytes"] == (2 * 56 + 2 * 29) * 2 * 16 * 4
    assert fastv["speedup"] == pytest.approx(
        statistics.median(a / b for a, b in zip(stock["ms_rounds"], fastv["ms_rounds"], strict=True))
    )
    assert fastv["gained_of_possible"] == pytest.approx(fastv["speedup"] / fastv["possible"])
    assert stock["target"] is None
    assert fastv["target"] == 0.95
    assert not whole["reduces"]


@pytest.mark.usefixtures("tiny")
def test_the_table_says_where_a_cache_is_not_as_planned() -> None:
    rows = run_bench(config(batches=(1,), rounds=1)).rows
    rows[2]["kv_exact"] = False
    (table,) = bench_tables(rows)
    out = io.StringIO()
    Console(file=out, width=180).print(table)
    assert out.getvalue().count("not as planned") == 1
    assert "two_stage" in out.getvalue()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("decoding", "met", "sure"), [([1.0] * 7, True, True), ([0.5] * 7, False, True), ([0.5, 2.0] * 4, True, False)]
)
def test_decoding_may_not_be_slower(decoding: list[float], met: bool, sure: bool) -> None:
    """decoding: how fast it is against the untouched model's, by round; the prefill is surely fast enough."""
    candidates = vlm.candidates_of(vlm.build_llava(), config(vlm_methods=("fastv",)))
    with torch.inference_mode():
        for c in candidates:
            vlm._prefill(c.model, vlm.prompts_of(1, "cpu", 0))
    rounds = len(decoding)
    prefill = {c.name: [9.0 if c.method == "stock" else 1.0] * rounds for c in candidates}
    decode = {c.name: [1.0] * rounds for c in candidates}
    decode["fastv 0.25"] = [1.0 / speed for speed in decoding]
    held = {c.name: [0] for c in candidates}
    row = vlm.vlm_rows(1, candidates, prefill, decode, held)[-1]
    assert (row["method"], row["met"], row["sure"]) == ("fastv", met, sure)


def test_unknown_methods_are_named() -> None:
    with pytest.raises(UnknownNameError, match='Did you mean "fastv"'):
        config(vlm_methods=("fastw",))
