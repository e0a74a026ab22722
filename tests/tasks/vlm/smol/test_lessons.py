from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tokensieve.tasks.vlm.smol.features import draw_picture
from tokensieve.tasks.vlm.smol.lessons import QuestionTask, add_lora, answer_loss, trained_tensors
from tokensieve.tasks.vlm.smol.model import merge_adapter
from tokensieve.tasks.vlm.smol.packing import Texts, answer_logits, pack, pool
from tokensieve.tasks.vlm.smol.photos import Photos
from tokensieve.tasks.vlm.smol.projector import PatchWords, solve_projector
from tokensieve.tasks.vlm.smol.recipe import QuestionConfig


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id = 2

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 90 for c in text]}


def language(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            attn_implementation="eager",
        )
    ).eval()


def projector(width: int) -> nn.Module:
    torch.manual_seed(1)
    module = nn.Module()
    module.linear_1, module.act, module.linear_2 = nn.Linear(width, 20), nn.GELU(), nn.Linear(20, 24)
    module.forward = lambda x: module.linear_2(module.act(module.linear_1(x)))
    return module


DIALOGUES = [[("What is it?", "cat"), ("Is it?", "no"), ("Where?", "top left")], [("How many?", "two")]]


@torch.no_grad()
def test_a_pack_gives_what_each_question_gives_alone() -> None:
    model, texts = language(), Texts(Letters())
    image = torch.randn(2, 256, 24)
    together = answer_logits(model.model, model.lm_head, image, pack(texts, DIALOGUES))
    alone = []
    for row, dialogue in enumerate(DIALOGUES):
        for question, answer in dialogue:
            behind = [*texts.question(question), *texts.answer(answer)]
            words = model.model.embed_tokens(torch.tensor([*texts.prefix, *behind]))
            start = len(texts.prefix)
            whole = torch.cat([words[:start], image[row], words[start:]])[None]
            logits = model(inputs_embeds=whole).logits[0]  # plain causal, positions 0, 1, 2 ...
            count = len(texts.answer(answer))
            alone.append(logits[-count - 1 : -1])
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def test_pooling_is_the_mean_of_squares_of_patches() -> None:
    tokens = torch.randn(2, 256, 5)
    pooled = pool(tokens, 8)
    assert pooled.shape == (2, 64, 5)
    for row, column in ((0, 0), (3, 5), (7, 7)):
        patches = [(2 * row + i) * 16 + 2 * column + j for i in (0, 1) for j in (0, 1)]
        assert torch.allclose(pooled[:, row * 8 + column], tokens[:, patches].mean(1), atol=1e-6)
    assert pool(tokens, 16) is tokens


def test_pooled_tokens_stand_where_their_last_patch_would() -> None:
    packed = pack(Texts(Letters()), DIALOGUES)
    start = len(packed.before)
    full, pooled = packed.positions(256), packed.positions(64)
    assert full[0, : start + 256].tolist() == list(range(start + 256))
    assert pooled[0, start : start + 9].tolist() == [start + n for n in (17, 19, 21, 23, 25, 27, 29, 31, 49)]
    assert torch.equal(full[:, start + 256 :], pooled[:, start + 64 :])


@torch.no_grad()
def test_what_ships_merged_is_what_was_trained() -> None:
    trained, fresh, ids = language(), language(), torch.randint(3, 96, (1, 12))
    config = QuestionConfig(steps=1, rank=4, alpha=8)
    add_lora(trained.model, 4, 8, 0)
    for name, parameter in trained.model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    tensors = trained_tensors(projector(8), trained.model, config)
    inner = SimpleNamespace(language_model=fresh.model, multi_modal_projector=projector(8))
    before = fresh(ids).logits
    merge_adapter(SimpleNamespace(model=inner), tensors)
    assert torch.allclose(fresh(ids).logits, trained(ids).logits, atol=5e-3)
    assert not torch.allclose(before, trained(ids).logits, atol=5e-2)


class Toy:
    """Features of a few pictures: noise, and the class of each patch in a channel of its own."""

    split, count = "train", 12

    def picture(self, number: int) -> object:
        return draw_picture("train", 0, number)

    def get(self, numbers: list[int]) -> torch.Tensor:
        rng = torch.Generator().manual_seed(0)
        noise = torch.randn(self.count, 256, 20, generator=rng)
        for number in range(self.count):
            shown = torch.from_numpy(self.picture(number).patches).flatten()
            noise[number, torch.arange(256), shown.clamp(min=0)] += 4.0
        return noise[numbers]


def test_the_projector_is_the_ridge_regression(noisy: Photos) -> None:
    """Against numpy's least squares: patches multiplied by the root of their weights, the ridge as more rows."""
    table = torch.randn(96, 24)
    words, toy, own = PatchWords(table, Letters()), Toy(), projector(20)
    solve_projector(own, words, toy, 9, shrink=1e-2)
    with torch.no_grad():
        hidden = own.act(own.linear_1(toy.get(list(range(9))))).flatten(0, 1).double()
    hidden = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
    shown, target = words.targets([toy.picture(n) for n in range(9)])
    weight = torch.where(shown == 17, 0.3, 1.0).flatten().double().sqrt()[:, None]
    ridge = (1e-2 * (hidden * weight).pow(2).sum(0).mean()).sqrt() * torch.eye(hidden.shape[1])
    left = torch.cat([hidden * weight, ridge]).numpy()
    right = torch.cat([(target.flatten(0, 1) - words.mean).double() * weight, torch.zeros(len(ridge), 24)]).numpy()
    solved = np.linalg.lstsq(left, right, rcond=None)[0]
    assert np.allclose(own.linear_2.weight.detach().numpy(), solved[:-1].T, atol=1e-4)


def test_a_few_steps_lower_the_loss(noisy: Photos) -> None:
    whole = language()
    whole.lm_head.weight.data *= 20  # so that what is in front of it can say something
    inner = SimpleNamespace(multi_modal_projector=projector(20), language_model=whole.model)
    model = SimpleNamespace(model=inner, lm_head=whole.lm_head.requires_grad_(False))
    config = QuestionConfig(steps=30, batch=2, lr=0.02, projector_lr=0.02, rank=4)
    task = QuestionTask(config, model, Letters(), Toy(), Toy())
    losses, batches = [], task.batches(0)
    chosen = next(batches)[1]
    for _ in range(30):
        packed, _ = task.pack(task.train, chosen, 0, captions=True)
        loss = answer_loss(task.logits(task.train, chosen, packed), packed)
        loss.backward()
        task.optimisers["answers"].step()
        task.optimisers["answers"].zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], losses
    with torch.no_grad():
        assert 0.0 <= task.validate().metrics["all"] <= 1.0
    first, again = next(task.batches(5)), next(task.batches(5))
    assert first == again
    assert first[1] != next(task.batches(6))[1]


@pytest.mark.parametrize(("side", "wrong"), [(3, "side=3"), (0, "side=0")])
def test_sizes_that_do_not_fit_are_refused(side: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        QuestionConfig(steps=1, side=side)
