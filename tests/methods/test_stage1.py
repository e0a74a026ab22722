"""visionzip and prumerge against loops written from the papers, and what they may be asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.method_views import best, cos, draw_view, importance_of, keys_of, one_of, patches_of
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods import make_method


def zipped(view, b, keep, contextual, merge):
    """Kept indices and the tokens (K, D) of image b."""
    attention, keys, x = importance_of(view, b), keys_of(view, b), patches_of(view, b)
    targets = round(contextual * keep)
    dominant = best(attention, keep - targets)
    rest = [i for i in range(view.n) if i not in dominant]
    step = max(1, len(rest) // targets)
    chosen = [rest[j * step] for j in range(targets)]
    groups = {t: [] for t in chosen}
    for i in rest:
        if i not in chosen:
            groups[max(chosen, key=lambda t: cos(keys[i], keys[t]))].append(i)
    kept = sorted(dominant + chosen)
    out = []
    for i in kept:
        others = [x[j] for j in groups.get(i, [])]
        if not others:
            out.append(x[i])
        elif merge == "add":
            out.append(x[i] + sum(others) / len(others))
        else:
            out.append((x[i] + sum(others)) / (1 + len(others)))
    return kept, np.stack(out)


@pytest.mark.parametrize("merge", ["add", "mean"])
@pytest.mark.parametrize(("keep", "contextual"), [(8, 0.25), (5, 0.6), (12, 10 / 64), (3, 1.0)])
def test_visionzip_is_the_papers(keep, contextual, merge) -> None:
    view = draw_view(1, n=21, biased=False)
    reduction = make_method("visionzip", contextual=contextual, merge=merge).reduce(view, keep)
    out, _ = reduction.apply(view.tokens, view.prefix)
    for b in range(view.batch):
        kept, wanted = zipped(view, b, keep, contextual, merge)
        assert reduction.keep[b].tolist() == kept
        assert np.allclose(out[b, view.prefix :].numpy(), wanted, atol=1e-5)
    assert torch.equal(out[:, :1], view.tokens[:, :1])


def test_visionzip_without_contextual_tokens_is_the_top_by_attention() -> None:
    view = draw_view(2, n=21, biased=False)
    reduction = make_method("visionzip", contextual=0.0).reduce(view, 7)
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
        assert torch.equal(alone.goal[0], together.goal[b])
    out, _ = method.reduce(view, 16).apply(view.tokens, 1)
    assert torch.equal(out, view.tokens)


@pytest.mark.parametrize(("name", "options", "words"), [
    ("visionzip", {"contextual": -0.1}, "contextual"), ("visionzip", {"merge": "sum"}, "merge"),
    ("prumerge", {"fill": "grid"}, "fill"),
])  # fmt: skip
def test_wrong_options(name, options, words) -> None:
    with pytest.raises(OptionError, match=words):
        make_method(name, **options)


@pytest.mark.parametrize("name", ["visionzip", "prumerge"])
def test_wrong_budgets(name) -> None:
    for keep in (0, 17):
        with pytest.raises(BudgetError, match=f"keep={keep}"):
            make_method(name).reduce(draw_view(0, n=16, biased=False), keep)
