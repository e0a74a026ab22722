"""LLaVA reduced against a referee that masks instead of dropping, and the exact properties of generation."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import tokensieve
from helpers.naive_llava import full_embeds, gone_places, masked_decoder
from tokensieve.core.cost import decoder_macs, decoder_shape
from tokensieve.errors import BudgetError
from tokensieve.testing.vlm import tiny_llava

SDPA, EAGER = tiny_llava(), tiny_llava("eager")
BOTH = {"sdpa": SDPA, "eager": EAGER}
ONE = [(3, 1, 5)]
LENGTHS = [(3, 1, 5), (6, 1, 2), (2, 1, 9), (4, 1, 4)]
MIXED = [(3, 1, 5), (6, 2, 2), (2, 1, 9), (4, 3, 4)]

# a method, its options: every stage, one cut and several, both
DROPS = {
    "random-1": ("random", {"keep": 10}),
    "divprune-1": ("divprune", {"keep": 7}),
    "fastv": ("fastv", {"keep": 12}),
    "fastv-at-4": ("fastv", {"keep": 5, "at": 4}),
    "pyramiddrop": ("pyramiddrop", {"keep": 0.125}),
    "random-layers": ("random", {"keep": [20, 9], "at": [0, 3]}),
    "two_stage": ("two_stage", {"keep": 0.25, "first": "vispruner", "second": "fastv"}),
}
ALL = DROPS | {
    "visionzip": ("visionzip", {"keep": 12}),
    "prumerge": ("prumerge", {"keep": 12}),
    "sparsevlm": ("sparsevlm", {"keep": 0.3}),
    "two_stage-merging": ("two_stage", {"keep": 0.25}),
    "sieve": ("sieve", {"keep": 12}),
    "divprune-fold": ("divprune", {"keep": [20, 9], "at": [1, 3], "fold": True}),
    "two_stage-fold": (
        "two_stage",
        {"keep": 0.25, "first": "tome", "second": "fastv", "second_options": {"fold": True}},
    ),
}


def attach(tiny, case):
    name, options = ALL[case]
    return tokensieve.attach(tiny.model, name, **options)


def generate(tiny, prompts, new=8, **options):
    """Tokens (B, new) and their logits (B, new, V)."""
    options = {"do_sample": False} | options
    with torch.no_grad():
        out = tiny.model.generate(
            **prompts, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options
        )
    return out.sequences[:, prompts["input_ids"].shape[1] :], torch.stack(out.logits, dim=1)


# -- keep-all -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ONE, MIXED], ids=["one", "mixed"])
@pytest.mark.parametrize("tiny", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize("case", ["visionzip", "fastv", "pyramiddrop", "two_stage"])
def test_keep_all_is_bit_equal_prefill_and_twenty_tokens(case, tiny, rows) -> None:
    prompts = tiny.prompts(rows)
    name, options = ALL[case]
    options = options | {"keep": 1.0} | ({"merge_keep": 1.0} if name == "two_stage" else {})
    with torch.no_grad():
        before, tokens = tiny.model(**prompts).logits, generate(tiny, prompts, 20)
        with pytest.warns(UserWarning, match="nothing is reduced"):
            handle = tokensieve.attach(tiny.model, name, **options)
        with handle:
            assert torch.equal(tiny.model(**prompts).logits, before)
            again = generate(tiny, prompts, 20)
    assert torch.equal(again[0], tokens[0])
    assert torch.equal(again[1], tokens[1])


# -- dropping is masking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("tiny", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize("case", DROPS)
def test_dropping_equals_masking_the_same_tokens(case, tiny, images) -> None:
    prompts = tiny.prompts([(3, images, 5)])
    with torch.no_grad(), attach(tiny, case) as handle:
        logits = tiny.model(**prompts).logits[0]
        kept = handle.kept
    embeds, places = full_embeds(tiny.model, prompts["input_ids"], prompts["pixel_values"])
    gone = gone_places(kept, places)
    assert sum(map(len, gone.values())) > 0
    wanted, _ = masked_decoder(tiny.model, embeds, gone)
    left = sorted(set(range(len(embeds))) - set(gone[max(gone)].tolist()))
    assert logits.shape[0] == len(left)
    assert (logits - wanted[left]).abs().max() < 1e-4 * wanted.abs().max()


def folded_prompt(tiny, prompts, handle):
    """What one image's reduced prompt is by loops: embeddings with what stage 1 averaged, sizes, joins by layer."""
    model, inner = tiny.model, tiny.model.model
    embeds, places = full_embeds(model, prompts["input_ids"], prompts["pixel_values"])
    size, joins, kept = torch.ones(len(embeds)), {}, torch.arange(len(places))
    for layer, (reduction,) in sorted(handle.last.reductions.items()):
        slots = reduction.slots(len(kept))[0].tolist()
        stay = reduction.keep[0].tolist()
        if layer < 0:
            prefix = 1 if model.config.vision_feature_select_strategy == "default" else 0
            states = inner.vision_tower(prompts["pixel_values"], output_hidden_states=True).hidden_states
            raw = states[model.config.vision_feature_layer][0, prefix:]
            for slot, number in enumerate(stay):
                members = [i for i in range(len(raw)) if slots[i] == slot]
                mean = sum(raw[i] for i in members) / len(members)
                embeds[places[number]] = inner.multi_modal_projector(mean)
                size[places[number]] = len(members)
        else:
            joins[layer] = {
                int(places[kept[i]]): int(places[kept[stay[slots[i]]]]) for i in range(len(kept)) if i not in stay
            }
        kept = kept[stay]
    return embeds, places, size, joins


