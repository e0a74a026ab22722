"""visionzip and prumerge against loops written from the papers, and what they may be asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tokensieve
from helpers.method_views import best, cos, draw_view, importance_of, keys_of, one_of, patches_of
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method
from tokensieve.models.families.vlm.llava import inner_tower
from tokensieve.testing.vlm import tiny_llava


def zipped(view, b, keep, contextual, merge="add", cls=True, behind=True):
    """The places and the tokens (K, D) of image b, by loops: CLS first, the dominant, the contextual behind."""
    attention, keys, x = importance_of(view, b), keys_of(view, b), patches_of(view, b)
    targets = round(contextual * keep)
    with_cls = cls and targets + 1 < keep
    dominant = best(attention, keep - targets - with_cls)
    rest = [i for i in range(view.n) if i not in dominant]
    step = max(1, len(rest) // max(1, targets))
    chosen = [rest[j * step] for j in range(targets)]
    groups = {t: [] for t in chosen}
    for i in rest:
        if i not in chosen and chosen:
            groups[max(chosen, key=lambda t: cos(keys[i], keys[t]))].append(i)
    out = []
    if with_cls:
        place = max((i for i in rest if i not in chosen), key=lambda i: attention[i])
        out.append((place, view.tokens[b, 0].double().numpy()))
    out += [(i, x[i]) for i in dominant]
    for t in chosen:
        others = [x[j] for j in groups[t]]
        if merge == "add":
            out.append((t, x[t] + (sum(others) / len(others) if others else 0)))
        else:
            out.append((t, (x[t] + sum(others)) / (1 + len(others))))
    if not behind:
        out.sort(key=lambda pair: pair[0])
    return sorted(i for i, _ in out), np.stack([token for _, token in out])


@pytest.mark.parametrize("options", [{}, {"merge": "mean"}, {"cls": False}, {"cls": False, "behind": False}])
@pytest.mark.parametrize(("keep", "contextual"), [(8, 0.25), (5, 0.6), (12, 10 / 64), (3, 1.0), (1, 0.0)])
def test_visionzip_is_the_released(keep, contextual, options) -> None:
    view = draw_view(1, n=21, biased=False)
    reduction = make_method("visionzip", contextual=contextual, **options).reduce(view, keep)
    out, _ = reduction.apply(view.tokens, view.prefix)
    for b in range(view.batch):
        kept, wanted = zipped(view, b, keep, contextual, **options)
        assert reduction.keep[b].tolist() == kept
        assert np.allclose(out[b, view.prefix :].numpy(), wanted, atol=1e-5)
    assert torch.equal(out[:, :1], view.tokens[:, :1])


def test_visionzips_options_tell_the_readings_apart() -> None:
    view = draw_view(1, n=21, biased=False)
    found = [
        make_method("visionzip", **options).reduce(view, 12).apply(view.tokens, 1)[0]
        for options in ({}, {"merge": "mean"}, {"cls": False}, {"behind": False})
    ]
    assert all(not torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])


def test_visionzip_without_contextual_tokens_is_the_top_by_attention() -> None:
    view = draw_view(2, n=21, biased=False)
    reduction = make_method("visionzip", contextual=0.0, cls=False).reduce(view, 7)
    for b in range(view.batch):
        assert reduction.keep[b].tolist() == best(importance_of(view, b), 7)
    assert (reduction.slots(21) >= 0).sum(1).tolist() == [7] * view.batch


def peaked_view(seed):
    """A view where CLS looks at a few patches only, so that there are outliers."""
    view = draw_view(seed, n=24, biased=False)
    q, k = view.q.clone(), view.k.clone()
    for b in range(view.batch):
        for i in range(2 + b):
            k[b, :, 1 + 5 * i + b] += 3.0 * q[b, :, 0]
    view._k = k
    return view


def merged(view, b, keep):
    attention, keys, x = importance_of(view, b), keys_of(view, b), patches_of(view, b)
    low, high = np.quantile(attention, 0.25), np.quantile(attention, 0.75)
    outliers = [i for i in range(view.n) if attention[i] > high + 1.5 * (high - low)]
    kept = sorted(outliers, key=lambda i: -attention[i])[:keep]
    # halves first, then quarters, ...: the reversed binary digits, written with strings
    spread = sorted(range(view.n), key=lambda i: int(f"{i:05b}"[::-1], 2))
    kept = sorted(kept + [i for i in spread if i not in kept][: keep - len(kept)])
    groups = {i: [i] for i in kept}
    for i in range(view.n):
        if i not in kept:
            groups[max(kept, key=lambda t: cos(keys[i], keys[t]))].append(i)
    total = [sum(attention[j] * x[j] for j in groups[i]) / sum(attention[j] for j in groups[i]) for i in kept]
    return outliers, kept, np.stack(total)


@pytest.mark.parametrize("keep", [3, 8, 16])
def test_prumerge_is_the_papers(keep) -> None:
    view = peaked_view(3)
    reduction = make_method("prumerge").reduce(view, keep)
    out, _ = reduction.apply(view.tokens, view.prefix)
    for b in range(view.batch):
        outliers, kept, wanted = merged(view, b, keep)
        assert len(outliers) >= 2
        assert reduction.keep[b].tolist() == kept
        assert np.allclose(out[b, view.prefix :].numpy(), wanted, atol=1e-5)
        assert (reduction.slots(view.n)[b] >= 0).all()  # everything went somewhere


def released_merge(view, b, keep, nearest=32):
    """Attention and keys over the full width; overlapping sums; one more token for all that are not kept."""
    q = view.q[b].double().numpy().transpose(1, 0, 2).reshape(view.n + 1, -1)
    k = view.k[b].double().numpy().transpose(1, 0, 2).reshape(view.n + 1, -1)
    e = np.exp(q[0] @ k.T / np.sqrt(q.shape[1]))
    attention, keys, x = (e / e.sum())[1:], k[1:], patches_of(view, b)
    kept = best(attention, keep - 1)
    gone = [i for i in range(view.n) if i not in kept]
    out = {max(gone, key=lambda i: attention[i]): sum(attention[i] * x[i] for i in gone)}
    for i in kept:
        near = sorted((j for j in range(view.n) if j != i), key=lambda j: -cos(keys[i], keys[j]))[:nearest]
        out[i] = x[i] + sum(attention[j] * x[j] for j in near)
    return sorted(out), np.stack([out[i] for i in sorted(out)])


def test_prumerges_released_merge() -> None:
    view = draw_view(5, n=50, biased=False)
    method = make_method("prumerge", merge="released", fill="attention")
    assert method.reads_next_layer
    assert not make_method("prumerge").reads_next_layer
    for keep in (1, 7, 49):
        reduction = method.reduce(view, keep)
        out, _ = reduction.apply(view.tokens, 1)
        for b in range(view.batch):
            places, wanted = released_merge(view, b, keep)
            assert reduction.keep[b].tolist() == places
            assert np.allclose(out[b, 1:].numpy(), wanted, atol=1e-5)
            assert not np.allclose(wanted, released_merge(view, b, keep, nearest=4)[1], atol=1e-5) or keep == 1
    gentle = make_method("prumerge", fill="attention").reduce(view, 7).apply(view.tokens, 1)[0]
    assert not torch.allclose(gentle, method.reduce(view, 7).apply(view.tokens, 1)[0], atol=1e-2)


def test_prumerge_released_fills_up_as_the_other_does() -> None:
    view = peaked_view(3)
    method = make_method("prumerge", merge="released")
    scores = method.score(view)
    kept = method.reduce(view, 9).keep
    for b in range(view.batch):
        assert set(best(scores[b].tolist(), 8)) < set(kept[b].tolist())


def test_prumerge_released_looks_at_the_towers_last_layer() -> None:
    """In a LLaVA whose features are of the next-to-last layer: the last block's queries and keys of those features."""
    tiny = tiny_llava()
    prompts = tiny.prompts([(3, 1, 5)])
    with torch.no_grad(), tokensieve.attach(tiny.model, "prumerge", keep=12, merge="released") as handle:
        tiny.model(**prompts)
        scores = handle.scores[-1][0]
    inner = tiny.model.model
    with torch.no_grad():
        states = inner.vision_tower(prompts["pixel_values"], output_hidden_states=True).hidden_states[-2]
        block = inner_tower(inner.vision_tower).encoder.layers[-1]
        x = block.layer_norm1(states)
        q, k = block.self_attn.q_proj(x)[0, 0], block.self_attn.k_proj(x)[0]
        attention = (k @ q * len(q) ** -0.5).softmax(0)[1:].numpy()
    low, high = np.quantile(attention, 0.25), np.quantile(attention, 0.75)
    outlier = attention > high + 1.5 * (high - low)
    assert 0 < outlier.sum() < 12
    assert np.allclose(scores[outlier].numpy(), 1 + attention[outlier] / attention.max(), atol=1e-5)
    assert (scores[~outlier] < 1).all()


