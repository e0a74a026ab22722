"""Families of vision-language models: videos, beams, sampling, training, hooks, and what their towers' scores are."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import tokensieve
from helpers.masked_vlm import gone_of, layers_of, masked_logits, vision_places, with_words
from tokensieve.models.families.vlm import vlm_parts
from tokensieve.testing.vlm import tiny_vlm

model_of = cache(tiny_vlm)
KINDS = ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_next", "gemma3"]


def generate(tiny, prompts, new, **options):
    with torch.no_grad():
        out = tiny.model.generate(
            **prompts, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options
        )
    return out.sequences[:, prompts["input_ids"].shape[1] :], torch.stack(out.logits, dim=1)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "llava_next_video"])
@pytest.mark.parametrize(("name", "options"), [
    ("divprune", {"keep": 0.4}), ("vispruner", {"keep": 0.4}), ("fastv", {"keep": 0.3}),
])  # fmt: skip
def test_frames_of_a_video_leave_as_if_masked(kind, name, options) -> None:
    tiny = model_of(kind)
    prompts = tiny.video_prompts(frames=2)
    with tokensieve.attach(tiny.model, name, **options) as handle:
        tokens, logits = generate(tiny, prompts, 3, do_sample=False)
        gone = gone_of(handle.kept, vision_places(tiny.model, prompts["input_ids"]))
    assert sum(map(len, gone.values())) > 0
    for step in range(3):
        wanted = masked_logits(tiny.model, with_words(prompts, tokens[0, :step]), gone)[-1]
        assert (logits[0, step] - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_beams_of_a_batch_equal_their_singles_and_sampling_repeats(kind) -> None:
    tiny, rows = model_of(kind), [(3, 1, 5), (6, 2, 2)]
    beams = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    for name, options in (("divprune", {"keep": 0.4}), ("fastv", {"keep": 0.3})):
        with torch.no_grad(), tokensieve.attach(tiny.model, name, **options):
            batch = tiny.model.generate(**tiny.prompts(rows), **beams)
            for i, row in enumerate(rows):
                alone = tiny.model.generate(**tiny.prompts([row]), **beams)
                assert torch.equal(alone[0, -4:], batch[i, -4:])
            drawn = []
            for _ in range(2):
                torch.manual_seed(5)
                drawn.append(generate(tiny, tiny.prompts(rows), 4, do_sample=True, num_return_sequences=2))
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.allclose(drawn[0][1][0, 0], drawn[0][1][1, 0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_nothing(kind) -> None:
    tiny = tiny_vlm(kind)
    prompts = tiny.prompts([(3, 1, 5)])
    labels = prompts["input_ids"].clone()
    labels[:, :-4] = -100
    found = []
    for checkpointing in (False, True):
        tiny.model.train()
        if checkpointing:
            tiny.model.gradient_checkpointing_enable({"use_reentrant": False})
        tiny.model.zero_grad()
        with tokensieve.attach(tiny.model, "two_stage", keep=0.25) as handle:
            tiny.model(**prompts, labels=labels, use_cache=False).loss.backward()
            grad = layers_of(tiny.model)[0].self_attn.q_proj.weight.grad.clone()
            found.append((grad, handle.tokens_per_layer))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert found[0][0].abs().sum() > 0
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl"])
def test_accelerates_hooks_do_not_hide_the_reduction(kind) -> None:
    accelerate = pytest.importorskip("accelerate")
    tiny = tiny_vlm(kind)
    prompts = tiny.prompts([(3, 1, 5)])
    with torch.no_grad(), tokensieve.attach(tiny.model, "two_stage", keep=0.25) as handle:
        wanted, layers = tiny.model(**prompts).logits, handle.tokens_per_layer
    for first in (True, False):
        model = tiny_vlm(kind).model
        if first:
            model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
        with torch.no_grad(), tokensieve.attach(model, "two_stage", keep=0.25) as handle:
            if not first:
                model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
            assert torch.equal(model(**prompts).logits, wanted)
            assert handle.tokens_per_layer == layers


@pytest.mark.parametrize("kind", [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl", "idefics3", "mistral3", "llava-pixtral", "gemma3",
    "llava_next", "llava-dinov2",
])  # fmt: skip
def test_what_a_score_looks_at_is_what_the_tower_computes(kind, monkeypatch) -> None:
    """Queries and keys are rows that reached torch's attention; weights are pooled from the map written out."""
    tiny = model_of(kind)
    prompts, seen, plain = tiny.prompts([(3, 2, 5)]), [], torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, *args, **kwargs):
        seen.append((q, k))
        return plain(q, k, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        encoded = vlm_parts(tiny.model)[2].encode(tiny.model.model, "image", prompts)
        ours = encoded.attention(0)
        assert any(has_rows(q, ours.q) and has_rows(k, ours.k) for q, k in seen)
        maps = (ours.q @ ours.k.transpose(-1, -2) * ours.scale).softmax(-1).mean(1)  # (T, P+N, P+N)
        row = maps[:, 0] if ours.has_cls else maps.mean(1)
        wanted = ours.pool(row[:, ours.prefix :].unsqueeze(-1)).squeeze(-1)
        assert torch.allclose(ours.weight, wanted, atol=1e-5)
        assert len(ours.weight) == encoded.lengths[0]


def has_rows(seen, ours) -> bool:
    """Whether every token's row of `ours` (T, H, N, d) is one of `seen` (B, H, S, d)."""
    if seen.shape[1] != ours.shape[1] or seen.shape[3] != ours.shape[3]:
        return False
    seen, ours = (x.transpose(1, 2).flatten(0, 1).flatten(1) for x in (seen, ours))
    return bool((ours[:, None] - seen[None]).abs().amax(-1).amin(1).max() < 1e-4)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_pooled_queries_stand_in_the_order_of_the_features(kind) -> None:
    """Also where windows permute the cells: in a tower that mixes no tokens a changed cell changes its own query."""
    tiny = tiny_vlm(kind)
    for block in tiny.model.model.visual.blocks:
        block.attn.proj.weight.data.zero_()
    given = {"pixel_values": torch.zeros(24, 384), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    given["pixel_values"] += 0.1 * torch.randn(24, 384, generator=torch.Generator().manual_seed(0))
    family = vlm_parts(tiny.model)[2]

    def queries(pixels):
        encoded = family.encode(tiny.model.model, "image", given | {"pixel_values": pixels})
        return encoded.attention(0).pooled(encoded.attention(0).q).transpose(0, 1).flatten(1)

    with torch.no_grad():
        before = queries(given["pixel_values"])
        for cell in range(6):
            pixels = given["pixel_values"].clone()
            pixels[4 * cell : 4 * cell + 4] += torch.randn(4, 384, generator=torch.Generator().manual_seed(cell))
            changed = (queries(pixels) - before).norm(dim=1) > 1e-4
            assert changed.nonzero().flatten().tolist() == [cell]
