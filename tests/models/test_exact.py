"""Pruned forwards against ones written by hand, and the modes that only look."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import tokensieve
from helpers import naive_forward as naive
from helpers.extra_token import OneMore
from tokensieve import Reduction, TokenView
from tokensieve.core.select import strided
from tokensieve.testing import TinyModel, tiny_model, tiny_models

TOWERS = ["openclip", "openclip_layerscale", "timm"]


def even(keep: int):
    return lambda q, k, bias: strided(k.shape[1] - 1, keep, 1)[0].tolist()


# name, options, budget after blocks 0 and 2, the same by hand
BY_HAND = [
    ("grid", {}, [24, 12], {0: naive.drop(even(24)), 2: naive.drop(even(12))}),
    ("grid", {}, [35, 34], {0: naive.drop(even(35)), 2: naive.drop(even(34))}),
    ("evit", {}, [20, 9], {0: naive.evit(20), 2: naive.evit(9)}),
    ("evit", {"fuse": False}, [20, 9], {0: naive.drop(naive.by_cls(20)), 2: naive.drop(naive.by_cls(9))}),
    ("grid", {"fold": True}, [20, 9], {0: naive.fold(even(20)), 2: naive.fold(even(9))}),
    (
        "evit",
        {"fold": True, "proportional": True},
        [20, 9],
        {0: naive.fold(naive.by_cls(20)), 2: naive.fold(naive.by_cls(9))},
    ),
    ("tome", {}, [25, 15], {0: naive.tome(11), 2: naive.tome(10)}),
]


IDS = [f"{name}-{'-'.join(options) or 'plain'}-{keep[-1]}" for name, options, keep, _ in BY_HAND]


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize(("name", "options", "keep", "cuts"), BY_HAND, ids=IDS)
def test_two_cuts_by_hand(tower: str, name: str, options: dict, keep: list[int], cuts: dict) -> None:
    tiny = tiny_model(tower)
    images = tiny.images(3)
    with torch.no_grad():
        rows = naive.blocks_by_hand(naive.blocks_of(tiny.model), naive.embed(tiny.model, images), cuts)
        wanted = torch.stack([naive.cls_feature(tiny.model, x) for x, _ in rows])
        with tokensieve.attach(tiny.model, name, keep=keep, at=[0, 2], **options) as handle:
            got = tiny.feature(tiny.model, images)
            sizes = handle.sizes
    assert torch.allclose(got, wanted, atol=2e-5), (got - wanted).abs().max()
    if sizes is not None:
        assert torch.equal(sizes, torch.stack([size[1:] for _, size in rows]))
        assert (sizes.sum(1) == 36).all()


@pytest.mark.parametrize("tower", TOWERS)
def test_one_token_more_by_hand(tower: str) -> None:
    tiny = tiny_model(tower)
    images = tiny.images(3)
    with torch.no_grad():
        cuts = {1: naive.one_more(11)}
        rows = naive.blocks_by_hand(naive.blocks_of(tiny.model), naive.embed(tiny.model, images), cuts)
        wanted = torch.stack([naive.cls_feature(tiny.model, x) for x, _ in rows])
        with tokensieve.attach(tiny.model, OneMore(), keep=11, at=1):
            got = tiny.feature(tiny.model, images)
    assert torch.allclose(got, wanted, atol=2e-5), (got - wanted).abs().max()


def test_sizes_do_not_count_in_attention_where_the_method_says_so() -> None:
    tiny = tiny_model("openclip")
    images = tiny.images(2)
    with torch.no_grad():
        features = []
        for proportional in (True, False):
            with tokensieve.attach(tiny.model, "tome", keep=18, proportional=proportional):
                features.append(tiny.feature(tiny.model, images))
    assert (features[0] - features[1]).abs().max() > 1e-3


@pytest.mark.parametrize("tower", ["openclip_avg", "timm_avg"])
@pytest.mark.parametrize(
    ("name", "cuts"), [("tome", {1: naive.tome(15)}), ("grid", {1: naive.fold(even(21))})], ids=["tome", "fold"]
)
def test_average_pooling_is_weighted_by_size(tower: str, name: str, cuts: dict) -> None:
    tiny = tiny_model(tower)
    images = tiny.images(3)
    options = {"fold": True} if name == "grid" else {}
    with torch.no_grad():
        rows = naive.blocks_by_hand(naive.blocks_of(tiny.model), naive.embed(tiny.model, images), cuts)
        wanted = torch.stack([naive.mean_feature(tiny.model, x, size) for x, size in rows])
        unweighted = torch.stack([naive.mean_feature(tiny.model, x, torch.ones_like(size)) for x, size in rows])
        with tokensieve.attach(tiny.model, name, keep=21, at=1, **options):
            got = tiny.feature(tiny.model, images)
    assert torch.allclose(got, wanted, atol=2e-5), (got - wanted).abs().max()
    assert (wanted - unweighted).abs().max() > 1e-3


def test_rotary_rows_go_with_their_patches() -> None:
    """After the cut every block turns each patch by the row of its own place; timm's untouched blocks say the same."""
    tiny = tiny_model("timm_eva")
    model, images = tiny.model, tiny.images(2)
    keep = even(12)(None, torch.zeros(1, 37, 1), None)
    rows = [0] + [1 + i for i in keep]
    with torch.no_grad():
        tokens, rope = model._pos_embed(model.patch_embed(images))
        first, *others = model.blocks
        tokens = tokens + first.attn(first.norm1(tokens), rope=rope)
        tokens = tokens[:, rows]
        tokens = tokens + first.mlp(first.norm2(tokens))
        for block in others:
            tokens = block(tokens, rope=rope[keep])
        wanted = model.forward_head(model.norm(tokens))
        with tokensieve.attach(model, "grid", keep=12, at=0) as handle:
            got = tiny.feature(model, images)
            assert handle.kept[0][0].tolist() == keep
    assert torch.allclose(got, wanted, atol=2e-5), (got - wanted).abs().max()


