"""Single images in machine code: what the operations in torch say, for every kernel, and safe with any numbers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_views import draw_view
from torch.utils.flop_counter import FlopCounterMode

import tokensieve
from tokensieve.core import native
from tokensieve.core.reduction import Reduction
from tokensieve.core.score import image_hash, unit_noise
from tokensieve.core.select import max_min, top
from tokensieve.errors import BudgetError
from tokensieve.methods.anchor import Anchor
from tokensieve.methods.base import Selector
from tokensieve.methods.divprune import DivPrune
from tokensieve.methods.evit import EViT
from tokensieve.methods.random import Random
from tokensieve.methods.registry import make_method
from tokensieve.methods.sieve import SieveMethod
from tokensieve.methods.tome import ToMe
from tokensieve.testing.models import tiny_model, tiny_models

kernels = pytest.importorskip("tokensieve.core.native.kernels", exc_type=ImportError)


@pytest.fixture
def calls(monkeypatch):
    """The kernels that were called."""
    seen: list[str] = []
    call = native._call
    monkeypatch.setattr(native, "_call", lambda name, *args: seen.append(name) or call(name, *args))
    return seen


def both(method, keep, seed, **drawn):
    """The choice in torch and in machine code, of the same view."""
    found = []
    for inside in (False, True):
        view = draw_view(seed, batch=1, native=inside, **drawn)
        found.append(method.reduce(view, keep))
    return found


def assert_same_choice(wanted, found, n):
    assert torch.equal(wanted.keep, found.keep)
    assert torch.equal(wanted.slots(n), found.slots(n))
    assert found.keep.dtype == torch.int64
    if wanted.drop is not None:
        assert sorted(wanted.drop[0].tolist()) == sorted(found.drop[0].tolist())
    assert (wanted.scores is None) == (found.scores is None)
    if wanted.scores is not None:
        torch.testing.assert_close(found.scores, wanted.scores, atol=2e-6, rtol=2e-5)
    assert (wanted.extra is None) == (found.extra is None)
    if wanted.extra is not None:
        torch.testing.assert_close(found.extra, wanted.extra, atol=2e-6, rtol=2e-5)


METHODS = {
    "tome": ToMe(),
    "sieve": SieveMethod(),
    "sieve, all heads together": SieveMethod(parts=1, weight=0.0),
    "sieve, each head by itself": SieveMethod(parts=6, weight=1.0),
    "sieve, parts that do not divide": SieveMethod(parts=4),
    "anchor": Anchor(k=3),
    "anchor, the literal formula": Anchor(k=1, alpha=0.9, normalize=None),
    "anchor, folded": Anchor(k=3, fold=True),
    "evit": EViT(),
    "evit, dropped": EViT(fuse=False),
    "random": Random(seed=3),
    "divprune": DivPrune(),
    "divprune, by keys, folded": DivPrune(space="keys", fold=True),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("n", [9, 40, 41])
@pytest.mark.parametrize("prefix", [1, 4])
@pytest.mark.parametrize(("biased", "made"), [(True, 0), (False, 0), (True, 2)])
def test_every_choice_is_that_of_torch(name, n, prefix, biased, made, calls):
    method = METHODS[name]
    for keep in sorted({max(method.floor(n, prefix), 1), n // 2 + 1, n - 1}):
        for seed in range(3):
            calls.clear()
            wanted, found = both(method, keep, seed, n=n, heads=6, d=10, prefix=prefix, biased=biased, made=made)
            assert calls  # it went this way
            assert_same_choice(wanted, found, n)


def test_tome_without_a_prefix_and_with_two_patches():
    for n in (2, 3, 8):
        wanted, found = both(ToMe(), n - 1, 5, n=n, heads=2, prefix=0)
        assert_same_choice(wanted, found, n)


def test_anchor_where_all_are_alike():
    """Constant scores: 0.5 everywhere, as in torch, and not noise made large."""
    views = [draw_view(0, batch=1, n=6, biased=False, native=inside) for inside in (False, True)]
    for view in views:
        view.tokens.copy_(view.tokens[:, :1].expand_as(view.tokens))
    scores = [Anchor(k=2, alpha=0.0).select(view, 4)[1] for view in views]
    torch.testing.assert_close(scores[1], scores[0])
    assert scores[1].eq(0.5).all()


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 12), prefix=st.integers(0, 3), made=st.integers(0, 2), sized=st.booleans(), merges=st.booleans(),
    fresh=st.integers(0, 2), weight=st.sampled_from([0.0, 0.85, 1.0]), seed=st.integers(0, 999),
)  # fmt: skip
def test_shrink_is_apply_and_the_log_of_the_sizes(n, prefix, made, sized, merges, fresh, weight, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, prefix + n + made, 5, generator=draw)
    k = int(torch.randint(1, n + 1, (), generator=draw))
    order = torch.randperm(n, generator=draw)
    keep, drop = order[:k].sort().values[None], order[k:][None]
    into = torch.randint(0, k, (1, n - k), generator=draw) if merges else None
    extra = torch.rand(1, fresh, n + made, generator=draw).softmax(-1) if fresh else None
    size = 1.0 + torch.randint(0, 5, (1, n + made), generator=draw) if sized else None
    reduction = Reduction(keep=keep, drop=drop if merges else None, into=into, extra=extra)
    assert native.applies(reduction, x)
    out, sizes = reduction.apply(x, prefix, made, size)
    found, found_sizes, bias = native.shrink(reduction, x, prefix, made, size, weight)
    torch.testing.assert_close(found, out)
    assert (sizes is None) == (found_sizes is None)
    assert (bias is None) == (sizes is None or not weight)
    if sizes is not None:
        torch.testing.assert_close(found_sizes, sizes)
    if bias is not None:
        torch.testing.assert_close(bias, torch.cat([torch.zeros(1, prefix), weight * sizes.log()], dim=1))


def test_what_it_cannot_apply_is_left_to_torch():
    class Other(Reduction):
        pass

    keep, x = torch.tensor([[0, 2]]), torch.randn(1, 5, 3)
    extra = torch.full((1, 1, 4), 0.25)
    assert native.applies(Reduction(keep=keep, extra=extra), x)
    assert not native.applies(Reduction(keep=keep, extra=extra.double()), x)
    assert not native.applies(Reduction(keep=keep), x.double())
    assert not native.applies(Reduction(keep=keep, into=torch.tensor([[0, 1]])), x)  # torch says what is missing
    assert not native.applies(Other(keep=keep), x)
    # what torch has an error for
    assert not native.applies(Reduction(keep=keep[0]), x)
    assert not native.applies(Reduction(keep=keep.int()), x)
    assert not native.applies(Reduction(keep=keep.expand(2, -1)), x)
    assert not native.applies(Reduction(keep=keep, extra=extra.expand(2, -1, -1)), x)
    assert not native.applies(Reduction(keep=keep, extra=extra[:, :0]), x)


@pytest.mark.parametrize(
    "method", [Anchor(k=3), DivPrune(), EViT(), Random(), SieveMethod(), ToMe()], ids=lambda m: type(m).__name__
)
def test_a_budget_that_cannot_be_is_named(method):
    for keep in (0, 13):
        with pytest.raises(BudgetError, match=f"keep={keep}"):
            method.reduce(draw_view(0, batch=1, n=12, native=True), keep)


def test_max_min_of_equals_and_of_one():
    for x in (torch.ones(1, 6, 4), torch.ones(1, 1, 4), torch.eye(5)[None], torch.tensor([[[1.0, 0], [1, 0], [0, 1]]])):
        for k in range(1, x.shape[1] + 1):
            found = native.max_min(x, k)
            assert torch.equal(found, max_min(x, k))
            assert found[0].unique().numel() == k
    assert native.max_min(torch.full((1, 4, 3), torch.nan), 3).shape == (1, 3)  # and nothing is read outside


def test_top_and_noise():
    scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for k in (1, 7, 50):
        assert torch.equal(native.top(scores, k), top(scores, k))
    assert native.top(torch.zeros(1, 5), 3).tolist() == [[0, 1, 2]]  # equals: the first
    for width, seed in ((4, 0), (7, 3), (100, 12345)):
        view = draw_view(seed, batch=1, n=30, heads=1, d=width, origin=torch.arange(5, 35)[None])
        assert torch.equal(native.noise(view, seed), unit_noise(image_hash(view.tokens), view.origin, seed))


def test_exp_is_right_to_single_precision():
    x = np.linspace(-87, 87, 100_001, dtype=np.float32)
    row, bits = x.copy(), np.empty(x.shape, np.int32)
    kernels._exp(row, bits, bits.view(np.float32))
    wanted = np.exp(x.astype(np.float64))
    assert np.abs(row / wanted - 1).max() < 5e-7
    far = np.array([-1000.0, 0.0], np.float32)
    kernels._exp(far, bits[:2], bits[:2].view(np.float32))
    assert far[0] < 1e-37
    assert far[1] == 1.0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_whatever_the_numbers_indices_are_indices(name, bad):
    """No read outside of an array, and an exact budget, when a model's numbers have gone."""
    view = draw_view(1, batch=1, n=20, heads=6, native=True)
    for x in (view.tokens, view.q, view.k):
        x[:, :, 3:] = bad
    view.bias[:, 5:] = bad
    method = METHODS[name]
    keep = max(12, method.floor(20, 1))
    found = method.reduce(view, keep)
    assert found.keep.shape == (1, keep)
    assert len(set(found.keep[0].tolist()) & set(range(20))) == keep
    if found.into is not None:
        assert found.into.min() >= 0
        assert found.into.max() < keep
    out, _, _ = native.shrink(found, view.tokens, 1, 0, view.size, 1.0)
    assert out.shape[1] == 1 + keep + (0 if found.extra is None else 1)


