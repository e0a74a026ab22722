"""`tokensieve train vlm` on a tiny LLaVA: what is learned, written, resumed, warned of and refused."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokensieve
from tokensieve.errors import DataError, OptionError
from tokensieve.models.families.vlm.llava import encode
from tokensieve.tasks.vlm.base import save_small_llava
from tokensieve.tasks.vlm.batches import FileQuestions, GeneratedQuestions, collate, scaled_down
from tokensieve.tasks.vlm.config import SMALL, parse_config
from tokensieve.tasks.vlm.data import write_synthetic
from tokensieve.tasks.vlm.discriminator import Discriminator
from tokensieve.tasks.vlm.health import Health
from tokensieve.tasks.vlm.losses import answer_positions, distill_loss, guide_loss, margins, task_loss, temperature_at
from tokensieve.tasks.vlm.processor import PROMPT
from tokensieve.tasks.vlm.train import VlmTask, all_right, answered, build_task, train_vlm

torch.set_num_threads(1)
QUICK = [
    "batch_size=4", "questions=24", "val_questions=8", "eval_every=3", "checkpoint_every=2", "pruner_d_internal=16",
    "pruning_layers=[1]", "warmup_steps=1", "disc_reinit_prob=0.3",
]  # fmt: skip


def config(folder: Path, *more: str):
    return parse_config(SMALL, [*QUICK, f"output_dir={folder}", *more])


def task(folder: Path, tiny, processor, *more: str) -> VlmTask:
    settings = config(folder, *more)
    data = settings.dataset_settings
    tiny.requires_grad_(False)
    return VlmTask(settings, tiny, GeneratedQuestions(processor, data.questions, data.val_questions, settings.dl.seed))


def run(folder: Path, tiny, processor, *more: str, resume: bool = False, tell=lambda line: None):
    made = task(folder, tiny, processor, *more)
    return train_vlm(made.config, task=made, resume=resume, tell=tell), made


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_temperature_falls_over_its_share_of_the_steps() -> None:
    found = [temperature_at(step, 100, 1.0, 0.1, 0.5) for step in (0, 25, 50, 99)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_losses_against_loops() -> None:
    torch.manual_seed(0)
    hidden, answers = torch.randn(2, 6, 3), torch.tensor([[1, 2], [0, -100]])
    picked = answer_positions(hidden, answers)
    assert torch.equal(picked, torch.stack([hidden[0, 3], hidden[0, 4], hidden[1, 3]]))
    logits, teacher = torch.randn(3, 4), torch.randn(3, 4)
    wanted = -sum(logits[i].log_softmax(0)[t] for i, t in enumerate([1, 2, 0])) / 3
    assert float(task_loss(logits, answers)) == pytest.approx(float(wanted), rel=1e-5)
    p, q = teacher.softmax(1), logits.softmax(1)
    assert float(distill_loss(logits, teacher)) == pytest.approx(float((p * (p / q).log()).sum() / 3), rel=1e-4)
    assert float(distill_loss(logits, logits)) == pytest.approx(0.0, abs=1e-6)


def test_margins_and_guide_against_loops() -> None:
    torch.manual_seed(0)
    logits, answers = torch.randn(3, 4), torch.tensor([[1, 2], [0, -100]])
    for i, token in enumerate([1, 2, 0]):
        others = sum(math.exp(logits[i, j]) for j in range(4) if j != token)
        assert float(margins(logits, answers)[i]) == pytest.approx(float(logits[i, token]) - math.log(others), rel=1e-4)
    scores, matters = torch.randn(2, 5), torch.rand(2, 5)
    matters[0, 2] = 0.0
    wanted = 0.0
    for row in range(2):
        p, q = matters[row] / matters[row].sum(), scores[row].softmax(0)
        wanted += sum(float(p[j] * (p[j] / q[j]).log()) for j in range(5) if p[j] > 0) / 2
    assert float(guide_loss(scores, matters)) == pytest.approx(wanted, rel=1e-4)
    assert float(guide_loss(matters[1:].log(), 7 * matters[1:])) == pytest.approx(0.0, abs=1e-6)
    assert math.isfinite(float(guide_loss(scores, torch.zeros(2, 5))))


def test_the_guide_is_the_slope_of_the_answers_margins(tiny, processor, tmp_path) -> None:
    """Against a difference: one vision token's key raised a little for every query, in every layer from one on."""
    guided = task(tmp_path, tiny, processor, "prune_guide_weight=1")
    batch = guided.questions.batch(0, 3)
    encoded = encode(tiny.model, batch.pixels)
    states, matters = guided._teacher(batch, encoded)
    plain, nothing = task(tmp_path, tiny, processor, "merge_guide_weight=0", "prune_guide_weight=0")._teacher(
        batch, encoded
    )
    assert not nothing
    assert list(matters) == [-1, *guided.pruners.layers]
    assert torch.allclose(states, plain, atol=1e-4)
    assert not any(layer._forward_pre_hooks for layer in tiny.model.language_model.layers)
    length, where = batch.ids.shape[1], batch.ids == tiny.config.image_token_id
    embeds = tiny.get_input_embeddings()(batch.ids)
    features = tiny.model.multi_modal_projector(encoded.tokens[:, encoded.prefix :])
    embeds = embeds.masked_scatter(where.unsqueeze(-1), features)
    causal = torch.full((3, 1, length, length), torch.finfo(torch.float32).min)
    for b, q, k in itertools.product(range(3), range(length), range(length)):
        if k <= q and batch.mask[b, k]:
            causal[b, 0, q, k] = 0.0
    layers = tiny.model.language_model.layers

    @torch.no_grad()
    def margin(bias, start):
        key_bias = causal + bias[:, None, None, :]
        hooks = [
            layer.register_forward_pre_hook(
                lambda *call: (call[1], call[2] | {"attention_mask": key_bias}), with_kwargs=True
            )
            for layer in layers[max(start, 0) :]
        ]
        hidden = tiny.model.language_model(inputs_embeds=embeds, attention_mask=causal, use_cache=False)
        for hook in hooks:
            hook.remove()
        return margins(tiny.lm_head(answer_positions(hidden.last_hidden_state, batch.answers)), batch.answers).sum()

    for start, (row, token) in itertools.product(matters, ((0, 0), (1, 5), (2, 100))):
        place = where[row].nonzero()[token, 0]
        up, down = torch.zeros(batch.ids.shape), torch.zeros(batch.ids.shape)
        up[row, place], down[row, place] = 0.5, -0.5
        slope = abs(float(margin(up, start) - margin(down, start)))
        assert float(matters[start][row, token]) == pytest.approx(slope, rel=0.1, abs=2e-5)