@dataclass(kw_only=True)
class Everything(tokensieve.Method):
    """Asked for fewer, it keeps all: the cut runs and removes nothing."""

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        return Reduction(keep=torch.arange(view.n).expand(view.batch, -1))


@dataclass(kw_only=True)
class OneGroup(tokensieve.Method):
    """Keeps all but the last patch, which is merged into the first one."""

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        index = torch.arange(view.n).expand(view.batch, -1)
        return Reduction(keep=index[:, :-1], drop=index[:, -1:], into=torch.zeros(view.batch, 1, dtype=torch.int64))


@pytest.mark.parametrize("family", tiny_models())
def test_keeping_all_through_the_real_cut_equals_the_untouched_model(family: str) -> None:
    tiny = tiny_model(family)
    images = tiny.images(8)
    with torch.no_grad():
        wanted = tiny.feature(tiny.model, images)
        with tokensieve.attach(tiny.model, Everything(), keep=[35, 34, 33, 32]) as handle:
            got = tiny.feature(tiny.model, images)
            assert list(handle.kept) == [0, 1, 2, 3], "the cut did not run"
    assert torch.allclose(got, wanted, atol=1e-5), (got - wanted).abs().max()


@pytest.mark.parametrize("family", tiny_models())
def test_merging_equal_patches_changes_nothing(family: str) -> None:
    """Two patches that are the same, merged with log 2 on their logit, are what they were: also after pooling."""
    tiny = tiny_model(family)
    if tiny.placed:
        pytest.skip("positions in attention tell equal patches apart")
    seen = {}

    def twin(_, args, kwargs):
        tokens = (args[0] if args else kwargs["hidden_states"]).clone()
        tokens[:, -1] = tokens[:, tiny.prefix]
        seen["tokens"] = tokens
        return ((tokens, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": tokens})

    with torch.no_grad():
        handle = tokensieve.attach(tiny.model, OneGroup(), keep=35, at=0)
        first = next(iter(handle.blocks.children()))
        handle.remove()
        hook = first.register_forward_pre_hook(twin, with_kwargs=True)
        wanted = tiny.feature(tiny.model, tiny.images(2))
        with tokensieve.attach(tiny.model, OneGroup(), keep=35, at=0) as handle:
            got = tiny.feature(tiny.model, tiny.images(2))
            assert handle.sizes is not None
            assert handle.sizes[0, 0] == 2
        hook.remove()
    assert seen["tokens"].shape[1] == tiny.prefix + 36
    assert torch.allclose(got, wanted, atol=2e-5), (got - wanted).abs().max()


@pytest.mark.parametrize("family", tiny_models())
def test_a_batch_of_eight_equals_eight_singles(family: str) -> None:
    tiny = tiny_model(family)
    images = tiny.images(8)
    with torch.no_grad(), tokensieve.attach(tiny.model, "anchor", keep=16, k=5, fold=True):
        together = tiny.feature(tiny.model, images)
        alone = torch.cat([tiny.feature(tiny.model, image[None]) for image in images])
    assert torch.allclose(alone, together, atol=1e-5), (alone - together).abs().max()


# -- modes that only look ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny_models())
def test_analyse_is_the_baseline_and_selects_what_prune_would(family: str) -> None:
    tiny = tiny_model(family)
    images = tiny.images(3)
    with torch.no_grad():
        wanted = tiny.feature(tiny.model, images)
        with tokensieve.attach(tiny.model, "anchor", keep=14, at=1, mode="analyse") as handle:
            got, kept, scores = tiny.feature(tiny.model, images), handle.kept, handle.scores
            assert handle.tokens_per_layer == [36 + tiny.prefix] * 4
        with tokensieve.attach(tiny.model, "anchor", keep=14, at=1) as handle:
            tiny.feature(tiny.model, images)
            assert torch.equal(handle.kept[1], kept[1])
            assert torch.allclose(handle.scores[1], scores[1], atol=1e-5)
    assert torch.equal(got, wanted)
    assert scores[1].shape == (3, 36)


FUSING = ["openclip", "openclip_whole", "openclip_timm", "openclip_layerscale"]


@pytest.mark.parametrize("family", FUSING)
def test_fuse_is_its_formula(family: str) -> None:
    tiny = tiny_model(family)
    images = tiny.images(3)
    tower = getattr(tiny.model, "visual", tiny.model)
    timm = hasattr(tower, "trunk")
    blocks = tower.trunk.blocks if timm else tower.transformer.resblocks
    tail: list[torch.Tensor] = []
    with torch.no_grad():
        hook = blocks[3].register_forward_hook(lambda _, __, out: tail.append(out))
        cls = tiny.feature(tiny.model, images)
        hook.remove()
        with tokensieve.attach(tiny.model, "anchor", keep=14, at=1, mode="fuse", fuse_weight=0.3) as handle:
            got, kept, scores = tiny.feature(tiny.model, images), handle.kept[1], handle.scores[1]
        for i in range(3):
            patches = tail[0][i, 1:][kept[i]]
            joint = tower.head(tower.trunk.norm(patches)) if timm else tower.ln_post(patches) @ tower.proj
            pooled = (scores[i][kept[i]].softmax(0)[:, None] * joint).sum(0)
            wanted = 0.7 * F.normalize(cls[i], dim=0) + 0.3 * F.normalize(pooled, dim=0)
            assert torch.allclose(got[i], wanted, atol=1e-5)


# -- what is shown of a forward -------------------------------------------------------------------------------------


def tower_with_tokens() -> TinyModel:
    tiny = tiny_model("openclip")
    tiny.model.output_tokens = True
    return tiny


def test_output_tokens_and_restore() -> None:
    tiny = tower_with_tokens()
    with torch.no_grad(), tokensieve.attach(tiny.model, "grid", keep=[24, 12], at=[0, 2]) as handle:
        _, tokens = tiny.model(tiny.images(2))
        kept = handle.kept[2]
        assert tokens.shape == (2, 12, 32)
        full = handle.restore(tokens)
        assert full.shape == (2, 36, 32)
        for i in range(2):
            assert torch.equal(full[i, kept[i]], tokens[i])
            gone = [j for j in range(36) if j not in kept[i].tolist()]
            assert (full[i, gone] == 0).all()
        with_cls = torch.cat([torch.ones(2, 1, 32), tokens], dim=1)
        assert torch.equal(handle.restore(with_cls), torch.cat([torch.ones(2, 1, 32), full], dim=1))
        with pytest.raises(tokensieve.errors.OptionError, match="tokens given"):
            handle.restore(tokens[:, :5])
        with pytest.raises(tokensieve.errors.OptionError, match="images given"):
            handle.restore(tokens[:1])


def test_restore_copies_merged_patches() -> None:
    tiny = tower_with_tokens()
    with torch.no_grad(), tokensieve.attach(tiny.model, "tome", keep=[25, 15], at=[0, 2]) as handle:
        _, tokens = tiny.model(tiny.images(2))
        full, sizes = handle.restore(tokens), handle.sizes
    assert sizes is not None
    for i in range(2):
        copies = [(full[i] == token).all(-1).sum().item() for token in tokens[i]]
        assert copies == sizes[i].tolist()


def test_restore_leaves_a_made_token_out() -> None:
    tiny = tower_with_tokens()
    with torch.no_grad(), tokensieve.attach(tiny.model, OneMore(), keep=10, at=1) as handle:
        _, tokens = tiny.model(tiny.images(2))
        assert tokens.shape[1] == 11
        full = handle.restore(tokens)
        assert full.shape[1] == 36
        assert torch.equal(full[0, handle.kept[1][0]], tokens[0, :10])
        assert ((full != 0).any(-1).sum(1) == 10).all()


def test_scores_lie_on_the_full_grid() -> None:
    tiny = tiny_model("timm")
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", fuse=False, keep=[24, 12], at=[0, 2]) as handle:
        tiny.model(tiny.images(2))
        scores, kept = handle.scores, handle.kept
    assert not scores[0].isnan().any()
    for i in range(2):
        assert sorted(scores[0][i].topk(24).indices.tolist()) == kept[0][i].tolist()
        there = ~scores[2][i].isnan()
        assert there.nonzero().flatten().tolist() == kept[0][i].tolist()
        assert sorted(scores[2][i].nan_to_num(-1.0).topk(12).indices.tolist()) == kept[2][i].tolist()


@pytest.mark.parametrize("tower", ["openclip", "timm"])
def test_alpha_changes_what_is_kept(tower: str) -> None:
    tiny = tiny_model(tower)
    kept = []
    with torch.no_grad():
        for alpha in (0.0, 0.5, 1.0):
            with tokensieve.attach(tiny.model, "anchor", k=4, m=10, alpha=alpha) as handle:
                tiny.model(tiny.images(4))
                kept.append(handle.kept[1])
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])
    assert not torch.equal(kept[0], kept[2])