def test_queries_and_keys_as_projections_leave_them():
    """In rows of all heads, as most towers have them, not by head."""
    view = draw_view(2, batch=1, n=30, heads=6, d=8, native=True)
    wanted = SieveMethod().reduce(view, 20)
    view._q, view._k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (view.q, view.k))
    assert not view.k.is_contiguous()
    view._seen.clear()
    assert_same_choice(wanted, SieveMethod().reduce(view, 20), 30)


# -- in a model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny_models())
@pytest.mark.parametrize("name", ["tome", "sieve", "anchor", "evit", "random", "grid", "divprune"])
def test_models_give_the_same_feature(family, name, calls, monkeypatch):
    tiny = tiny_model(family)
    options = {"k": 3} if name == "anchor" else {"fuse": False} if (family, name) == ("timm_eva", "evit") else {}
    try:
        handle = tokensieve.attach(tiny.model, name, keep=0.5, **options)
    except tokensieve.errors.TokensieveError as error:
        pytest.skip(str(error))
    x = tiny.images(1)
    with handle, torch.no_grad():
        found, kept, sizes = tiny.feature(tiny.model, x), handle.kept, handle.sizes
        restored = handle.restore(
            torch.randn(1, handle.tokens_per_layer[-1], 4, generator=torch.Generator().manual_seed(0))
        )
        assert "shrink" in calls
        calls.clear()
        monkeypatch.setattr(native, "_kernels", lambda: None)
        wanted = tiny.feature(tiny.model, x)
        assert not calls
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        assert kept.keys() == handle.kept.keys()
        assert all(torch.equal(kept[block], handle.kept[block]) for block in kept)
        if sizes is not None:
            torch.testing.assert_close(sizes, handle.sizes)
        again = handle.restore(
            torch.randn(1, handle.tokens_per_layer[-1], 4, generator=torch.Generator().manual_seed(0))
        )
        assert torch.equal(restored, again)


