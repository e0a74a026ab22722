"""The benchmark on a tiny model: what it runs, its arithmetic against a naive recomputation, its record."""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tokensieve.errors import BudgetError, OptionError, UnknownNameError
from tokensieve.models.attach import attach
from tokensieve.records import read_record, write_record
from tokensieve.tasks.bench import memory, run, share, speed
from tokensieve.tasks.bench.config import BenchConfig, quick
from tokensieve.tasks.bench.models import build_model, check_model, images, twin
from tokensieve.tasks.bench.sdpa import attach_fused
from tokensieve.tasks.bench.table import bench_tables
from tokensieve.tasks.bench.timing import check_target, interleave, interval, quartiles, ratio
from tokensieve.utils.torchvision import declare_missing_schemas


def tiny(size: object = 48, *_: object) -> tuple[nn.Module, int]:
    """36 patches, or as many as a size in pixels has; four blocks."""
    size = size if isinstance(size, int) else 48
    declare_missing_schemas()
    from open_clip.transformer import VisionTransformer

    torch.manual_seed(0)
    tower = VisionTransformer(image_size=size, patch_size=8, width=32, layers=4, heads=4, mlp_ratio=4.0, output_dim=16)
    return tower.eval(), size


def config(**changes: object) -> BenchConfig:
    base = {"models": ("vit-b16",), "batches": (1, 2), "methods": ("evit", "tome"), "rounds": 3, "share_sizes": (16,)}
    return BenchConfig(**(base | changes))


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "build_model", tiny)
    monkeypatch.setattr(memory, "build_model", tiny)


# -- timing -------------------------------------------------------------------------------------------------------