def test_pruners_are_guided_by_what_matters_of_the_tokens_that_came(tiny, processor, tmp_path) -> None:
    """Numbers of tokens, by hand: each pruner sees what the one before it kept."""
    guided = task(tmp_path, tiny, processor, "prune_guide_weight=1")
    batch = guided.questions.batch(0, 3)
    encoded = encode(tiny.model, batch.pixels)
    _, matters = guided._teacher(batch, encoded)
    guided.merger.eval()  # no noise on its choice
    _, scored = guided._student(batch, encoded, guided.sizes.merged)
    came = None
    for layer in (-1, *guided.pruners.layers):
        scores, numbers = scored[layer]
        if came is not None:
            assert torch.equal(numbers, came)
        keep = guided.sizes.merged if layer < 0 else guided.counts[guided.pruners.layers.index(layer)]
        if layer < 0:  # the merger chooses by coverage too
            joint = tiny.model.multi_modal_projector(encoded.tokens[:, encoded.prefix :])
            unit = joint / joint.norm(dim=-1, keepdim=True)
            scores = guided.merger.price(scores, unit @ unit.transpose(1, 2))
        best = scores.topk(keep, dim=1).indices.sort(dim=1).values
        came = numbers.gather(1, best)
    merged, pruned = guided._guides(matters, scored)
    assert torch.allclose(merged, guide_loss(scored[-1][0], matters[-1]))
    wanted = [guide_loss(scored[i][0], matters[i].gather(1, scored[i][1])) for i in guided.pruners.layers]
    assert torch.allclose(pruned, torch.stack(wanted).mean())


