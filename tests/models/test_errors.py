"""What cannot be done is said at once, in one line that names what can."""

from __future__ import annotations

import warnings

import pytest
import torch

import tokensieve
from helpers.extra_token import OneMore
from tokensieve.errors import BudgetError, OptionError, UnknownNameError, UnsupportedModelError
from tokensieve.methods.base import Selector
from tokensieve.testing import tiny_model, tiny_models
from tokensieve.utils.torchvision import declare_missing_schemas


def test_a_text_has_rows_of_features() -> None:
    for shape in ((16,), (1, 1, 2, 16)):
        with pytest.raises(OptionError, match=r"give features \(T, E\)"):
            tokensieve.attach(tiny_model("openclip").model, "cdpruner", keep=9, text=torch.randn(shape))


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_towers_without_a_sequence(name: str) -> None:
    declare_missing_schemas()
    import timm

    with pytest.raises(UnsupportedModelError, match="ResNet, ConvNeXt and Swin") as caught:
        tokensieve.attach(timm.create_model(name), "tome", keep=0.5)
    for family in ("open_clip", "timm", "transformers"):
        assert family in str(caught.value)


def test_openclip_resnet() -> None:
    declare_missing_schemas()
    from open_clip.modified_resnet import ModifiedResNet

    model = ModifiedResNet(layers=(1, 1, 1, 1), output_dim=8, heads=2, image_size=32, width=8)
    with pytest.raises(UnsupportedModelError, match="ModifiedResNet"):
        tokensieve.attach(model, "tome", keep=0.5)


def test_openclip_wrapper_names_the_trunk() -> None:
    declare_missing_schemas()
    from open_clip.timm_model import TimmModel

    with pytest.raises(UnsupportedModelError, match="its tower is ResNet"):
        tokensieve.attach(TimmModel("resnet18", 16, pool="avg"), "tome", keep=0.5)


def test_text_only_model() -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="CLIPTextModel"):
        tokensieve.attach(CLIPTextModel(config), "tome", keep=0.5)


def test_scaled_cosine_attention() -> None:
    declare_missing_schemas()
    from open_clip.transformer import VisionTransformer

    model = VisionTransformer(32, 8, 16, 2, 2, 2.0, output_dim=8, scaled_cosine_attn=True)
    with pytest.raises(UnsupportedModelError, match=r"CustomResidualAttentionBlock .* own forward fails"):
        tokensieve.attach(model, "tome", keep=0.5)


def test_a_made_token_in_a_rotary_tower() -> None:
    tiny = tiny_model("timm_eva")
    kinds = [type(m) for m in tiny.model.modules()]
    with pytest.raises(UnsupportedModelError, match="no place in a rotary tower"):
        tokensieve.attach(tiny.model, OneMore(), keep=18)
    assert [type(m) for m in tiny.model.modules()] == kinds
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", keep=18) as handle:  # its fused token has a place
        tiny.model(tiny.images(1))
        assert handle.kept[handle.at[-1]].shape == (1, 18)


def test_fuse_and_text_without_a_joint_space() -> None:
    for family in ("openclip_coca", "openclip_timm_siglip", "timm", "transformers_clip", "transformers_dinov2"):
        with pytest.raises(UnsupportedModelError, match="fuse"):
            tokensieve.attach(tiny_model(family).model, "grid", keep=9, mode="fuse")
    with pytest.raises(UnsupportedModelError, match="joint space"):
        tokensieve.attach(tiny_model("transformers_dinov2").model, "cdpruner", keep=9, text=torch.randn(2, 16))


def test_attention_maps_are_refused() -> None:
    tiny = tiny_model("transformers_dinov2")
    with torch.no_grad(), tokensieve.attach(tiny.model, "grid", keep=9):
        layer = next(iter(tiny.model.encoder.layer))
        with pytest.raises(UnsupportedModelError, match="attention mask"):
            layer(torch.randn(1, 37, 32), attention_mask=torch.zeros(1, 1, 37, 37))


def test_a_block_called_by_itself() -> None:
    tiny = tiny_model("timm")
    block = tiny.model.blocks[0]
    with tokensieve.attach(tiny.model, "grid", keep=9), pytest.raises(UnsupportedModelError, match="by itself"):
        block(torch.randn(1, 37, 32))


