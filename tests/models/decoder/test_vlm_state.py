"""A reduced LLaVA as a module: removal, copies, training, other models, and what is said about bad input."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch

import tokensieve
from helpers.naive_llava import full_embeds, gone_places, masked_decoder
from tokensieve.errors import BudgetError, OptionError, UnknownNameError, UnsupportedModelError
from tokensieve.testing.models import tiny_model
from tokensieve.testing.vlm import IMAGE, tiny_llava

ONE = [(3, 1, 5)]
STAGES = [("visionzip", {"keep": 12}), ("fastv", {"keep": 12}), ("two_stage", {"keep": 0.25})]


@pytest.fixture
def tiny():
    return tiny_llava()


def tokens(model, prompts, **options):
    with torch.no_grad():
        return model.generate(**prompts, max_new_tokens=5, do_sample=False, **options)


# -- in and out ---------------------------------------------------------------------------------------------------


def facts(model):
    return [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]


@pytest.mark.parametrize(("name", "options"), STAGES)
def test_removal_leaves_no_trace_also_after_an_error(tiny, name, options) -> None:
    prompts = tiny.prompts(ONE)
    before, classes = tokens(tiny.model, prompts), facts(tiny.model)
    with tokensieve.attach(tiny.model, name, **options) as handle:
        assert tokensieve.attachment_of(tiny.model) is handle
        assert not torch.equal(tokens(tiny.model, prompts), before)
        with pytest.raises(OptionError):
            tiny.model(**(prompts | {"pixel_values": prompts["pixel_values"].repeat(2, 1, 1, 1)}))
    handle.remove()
    assert facts(tiny.model) == classes
    assert tokensieve.attachment_of(tiny.model) is None
    assert torch.equal(tokens(tiny.model, prompts), before)


def test_two_models_share_nothing(tiny) -> None:
    other, prompts = tiny_llava(seed=1), tiny.prompts(ONE)
    plain = tokens(other.model, prompts)
    with tokensieve.attach(tiny.model, "fastv", keep=12):
        assert torch.equal(tokens(other.model, prompts), plain)


def test_a_second_method_is_refused(tiny) -> None:
    with tokensieve.attach(tiny.model, "fastv", keep=12), pytest.raises(UnsupportedModelError, match="already"):
        tokensieve.attach(tiny.model, "visionzip", keep=12)


@pytest.mark.parametrize(("name", "options"), STAGES)
def test_copies_and_pickles_are_attached_and_saved_under_the_models_own_name(tiny, name, options, tmp_path) -> None:
    prompts = tiny.prompts(ONE)
    with tokensieve.attach(tiny.model, name, **options) as handle:
        pickled = pickle.loads(pickle.dumps(tiny.model))  # before a forward: transformers' own hooks cannot be pickled
        wanted = tokens(tiny.model, prompts)
        tiny.model.save_pretrained(tmp_path)
        twins = [copy.deepcopy(tiny.model), pickled]
    for twin in twins:
        own = tokensieve.attachment_of(twin)
        assert own is not handle
        assert torch.equal(tokens(twin, prompts), wanted)
        assert own.stats.tokens_per_layer == handle.stats.tokens_per_layer
        own.remove()
        assert torch.equal(tokens(twin, prompts), tokens(tiny.model, prompts))
    assert '"LlavaForConditionalGeneration"' in (tmp_path / "config.json").read_text()


def test_the_inner_model_alone(tiny) -> None:
    prompts = tiny.prompts(ONE)
    with torch.no_grad(), tokensieve.attach(tiny.model, "fastv", keep=12):
        wanted = tiny.model(**prompts).logits
    with torch.no_grad(), tokensieve.attach(tiny.model.model, "fastv", keep=12) as handle:
        hidden = tiny.model.model(**prompts).last_hidden_state
        assert handle.stats.tokens_per_layer[-1] == hidden.shape[1] == 20
    assert torch.equal(tiny.model.lm_head(hidden), wanted)


def test_a_bare_clip_tower_inside_still_takes_an_encoders_method(tiny) -> None:
    tower = tiny.model.model.vision_tower
    pixels = tiny.prompts(ONE)["pixel_values"]
    with torch.no_grad(), tokensieve.attach(tower, "evit", keep=12, at=1) as handle:
        assert tower(pixels).last_hidden_state.shape[1] == 13  # CLS and 12, the fused one among them
        assert handle.kept[1].shape == (1, 12)


def test_image_features_that_are_asked_for_are_the_untouched_ones(tiny) -> None:
    pixels = tiny.prompts(ONE)["pixel_values"]
    with torch.no_grad():
        wanted = tiny.model.get_image_features(pixels).pooler_output
        with tokensieve.attach(tiny.model, "visionzip", keep=12):
            found = tiny.model.get_image_features(pixels).pooler_output
    assert torch.equal(torch.stack(list(found)), torch.stack(list(wanted)))


# -- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), STAGES[1:])
def test_the_loss_is_that_of_the_tokens_that_are_left(tiny, name, options) -> None:
    options = options | ({"first": "grid"} if name == "two_stage" else {})
    prompts = tiny.prompts([(3, 1, 5), (2, 1, 4)], pad="right")
    labels = prompts["input_ids"].masked_fill(prompts["input_ids"] == IMAGE, -100)
    labels = labels.masked_fill(prompts["attention_mask"] == 0, -100)
    with tokensieve.attach(tiny.model, name, **options) as handle:
        loss = tiny.model(**prompts, labels=labels).loss
        kept = handle.kept
        loss.backward()
    total, count = 0.0, 0
    for row in range(2):
        length = int(prompts["attention_mask"][row].sum())
        ids = prompts["input_ids"][row : row + 1, :length]
        embeds, places = full_embeds(tiny.model, ids, prompts["pixel_values"][row : row + 1])
        gone = gone_places(kept, places, row)
        wanted, _ = masked_decoder(tiny.model, embeds, gone)
        left = sorted(set(range(length)) - set(gone[max(gone)].tolist()))
        for here, then in pairwise(left):
            if labels[row, then] != -100:
                total -= float(wanted[here].detach().log_softmax(-1)[labels[row, then]])
                count += 1
    assert loss.item() == pytest.approx(total / count, rel=1e-4)
    assert tiny.model.model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum() > 0


def test_gradient_checkpointing_changes_nothing(tiny) -> None:
    prompts = tiny.prompts([(3, 1, 5), (3, 1, 5)])
    labels = prompts["input_ids"].masked_fill(prompts["input_ids"] == IMAGE, -100)
    found = []
    for checkpointing in (False, True):
        tiny.model.train()
        if checkpointing:
            tiny.model.gradient_checkpointing_enable({"use_reentrant": False})
        tiny.model.zero_grad()
        with tokensieve.attach(tiny.model, "two_stage", keep=0.25) as handle:
            tiny.model(**prompts, labels=labels, use_cache=False).loss.backward()
            found.append((tiny.model.model.multi_modal_projector.linear_1.weight.grad.clone(), handle.tokens_per_layer))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert found[0][1] == found[1][1]


# -- statistics ---------------------------------------------------------------------------------------------------


def test_before_a_forward_there_are_plans_but_no_figures(tiny) -> None:
    with tokensieve.attach(tiny.model, "pyramiddrop", keep=0.25) as handle:
        planned = handle.vision_tokens_per_layer
        assert planned[0] == 36
        assert planned[-1] == 9
        assert handle.cost(text_tokens=10).tokens_per_layer == tuple(round(n) + 10 for n in planned)
        for name in ("stats", "kept", "scores"):
            with pytest.raises(RuntimeError, match="no forward yet"):
                getattr(handle, name)
        tokens(tiny.model, tiny.prompts(ONE))
        assert handle.vision_tokens_per_layer == planned
        assert handle.cost().macs == handle.cost(text_tokens=8).macs
        assert set(handle.kept) == set(handle.scores) == {1, 3, 4}
        assert handle.scores[4][0].isnan().sum() == 36 - handle.kept[3].shape[1]


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), STAGES)
def test_prompts_and_images_that_do_not_fit(tiny, name, options) -> None:
    prompts = tiny.prompts(ONE)
    two = prompts | {"pixel_values": prompts["pixel_values"].repeat(2, 1, 1, 1)}
    words = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    with tokensieve.attach(tiny.model, name, **options):
        for call in (lambda p: tiny.model(**p), lambda p: tokens(tiny.model, p)):
            with pytest.raises(OptionError, match=r"2 image\(s\) of 36 tokens need 72 image placeholders.* have 36"):
                call(two)
            with pytest.raises(OptionError, match=r"no image placeholder, but 1 image\(s\) were given"):
                call(words | {"pixel_values": prompts["pixel_values"]})
            with pytest.raises(OptionError, match="36 image placeholders, but no image was given"):
                call({k: v for k, v in prompts.items() if k != "pixel_values"})
            with pytest.warns(UserWarning, match="the prompt has no image: nothing is reduced"):
                call(words)


def test_text_alone_is_answered_as_ever(tiny) -> None:
    words = {"input_ids": torch.tensor([[3, 4, 5], [0, 7, 8]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    wanted = tokens(tiny.model, words)
    for name, options in STAGES:
        with tokensieve.attach(tiny.model, name, **options), pytest.warns(UserWarning, match="no image"):
            assert torch.equal(tokens(tiny.model, words), wanted)


@pytest.mark.parametrize(("name", "options", "error", "words"), [
    ("fastv", {}, BudgetError, "no budget"),
    ("fastv", {"keep": 0.5, "keep_average": 0.5}, BudgetError, "give one"),
    ("fastv", {"keep": 0}, BudgetError, "at least one"),
    ("fastv", {"keep": 12, "at": 0}, OptionError, "layers 1 to 5"),
    ("fastv", {"keep": 12, "at": 6}, OptionError, "layers 1 to 5"),
    ("fastv", {"keep": 12, "at": [2, 2]}, OptionError, "once"),
    ("fastv", {"keep": [20, 10], "at": 2}, BudgetError, "2 budgets for 1"),
    ("visionzip", {"keep": 12, "at": 2}, OptionError, "between vision tower and projector"),
    ("visionzip", {"keep": 12, "positions": "renumbered"}, OptionError, "renumber"),
    ("visionzip", {"keep": 12, "mode": "analyse"}, OptionError, "mode='prune'"),
    ("visionzip", {"keep": 12, "contextual": 2.0}, OptionError, "contextual"),
    ("evit", {"keep": 12}, UnsupportedModelError, "vision_tower"),
    ("two_stage", {"keep": 0.2, "first": "fastv"}, OptionError, "first=FastV: it works at decoder"),
    ("two_stage", {"keep": 0.2, "second": "fastw"}, UnknownNameError, "fastv"),
    ("divprune", {"keep": 12, "at": 0, "space": "keys"}, OptionError, "no layer comes before"),
])  # fmt: skip
def test_what_cannot_be_asked_for(tiny, name, options, error, words) -> None:
    before = facts(tiny.model)
    with pytest.raises(error, match=words), tokensieve.attach(tiny.model, name, **options):
        tiny.model(**tiny.prompts(ONE))
    after = facts(tiny.model)
    assert [f[1] for f in after] == [f[1] for f in before]


@pytest.mark.parametrize("name", ["fastv", "visionzip", "two_stage"])
def test_a_plain_clip_is_no_place_for_them(name) -> None:
    tower = tiny_model("transformers_clip").model
    with pytest.raises(UnsupportedModelError, match=r"works in a vision-language model \(LLaVA\).*is a vision encoder"):
        tokensieve.attach(tower, name, keep=0.5)
    with pytest.raises(OptionError, match="positions"):
        tokensieve.attach(tower, "evit", keep=0.5, positions="renumber")


def test_calls_that_go_past_the_model(tiny) -> None:
    prompts = tiny.prompts(ONE)
    with tokensieve.attach(tiny.model, "fastv", keep=12):
        with pytest.raises(UnsupportedModelError, match="called by itself"):
            tiny.model.model.language_model(input_ids=torch.tensor([[3, 4]]))
        with pytest.raises(OptionError, match="logits_to_keep"):
            tiny.model(**prompts, logits_to_keep=torch.tensor([1]))
        with pytest.raises(UnsupportedModelError, match="StaticLayer"):
            tokens(tiny.model, prompts, cache_implementation="static")
        with pytest.raises(UnsupportedModelError, match="2D attention mask"):
            tiny.model(**(prompts | {"attention_mask": torch.ones(1, 1, 44, 44)}))


def test_tokens_that_a_shortened_cache_has_seen_are_not_run_again(tiny) -> None:
    prompts = tiny.prompts(ONE)
    with tokensieve.attach(tiny.model, "visionzip", keep=12):
        first = tokens(tiny.model, prompts, return_dict_in_generate=True)
        again = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
        with pytest.raises(OptionError, match="give only the new tokens"):
            tokens(tiny.model, again, past_key_values=first.past_key_values)


@pytest.mark.parametrize(("name", "reason"), [
    ("MllamaForConditionalGeneration", "cross-attention layers"), ("Llama4ForConditionalGeneration", "experts"),
    ("Blip2ForConditionalGeneration", "32 tokens"), ("Florence2ForConditionalGeneration", "encoder and a decoder"),
    ("FuyuForCausalLM", "no vision tower"), ("Kosmos2ForConditionalGeneration", "LLaVA, .*Qwen2.5-VL"),
])  # fmt: skip
def test_other_vision_language_models_are_refused_with_the_reason(name, reason) -> None:
    import transformers as hf

    made = getattr(hf, name)
    config = made.config_class()
    for part in (config, getattr(config, "text_config", config), getattr(config, "vision_config", config)):
        for count in ("num_hidden_layers", "num_global_layers", "encoder_layers", "decoder_layers"):
            if isinstance(getattr(part, count, None), int):
                setattr(part, count, 1)
    with torch.device("meta"):
        model = made(config)
    with pytest.raises(UnsupportedModelError, match=f"{name} is not supported: .*{reason}"):
        tokensieve.attach(model, "fastv", keep=0.5)