def test_a_budget_is_drawn_for_every_step(tiny, processor, tmp_path) -> None:
    spread = task(tmp_path, tiny, processor, "budget_spread=1")
    middle, patches = spread.sizes.merged, spread.sizes.patches
    drawn = [spread.merged_at(step) for step in range(200)]
    assert drawn == [spread.merged_at(step) for step in range(200)]
    assert middle // 2 <= min(drawn) < 0.6 * middle
    assert 1.6 * middle < max(drawn) <= min(2 * middle, patches - 1)
    assert abs(sum(math.log(n / middle) for n in drawn) / 200) < 0.1
    assert task(tmp_path, tiny, processor, "budget_spread=0").merged_at(3) == middle
    batch = spread.questions.batch(0, 2)
    _, scored = spread._student(batch, encode(tiny.model, batch.pixels), 30)
    assert [scores.shape[1] for scores, _ in scored.values()] == [patches, 30, *spread.pruners.counts(30)[:-1]]


def test_batches_are_prompts_on_the_left_and_answers_on_the_right() -> None:
    batch = collate([[1, 2, 3], [4]], [[5], [6, 7]], torch.zeros(2, 1), pad=0)
    assert batch.ids.tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.answers.tolist() == [[5, -100], [6, 7]]
    assert batch.prompt().tolist() == [[True] * 3 + [False] * 2] * 2


def test_generated_prompts_are_the_processors(processor) -> None:
    batch = GeneratedQuestions(processor, 10, 4, 0).batch(3, 4)
    tokenizer = processor.tokenizer
    for ids, mask in zip(batch.ids, batch.mask, strict=True):
        text = tokenizer.decode([i for i in ids[mask.bool()].tolist() if i > 4])
        asked = text.split("user:")[1].split("assistant:")[0].strip()
        again = processor(
            images=torch.zeros(3, 96, 96, dtype=torch.uint8), text=PROMPT.format(question=asked), return_tensors="pt"
        )["input_ids"][0].tolist()
        assert ids[mask.bool()].tolist()[: len(again)] == again
    same = GeneratedQuestions(processor, 10, 4, 0).batch(3, 4)
    assert torch.equal(batch.ids, same.ids)
    assert torch.equal(batch.pixels, same.pixels)


def test_questions_of_files(tmp_path, processor) -> None:
    write_synthetic(tmp_path / "train", 2, 0, "train")
    write_synthetic(tmp_path / "val", 1, 1, "train")
    files = [str(tmp_path / name / "questions.jsonl") for name in ("train", "val")]
    questions = FileQuestions(processor, *files, seed=0)
    size = len(questions)
    whole = [questions.batch(step, 1).ids.tolist() for step in range(size)]
    assert len({str(one) for one in whole}) == len({str(questions.batch(0, size).ids[i].tolist()) for i in range(size)})
    assert questions.batch(0, size + 2).ids.shape[0] == size + 2  # on into the next epoch
    assert sum(len(batch.ids) for batch in questions.held_back(4)) == len(questions.val)
    with pytest.raises(DataError, match="same file"):
        FileQuestions(processor, files[0], files[0], seed=0)


def test_images_are_scaled_down_to_their_longest_side() -> None:
    from PIL import Image

    assert scaled_down(Image.new("RGB", (400, 100)), 200).size == (200, 50)
    assert scaled_down(Image.new("RGB", (40, 100)), 200).size == (40, 100)


def test_an_answer_is_right_as_a_whole() -> None:
    answers = torch.tensor([[1, 2], [3, -100], [4, 5]])
    assert all_right(torch.tensor([1, 2, 3, 4, 6]), answers).tolist() == [True, True, False]


