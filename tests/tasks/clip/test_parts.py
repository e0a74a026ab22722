"""Probe, speed and captions by themselves, against what a naive loop or a model of known answers gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tokensieve.errors import OptionError
from tokensieve.tasks.clip import captions, probe
from tokensieve.tasks.clip.config import SieveConfig
from tokensieve.tasks.clip.speed import Speed

FIT = probe.Fit(lr=0.1, epochs=8, batch_size=16, seed=0, device="cpu", amp=False)


def test_top_k_accuracy_is_that_of_a_loop() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(40, 7), torch.randint(7, (40,))
    for k, found in zip((1, 3, 5), probe.top_k_accuracy(logits, target, (1, 3, 5)), strict=True):
        ranks = [
            sorted(row, reverse=True).index(row[label]) for row, label in zip(logits.tolist(), target, strict=True)
        ]
        assert found == sum(rank < k for rank in ranks) / 40
    assert probe.top_k_accuracy(logits, target.float()) == probe.top_k_accuracy(logits, target)


def splits(classes: int = 6, count: int = 60) -> dict[str, probe.Split]:
    torch.manual_seed(1)
    centres = 3 * torch.randn(classes, 8)
    found = {}
    for name in ("train", "val", "test"):
        targets = torch.arange(count) % classes
        found[name] = probe.Split(centres[targets] + 0.3 * torch.randn(count, 8), targets)
    return found


def test_the_probe_learns_what_can_be_told_apart() -> None:
    result = probe._score(splits(), FIT, -1, True)
    assert result["lp_acc1"] == result["lp_acc5"] == result["lp_mean_per_class_recall"] == 1.0
    plain = {name: split for name, split in splits().items() if name != "val"}
    assert probe._score(plain, FIT, -1, True)["weight_decay"] == 0.0
    assert probe._score(plain, FIT, 3, False)["fewshot_k"] == 3
    assert probe._score(splits(classes=4), FIT, -1, True)["lp_acc5"] is None


def test_the_learning_rate_falls_along_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self))[1]
    )
    probe._train(splits()["train"], 6, 0.0, FIT)
    steps = 8 * 4
    expected = 0.5 * 0.1 * (1 + torch.cos(torch.pi * torch.arange(steps) / steps))
    assert torch.allclose(torch.tensor(rates), expected, atol=1e-6)


def test_few_shots_are_exactly_so_many_of_each_class() -> None:
    few = probe._few(splits()["train"], 4)
    assert few.targets.bincount().tolist() == [4] * 6
    with pytest.raises(OptionError, match="--fewshot_k"):
        probe._few(splits()["train"], 11)


class Counter(nn.Module):
    """Encodes by adding; notes who was called."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def encode_image(self, images: Tensor) -> Tensor:
        self.log.append(self.name)
        return images + 1


def test_the_untouched_model_takes_turns_and_only_on_full_batches() -> None:
    log: list[str] = []
    model, stock = Counter("reduced", log), Counter("stock", log)
    speed = Speed(model, stock, 3, "cpu")
    for size in (4, 4, 2, 4, 4):
        assert torch.equal(model.encode_image(torch.zeros(size)), torch.ones(size))
    warm = ["stock", "reduced"]
    assert log == [*warm, "stock", "reduced", "reduced", "stock", "reduced", "stock", "reduced", "reduced"]
    assert (speed.images, len(speed.ratios), len(speed.rates)) == (18, 3, 4)
    facts = speed.facts()
    assert facts["speedup_low"] <= facts["speedup"] <= facts["speedup_high"]  # type: ignore[operator]


def test_a_speed_up_is_the_ratio_of_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, clock = {"reduced": 1.0, "stock": 6.0}, [0.0]

    def encode(counter: Counter, images: Tensor) -> Tensor:
        clock[0] += seconds[counter.name]
        return images + 1

    monkeypatch.setattr(Counter, "encode_image", encode)
    monkeypatch.setattr("tokensieve.tasks.clip.speed.time.perf_counter", lambda: clock[0])
    model, stock = (Counter(name, []) for name in seconds)
    speed = Speed(model, stock, 3, "cpu")
    for _ in range(4):
        assert torch.equal(model.encode_image(torch.zeros(2)), torch.ones(2))
    facts = speed.facts()
    assert (facts["speedup"], facts["images_per_second"]) == (6.0, 2.0)


def test_the_untouched_model_alone_has_a_speed_up_of_one() -> None:
    log: list[str] = []
    model = Counter("stock", log)
    speed = Speed(model, None, 4, "cpu")
    model.encode_image(torch.zeros(3))
    assert log == ["stock", "stock"]
    assert speed.facts()["speedup"] == 1.0
    assert Speed(Counter("stock", log), None, 4, "cpu").facts()["speedup"] is None


class Writer(nn.Module):
    """Says the number of tokens so far; for image i it would end after 2 + 4 i words."""

    def _encode_image(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return images, images

    def forward(self, images: Tensor, tokens: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = torch.zeros(*tokens.shape, 49408)
        logits[:, -1, tokens.shape[1]] = 1.0
        for i in range(len(images)):
            if tokens.shape[1] > 2 + 4 * i:
                logits[i, -1, captions.END] = 2.0
        return {"logits": logits}


def test_greedy_captions_end_where_the_model_ends_them() -> None:
    tokens = captions.greedy(Writer(), torch.zeros(2, 3))
    start, end, pad = captions.START, captions.END, captions.PAD
    assert tokens.tolist() == [[start, 1, 2, 3, 4, end, pad, pad], [start, 1, 2, 3, 4, 5, 6, end]]
    assert captions.greedy(Writer(), torch.zeros(9, 3)).shape[1] == 30


def test_scores_without_java_name_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions.shutil, "which", lambda _: None)
    true = {i: [{"caption": f"A red square, number {i}."}] for i in range(4)}
    metrics, left_out = captions.score(true, true)
    assert metrics["Bleu_4"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["ROUGE_L"] == pytest.approx(1.0)
    assert [entry.split()[0] for entry in left_out] == ["METEOR", "Penn", "SPICE"]


def test_names_of_configurations_are_short_and_fit_for_files() -> None:
    config = SieveConfig(method="anchor", keep=(0.5, 0.25), at=(1, 3), options={"alpha": 0.3, "normalize": None})
    assert config.slug == "anchor-0.5,0.25-at1,3-alpha0.3-normalizeNone"
    assert SieveConfig().slug == "none"
