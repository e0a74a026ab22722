"""The legacy names: each against a loop, and against the code the rest of the package runs."""

import pytest
import torch

import tokensieve
from tokensieve import compat
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError
from tokensieve.methods.anchor import Anchor
from tokensieve.testing.models import tiny_model


def _attention(tokens):
    q = tokens
    return (q @ q.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)


def _scaled(values):
    low, high = min(values), max(values)
    return [(value - low) / (high - low) for value in values]


@pytest.mark.parametrize("normalize", ["minmax", None])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_four_steps_against_loops(seed, normalize):
    tokens = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(seed))
    attention = _attention(tokens)
    anchors = compat.select_anchor_tokens(tokens, k=3)
    importance = compat.compute_importance_scores(tokens, anchors)
    diverse = compat.compute_diversity_scores(tokens, anchors)
    for b in range(2):
        row = attention[b, 0, 1:].tolist()
        expected = sorted(sorted(range(12), key=lambda i: -row[i])[:3])
        assert anchors[b].tolist() == expected
        for i in range(12):
            mean = sum(attention[b, i + 1, j + 1].item() for j in expected) / 3
            assert importance[b, i].item() == pytest.approx(mean, rel=1e-5)
            cosines = [torch.cosine_similarity(tokens[b, i + 1], tokens[b, j + 1], dim=0).item() for j in expected]
            assert diverse[b, i].item() == pytest.approx(1 - max(cosines), abs=1e-5)
    chosen = compat.select_tokens_with_scoring(importance, diverse, anchors, m=4, alpha=0.3, normalize=normalize)
    for b in range(2):
        terms = importance[b].tolist(), diverse[b].tolist()
        matters, differs = map(_scaled, terms) if normalize else terms
        score = [0.3 * one + 0.7 * other for one, other in zip(matters, differs, strict=True)]
        others = [i for i in range(12) if i not in anchors[b].tolist()]
        best = sorted(others, key=lambda i: -score[i])[:4]
        assert chosen[b].tolist() == sorted(anchors[b].tolist() + best)
    whole = compat.apply_token_selection(tokens, k=3, m=4, alpha=0.3, normalize=normalize)
    for b in range(2):
        assert (whole[b, 1:].abs().sum(-1) > 0).nonzero().flatten().tolist() == chosen[b].tolist()


def test_wrong_numbers_of_a_step_are_named():
    scores, anchors = torch.rand(1, 9), torch.tensor([[2, 5]])
    with pytest.raises(OptionError, match=r"alpha=2"):
        compat.select_tokens_with_scoring(scores, scores, anchors, alpha=2)
    with pytest.raises(OptionError, match=r"m=-1"):
        compat.select_tokens_with_scoring(scores, scores, anchors, m=-1)
    assert compat.select_tokens_with_scoring(scores, scores, anchors, m=50).tolist() == [list(range(9))]


def test_half_precision_scores_may_differ_in_kind():
    tokens = torch.randn(2, 13, 8).bfloat16()
    anchors = compat.select_anchor_tokens(tokens, k=3)
    scores = compat.compute_importance_scores(tokens, anchors), compat.compute_diversity_scores(tokens, anchors)
    for normalize in ("minmax", None):
        assert compat.select_tokens_with_scoring(*scores, anchors, m=4, normalize=normalize).shape == (2, 7)


def test_apply_token_selection_keeps_shape_and_zeroes_the_rest():
    tokens = torch.randn(3, 30, 16)
    out = compat.apply_token_selection(tokens, k=4, m=6, alpha=0.5)
    assert out.shape == tokens.shape
    stays = out.abs().sum(-1) > 0
    assert stays[:, 0].all()
    assert (stays.sum(1) == 1 + 4 + 6).all()
    assert torch.equal(out[stays], tokens[stays])
    mask = Anchor(k=4, m=6).reduce(TokenView.of(tokens), 10).mask(29)
    assert torch.equal(stays[:, 1:], mask)


def test_apply_token_selection_edges():
    pooled = torch.randn(4, 16)
    assert compat.apply_token_selection(pooled, k=2, m=2, alpha=0.5) is pooled
    few = torch.randn(1, 6, 16)
    with pytest.warns(UserWarning, match=r"k \+ m = 60 and there are 5 patches"):
        assert torch.equal(compat.apply_token_selection(few, k=10, m=50), few)
    with pytest.raises(OptionError, match=r"alpha=1\.5"):
        compat.apply_token_selection(torch.randn(1, 6, 16), alpha=1.5)


def test_features_with_tokens_are_the_models_own():
    tiny = tiny_model("openclip")
    model, images = tiny.model, tiny.images(2)
    with torch.inference_mode():
        feature, patches = compat.get_image_features_with_tokens(model, images)
        assert torch.equal(feature, model(images))
        raw = model._embeds(images)
        for block in model.transformer.resblocks:
            raw = block(raw)
    assert torch.equal(patches, raw[:, 1:])


def test_pruned_encoder_is_attach_and_can_be_removed():
    tiny = tiny_model("openclip")
    model, images = tiny.model, tiny.images(2)
    with torch.inference_mode():
        plain = model(images)
        encoder = compat.apply_pruning_to_model(model, k_anchors=2, top_m=3, alpha=0.4, layer=1)
        pruned = encoder(images)
        assert encoder.handle.kept[1].shape == (2, 5)
        encoder.remove()
        assert torch.equal(model(images), plain)
        with tokensieve.attach(model, "anchor", at=1, k=2, m=3, alpha=0.4):
            assert torch.equal(model(images), pruned)
    assert not torch.equal(pruned, plain)