@torch.no_grad()
def test_answers_are_evaluated_as_greedy_generation_would(tiny, processor) -> None:
    batch = GeneratedQuestions(processor, 10, 4, 0).batch(0, 4)
    split = batch.prompt_length
    prompts = {"input_ids": batch.ids[:, :split], "attention_mask": batch.mask[:, :split], "pixel_values": batch.pixels}
    said = tiny.generate(**prompts, max_new_tokens=2, do_sample=False, eos_token_id=None)[:, -2:]
    assert not answered(tiny, batch).any()
    batch.ids[:, split:], batch.answers = said, said.clone()
    batch.mask[:, split:] = 1
    assert answered(tiny, batch).all()


# -- the run -----------------------------------------------------------------------------------------------------------


def test_soft_and_hard_are_the_same_answers(tmp_path, tiny, processor) -> None:
    made = task(tmp_path, tiny, processor)
    for part in made.modules.values():
        part.eval()
    batch = made.questions.batch(0, 4)
    with torch.no_grad():
        soft, _ = made._student(batch, encode(tiny.model, batch.pixels), made.sizes.merged)
        split = batch.prompt_length
        with made.hard():
            hard = tiny.model(
                input_ids=batch.ids[:, :split], attention_mask=batch.mask[:, :split], pixel_values=batch.pixels
            ).last_hidden_state[:, -1]
    first = torch.tensor([i for i, (_, column) in enumerate((batch.answers != -100).nonzero()) if column == 0])
    assert torch.allclose(soft[first], hard, atol=1e-4)


def test_the_teacher_is_the_untouched_model(tmp_path, tiny, processor) -> None:
    made = task(tmp_path, tiny, processor)
    batch = made.questions.batch(0, 4)
    with torch.no_grad():
        found, _ = made._teacher(batch, encode(tiny.model, batch.pixels))
        whole = tiny.model(input_ids=batch.ids, attention_mask=batch.mask, pixel_values=batch.pixels).last_hidden_state
    assert torch.allclose(found, answer_positions(whole, batch.answers), atol=1e-4)


def test_a_run_leaves_what_it_says(tmp_path, tiny, processor) -> None:
    result, made = run(tmp_path, tiny, processor)
    assert result.step == 6
    assert set(result.losses[0]) == {"token_merger", "layer_pruners", "discriminator"}
    for name in ("token_merger", "layer_pruners", "discriminator"):
        assert (tmp_path / "checkpoints" / f"{name}_step_6.safetensors").is_file()
    log = (tmp_path / "logs" / "training.log").read_text()
    for words in ("[Step 0] Temperature: 1.000", "merge_sparsity_loss", "adv_loss", "real_loss", "[Eval Step 6]"):
        assert words in log
    metrics = result.validations[-1]
    assert {"accuracy_baseline", "accuracy_soft", "accuracy_hard", "keep_ratio_merge"} <= set(metrics)
    assert (metrics["avg_original_tokens"], metrics["avg_merged_tokens"]) == (144, 60)
    assert metrics["accuracy_soft"] == metrics["accuracy_hard"]
    names = _tensorboard(tmp_path)
    assert {"temperature", "disc_prob_real", "adv_loss", "task_loss", "validation/accuracy_hard"} <= names
    batch = made.questions.batch(0, 2)
    with torch.no_grad(), tokensieve.attach(tiny, "two_stage", adapter=tmp_path / "last.safetensors") as handle:
        tiny(input_ids=batch.ids, attention_mask=batch.mask, pixel_values=batch.pixels)
        assert handle.stats.vision_tokens_per_layer == [60, 51]