BAD = [
    (("tomee", {"keep": 9}), UnknownNameError, r'Did you mean "tome"\?'),
    (("anchor", {"keep": 12, "alfa": 0.5}), UnknownNameError, r'no option \'alfa\'.* Did you mean "alpha"\?'),
    (("anchor", {"keep": 12, "alpha": 1.5}), OptionError, r"alpha=1\.5"),
    (("anchor", {"keep": 12, "k": 0}), OptionError, "k=0"),
    (("anchor", {"keep": 12, "m": -1}), OptionError, "m=-1"),
    (("grid", {"keep": 9, "at": 4}), OptionError, "at=4: this encoder has blocks 0 to 3"),
    (("grid", {"keep": 9, "at": -1}), OptionError, "at=-1"),
    (("grid", {"keep": 9, "at": [1, 1]}), OptionError, "each block once"),
    (("grid", {"keep": 9, "at": []}), OptionError, "at least one"),
    (("grid", {"keep": 9, "at": True}), OptionError, "at=True"),
    (("grid", {"keep": 0}), BudgetError, "keep=0"),
    (("grid", {"keep": -3}), BudgetError, "keep=-3"),
    (("grid", {"keep": 1.5}), BudgetError, r"keep=1\.5"),
    (("grid", {"keep": True}), BudgetError, "keep=True"),
    (("grid", {"keep": [9, 8, 7]}), BudgetError, "3 budgets for 4"),
    (("grid", {"keep": [9, 12], "at": [0, 1]}), BudgetError, "grows from 9 to 12"),
    (("grid", {"keep": 9, "schedule": "liner"}), OptionError, '"linear"'),
    (("grid", {"keep": 9, "mode": "analyze"}), OptionError, '"analyse"'),
    (("grid", {"keep": 9, "mode": "fuse", "fuse_weight": 1.2}), OptionError, r"fuse_weight=1\.2"),
    (("grid", {}), BudgetError, "no budget"),
    (("grid", {"keep": 9, "keep_average": 12}), BudgetError, "two ways"),
    (("tome", {"keep": 9, "at": 1}), BudgetError, "cannot go under 18"),
    (("anchor", {"keep": 5}), BudgetError, "cannot go under 10"),
    (("grid", {"keep_average": 5, "at": 2}), BudgetError, r"cannot go under 18\.5"),
]


@pytest.mark.parametrize(
    ("call", "error", "words"), BAD, ids=lambda v: v[0] + "-" + str(v[1]) if type(v) is tuple else ""
)
def test_what_was_asked_cannot_be(call, error, words: str) -> None:
    tiny = tiny_model("openclip")
    name, options = call
    with pytest.raises(error, match=words):
        tokensieve.attach(tiny.model, name, **options)
    assert tokensieve.attachment_of(tiny.model) is None, "an attach that failed left something behind"
    assert tiny.feature(tiny.model, tiny.images(1)).isfinite().all()


def test_a_method_must_be_one() -> None:
    tiny = tiny_model("openclip")
    with pytest.raises(OptionError, match="not int"):
        tokensieve.attach(tiny.model, 3, keep=9)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="made already"):
        tokensieve.attach(tiny.model, tokensieve.make_method("grid"), keep=9, fold=True)


@pytest.mark.parametrize("family", tiny_models())
@pytest.mark.parametrize("options", [{"keep": 1.0}, {"keep": 400}, {"k": 10, "m": 50}], ids=["ratio", "count", "own"])
def test_a_budget_that_removes_nothing_says_so_and_changes_nothing(family: str, options: dict) -> None:
    tiny = tiny_model(family)
    with torch.no_grad():
        wanted = tiny.feature(tiny.model, tiny.images(2))
        asked = options.get("keep", 60)
        said = rf"nothing is reduced: the budget keeps 36 \(keep={asked}\) and the image has 36 patches"
        with pytest.warns(UserWarning, match=said):
            handle = tokensieve.attach(tiny.model, "anchor", **options)
        with handle:
            assert torch.equal(tiny.feature(tiny.model, tiny.images(2)), wanted)
            assert not handle.reduces
            assert handle.cost().possible == 1.0


def test_a_budget_that_removes_something_does_not_warn() -> None:
    tiny = tiny_model("openclip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), tokensieve.attach(tiny.model, "anchor", keep=35) as handle:
            tiny.feature(tiny.model, tiny.images(2))
            assert handle.tokens_per_layer[-1] == 1 + 35


@pytest.mark.parametrize("family", ["openclip_avg", "timm_avg", "transformers_siglip"])
def test_merging_and_dropping_where_patches_are_pooled(family: str) -> None:
    """A dropped patch has no token to be given back: said, instead of pooling over another image's tokens."""
    tiny = tiny_model(family)
    handle = tokensieve.attach(tiny.model, MergesThenDrops(), keep=[20, 10], at=[0, 2])
    with handle, torch.no_grad(), pytest.raises(UnsupportedModelError, match="merge them or drop them"):
        tiny.feature(tiny.model, tiny.images(2))


class MergesThenDrops(tokensieve.Method):
    def reduce(self, view: tokensieve.TokenView, keep: int) -> tokensieve.Reduction:
        return tokensieve.make_method("grid", fold=view.n == 36).reduce(view, keep)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("wrong", [-1, 36])
def test_an_index_that_is_none_is_refused(batch, wrong):
    """Not the CLS token in its place, nor the next image's."""

    class Slips(Selector):
        def score(self, view, keep):
            raise AssertionError

        def select(self, view, keep):
            index = torch.arange(keep).repeat(view.batch, 1)
            index[0, 0 if wrong < 0 else -1] = wrong
            return index, None

    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, Slips(), keep=9, at=0) as handle:
        assert handle.patches == 36
        with pytest.raises((RuntimeError, IndexError), match=r"out of (bounds|range)"):
            tiny.model(tiny.images(batch))


