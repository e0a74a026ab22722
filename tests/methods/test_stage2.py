"""fastv, pyramiddrop, sparsevlm and two_stage: scores against loops over a written-out attention map."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tokensieve
from helpers.method_views import best
from tokensieve.core.prompt import Sentence
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method
from tokensieve.testing.vlm import tiny_llava

BATCH, HEADS, GROUPS, D, BEFORE, N, AFTER = 3, 4, 2, 5, 2, 20, 6
LENGTH = BEFORE + N + AFTER


def draw(seed=0, valid=None, text_valid=None, past=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, HEADS, LENGTH, D, generator=g)
    k = torch.randn(BATCH, GROUPS, past + LENGTH, D, generator=g)
    tokens = torch.randn(BATCH, N, 8, generator=g)
    joint, text = torch.randn(BATCH, N, 6, generator=g), torch.randn(BATCH, AFTER, 6, generator=g)
    place = torch.arange(LENGTH).expand(BATCH, -1)
    sentence = Sentence(
        lambda rows: q.gather(2, rows[:, None, :, None].expand(-1, HEADS, -1, D)), lambda: k, scale=0.7,
        vision=place[:, BEFORE : BEFORE + N], last=place[:, -1], text=place[:, BEFORE + N :], valid=valid, past=past,
    )  # fmt: skip
    view = TokenView(
        tokens, lambda _: q[:, :, BEFORE : BEFORE + N], lambda _: k, scale=0.7, prefix=0, has_cls=False, text=text,
        text_valid=text_valid, project=lambda _: joint, sentence=sentence,
    )  # fmt: skip
    return view, q, k, joint, text


def attention(q, k, b, row, valid=None, past=0):
    """(S,) what the token at `row` of prompt b looks at, mean over heads, in plain numbers."""
    total = np.zeros(k.shape[2])
    for h in range(HEADS):
        e = np.zeros(k.shape[2])
        for j in range(k.shape[2]):
            if j <= row + past and (valid is None or valid[b, j]):
                e[j] = np.exp(0.7 * float(q[b, h, row].double() @ k[b, h // (HEADS // GROUPS), j].double()))
        total += e / e.sum() / HEADS
    return total


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["fastv", "pyramiddrop"])
def test_the_last_tokens_attention(name, padded, past) -> None:
    valid = None
    if padded:
        valid = torch.ones(BATCH, past + LENGTH, dtype=torch.bool)
        valid[1, past : past + 2] = False
    view, q, k, *_ = draw(1, valid=valid, past=past)
    reduction = make_method(name).reduce(view, 7)
    for b in range(BATCH):
        row = attention(q, k, b, LENGTH - 1, valid, past)[past + BEFORE : past + BEFORE + N]
        assert np.allclose(reduction.scores[b].numpy(), row, atol=1e-6)
        assert reduction.keep[b].tolist() == best(row, 7)


@pytest.mark.parametrize("short", [False, True])
def test_sparsevlm_scores_by_its_raters(short) -> None:
    text_valid = torch.ones(BATCH, AFTER, dtype=torch.bool)
    if short:
        text_valid[2, :3] = False
    view, q, k, joint, text = draw(2, text_valid=text_valid)
    scores = make_method("sparsevlm").score(view)
    for b in range(BATCH):
        words = [t for t in range(AFTER) if text_valid[b, t]]
        share = np.zeros(AFTER)
        for i in range(N):
            e = np.array([np.exp(float(joint[b, i].double() @ text[b, t].double())) for t in words])
            share[words] += e / e.sum() / N
        raters = [t for t in words if share[t] >= np.mean(share[words])]
        assert 0 < len(raters) < len(words)
        rows = [attention(q, k, b, BEFORE + N + t)[BEFORE : BEFORE + N] for t in raters]
        assert np.allclose(scores[b].numpy(), np.mean(rows, axis=0), atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_prior_tr_takes_off_what_would_be_looked_at_anyway(padded) -> None:
    valid = None
    if padded:
        valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        valid[1, :2] = False
    view, q, k, *_ = draw(6, valid=valid)
    reduction = make_method("prior_tr").reduce(view, 7)
    for b in range(BATCH):
        p, prior = (attention(q, k, b, row, valid)[BEFORE : BEFORE + N] for row in (LENGTH - 1, BEFORE + N))
        p, prior = p / p.sum(), prior / prior.sum()
        wanted = [a * np.log(a / c) for a, c in zip(p, prior, strict=True)]
        assert np.allclose(reduction.scores[b].numpy(), wanted, atol=1e-6)
        assert reduction.keep[b].tolist() == best(wanted, 7)
        assert reduction.keep[b].tolist() != best(p, 7)  # what attention alone would keep


def test_v2drop_keeps_what_changed_most() -> None:
    view, *_ = draw(7)
    before = torch.randn(BATCH, LENGTH, 8, generator=torch.Generator().manual_seed(8))
    view.sentence._came = lambda rows: before.gather(1, rows.unsqueeze(-1).expand(-1, -1, 8))
    reduction = make_method("v2drop").reduce(view, 6)
    for b in range(BATCH):
        now = view.tokens[b].double().numpy()
        change = [np.sqrt(((now[i] - before[b, BEFORE + i].double().numpy()) ** 2).sum()) for i in range(N)]
        assert np.allclose(reduction.scores[b].numpy(), change, atol=1e-5)
        assert reduction.keep[b].tolist() == best(change, 6)


def test_v2drop_looks_at_the_states_around_the_layer_before_the_cut() -> None:
    tiny = tiny_llava()
    prompts = tiny.prompts([(3, 1, 5)])
    seen = []
    layer = tiny.model.model.language_model.layers[2]
    with torch.no_grad():
        hook = layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        tiny.model(**prompts)
        hook.remove()
        with tokensieve.attach(tiny.model, "v2drop", keep=9, at=3) as handle:
            tiny.model(**prompts)
            kept, scores = handle.kept[3][0], handle.scores[3][0]
    (entered, left), place = seen[0], slice(3, 39)
    change = (left[0, place] - entered[0, place]).norm(dim=-1)
    assert torch.allclose(scores, change, rtol=1e-4)
    assert kept.tolist() == sorted(change.topk(9).indices.tolist())


def test_sparsevlm_recycles_the_best_of_the_dropped() -> None:
    view, *_ = draw(3)
    method = make_method("sparsevlm", recycle=0.8, clusters=0.25)
    keep = 9
    recycled, made = method.made(N, keep)
    assert made == 3  # a quarter of 80 % of the 14 that are dropped before any is recycled
    assert recycled == round(0.8 * (N - keep + made))
    reduction = method.reduce(view, keep)
    out, _ = reduction.apply(view.tokens)
    for b in range(BATCH):
        order = reduction.scores[b].argsort(descending=True).tolist()
        stay, pool = order[: keep - made], order[keep - made : keep - made + recycled]
        kept = reduction.keep[b].tolist()
        centres = [i for i in kept if i not in stay]
        assert set(stay) < set(kept)
        assert len(centres) == made
        assert set(centres) < set(pool)
        groups = {c: [] for c in centres}
        for i in pool:
            near = min(centres, key=lambda c, i=i: float((view.tokens[b, i] - view.tokens[b, c]).norm()))
            groups[i if i in centres else near].append(i)
        for slot, i in enumerate(kept):
            wanted = view.tokens[b, groups[i]].mean(0) if i in groups else view.tokens[b, i]
            assert torch.allclose(out[b, slot], wanted, atol=1e-5)


def peaks(x, clusters, neighbours):
    """Centres by density peaks; neighbours: how many, a token itself among them, make its density."""
    m, width = x.shape
    d = np.array([[np.linalg.norm(a - b) / np.sqrt(width) for b in x] for a in x])
    density = [np.exp(-np.mean(np.sort(row)[:neighbours] ** 2)) for row in d]
    apart = [min((d[i, j] for j in range(m) if density[j] > density[i]), default=d.max()) for i in range(m)]
    return set(sorted(range(m), key=lambda i: -density[i] * apart[i])[:clusters])


def test_sparsevlms_density_is_of_as_many_neighbours_as_clusters() -> None:
    view, *_ = draw(3)
    method, keep = make_method("sparsevlm", recycle=0.9, clusters=0.25), 9
    recycled, made = method.made(N, keep)
    assert made == 3
    reduction, others = method.reduce(view, keep), 0
    for b in range(BATCH):
        order = reduction.scores[b].argsort(descending=True).tolist()
        stay, pool = order[: keep - made], np.array(order[keep - made : keep - made + recycled])
        x = view.tokens[b, pool].double().numpy()
        assert set(reduction.keep[b].tolist()) - set(stay) == set(pool[list(peaks(x, made, made))].tolist())
        others += peaks(x, made, made) != peaks(x, made, 6)
    assert others


def test_sparsevlm_without_recycling_only_drops() -> None:
    view, *_ = draw(4)
    reduction = make_method("sparsevlm", recycle=0.0).reduce(view, 5)
    for b in range(BATCH):
        assert reduction.keep[b].tolist() == best(reduction.scores[b].tolist(), 5)
    assert torch.equal(reduction.apply(view.tokens)[0][0], view.tokens[0, reduction.keep[0]])


@pytest.mark.parametrize(("name", "depth", "layers"), [
    ("pyramiddrop", 32, (8, 16, 24)), ("pyramiddrop", 8, (2, 4, 6)), ("pyramiddrop", 2, (1,)),
    ("sparsevlm", 32, (3, 7, 16)), ("sparsevlm", 8, (1, 2, 4)), ("sparsevlm", 16, (2, 4, 8)),
    ("v2drop", 32, (3, 17, 22)), ("v2drop", 8, (1, 4, 6)), ("prior_tr", 32, (2,)),
    ("fastv", 32, (2,)), ("fastv", 2, (1,)), ("two_stage", 32, (8, 16, 24)),
])  # fmt: skip
def test_layers_scale_with_the_depth(name, depth, layers) -> None:
    assert make_method(name).layers(depth) == layers


def test_two_stage_is_made_of_two_methods() -> None:
    method = make_method("two_stage", first="random", first_options={"seed": 3}, second=make_method("fastv", fold=True))
    assert method.parts[0].seed == 3
    assert method.parts[1].fold
    with pytest.raises(OptionError, match="second_options go with a method's name"):
        make_method("two_stage", second=make_method("fastv"), second_options={"fold": True})
    with pytest.raises(OptionError, match="second=VisionZip: it works at projector, not decoder"):
        make_method("two_stage", second="visionzip")
    with pytest.raises(BudgetError, match=r"keep=1\.5"):
        make_method("two_stage", merge_keep=1.5)
    with pytest.raises(TypeError, match="its parts do"):
        method.reduce(draw()[0], 3)


def test_views_without_a_sentence_say_so() -> None:
    view = TokenView.of(torch.randn(2, 9, 8))
    with pytest.raises(TypeError, match="no language model"):
        make_method("fastv").reduce(view, 3)
    with pytest.raises(TypeError, match="no sequence with a text"):
        view.attention_from_text()


def test_wrong_options() -> None:
    for options in ({"recycle": 1.5}, {"clusters": -0.1}):
        with pytest.raises(OptionError, match=next(iter(options))):
            make_method("sparsevlm", **options)
