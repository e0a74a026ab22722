"""Every family of vision-language models against the untouched model with the same tokens masked."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch

import tokensieve
from helpers.masked_vlm import gone_of, layers_of, masked_logits, vision_places, with_words
from tokensieve.errors import UnsupportedModelError
from tokensieve.testing.vlm import VLM_KINDS, tiny_vlm

OWN_FILES = {"llava", "llava-siglip", "llava-llama", "llava-mistral", "llava-qwen2"}  # test_vlm_exact.py has them
KINDS = [kind for kind in VLM_KINDS if kind not in OWN_FILES]
MIXED = [(3, 1, 5), (6, 2, 2), (2, 1, 9)]
TWO = [(3, 2, 5)]

DROPS = {
    "divprune": ("divprune", {"keep": 0.4}),
    "fastv": ("fastv", {"keep": 0.3}),
    "layers": ("random", {"keep": [0.7, 0.3], "at": [0, 3]}),
    "both": ("two_stage", {"keep": 0.25, "first": "vispruner", "second": "fastv"}),
}
ALL = DROPS | {"visionzip": ("visionzip", {"keep": 0.5}), "sieve": ("sieve", {"keep": 0.5})}

model_of = cache(tiny_vlm)


def refused(kind: str, case: str) -> bool:
    """Whether the family has no stage 1 and the case needs one; then attach must say so."""
    name, options = ALL[case]
    if kind != "idefics2" or name == "fastv" or "at" in options:
        return False
    with pytest.raises(UnsupportedModelError, match="resampler"):
        tokensieve.attach(model_of(kind).model, name, **options)
    return True


def generate(tiny, prompts, new, **options):
    """Tokens (B, new) and their logits (B, new, V)."""
    with torch.no_grad():
        out = tiny.model.generate(
            **prompts, max_new_tokens=new, return_dict_in_generate=True, output_logits=True,
            **{"do_sample": False} | options,
        )  # fmt: skip
    return out.sequences[:, prompts["input_ids"].shape[1] :], torch.stack(out.logits, dim=1)


def close(found, wanted, tolerance=1e-4) -> bool:
    return bool((found - wanted).abs().max() < tolerance * wanted.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_keep_all_is_bit_equal_prefill_and_twenty_tokens(kind) -> None:
    tiny = model_of(kind)
    prompts = tiny.prompts(MIXED)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, (tokens, logits) = tiny.model(**prompts).logits, generate(tiny, prompts, 20)
        for name in ("pyramiddrop" if kind == "idefics2" else "visionzip", "fastv"):
            with tokensieve.attach(tiny.model, name, keep=1.0):
                assert torch.equal(tiny.model(**prompts).logits, before)
                again = generate(tiny, prompts, 20)
            assert torch.equal(again[0], tokens)
            assert torch.equal(again[1], logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", DROPS)
def test_a_drop_equals_masking_the_same_tokens_decoding_included(case, kind) -> None:
    if refused(kind, case):
        return
    tiny = model_of(kind)
    prompts = tiny.prompts(TWO)
    name, options = DROPS[case]
    with tokensieve.attach(tiny.model, name, **options) as handle:
        tokens, logits = generate(tiny, prompts, 4)
        kept = handle.kept
    gone = gone_of(kept, vision_places(tiny.model, prompts["input_ids"]))
    assert sum(map(len, gone.values())) > 0
    for step in range(4):
        wanted = masked_logits(tiny.model, with_words(prompts, tokens[0, :step], kind == "paligemma"), gone)[-1]
        assert close(logits[0, step], wanted), f"step {step}: {(logits[0, step] - wanted).abs().max():.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["visionzip", "sieve", "both", "layers"])
def test_a_left_padded_batch_equals_its_singles(case, kind) -> None:
    if refused(kind, case):
        return
    tiny = model_of(kind)
    name, options = ALL[case]
    with tokensieve.attach(tiny.model, name, **options) as handle:
        tokens, logits = generate(tiny, tiny.prompts(MIXED), 3)
        kept = handle.kept
        for i, row in enumerate(MIXED):
            alone, single = generate(tiny, tiny.prompts([row]), 3)
            for place, numbers in handle.kept.items():
                mine = kept[place][i]
                assert torch.equal(mine[mine >= 0], numbers[0])
            assert close(single[0], logits[i], 1e-3)
            assert torch.equal(alone[0], tokens[i])


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_as_short_as_scheduled_and_removal_leaves_no_trace(kind) -> None:
    tiny = model_of(kind)
    prompts = tiny.prompts(TWO)
    facts = [(name, type(m), sorted(vars(m))) for name, m in tiny.model.named_modules()]
    with torch.no_grad():
        before = tiny.model(**prompts).logits
        with tokensieve.attach(tiny.model, "pyramiddrop", keep=0.25) as handle:
            out = tiny.model(**prompts)
            stats, counts = handle.stats, handle.last.layout.counts[0]
        text, vision = stats.text_of_prompts[0], stats.vision_of_prompts[0]
        expected, current = [], vision
        for layer in range(tiny.layers):
            current = counts.get(layer, current)
            expected.append(text + current)
        assert expected[-1] == text + round(0.25 * vision) < expected[0]
        held = [cached.keys.shape[2] for cached in out.past_key_values.layers]
        windows = [getattr(cached, "sliding_window", None) for cached in out.past_key_values.layers]
        assert held == [n if w is None else min(n, w - 1) for n, w in zip(expected, windows, strict=True)]
        assert stats.tokens_per_layer == expected
        assert facts == [(name, type(m), sorted(vars(m))) for name, m in tiny.model.named_modules()]
        assert torch.equal(tiny.model(**prompts).logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_tokens_that_are_left(kind) -> None:
    tiny = model_of(kind)
    prompts = tiny.prompts([(3, 1, 6)])
    ids = prompts["input_ids"]
    labels = ids.clone()
    labels[:, :-5] = -100
    name, options = DROPS["layers" if kind == "idefics2" else "both"]
    with tokensieve.attach(tiny.model, name, **options) as handle:
        loss = tiny.model(**prompts, labels=labels).loss
        kept = handle.kept
        loss.backward()
    grads = [p.grad for p in layers_of(tiny.model)[0].parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)
    assert any(grad.abs().sum() > 0 for grad in grads)
    tiny.model.zero_grad()
    wanted = masked_logits(tiny.model, prompts, gone_of(kept, vision_places(tiny.model, ids)))
    own = torch.nn.functional.cross_entropy(wanted[-6:-1], ids[0, -5:])
    assert loss.item() == pytest.approx(own.item(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_following_turn_goes_on_from_the_shortened_cache(kind) -> None:
    tiny = model_of(kind)
    prompts, more = tiny.prompts(TWO), torch.tensor([[7, 8, 9]])
    for case in ("layers" if kind == "idefics2" else "divprune", "fastv"):
        name, options = DROPS[case]
        with torch.no_grad(), tokensieve.attach(tiny.model, name, **options) as handle:
            first = tiny.model(**prompts, use_cache=True)
            kept = handle.kept
            out = tiny.model(input_ids=more, past_key_values=first.past_key_values)
        gone = gone_of(kept, vision_places(tiny.model, prompts["input_ids"]))
        wanted = masked_logits(tiny.model, with_words(prompts, more[0], kind == "paligemma"), gone)[-3:]
        assert close(out.logits[0], wanted)