def test_what_is_done_to_kept_changes_nothing():
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", keep=9, at=0) as handle:
        tiny.model(tiny.images(1))
        tokens = torch.randn(1, handle.tokens_per_layer[-1], 4)
        before = handle.restore(tokens)
        handle.kept[0].add_(1)
        assert torch.equal(handle.restore(tokens), before)


@pytest.mark.parametrize("mode", ["analyse", "fuse"])
@pytest.mark.parametrize("method", ["tome", "pitome"])
def test_a_method_that_at_most_halves_is_refused_where_it_chooses_from_all(method: str, mode) -> None:
    tiny = tiny_model("openclip")
    with pytest.raises(BudgetError, match=rf'mode="{mode}" chooses from all 36 patches.*keep at least 18'):
        tokensieve.attach(tiny.model, method, keep=0.3, mode=mode)
    with torch.no_grad(), tokensieve.attach(tiny.model, method, keep=0.5, mode=mode) as handle:
        tiny.feature(tiny.model, tiny.images(1))
        assert handle.kept[handle.at[-1]].shape == (1, 18)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keep": 9, "at": 1.5}, "at=1.5: give a block of 0 to 3"),
        ({"keep": 9, "at": True}, "at=True"),
        ({"keep": {}}, "keep={}"),
        ({"keep_average": [1, 2]}, r"keep_average=\[1, 2\]"),
        ({"keep_average": 2.0}, "keep_average=2.0: a ratio lies in"),
        ({"keep": 0.0}, "keep=0.0: .* at least one patch"),
        ({"keep": 5}, "keep at least 10$"),  # k anchors: more blocks would not help
        ({"keep_avrage": 0.5}, 'Did you mean "keep_average"'),
        ({"schdule": "linear"}, 'Did you mean "schedule"'),
        ({"keep": 0.5, "proportional": -1.0}, "proportional=-1.0"),
        ({"keep": 9, "fuse_weight": "a"}, "fuse_weight='a'"),
        ({"keep": 9, "text": "a dog"}, "text takes features.*not str"),
        ({"keep": 9, "text": torch.randn(1, 16)}, "Anchor does not look at any"),
    ],
)
def test_arguments_of_the_wrong_kind(given: dict, said: str) -> None:
    with pytest.raises((OptionError, BudgetError, UnknownNameError), match=said):
        tokensieve.attach(tiny_model("openclip").model, "anchor", **given)


def test_what_is_no_module() -> None:
    with pytest.raises(UnsupportedModelError, match="a torch module, not int"):
        tokensieve.attach(3, "anchor", keep=9)  # type: ignore[arg-type]


def test_blocks_may_be_numpys() -> None:
    import numpy as np

    model = tiny_model("openclip").model
    for at in (np.int64(2), np.array([2])):
        with tokensieve.attach(model, "evit", keep=9, at=at) as handle:
            assert handle.at == (2,)


def test_a_class_derived_from_a_timm_vit() -> None:
    tiny = tiny_model("timm")
    cls = type(tiny.model)
    tiny.model.__class__ = type("Mine", (cls,), {"__module__": "mine"})
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", keep=9, at=0) as handle:
        tiny.feature(tiny.model, tiny.images(1))
        assert handle.kept[0].shape == (1, 9)


def test_a_token_that_is_added_where_patches_are_merged_and_pooled() -> None:
    """It would stand for patches that the kept ones stand for already."""

    class MergesAndAdds(tokensieve.Method):
        def reduce(self, view: tokensieve.TokenView, keep: int) -> tokensieve.Reduction:
            merged = tokensieve.make_method("grid", fold=True).reduce(view, keep)
            return tokensieve.Reduction(
                keep=merged.keep, drop=merged.drop, into=merged.into, extra=torch.full((view.batch, 1, view.n), 1 / 36)
            )

    tiny = tiny_model("timm_avg")
    handle = tokensieve.attach(tiny.model, MergesAndAdds(), keep=20, at=0)
    with handle, torch.no_grad(), pytest.raises(UnsupportedModelError, match="adds no token where it merges"):
        tiny.feature(tiny.model, tiny.images(2))