def test_everything_else_goes_by_torch(calls):
    tiny = tiny_model("openclip")
    model, one = tiny.model, tiny.images(1)
    with tokensieve.attach(model, "sieve", keep=0.5):
        model(one)  # gradients are on
        with torch.no_grad():
            model(tiny.images(2))
            with FlopCounterMode(display=False) as counter:
                model(one)
            torch.vmap(model)(one.unsqueeze(1))
            torch.compile(model, backend="eager")(one)
            with torch.autocast("cpu", torch.bfloat16):
                model(one)
            model.double()(one.double())
        assert not calls
        assert counter.get_total_flops() > 0
        with torch.inference_mode():
            model.float()(one)
        assert calls.count("sieve") == 2  # blocks 0 and 2 of four


def test_gradients_that_are_switched_on_on_the_way(calls):
    """The last blocks are trained on features of the first, inside a no_grad."""
    tiny = tiny_model("openclip")
    blocks = tiny.model.transformer.resblocks
    with tokensieve.attach(tiny.model, "tome", keep=0.5):
        hook = blocks[2].register_forward_pre_hook(lambda *_: torch.set_grad_enabled(True) and None)
        with torch.no_grad():
            out = tiny.model(tiny.images(1))
        hook.remove()
        assert calls.count("tome") == 2
        out.sum().backward()
    weight = blocks[2].mlp[0].weight
    assert weight.grad.abs().sum() > 0
    assert blocks[1].mlp[0].weight.grad is None


