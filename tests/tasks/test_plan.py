"""Plans against arithmetic written out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokensieve.cli.main import main
from tokensieve.errors import BudgetError, OptionError, UnknownNameError
from tokensieve.tasks.plan.encoder import plan_encoder
from tokensieve.tasks.plan.gpus import find_gpu
from tokensieve.tasks.plan.rates import Rates
from tokensieve.tasks.plan.vlm import is_vlm_name, plan_vlm

A100 = find_gpu("A100")


def vit_macs(tokens: list[tuple[int, int]], width: int, patches: int, patch: int, out: int) -> int:
    """A ViT from (tokens into the attention, tokens into the MLP) of each block, patch embedding and projection."""
    blocks = sum(4 * n * width**2 + 2 * n * n * width + 8 * m * width**2 for n, m in tokens)
    return blocks + patches * 3 * patch**2 * width + width * out


def test_encoder_by_hand() -> None:
    rates = Rates(A100, utilisation=0.5, gained=0.9, price=2.0)
    without, cut = plan_encoder("ViT-L-14-336", 1e9, rates, {"method": "grid", "keep": 144, "at": 11})
    full = vit_macs([(577, 577)] * 24, 1024, 576, 14, 768)
    less = vit_macs([(577, 577)] * 11 + [(577, 145)] + [(145, 145)] * 12, 1024, 576, 14, 768)
    assert without["gmacs"] == pytest.approx(full / 1e9, rel=1e-9)
    assert cut["gmacs"] == pytest.approx(less / 1e9, rel=1e-9)
    assert without["gpu_hours"] == pytest.approx(1e9 * 2 * full / (312e12 * 0.5) / 3600)
    assert cut["speedup"] == pytest.approx(0.9 * full / less)
    assert cut["dollars"] == pytest.approx(2.0 * without["gpu_hours"] / cut["speedup"])
    assert cut["tokens_end"] == 145


def test_llava_by_hand() -> None:
    rates = Rates(A100, utilisation=0.4, gained=1.0, bandwidth_use=0.7, memory_use=0.9, price=1.0)
    reduction = {"method": "fastv", "keep": 0.5, "at": 2}
    without, cut = plan_vlm("llava-1.5-7b", 1000, rates, reduction, text=64, answer=32, batch=8)
    left = [576] * 2 + [288] * 30
    d, m = 4096, 11008

    def prefill(tokens: list[int]) -> int:
        layers = sum(4 * n * d * d + 2 * n * n * d + 3 * n * d * m for n in (t + 64 for t in tokens))
        tower = vit_macs([(577, 577)] * 24, 1024, 576, 14, 0)
        return layers + tower + 576 * (1024 * d + d * d)

    assert without["prefill_tmacs"] == pytest.approx(prefill([576] * 32) / 1e12, rel=1e-6)
    assert cut["prefill_tmacs"] == pytest.approx(prefill(left) / 1e12, rel=1e-6)
    assert without["prefill_ms"] == pytest.approx(2e3 * prefill([576] * 32) / (312e12 * 0.4), rel=1e-6)
    # a token of LLaMA-7B is 2 x 4096 numbers of 2 bytes in each of 32 layers
    assert without["kv_mb"] == pytest.approx(32 * (576 + 64 + 32) * 2 * 4096 * 2 / 1e6)
    assert cut["kv_mb"] == pytest.approx(sum(n + 64 + 32 for n in left) * 2 * 4096 * 2 / 1e6)
    weights = 32 * (4 * d * d + 3 * d * m + 2 * d) + d + 32064 * d  # norms, and the head; one row of the embedding
    cache = 8 * sum(n + 64 + 16 for n in left) * 2 * 4096 * 2
    assert cut["decode_ms"] == pytest.approx(1e3 * (2 * weights + cache) / (2039e9 * 0.7), rel=1e-6)
    assert cut["batch"] == without["batch"] == 8
    assert cut["batch_fits"] > without["batch_fits"]
    seconds = 1000 * (cut["prefill_ms"] + 31 * cut["decode_ms"] / 8) / 1e3
    assert cut["gpu_hours"] == pytest.approx(seconds / 3600)


def test_the_batch_that_fits_fills_the_memory() -> None:
    rates = Rates(find_gpu("a100-40"))
    row = plan_vlm("llava-1.5-7b", 10, rates, {"method": "grid", "keep": 0.25}, text=60, answer=40, batch=None)[1]
    weights = 14.1e9  # 7.06 billion parameters of 2 bytes
    assert (row["batch_fits"] + 1) * row["kv_mb"] * 1e6 + weights > 36e9 - 0.2e9
    assert row["batch_fits"] * row["kv_mb"] * 1e6 + weights < 36e9 + 0.2e9
    assert row["batch"] == row["batch_fits"]


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    slow = Rates(A100, utilisation=0.001)
    row = plan_vlm("llava-1.5-7b", 10, slow, {"method": "grid", "keep": 0.5}, text=60, answer=2, batch=64)[0]
    macs = 64 * 6.6e9
    assert row["decode_ms"] == pytest.approx(2e3 * macs / (312e12 * 0.001), rel=0.05)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"utilisation": 0.0}, "utilisation"), ({"gained": 1.2}, "gained"), ({"price": -1.0}, "price")],
)
def test_impossible_rates(change: dict[str, float], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        Rates(A100, **change)


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="h100"):
        find_gpu("h1000")
    with pytest.raises(UnknownNameError, match=r"llava-1\.5-7b"):
        is_vlm_name("llava-1.5-70b")
    rates = Rates(find_gpu("t4"))
    with pytest.raises(BudgetError, match="larger --gpu"):
        plan_vlm("llava-1.5-13b", 10, rates, {"method": "grid", "keep": 0.5}, text=60, answer=2, batch=None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "plan.json"
    line = "plan --model ViT-L-14-336 --images 1e9 --method sieve --keep 0.4 --gpu a100 --gpus 8 -o"
    assert main([*line.split(), str(record)]) == 0
    said = capsys.readouterr().out
    for word in ("GPU hours", "dollars", "--utilisation", "--gained", "--price", "saved", "8 GPUs"):
        assert word in said
    rows = json.loads(record.read_text())["rows"]
    assert [row["reduction"] for row in rows] == ["without", "with"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("plan --gpu a1000", "a100"),
        ("plan --images none", "--images"),
        ("plan --model ViT-L-14-337", "ViT-L-14-336"),
        ("plan --method siev", "sieve"),
        ("plan --utilisation 2", "utilisation"),
        ("plan --model RN50 --keep 0.5", "no token sequence"),
        ("plan --gpus 0", "--gpus"),
    ],
)
def test_wrong_lines_are_one_line(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert named in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl", "idefics3", "gemma3", "mistral3"])
def test_other_vision_language_models_from_their_configuration(kind, tmp_path) -> None:
    from tokensieve.testing.vlm import tiny_vlm

    tiny_vlm(kind).model.config.save_pretrained(tmp_path)
    rates = Rates(A100, utilisation=0.4, gained=1.0)
    keep = {"method": "fastv", "keep": 0.25}
    without, cut = plan_vlm(str(tmp_path), 1e6, rates, keep, text=20, answer=8, batch=4)
    assert cut["vision_tokens"] < without["vision_tokens"]
    assert cut["prefill_tmacs"] < without["prefill_tmacs"]
    assert cut["kv_mb"] < without["kv_mb"]