def test_prumerge_filled_by_attention_keeps_the_top() -> None:
    view = peaked_view(4)
    reduction = make_method("prumerge", fill="attention").reduce(view, 9)
    for b in range(view.batch):
        assert reduction.keep[b].tolist() == best(importance_of(view, b), 9)


@pytest.mark.parametrize("name", ["visionzip", "prumerge"])
def test_a_batch_equals_its_singles_and_keep_all_changes_nothing(name) -> None:
    view = draw_view(6, n=16, biased=False)
    method = make_method(name)
    together = method.reduce(view, 6)
    for b in range(view.batch):
        alone = method.reduce(one_of(view, b), 6)
        assert torch.equal(alone.keep[0], together.keep[b])
        token = alone.apply(view.tokens[b : b + 1], 1)[0][0]
        assert torch.allclose(token, together.apply(view.tokens, 1)[0][b], atol=1e-6)
    out, _ = method.reduce(view, 16).apply(view.tokens, 1)
    assert torch.equal(out, view.tokens)


@pytest.mark.parametrize(("name", "options", "words"), [
    ("visionzip", {"contextual": -0.1}, "contextual"), ("visionzip", {"merge": "sum"}, "merge"),
    ("prumerge", {"fill": "grid"}, "fill"), ("prumerge", {"merge": "add"}, "merge"),
])  # fmt: skip
def test_wrong_options(name, options, words) -> None:
    with pytest.raises(OptionError, match=words):
        make_method(name, **options)


@pytest.mark.parametrize("name", ["visionzip", "prumerge"])
def test_wrong_budgets(name) -> None:
    for keep in (0, 17):
        with pytest.raises(BudgetError, match=f"keep={keep}"):
            make_method(name).reduce(draw_view(0, n=16, biased=False), keep)