def test_keys_of_another_precision_go_by_torch(calls, monkeypatch):
    """A tower that keeps its residual stream in float32 and attends in half precision."""
    tiny = tiny_model("openclip")
    block = tiny.model.transformer.resblocks[0]
    mixin = tokensieve.adapters.openclip.OpenClipBlock
    project = mixin.sieve_qkv

    def halved(self, x, state, *args, **kwargs):
        q, k, v, scale = project(self, x, state, *args, **kwargs)
        return q.bfloat16(), k.bfloat16(), v.bfloat16(), scale

    def attended(self, x, out):
        return x + self.ls_1(self.attn.out_proj(out.float()))

    monkeypatch.setattr(mixin, "sieve_qkv", halved)
    monkeypatch.setattr(mixin, "sieve_attended", attended)
    monkeypatch.setattr(mixin, "sieve_parts", lambda self: None)
    with tokensieve.attach(tiny.model, "sieve", keep=0.5) as handle, torch.no_grad():
        assert tiny.model(tiny.images(1)).isfinite().all()
        assert "sieve" not in calls
        assert handle.tokens_per_layer[-1] < handle.tokens_per_layer[0]
    assert block is tiny.model.transformer.resblocks[0]


def test_many_tokens_go_by_torch(calls, monkeypatch):
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "tome", keep=0.5), torch.no_grad():
        monkeypatch.setattr(native, "_MOST", 16)
        tiny.model(tiny.images(1))
        assert not calls


class Dear(SieveMethod):
    def price(self, view, order, distance, importance):
        return -super().price(view, order, distance, importance)


class OtherKeys(SieveMethod):
    def _compared(self, view):
        return super()._compared(view).flip(-1) * torch.arange(8.0)


class OtherAttention(EViT):
    def score(self, view, keep):
        return super().score(view, keep).flip(-1)


class OtherAnchors(Anchor):
    def anchors(self, view, keep):
        return torch.arange(self.k).expand(view.batch, -1)


@pytest.mark.parametrize(
    ("method", "ours"),
    [
        (Dear(), SieveMethod()),
        (OtherKeys(), SieveMethod()),
        (OtherAnchors(k=3), Anchor(k=3)),
        (OtherAttention(), EViT()),
    ],
    ids=lambda method: type(method).__name__,
)
def test_methods_derived_from_ours_decide_for_themselves(method, ours, calls):
    wanted, found = both(method, 8, 3, n=12)
    assert torch.equal(found.keep, wanted.keep)
    assert not {"sieve", "anchor", "evit"} & set(calls)
    assert not torch.equal(both(ours, 8, 3, n=12)[1].keep, found.keep)  # it is another choice
    assert {"sieve", "anchor", "evit"} & set(calls)