def test_every_round_runs_each_candidate_once_in_another_order() -> None:
    seen: list[str] = []
    rounds: list[list[str]] = []

    def tick() -> None:
        rounds.append(seen.copy())
        seen.clear()

    times = interleave({name: lambda name=name: seen.append(name) for name in "abc"}, 4, tick=tick)
    assert len(rounds) == 5  # one of warm-up
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len({tuple(order) for order in rounds[1:]}) > 2
    assert {name: len(t) for name, t in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_candidates_run_in_inference_mode() -> None:
    modes: list[bool] = []
    interleave({"a": lambda: modes.append(torch.is_inference_mode_enabled())}, 1)
    assert modes == [True, True]


def test_ratio_is_the_median_of_rounds_not_the_ratio_of_medians() -> None:
    assert ratio([1.0, 2.0, 9.0], [1.0, 1.0, 3.0]) == 2.0
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(("rounds", "first", "last"), [(6, 1, 6), (9, 2, 8), (15, 4, 12), (41, 14, 28), (100, 40, 61)])
def test_the_interval_has_the_ranks_of_the_sign_test(rounds: int, first: int, last: int) -> None:
    """The ranks that textbooks print for a median's 95 % interval, whatever order the values come in."""
    values = [float(i) for i in range(1, rounds + 1)]
    assert interval(values[::-1]) == (first, last)


def test_the_interval_of_very_many_rounds() -> None:
    low, high = interval([float(i) for i in range(3001)])
    assert low + high == 3000
    assert 1.9 < (1500 - low) / (0.5 * 3001**0.5) < 2.0  # the normal approximation's 1.96


def test_the_interval_holds_the_median_nineteen_times_of_twenty() -> None:
    generator = torch.Generator().manual_seed(4)
    draws = torch.empty(2000, 15, dtype=torch.float64).exponential_(generator=generator)
    inside = [low < math.log(2) < high for low, high in map(interval, draws.tolist())]
    assert 0.95 <= sum(inside) / len(inside) < 0.98  # 96.5 % at 15: ranks are whole numbers


def test_too_few_rounds_are_never_sure() -> None:
    assert interval([1.0] * 5) is None
    assert check_target(0.9, [2.0] * 5) == {"target": 0.9, "met": True, "sure": False}


def test_a_target_inside_the_interval_is_unsure() -> None:
    values = [0.88, 0.89, 0.91, 0.92, 0.93, 0.94]
    assert check_target(0.87, values) == {"target": 0.87, "met": True, "sure": True}
    assert check_target(0.88, values) == {"target": 0.88, "met": True, "sure": True}  # all reach it
    assert check_target(0.90, values) == {"target": 0.90, "met": True, "sure": False}
    assert check_target(0.93, values) == {"target": 0.93, "met": False, "sure": False}
    assert check_target(0.95, values) == {"target": 0.95, "met": False, "sure": True}
    assert check_target(None, values) == {"target": None, "met": None, "sure": None}


# -- candidates ---------------------------------------------------------------------------------------------------


def test_a_twin_shares_weights_and_nothing_else() -> None:
    model, size = tiny()
    copy = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    attach_fused(copy)
    x = images(2, size)
    kinds = [type(m) for m in model.modules()]
    with torch.inference_mode():
        torch.testing.assert_close(copy(x), model(x), atol=1e-5, rtol=1e-4)
    assert [type(m) for m in model.modules()] == kinds


def test_the_fused_baseline_runs_every_block_our_way_and_leaves_no_trace() -> None:
    model, size = tiny()
    kinds = [type(m) for m in model.modules()]
    handle = attach_fused(model)
    blocks = list(handle.blocks.children())
    assert all(type(block).__name__.startswith("Sieved") for block in blocks)
    with torch.inference_mode():
        model(images(1, size))
    assert handle.tokens_per_layer == [37] * 4
    assert handle.cost().possible == 1.0
    handle.remove()
    assert [type(m) for m in model.modules()] == kinds


def test_candidates_are_all_there_and_reduce_what_they_say() -> None:
    model, size = tiny()
    found = speed.candidates_of(model, config())
    assert [c.name for c in found] == [
        "stock 1.0", "sdpa 1.0", "keep-all 1.0", "evit 0.5", "evit 0.25", "tome 0.5", "tome 0.25",
    ]  # fmt: skip
    with torch.inference_mode():
        for c in found:
            c.model(images(2, size))
    ends = [c.handle.cost().tokens_per_layer[-1] for c in found if c.handle]
    assert ends == [37, 37, 1 + 18, 1 + 9, 1 + 18, 1 + 9]


def test_a_budget_that_keeps_all_is_refused_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny()
    monkeypatch.setattr(speed, "interleave", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(speed, "build_model", lambda name, *_: tiny(64 if name == "vit-b16" else 48))
    with pytest.raises(BudgetError, match="keep 40: nothing to measure, the image has 36 patches"):
        speed.measure_speed(config(models=("vit-b16", "vit-s14"), keep=(40,)), lambda _: None)
    with pytest.raises(BudgetError, match="keep 5000: nothing to measure, the image has 36 patches"):
        speed.candidates_of(model, config(keep=(0.5, 5000)))


# -- rows ---------------------------------------------------------------------------------------------------------


def test_rows_agree_with_a_naive_recomputation() -> None:
    model, _ = tiny()
    found = speed.candidates_of(model, config(methods=("random",)))
    generator = torch.Generator().manual_seed(1)
    times = {c.name: (torch.rand(9, generator=generator) + 0.5).tolist() for c in found}
    rows = speed.speed_rows("m", 16, found, times)
    stock, sdpa = times["stock 1.0"], times["sdpa 1.0"]
    best, name = (stock, "stock") if statistics.median(stock) < statistics.median(sdpa) else (sdpa, "sdpa")
    for c, row in zip(found, rows, strict=True):
        mine = times[c.name]
        assert row["ms"] == pytest.approx(1e3 * statistics.median(mine))
        assert row["ms_quartiles"] == pytest.approx([1e3 * sorted(mine)[2], 1e3 * sorted(mine)[6]])
        assert row["faster_baseline"] == name
        ordered = sorted(b / t for b, t in zip(best, mine, strict=True))
        assert row["speedup"] == pytest.approx(ordered[4])
        assert row["speedup_stock"] == pytest.approx(sorted(b / t for b, t in zip(stock, mine, strict=True))[4])
        assert row["possible"] == pytest.approx(row["macs_full"] / row["macs"])
        assert row["gained_of_possible"] == pytest.approx(row["speedup"] / row["possible"])
        assert row["gained_interval"] == pytest.approx((ordered[1] / row["possible"], ordered[7] / row["possible"]))
        assert row["reduces"] == (c.method == "random")
    checked = {row["method"]: row for row in rows}
    assert checked["keep-all"]["met"] == (checked["keep-all"]["speedup_stock"] >= 0.99)
    assert checked["random"]["met"] == (checked["random"]["gained_of_possible"] >= 0.95)
    assert checked["stock"]["met"] is None


def test_targets() -> None:
    assert speed.target_of("anchor", 0.5, 16) == 0.95
    assert speed.target_of("divprune", 0.25, 1) == 0.90
    assert speed.target_of("tome", 0.5, 16) == 0.90
    assert speed.target_of("keep-all", 1.0, 1) == 0.99
    assert speed.target_of("anchor", 0.4, 16) is None
    assert speed.target_of("grid", 0.5, 16) is None


# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_models")
def test_a_whole_run_goes_into_one_record_and_its_tables(tmp_path: Path) -> None:
    wanted = config(parts=("speed", "share"), threads=1, share_methods=("anchor", "divprune"))
    ticks: list[str] = []
    threads = torch.get_num_threads()
    record = run.run_bench(wanted, ticks.append)
    assert torch.get_num_threads() == threads
    assert len(ticks) == wanted.steps
    write_record(record, tmp_path / "bench.json")
    again = read_record(tmp_path / "bench.json")
    assert again.kind == "bench"
    assert again.config["keep"] == [0.5, 0.25]
    assert again.hardware["threads"] == 1
    assert again.rows == json.loads(json.dumps(record.rows))
    assert [row["part"] for row in again.rows] == ["speed"] * 14 + ["share"] * 2
    assert all(len(row["ms_rounds"]) == 3 for row in again.rows[:14])
    assert [table.row_count for table in bench_tables(again.rows)] == [14, 2]


def test_share_is_of_twelve_blocks_with_the_selections() -> None:
    rows = share.measure_share(config(rounds=2, share_methods=("anchor", "tome", "divprune")), lambda _: None)
    for row, cuts, keep in zip(rows, (4, 12, 1), (0.875, 23 / 24, 0.5), strict=True):
        each, block = row["selection_ms"], row["block_ms"]
        assert (row["cuts"], row["keep"]) == (cuts, pytest.approx(keep))
        assert row["block_share"] == pytest.approx(each / (each + block))
        assert row["share"] == pytest.approx(cuts * each / (cuts * each + 12 * block))
    assert rows[0]["met"] == (rows[0]["share"] < 0.05)
    assert rows[1]["met"] is None


def test_memory_compares_the_middle_of_three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {None: [1000, 990, 5000], "evit": [4000, 900, 100], "tome": [1100, 1101, 1099]}
    monkeypatch.setattr(
        memory, "_in_process", lambda c, m, b, method, k: {"peak": peaks[method].pop(), "includes_loading": 0}
    )
    ticks: list[str] = []
    wanted = config(parts=("memory",), keep=(0.5,), batches=(1,))
    rows = memory.measure_memory(wanted, ticks.append)
    assert [(row["ratio"], row["met"]) for row in rows] == [(0.9, True), (1.1, False)]
    assert len(ticks) == wanted.steps
    assert bench_tables(rows)[0].row_count == 2


@pytest.mark.usefixtures("tiny_models")
def test_peak_of_a_process_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"model": "vit-b16", "batch": 1, "method": "evit", "keep": 0.5, "schedule": None}
    warmed: list[str] = []
    monkeypatch.setattr(
        memory, "attach", lambda model, name, **rest: warmed.append(name) or attach(model, name, **rest)
    )
    found = memory.peak_of(task | {"device": "cpu", "threads": None, "seed": 0, "warm": ["tome", "divprune"]})
    assert warmed == ["tome", "divprune", "evit"]
    assert found["peak"] > 50 * 2**20  # torch alone is more


# -- what can be wrong --------------------------------------------------------------------------------------------


def test_wrong_configurations_are_refused_before_anything_runs() -> None:
    for error, changes in [
        (UnknownNameError, {"methods": ("tomme",)}),
        (OptionError, {"schedule": "lineal"}),
        (OptionError, {"rounds": 0}),
        (OptionError, {"batches": (0,)}),
        (OptionError, {"threads": 0}),
        (BudgetError, {"keep": (1.5,)}),
        (BudgetError, {"keep": (0,)}),
        (OptionError, {"share_sizes": (200,)}),
    ]:
        with pytest.raises(error):
            BenchConfig(**changes)
    with pytest.raises(OptionError, match="device 'cuda:99'"):
        run.run_bench(config(device="cuda:99"))
    with pytest.raises(UnknownNameError, match="vit-s14"):
        check_model("vit-s15")


def test_any_open_clip_name_is_a_model() -> None:
    model, size = build_model("ViT-S-32-alt")
    assert size == 224
    with torch.inference_mode():
        assert model(images(1, size)).shape == (1, 256)


def test_quick_gives_way_to_what_is_said() -> None:
    assert quick().models == ("vit-s14",)
    assert quick(batches=(2,)).batches == (2,)
    assert BenchConfig().batches_of("vit-l14-336") == (1,)
    assert BenchConfig().batches_of("ViT-B-32") == (1, 16)


FAULTS = """
import resource, torch
from tokensieve.tasks.bench.timing import heap_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(48 * 2**20, dtype=torch.uint8)  # above the size that glibc always gives back
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = [faults() for _ in range(30)]
with heap_kept() as kept:
    within = [faults() for _ in range(60)]
print(kept, *(sum(n > 1000 for n in some[-20:]) for some in (before, within)), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_what_a_candidate_frees_stays_while_others_are_measured():
    """Pages touched for the first time are counted: 12,288 for a tensor of 48 MiB, none once there is room for it.

    In a process of its own, as another's heap may have room anyway; and after some tensors, until small pieces that lie
    between them have found their place.
    """
    out = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout.split()
    assert out[:3] == ["True", "20", "0"]
    assert int(out[3]) > 1000  # what was kept has been given back
