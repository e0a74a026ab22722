"""Linear layers by parts: the same numbers as F.linear, wherever it applies, and F.linear itself wherever not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tokensieve
from tokensieve.adapters import linear as module
from tokensieve.adapters.linear import by_parts, linear, plain_linear, wants_fast
from tokensieve.testing.models import tiny_model, tiny_models
from tokensieve.testing.vlm import tiny_llava

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="made for MKL"),
    pytest.mark.usefixtures("two_threads"),
]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 197, 48), (2, 100, 48), (16, 48), (320, 48)])
@pytest.mark.parametrize("out", [256, 384])
@pytest.mark.parametrize("biased", [True, False])
def test_the_same_numbers(shape, out, biased, monkeypatch):
    x, weight, bias = draw(*shape), draw(out, 48, seed=1), draw(out, seed=2) if biased else None
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    monkeypatch.setattr(F, "linear", None)  # not by the usual way
    assert by_parts(x, weight)
    found = linear(x, weight, bias)
    assert found.shape == (*shape[:-1], out)
    assert found.is_contiguous()
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_outputs_that_no_four_parts_share_are_left_alone():
    x, weight = draw(64, 32), draw(258, 32, seed=1)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize(
    "case",
    [
        "rows",
        "vectors",
        "small",
        "double",
        "gradient",
        "one thread",
        "many threads",
        "autocast",
        "asked",
        "subclass",
        "trace",
    ],
)
def test_where_it_does_not_apply(case, monkeypatch):
    x, weight = draw(64, 32), draw(256, 32, seed=1)
    assert by_parts(x, weight)
    if case == "rows":
        assert not by_parts(draw(321, 32), weight)
    elif case == "vectors":
        assert not by_parts(draw(15, 32), weight)
    elif case == "small":
        monkeypatch.setattr(module, "_SMALL", 256 * 32)
        assert not by_parts(x, weight)
        assert by_parts(draw(64, 33), draw(256, 33))
    elif case == "double":
        assert not by_parts(x.double(), weight.double())
    elif case == "gradient":
        with torch.enable_grad():
            assert not by_parts(x, weight)
    elif case in ("one thread", "many threads"):
        torch.set_num_threads(1 if case == "one thread" else 5)
        assert not by_parts(x, weight)
    elif case == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not by_parts(x, weight)
    elif case == "asked":
        with plain_linear():
            assert not by_parts(x, weight)
        assert by_parts(x, weight)
    elif case == "trace":
        seen: list[bool] = []
        torch.jit.trace(lambda y: seen.append(by_parts(y, weight)) or y + 1, x, check_trace=False)
        assert seen == [False]
    else:
        assert not by_parts(x, weight.as_subclass(type("Quantised", (torch.Tensor,), {})))


def test_which_layers():
    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert wants_fast(nn.Linear(4, 4))
    assert wants_fast(nn.MultiheadAttention(4, 1).out_proj)
    assert not wants_fast(Own(4, 4))
    assert not wants_fast(nn.Conv2d(4, 4, 1))


@pytest.fixture
def calls(monkeypatch):
    """The number of parts of each product that goes by parts."""
    made: list[int] = []
    for name in ("bmm", "baddbmm"):
        product = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, product=product: made.append(a[-1].shape[0]) or product(*a))
    return made


@pytest.mark.parametrize("name", tiny_models())
def test_a_reduced_tower_differs_by_rounding_only(name, calls):
    tiny = tiny_model(name)
    model, x = tiny.model, tiny.images(1)
    kinds = [type(m) for m in model.modules()]
    with tokensieve.attach(model, "tome", keep=0.5) as handle:
        found = tiny.feature(model, x)
        many = len(calls)
        calls.clear()
        with plain_linear():
            wanted = tiny.feature(model, x)
        assert many >= len(calls) + 3 * handle.depth  # output, both layers of the MLP, mostly projections too
        calls.clear()
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(tiny.feature(twin, x), found)
            assert calls
            calls.clear()
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("mode", ["analyse", "keep everything"])
def test_a_model_that_is_not_reduced_keeps_its_bits(mode):
    tiny = tiny_model("openclip")
    model, x = tiny.model, tiny.images(1)
    before, kinds = tiny.feature(model, x), linear_kinds(model)
    if mode == "analyse":
        handle = tokensieve.attach(model, "evit", keep=0.5, mode="analyse")
    else:
        with pytest.warns(UserWarning, match="nothing is reduced"):
            handle = tokensieve.attach(model, "evit", keep=1.0)
    with handle:
        assert torch.equal(tiny.feature(model, x), before)
        assert linear_kinds(model) == kinds


def linear_kinds(model):
    return {type(m) for m in model.modules() if isinstance(m, nn.Linear)}


def test_a_graph_for_any_number_of_images_does_not_ask_for_the_rows():
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "tome", keep=0.5):
        batch = torch.export.Dim("batch", min=2, max=64)
        graph = torch.export.export(tiny.model, (tiny.images(4),), dynamic_shapes=[{0: batch}]).module()
        for many in (2, 16):  # within and beyond the rows for which parts are used
            torch.testing.assert_close(graph(tiny.images(many)), tiny.feature(tiny.model, tiny.images(many)))


def test_the_language_model_of_a_llava_too(calls):
    tiny = tiny_llava()
    prompts = tiny.prompts([(3, 1, 4)])
    kinds = [type(m) for m in tiny.model.modules()]
    with tokensieve.attach(tiny.model, "fastv", keep=0.5):
        found = tiny.model(**prompts).logits
        assert len(calls) == 7 * tiny.layers
        with plain_linear():
            wanted = tiny.model(**prompts).logits
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        calls.clear()
        tiny.model.generate(**prompts, max_new_tokens=3, do_sample=False)
        assert len(calls) == 7 * tiny.layers  # the prompt; a token at a time is no case for it
    assert [type(m) for m in tiny.model.modules()] == kinds