def test_equals_are_left_to_torch(calls):
    """Which of equals stays is to be the same for an image alone and in a batch."""

    class Two(Selector):
        def score(self, view, keep):
            return (torch.arange(view.n) % 2).float().expand(view.batch, -1)

    class TwoToo(Random):
        score = Two.score

    for method in (Two(), TwoToo()):
        wanted, found = both(method, 9, 0, n=12)
        assert torch.equal(wanted.keep, found.keep)
        assert not calls


@pytest.mark.parametrize(
    ("keep", "drop", "into", "extra"),
    [
        ([0, 4], None, None, None),
        ([-1, 2], None, None, None),
        ([0, 1], [2, 3], [0, 2], None),
        ([0, 1], [2, 4], [0, 1], None),
        ([0, 1], [2], [0, 1], None),
        ([0, 1], None, None, torch.ones(1, 1, 5)),
    ],
)
def test_a_reduction_that_points_outside_is_refused(keep, drop, into, extra):
    """As in torch; nothing is written where it does not belong."""
    drop, into = (None if x is None else torch.tensor([x]) for x in (drop, into))
    reduction = Reduction(keep=torch.tensor([keep]), drop=drop, into=into, extra=extra)
    with pytest.raises(IndexError, match="a reduction's"):
        native.shrink(reduction, torch.randn(1, 5, 3), 1, 0, None, 1.0)


def test_sizes_of_other_tokens_are_refused():
    with pytest.raises(IndexError, match="sizes of another number"):
        native.shrink(Reduction(keep=torch.tensor([[0]])), torch.randn(1, 5, 3), 1, 0, torch.ones(1, 3), 1.0)


# -- there or not -------------------------------------------------------------------------------------------------


def test_the_switch_and_the_version(monkeypatch):
    assert native.version() == kernels.numba.__version__
    code = "import torch; from tokensieve.core import native; print(native.version(), native.fits(torch.ones(1, 2, 3)))"
    there = f"{kernels.numba.__version__} True"
    for name, value, wanted in (
        (native.SWITCH, "0", "None False"),
        (native.SWITCH, "1", there),
        ("NUMBA_DISABLE_JIT", "1", "None False"),  # it would be Python's own loops
    ):
        monkeypatch.setenv(name, value)
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == wanted


def test_without_numba_and_with_a_broken_one(monkeypatch):
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name, *rest))
        native._kernels.cache_clear()
        assert native.version() is None
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "tokensieve.core.native.kernels")
        patch.delattr(native, "kernels")
        patch.setitem(sys.modules, "numba", None)  # importing it fails
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: True)
        native._kernels.cache_clear()
        with pytest.warns(UserWarning, match="single images are cut without it.*numba"):
            assert native.version() is None
    with monkeypatch.context() as patch:

        def stumble(name, *rest):
            raise AttributeError("module 'numpy' has no attribute 'long'")

        patch.setattr(importlib.util, "find_spec", stumble)  # as a numba of another time does when it is imported
        native._kernels.cache_clear()
        with pytest.warns(UserWarning, match="single images are cut without it.*'long'"):
            assert native.version() is None
        assert not native.fits(torch.ones(1, 2, 3))  # said once
    native._kernels.cache_clear()
    assert native.version() == kernels.numba.__version__


def test_a_full_disk(tmp_path):
    """What cannot be kept is compiled for this process."""
    code = """
import resource, torch, warnings
from tokensieve.core import native
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
warnings.simplefilter("always")
print(native.top(torch.tensor([[1.0, 3.0, 2.0]]), 2).tolist(), native.top(torch.tensor([[3.0, 2.0, 1.0]]), 1).tolist())
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert found.stdout.strip() == "[[1, 2]] [[0]]", found.stderr
    assert found.stderr.count("is not kept for the next time") == 1


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(monkeypatch):
    def njit(**options):
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernels.numba, "njit", njit)
    assert kernels.compiled(len) is len


@pytest.mark.parametrize("name", ["tome", "sieve", "anchor"])
def test_registered_names_reach_the_kernels(name, calls):
    make_method(name).reduce(draw_view(0, batch=1, n=30, native=True), 20)
    assert calls == [name]