@pytest.mark.parametrize("tiny", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize("case", ["sieve", "divprune-fold", "two_stage-fold"])
def test_merged_tokens_weigh_what_they_stand_for_in_prefill_and_decoding(case, tiny) -> None:
    prompts = tiny.prompts(ONE)
    with torch.no_grad(), attach(tiny, case) as handle:
        tokens, logits = generate(tiny, prompts, 4)
        kept, weight = handle.kept, (handle.second or handle.first).proportional
        embeds, places, size, joins = folded_prompt(tiny, prompts, handle)
    if case == "two_stage-fold":
        assert handle.first.proportional == weight
    assert sum(map(len, joins.values())) + int((size > 1).sum()) > 5
    for step in range(4):
        more = {"size": size, "joins": joins, "proportional": weight}
        wanted, _ = masked_decoder(tiny.model, embeds, gone_places(kept, places), **more)
        assert (logits[0, step] - wanted[-1]).abs().max() < 1e-4 * wanted[-1].abs().max()
        plain, _ = masked_decoder(tiny.model, embeds, gone_places(kept, places), **more | {"proportional": 0.0})
        assert (logits[0, step] - plain[-1]).abs().max() > 1e-3 * wanted[-1].abs().max()
        embeds = torch.cat([embeds, tiny.model.model.language_model.embed_tokens(tokens[0, step])[None]])
        size = torch.cat([size, torch.ones(1)])


def test_proportional_0_weighs_merged_tokens_as_one() -> None:
    prompts = SDPA.prompts(ONE)
    with torch.no_grad(), tokensieve.attach(SDPA.model, "tome", keep=20, proportional=0) as handle:
        _, logits = generate(SDPA, prompts, 1)
        embeds, places, size, _ = folded_prompt(SDPA, prompts, handle)
        assert handle.last.stretch_of(0).key_bias is None
    wanted, _ = masked_decoder(SDPA.model, embeds, gone_places(handle.kept, places), size=size, proportional=0.0)
    assert (logits[0, 0] - wanted[-1]).abs().max() < 1e-4 * wanted[-1].abs().max()


def test_flash_attention_cannot_weigh_and_says_so() -> None:
    from tokensieve.errors import UnsupportedModelError
    from tokensieve.models.decoder.memory import attention_mask

    with pytest.raises(UnsupportedModelError, match="proportional=0"):
        attention_mask("flash_attention_2", None, 4, 4, torch.zeros(1, 4, 8), torch.zeros(1, 4))


@pytest.mark.parametrize("case", ["fastv", "divprune-1", "two_stage"])
@pytest.mark.parametrize("options", [{"text": "mistral"}, {"text": "qwen2"}, {"tower": "siglip"}], ids=str)
def test_other_language_models_and_towers(options, case) -> None:
    tiny = tiny_llava(**options)
    prompts = tiny.prompts([(3, 2, 5)])
    with attach(tiny, case) as handle:
        tokens, logits = generate(tiny, prompts, 3)
        kept = handle.kept
    embeds, places = full_embeds(tiny.model, prompts["input_ids"], prompts["pixel_values"])
    for step in range(3):
        wanted, _ = masked_decoder(tiny.model, embeds, gone_places(kept, places))
        assert (logits[0, step] - wanted[-1]).abs().max() < 1e-4 * wanted[-1].abs().max()
        embeds = torch.cat([embeds, tiny.model.model.language_model.embed_tokens(tokens[0, step])[None]])


def test_fastv_keeps_what_the_last_token_attends_to_in_the_layer_before() -> None:
    for tiny in (SDPA, EAGER, tiny_llava(kv_heads=4, seed=3)):
        prompts = tiny.prompts(ONE)
        with torch.no_grad(), tokensieve.attach(tiny.model, "fastv", keep=9, at=3) as handle:
            tiny.model(**prompts)
            kept, scores = handle.kept[3][0], handle.scores[3][0]
            tiny.model(**prompts, use_cache=False)  # keys worked out anew, not taken from the cache
            assert torch.equal(handle.kept[3][0], kept)
        embeds, places = full_embeds(tiny.model, prompts["input_ids"], prompts["pixel_values"])
        _, maps = masked_decoder(tiny.model, embeds, {})
        row = maps[2][-1, places]
        assert torch.allclose(scores.double(), row, atol=1e-5)
        assert kept.tolist() == sorted(row.topk(9).indices.tolist())


@pytest.mark.parametrize("tiny", [SDPA, EAGER, tiny_llava(kv_heads=4, seed=3)], ids=["sdpa", "eager", "heads"])
def test_pyramiddrop_ranks_by_the_layer_that_comes_next(tiny) -> None:
    """Each cut by the map of the layer it stands before, in a decoder that keeps what this cut removes."""
    prompts = tiny.prompts(ONE)
    with torch.no_grad(), tokensieve.attach(tiny.model, "pyramiddrop", keep=[20, 12, 6]) as handle:
        out = tiny.model(**prompts)
        kept, scores = handle.kept, handle.scores
        tiny.model(**prompts, use_cache=False)
        assert all(torch.equal(handle.kept[layer], kept[layer]) for layer in kept)
        more = tiny.prompts([(2, 1, 4)], seed=7)
        mask = torch.cat([prompts["attention_mask"], more["attention_mask"]], dim=1)
        tiny.model(**more | {"attention_mask": mask}, past_key_values=out.past_key_values)
        kept_later, scores_later = handle.kept, handle.scores
    assert list(kept) == [1, 3, 4]
    first, places = full_embeds(tiny.model, prompts["input_ids"], prompts["pixel_values"])
    second, later = full_embeds(tiny.model, more["input_ids"], more["pixel_values"])
    gone, both = gone_places(kept, places), gone_places(kept_later, later + len(first))
    left, told_apart = torch.arange(36), 0
    for cut, count in zip(kept, [20, 12, 6], strict=True):
        _, maps = masked_decoder(tiny.model, first, {layer: gone[layer] for layer in gone if layer < cut})
        assert torch.allclose(scores[cut][0, left].double(), maps[cut][-1, places[left]], atol=1e-5)
        left, before = (left[m[-1, places[left]].topk(count).indices].sort().values for m in (maps[cut], maps[cut - 1]))
        assert kept[cut][0].tolist() == left.tolist()
        told_apart += left.tolist() != before.tolist()
        # the second turn: the first turn's keys are those that its own cut left to this layer
        whole = {layer: torch.cat([gone[layer], both[layer]]) if layer < cut else gone[layer] for layer in gone}
        _, maps = masked_decoder(tiny.model, torch.cat([first, second]), whole)
        seen = ~scores_later[cut][0].isnan()
        row = maps[cut][-1, (later + len(first))[seen]]
        assert torch.allclose(scores_later[cut][0, seen].double(), row, atol=1e-5)
    assert told_apart


def test_original_positions_are_kept_and_renumbering_moves_them_up() -> None:
    prompts = SDPA.prompts(ONE)
    for positions in ("original", "renumber"):
        with torch.no_grad(), tokensieve.attach(SDPA.model, "grid", keep=6, positions=positions) as handle:
            _, logits = generate(SDPA, prompts, 3)
            kept = handle.kept
        embeds, places = full_embeds(SDPA.model, prompts["input_ids"], prompts["pixel_values"])
        gone = gone_places(kept, places)[0]
        left = torch.tensor(sorted(set(range(len(embeds))) - set(gone.tolist())))
        place = torch.arange(len(left)) if positions == "renumber" else left
        wanted, _ = masked_decoder(SDPA.model, embeds[left], {}, place)
        assert torch.allclose(logits[0, 0].double(), wanted[-1], atol=1e-4)
        # the next token's position follows the prompt's in its own numbering
        word = SDPA.model.model.language_model.embed_tokens(logits[0, 0].argmax())
        longer = torch.cat([embeds[left], word[None]])
        wanted, _ = masked_decoder(SDPA.model, longer, {}, torch.cat([place, place[-1:] + 1]))
        assert torch.allclose(logits[0, 1].double(), wanted[-1], atol=1e-4)


# -- generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize("case", DROPS)
def test_generation_equals_running_the_whole_pruned_sequence_at_each_step(case, tiny) -> None:
    prompts = tiny.prompts([(3, 2, 5)])
    with attach(tiny, case) as handle:
        tokens, logits = generate(tiny, prompts, 5)
        kept = handle.kept
    embeds, places = full_embeds(tiny.model, prompts["input_ids"], prompts["pixel_values"])
    gone = gone_places(kept, places)
    for step in range(5):
        wanted, _ = masked_decoder(tiny.model, embeds, gone)
        assert (logits[0, step] - wanted[-1]).abs().max() < 1e-4 * wanted[-1].abs().max()
        embeds = torch.cat([embeds, tiny.model.model.language_model.embed_tokens(tokens[0, step])[None]])


@pytest.mark.parametrize("rows", [LENGTHS, MIXED], ids=["lengths", "images"])
@pytest.mark.parametrize("tiny", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize("case", ALL)
def test_a_left_padded_batch_equals_its_singles(case, tiny, rows) -> None:
    with attach(tiny, case) as handle:
        tokens, logits = generate(tiny, tiny.prompts(rows), 4)
        kept = handle.kept
        for i, row in enumerate(rows):
            alone, logits_alone = generate(tiny, tiny.prompts([row]), 4)
            for place, numbers in handle.kept.items():
                mine = kept[place][i]
                assert torch.equal(mine[mine >= 0], numbers[0])
            assert (logits_alone[0] - logits[i]).abs().max() < 1e-3 * logits[i].abs().max()
            assert torch.equal(alone[0], tokens[i])


@pytest.mark.parametrize("case", ALL)
def test_eager_and_sdpa_agree(case) -> None:
    found = []
    for tiny in BOTH.values():
        with attach(tiny, case):
            found.append(generate(tiny, tiny.prompts(MIXED), 4))
    (one, logits), (two, others) = found
    assert torch.equal(one, two)
    assert torch.allclose(logits, others, atol=1e-3)


@pytest.mark.parametrize("case", ["fastv", "pyramiddrop", "divprune-1", "two_stage"])
def test_beams_score_what_the_masked_model_says(case) -> None:
    prompts = SDPA.prompts(ONE)
    length = prompts["input_ids"].shape[1]
    with torch.no_grad(), attach(SDPA, case) as handle:
        out = SDPA.model.generate(
            **prompts, max_new_tokens=5, num_beams=4, num_return_sequences=4, do_sample=False, length_penalty=0.0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        kept = handle.kept
    embeds, places = full_embeds(SDPA.model, prompts["input_ids"], prompts["pixel_values"])
    scores = []
    for sequence in out.sequences[:, length:]:
        words = SDPA.model.model.language_model.embed_tokens(sequence)
        wanted, _ = masked_decoder(SDPA.model, torch.cat([embeds, words]), gone_places(kept, places))
        logs = wanted[length - 1 : -1].log_softmax(-1)
        scores.append(logs.gather(1, sequence[:, None]).sum().item())
    assert torch.allclose(out.sequences_scores.double(), torch.tensor(scores).double(), atol=1e-3)
    assert scores == sorted(scores, reverse=True)


def test_beams_of_a_padded_batch_with_several_images_equal_their_singles() -> None:
    for case in ("two_stage-merging", "two_stage-fold", "pyramiddrop"):
        with torch.no_grad(), attach(EAGER, case):
            batch = EAGER.model.generate(**EAGER.prompts(MIXED), max_new_tokens=5, num_beams=3, do_sample=False)
            for i, row in enumerate(MIXED):
                prompts = EAGER.prompts([row])
                alone = EAGER.model.generate(**prompts, max_new_tokens=5, num_beams=3, do_sample=False)
                assert torch.equal(alone[0, -5:], batch[i, -5:])


@pytest.mark.parametrize("case", ["fastv", "visionzip", "two_stage"])
def test_sampling_repeats_with_its_seed_and_draws_from_the_right_logits(case) -> None:
    prompts = SDPA.prompts(ONE)
    with attach(SDPA, case):
        drawn = []
        for _ in range(2):
            torch.manual_seed(5)
            drawn.append(generate(SDPA, prompts, 6, do_sample=True, num_return_sequences=3))
        greedy = generate(SDPA, prompts, 1)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert drawn[0][0].shape == (3, 6)
    assert len({tuple(row.tolist()) for row in drawn[0][0]}) > 1
    assert torch.allclose(drawn[0][1][:, 0], greedy[1][:, 0].expand(3, -1), atol=1e-4)


def test_a_second_turn_goes_on_from_the_shortened_cache() -> None:
    """A follow-up without an image, on the cache of the first turn: as if all had been said at once."""
    for case in ("fastv", "divprune-1"):
        prompts = SDPA.prompts(ONE)
        more = torch.tensor([[7, 8, 9]])
        with torch.no_grad(), attach(SDPA, case) as handle:
            first = SDPA.model(**prompts)
            kept = handle.kept
            mask = torch.cat([prompts["attention_mask"], torch.ones_like(more)], dim=1)
            out = SDPA.model(input_ids=more, attention_mask=mask, past_key_values=first.past_key_values)
        embeds, places = full_embeds(SDPA.model, prompts["input_ids"], prompts["pixel_values"])
        words = SDPA.model.model.language_model.embed_tokens(more[0])
        wanted, _ = masked_decoder(SDPA.model, torch.cat([embeds, words]), gone_places(kept, places))
        assert (out.logits[0] - wanted[-3:]).abs().max() < 1e-4 * wanted[-3:].abs().max()


@pytest.mark.parametrize("case", ["fastv", "divprune-1", "renumbered", "two_stage"])
@pytest.mark.parametrize("tiny", BOTH.values(), ids=list(BOTH))
def test_a_second_turn_with_another_image(tiny, case) -> None:
    first, second = tiny.prompts(ONE), tiny.prompts([(2, 1, 4)], seed=7)
    whole = {name: torch.cat([first[name], second[name]], dim=1) for name in ("input_ids", "attention_mask")}
    name, options = ("grid", {"keep": 9, "positions": "renumber"}) if case == "renumbered" else ALL[case]
    with torch.no_grad(), tokensieve.attach(tiny.model, name, **options) as handle:
        out = tiny.model(**first)
        kept = [handle.kept]
        more = second | {"attention_mask": whole["attention_mask"]}
        out = tiny.model(**more, past_key_values=out.past_key_values)
        kept.append(handle.kept)
        last = tiny.model(input_ids=torch.tensor([[5]]), past_key_values=out.past_key_values).logits[0, -1]
    pixels = torch.cat([first["pixel_values"], second["pixel_values"]])
    embeds, places = full_embeds(tiny.model, whole["input_ids"], pixels)
    embeds = torch.cat([embeds, tiny.model.model.language_model.embed_tokens(torch.tensor([5]))])
    halves = [gone_places(kept[0], places[:36]), gone_places(kept[1], places[36:])]
    gone = {layer: torch.cat([half[layer] for half in halves]) for layer in halves[0]}
    if case == "renumbered":
        left = [i for i in range(len(embeds)) if i not in gone[0].tolist()]
        embeds, gone = embeds[left], {}
    wanted, _ = masked_decoder(tiny.model, embeds, gone)
    assert (last - wanted[-1]).abs().max() < 1e-4 * wanted[-1].abs().max()


@pytest.mark.parametrize("case", ["fastv", "visionzip", "two_stage"])
def test_embeddings_instead_of_words_and_a_cache_that_is_cropped(case) -> None:
    """inputs_embeds with placeholders, also with beams; and prompt lookup, which crops what was guessed wrong."""
    prompts = SDPA.prompts(ONE)
    embeds = SDPA.model.get_input_embeddings()(prompts["input_ids"]).detach()
    given = {"inputs_embeds": embeds} | {name: prompts[name] for name in ("attention_mask", "pixel_values")}
    with torch.no_grad(), attach(SDPA, case):
        for options in ({}, {"num_beams": 3}):
            wanted = SDPA.model.generate(**prompts, max_new_tokens=5, do_sample=False, **options)
            found = SDPA.model.generate(**given, max_new_tokens=5, do_sample=False, **options)
            assert torch.equal(found, wanted[:, -5:])
        looked_up = SDPA.model.generate(**prompts, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
        assert torch.equal(looked_up, SDPA.model.generate(**prompts, max_new_tokens=12, do_sample=False))


# -- what it holds and what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "vision"), [
    ("fastv", [36, 36, 12, 12, 12, 12]), ("random-1", [10] * 6), ("random-layers", [20, 20, 20, 9, 9, 9]),
    ("fastv-at-4", [36, 36, 36, 36, 5, 5]),
])  # fmt: skip
def test_kv_bytes_are_what_the_schedule_says(case, vision) -> None:
    rows, new = [(3, 1, 5), (4, 1, 4)], 6
    with attach(SDPA, case) as handle:
        handle.timing = True
        generate(SDPA, SDPA.prompts(rows), new)
        stats = handle.stats
    # two kv heads of twelve, keys and values, float32, two prompts; the last new token is never cached
    wanted = [(8 + n + new - 1) * 2 * 2 * 12 * 4 * 2 for n in vision]
    assert stats.kv_bytes_per_layer == wanted
    assert stats.kv_bytes == sum(wanted)
    assert stats.tokens_per_layer == [8 + n for n in vision]
    assert stats.vision_tokens_per_layer == vision
    assert stats.vision_tokens_average == pytest.approx(sum(vision) / 6)
    assert stats.decode_steps == new - 1
    assert 0.0 < stats.overhead_seconds < stats.prefill_seconds
    assert stats.decode_seconds > 0.0
    assert stats.vision_seconds > 0.0


def test_the_formula_gives_the_published_macs() -> None:
    shapes = [decoder_shape(4096, 11008, 32)] * 32
    assert decoder_macs(shapes, [576] * 32) / 1e12 == pytest.approx(3.82, abs=0.005)
    steps = [576] * 8 + [288] * 8 + [144] * 8 + [72] * 8
    assert decoder_macs(shapes, steps) / 1e12 == pytest.approx(1.78, abs=0.005)
    n, d, m = 100, 4096, 11008
    assert decoder_macs(shapes[:1], [n]) == 4 * n * d * d + 2 * n * n * d + 3 * n * d * m


def test_cost_counts_matrices_as_hooks_see_them() -> None:
    """Every linear layer of decoder, tower and projector, counted while it runs; attention's products by formula."""
    prompts = SDPA.prompts(ONE)
    spent = {"decoder": 0, "vision": 0}
    inner = SDPA.model.model

    def count(kind):
        def hook(module, args, out):
            spent[kind] += args[0].shape[:-1].numel() * module.weight.numel()

        return hook

    hooks = []
    parts_of = {"decoder": [inner.language_model], "vision": [inner.vision_tower, inner.multi_modal_projector]}
    for kind, parts in parts_of.items():
        for part in parts:
            linears = [m for m in part.modules() if isinstance(m, torch.nn.Linear)]
            hooks += [m.register_forward_hook(count(kind)) for m in linears]
    try:
        # grid looks at nothing: what is counted is the model's work alone
        options = {"first": "grid", "second": "grid"}
        with torch.no_grad(), tokensieve.attach(SDPA.model, "two_stage", keep=0.25, **options) as handle:
            SDPA.model(**prompts)
            cost, tokens = handle.cost(), handle.tokens_per_layer
    finally:
        for hook in hooks:
            hook.remove()
    products = sum(2 * n * n * 48 for n in tokens)
    assert cost.macs == spent["decoder"] + products
    tower = 4 * 2 * 37 * 37 * 32 + 36 * 3 * 8 * 8 * 32  # attention's products and the patch embedding
    assert cost.vision_macs == spent["vision"] + tower
    assert cost.with_tower.macs == cost.macs + cost.vision_macs
    assert cost.possible > cost.with_tower.possible > 1.0
    assert cost.tokens_per_layer == tuple(tokens)


def test_the_cost_of_a_batch_is_the_mean_of_its_prompts() -> None:
    for case in ("two_stage", "fastv", "visionzip"):
        with torch.no_grad(), attach(SDPA, case) as handle:
            SDPA.model(**SDPA.prompts(MIXED))
            together = handle.cost()
            alone = []
            for row in MIXED:
                SDPA.model(**SDPA.prompts([row]))
                alone.append(handle.cost())
        for name in ("macs", "macs_full", "vision_macs", "vision_macs_full", "vision_tokens_average"):
            wanted = sum(getattr(cost, name) for cost in alone) / len(alone)
            assert getattr(together, name) == pytest.approx(wanted, abs=1)
        assert min(cost.saved for cost in alone) <= together.saved <= max(cost.saved for cost in alone)


@pytest.mark.parametrize(("name", "options"), [
    ("fastv", {}), ("pyramiddrop", {}), ("sparsevlm", {}), ("visionzip", {}), ("two_stage", {"merge_keep": 0.7}),
])  # fmt: skip
def test_keep_average_is_solved_for(name, options) -> None:
    with tokensieve.attach(SDPA.model, name, keep_average=0.6, **options) as handle:
        generate(SDPA, SDPA.prompts(MIXED), 2)
        stats = handle.stats
        images = sum(images for _, images, _ in MIXED) / len(MIXED)
    assert stats.vision_tokens_average == pytest.approx(0.6 * 36 * images, abs=1.0 * images)


def test_an_average_under_the_floor_prints_it() -> None:
    floor = (2 * 36 + 4 * 1) / 6
    with pytest.raises(BudgetError, match=rf"cannot go under {floor:.1f} \({floor / 36:.3f}\)"):
        tokensieve.attach(SDPA.model, "fastv", keep_average=0.25)
    with warnings.catch_warnings(), tokensieve.attach(SDPA.model, "fastv", keep_average=math.ceil(floor)) as handle:
        assert sum(handle.vision_tokens_per_layer) / 6 == pytest.approx(floor, abs=1.0)
