"""Scores, intervals and costs of `eval vlm` against loops written out here."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tokensieve.errors import DataError, OptionError, UnknownNameError
from tokensieve.methods.trained.merger import Merger, TokenMerger
from tokensieve.methods.trained.pruner import LayerPruners, Pruner
from tokensieve.methods.two_stage import TwoStage
from tokensieve.models.attach import attach
from tokensieve.tasks.bench.models import twin
from tokensieve.tasks.vlm.answers import Answers, Asked, Asker, kept_patches, learned_macs, pictures_of
from tokensieve.tasks.vlm.compare import Comparison, figures_of
from tokensieve.tasks.vlm.data import load_questions, vqa_accuracy, write_synthetic
from tokensieve.tasks.vlm.evaluate import VlmEvalOptions, attach_reduced, held_out_questions, plan_of
from tokensieve.tasks.vlm.paired import paired_interval
from tokensieve.tasks.vlm.soft_answers import is_learned, soft_answers


def naive_vqa(given: str, answers: list[str]) -> float:
    """Over every set of all answers but one: how many of them agree, a third for each, at most 1."""
    rounds = []
    for others in itertools.combinations(answers, len(answers) - 1):
        agree = 0
        for answer in others:
            agree += answer == given
        rounds.append(min(1.0, agree / 3))
    return sum(rounds) / len(rounds)


@pytest.mark.parametrize("right", range(11))
def test_vqa_score_is_the_mean_over_leaving_one_out(right: int) -> None:
    answers = ["red"] * right + ["blue"] * (10 - right)
    assert vqa_accuracy("Red.", answers) == pytest.approx(naive_vqa("red", answers))
    assert vqa_accuracy("green", answers) == 0.0


def test_the_interval_is_what_drawing_images_anew_gives() -> None:
    rng = np.random.default_rng(0)
    images = [f"{i:03d}" for i in range(120) for _ in range(int(rng.integers(1, 7)))]
    hard = {name: rng.random() for name in set(images)}  # questions of one image succeed and fail together
    a = [float(hard[name] < 0.7) for name in images]
    b = [float(hard[name] < 0.5) for name in images]
    mean, low, high = paired_interval(a, b, images)
    assert mean == pytest.approx(np.mean(a) - np.mean(b))
    places: dict[str, list[int]] = {}
    for index, name in enumerate(images):
        places.setdefault(name, []).append(index)
    difference, drawn = np.array(a) - np.array(b), []
    for _ in range(1500):
        chosen = [i for name in rng.choice(list(places), len(places)) for i in places[name]]
        drawn.append(difference[chosen].mean())
    assert (low, high) == pytest.approx(np.percentile(drawn, (2.5, 97.5)), abs=0.02)
    by_question = 1.96 * difference.std() / len(difference) ** 0.5
    assert (high - low) / 2 > 1.4 * by_question  # as if questions were independent, it would be too narrow


def test_an_interval_of_one_image_knows_nothing() -> None:
    mean, low, high = paired_interval([1.0, 0.0], [0.0, 0.0], ["a", "a"])
    assert (mean, low, high) == (0.5, -np.inf, np.inf)


def asked(*rows: tuple[str, str, str]) -> list[Asked]:
    blank = np.zeros((8, 8, 3), dtype=np.uint8)
    return [Asked(blank, name, "?", (answer,), kind) for name, kind, answer in rows]


def test_accuracy_by_type_and_loyalty() -> None:
    questions = asked(("a", "colour", "red"), ("a", "count", "two"), ("b", "colour", "blue"), ("b", "count", "3"))
    found = Comparison(questions, ["red", "2", "green", "4"], ["Red.", "3", "green", "3"])
    assert found.scores == [1.0, 1.0, 0.0, 0.0]
    assert found.same == [1.0, 0.0, 1.0, 0.0]
    assert found.metrics() == {
        "accuracy": 0.5, "accuracy_baseline": 0.5, "loyalty": 0.5, "accuracy, colour": 0.5, "accuracy, count": 0.5,
    }  # fmt: skip
    colour, count = found.rows()
    assert colour == {"type": "colour", "questions": 2, "accuracy": 0.5, "accuracy_baseline": 0.5, "loyalty": 1.0}
    assert (count["accuracy_baseline"], count["loyalty"]) == (0.5, 0.0)
    assert found.change()["accuracy_change"] == 0.0


def ask_all(model: Any, processor: Any, questions: list[Asked], size: int, handle: Any = None) -> Answers:
    answers, asker = Answers(), Asker(processor, new_tokens=3)
    for inputs in asker.batches(questions, size):
        asker.ask(model, inputs, answers, handle)
    return answers


def test_answers_are_those_of_plain_generation(tiny: Any, processor: Any) -> None:
    questions = held_out_questions(2)
    answers = ask_all(tiny, processor, questions, 4)
    for text, q in zip(answers.texts, questions, strict=True):
        prompt = f"USER: <image>\n{q.question} ASSISTANT:"
        inputs = processor(images=Image.fromarray(q.image), text=prompt, return_tensors="pt")
        with torch.no_grad():
            ids = tiny.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert text == processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert sum(answers.rows) == len(questions)


def test_costs_are_counted_to_the_token(tiny: Any, processor: Any) -> None:
    questions = held_out_questions(2)
    plain = ask_all(tiny, processor, questions, 1)
    base = figures_of(plain, plan_of(tiny), reduced=False)
    model, handle = attach_reduced(tiny, VlmEvalOptions(method="random", keep=30, at=(1,)))
    found = figures_of(ask_all(model, processor, questions, 1, handle), plan_of(tiny), reduced=True)
    width, mlp, layers = 32, 48, 2
    text = plain.text

    def macs(n: int) -> int:
        return 4 * n * width**2 + 2 * n**2 * width + 3 * n * width * mlp

    assert base["gmacs"] * 1e9 == pytest.approx(np.mean([layers * macs(t + 144) for t in text]))
    assert found["gmacs"] * 1e9 == pytest.approx(np.mean([macs(t + 144) + macs(t + 30) for t in text]))
    assert base["gmacs_with_tower"] - base["gmacs"] == pytest.approx(found["gmacs_with_tower"] - found["gmacs"])
    assert (base["tokens_per_layer"], found["tokens_per_layer"]) == ("144 144", "144 30")
    assert found["tokens_average"] == 87.0
    each = 2 * width * 4  # keys and values, float32
    assert base["kv_bytes"] == round(np.mean([layers * (t + 144) * each for t in text]))
    assert found["kv_bytes"] == round(np.mean([(2 * t + 144 + 30) * each for t in text]))
    assert type(tiny) is not type(model)  # the untouched model stays untouched


def test_learned_networks_are_counted(tiny: Any) -> None:
    merger = TokenMerger(width=32, text_width=32, kind="question_aware", ratio=0.5, inner=16, heads=2)
    pruners = LayerPruners(32, 2, [1], patches=144, inner=16, heads=2, keep=0.5)
    method = TwoStage(first=Merger(adapter=merger), second=Pruner(adapter=pruners), merge_keep=0.5)
    handle = attach(tiny, method, keep=36)
    projector = tiny.model.multi_modal_projector
    weights = projector.linear_1.weight.numel() + projector.linear_2.weight.numel()
    assert learned_macs(handle, 7) == merger.macs(144, 7, 72, weights) + pruners.macs(1, 72, 7)
    handle.remove()
    handle = attach(tiny, "fastv", keep=36, at=1)
    assert learned_macs(handle, 7) == 0


@pytest.mark.parametrize("positions", ["original", "renumber"])
def test_soft_answers_are_those_of_dropping(tiny: Any, processor: Any, positions: str) -> None:
    torch.manual_seed(0)
    merger = TokenMerger(width=32, text_width=32, kind="question_aware", ratio=0.5, inner=16, heads=2)
    pruners = LayerPruners(32, 2, [1], patches=144, inner=16, heads=2, keep=0.5)
    method = TwoStage(first=Merger(adapter=merger.eval()), second=Pruner(adapter=pruners.eval()), merge_keep=0.5)
    model = twin(tiny)
    handle = attach(model, method, keep=20, positions=positions)
    questions = held_out_questions(2)
    hard = ask_all(model, processor, questions, 4, handle).texts
    assert is_learned(handle)
    assert soft_answers(Asker(processor, new_tokens=3), tiny, handle, questions, 4) == hard
    assert hard != ask_all(tiny, processor, questions, 4).texts  # what is kept matters to this model


def test_kept_patches_and_pictures(tiny: Any, processor: Any) -> None:
    questions = held_out_questions(1)[:2]
    model, handle = attach_reduced(tiny, VlmEvalOptions(method="grid", keep=36))
    inputs = next(Asker(processor).batches(questions, 2))
    Asker(processor, new_tokens=1).ask(model, inputs, Answers(), handle)
    kept = kept_patches(handle)
    assert [len(row) for row in kept] == [36, 36]
    assert kept[0] == handle.kept[-1][0].tolist()
    picture = pictures_of(inputs["pixel_values"], processor)[0]
    assert np.abs(np.asarray(picture).astype(int) - questions[0].image.astype(int)).max() <= 1


def test_generated_questions_are_those_of_the_written_set(tmp_path: Path) -> None:
    write_synthetic(tmp_path, 3, 4)
    written, drawn = load_questions(tmp_path), held_out_questions(3, 4)
    assert [(q.question, q.answers, q.kind) for q in written] == [(q.question, q.answers, q.kind) for q in drawn]
    assert (np.asarray(Image.open(written[-1].image)) == drawn[-1].image).all()
    assert json.loads((tmp_path / "questions.jsonl").read_text().splitlines()[0])["question"] == drawn[0].question


def test_what_cannot_be_asked(processor: Any) -> None:
    for prompt in ("USER: {question}", "<image> <image> {question}", "<image> what?"):
        with pytest.raises(OptionError, match="--prompt"):
            Asker(processor, prompt)
    blank = np.zeros((8, 8, 3), dtype=np.uint8)
    with pytest.raises(DataError, match="2 placeholders for one image"):
        next(Asker(processor).batches([Asked(blank, "a", "<image> what?", ("red",))], 1))
    with pytest.raises(UnknownNameError, match="exact"):
        VlmEvalOptions(metric="exakt")
    with pytest.raises(OptionError, match="--images 0"):
        VlmEvalOptions(images=0)
    with pytest.raises(OptionError, match="keep does nothing without --method"):
        VlmEvalOptions(keep=0.5)