def _tensorboard(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return set(found.Tags()["scalars"])


def test_only_the_small_parts_learn(tmp_path, tiny, processor) -> None:
    before = {name: value.clone() for name, value in tiny.state_dict().items()}
    made = task(tmp_path, tiny, processor)
    parts = {n: {k: v.clone() for k, v in part.state_dict().items()} for n, part in made.modules.items()}
    train_vlm(made.config, task=made)
    assert all(torch.equal(value, before[name]) for name, value in tiny.state_dict().items())
    for name, part in made.modules.items():
        assert any(not torch.equal(value, parts[name][key]) for key, value in part.state_dict().items()), name


def test_the_discriminator_can_be_switched_off(tmp_path, tiny, processor) -> None:
    result, _ = run(tmp_path, tiny, processor, "adv_loss_weight=0", "distill_loss_weight=0", "questions=4")
    assert set(result.losses[0]) == {"token_merger", "layer_pruners"}


def test_a_new_discriminator_remembers_nothing() -> None:
    torch.manual_seed(0)
    judge = Discriminator(8, 4)
    optimiser = torch.optim.Adam(judge.parameters())
    judge(torch.randn(3, 8)).sum().backward()
    optimiser.step()
    before = judge.layers[0].weight.clone()
    rng = torch.get_rng_state()
    judge.start_anew(optimiser, 3)
    assert not torch.equal(before, judge.layers[0].weight)
    assert not optimiser.state
    assert torch.equal(rng, torch.get_rng_state())  # what a step draws after it stays the same


_KILLED = """
import os, signal, sys, torch
torch.set_num_threads(1)
from tokensieve.tasks.vlm.config import SMALL, parse_config
from tokensieve.tasks.vlm.train import train_vlm

config = parse_config(SMALL, sys.argv[1:])
train_vlm(config, tick=lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 5 else None)
"""


def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, tiny, processor) -> None:
    save_small_llava(tiny, processor, tmp_path / "model")
    more = [*QUICK, f"name={tmp_path / 'model'}"]
    whole = train_vlm(parse_config(SMALL, [*more, f"output_dir={tmp_path / 'whole'}"]))
    torn = [*more, f"output_dir={tmp_path / 'torn'}"]
    done = subprocess.run([sys.executable, "-c", _KILLED, *torn], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    again = train_vlm(parse_config(SMALL, torn), resume=True)
    assert again.losses == whole.losses
    assert again.validations == whole.validations
    with pytest.raises(OptionError, match="other settings"):
        train_vlm(parse_config(SMALL, [*torn, "merge_ratio=0.25", "target_merge_tokens=36"]), resume=True)


def test_data_that_is_not_there(tmp_path, tiny, processor) -> None:
    save_small_llava(tiny, processor, tmp_path / "model")
    with pytest.raises(DataError, match=r"dataset_settings\.train"):
        build_task(config(tmp_path, f"name={tmp_path / 'model'}", "train=''"))


def test_out_of_memory_says_what_to_lower(tmp_path, tiny, processor, monkeypatch) -> None:
    made = task(tmp_path, tiny, processor)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made, "step", full)
    with pytest.raises(OptionError, match=r"batch_size.*max_vision_tokens.*image_max_size"):
        train_vlm(made.config, task=made)


# -- health ------------------------------------------------------------------------------------------------------------

FINE = {
    "accuracy_baseline": 0.9, "accuracy_soft": 0.89, "accuracy_hard": 0.89, "avg_merged_tokens": 72.0,
    "avg_original_tokens": 144.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"avg_merged_tokens": 144.0}, "lower merge_ratio"),
        ({"accuracy_hard": 0.8, "accuracy_soft": 0.8}, "raise task_loss_weight"),
        ({"accuracy_hard": 0.88}, "1.0 points apart"),
        ({}, None),
    ],
)
def test_a_validation_that_is_bad_is_one_warning(change, words) -> None:
    said: list[str] = []
    health = Health(parse_config(SMALL), 100, said.append)
    health.start()
    for step in (60, 80):
        health.evaluated(step, FINE | change)
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


def test_a_discriminator_that_has_won_and_a_temperature_that_stays_are_warned_of() -> None:
    said: list[str] = []
    health = Health(parse_config(SMALL, ["temperature_min=1.0"]), 100, said.append)
    health.start()
    assert "temperature will not fall" in said[0]
    for _ in range(120):
        health.step({"disc_prob_real": 0.6, "disc_prob_fake": 0.4})
    assert len(said) == 1
    for _ in range(120):
        health.step({"disc_prob_real": 0.99, "disc_prob_fake": 0.01})
    assert len(said) == 2
    assert "disc_reinit_prob" in said[1]
