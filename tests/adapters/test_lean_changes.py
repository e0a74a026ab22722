"""Lean blocks are kept between forwards: whatever changes in between is seen."""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from lean_parts import parts_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tokensieve
from tokensieve.adapters.linear import plain_linear
from tokensieve.testing.models import tiny_model, tiny_models

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="made for MKL"),
    pytest.mark.usefixtures("way"),
]

# rotations, norms of queries and keys, an attention class of its own: these go their own way
OWN_WAY = {"openclip_custom", "timm_eva", "timm_qknorm"}


def assert_moved(tiny, x, before) -> None:
    """The feature is another than before, and the one that the blocks' own way gives."""
    after = tiny.feature(tiny.model, x)
    assert not torch.allclose(before, after, atol=1e-3)
    with plain_linear():
        torch.testing.assert_close(after, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("change", ["in place", "new parameter", "other memory"])
def test_weights_are_those_of_the_moment(change):
    """What was gathered by a forward before is used for the same weights only."""
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        before = tiny.feature(tiny.model, x)
        layer = parts_of(tiny.model)[2].mlp[0]
        if change == "in place":
            layer.weight.mul_(0.5)
        elif change == "new parameter":
            layer.weight = nn.Parameter(layer.weight * 0.5)
        else:
            layer.weight.data = layer.weight.data * 0.5
        after = tiny.feature(tiny.model, x)
        with plain_linear():
            torch.testing.assert_close(after, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(before, after, atol=1e-3)
        assert tiny.model.transformer.resblocks.last.known is None  # a run that is kept holds no weights


def test_blocks_are_gathered_once(gathered):
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        for _ in range(3):
            tiny.feature(tiny.model, tiny.images(1))
        assert len(gathered) == handle.depth


@pytest.mark.parametrize("name", sorted(set(tiny_models()) - OWN_WAY))
@pytest.mark.parametrize(
    "what",
    ["parameter", "data", "module", "eps", "class", "hook", "forward", "new hooks", "new parameters", "all of another"],
)
def test_what_changed_is_gathered_anew(name, what, gathered):
    tiny = tiny_model(name)
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        before = tiny.feature(tiny.model, x)
        parts = parts_of(tiny.model)[1]
        norm = parts.norm2
        gathered.clear()
        if what == "parameter":
            norm.weight = nn.Parameter(norm.weight * 3)
        elif what == "data":
            norm.weight.data = norm.weight.data * 3
        elif what == "module":
            other = copy.deepcopy(norm)
            other.weight.data.mul_(3)
            block = next(m for m in tiny.model.modules() if norm in m._modules.values())
            block._modules[next(key for key, value in block._modules.items() if value is norm)] = other
        elif what == "eps":
            norm.eps = 1.0
        elif what == "class":

            class Twice(nn.LayerNorm):
                def forward(self, x):
                    return 3 * super().forward(x)

            norm.__class__ = Twice
        elif what == "forward":
            forward = norm.forward
            norm.forward = lambda x: 3 * forward(x)
        elif what == "new hooks":
            norm._forward_hooks = OrderedDict()  # a usual way to be rid of all of them
            norm.register_forward_hook(lambda module, given, out: 3 * out)
        elif what == "new parameters":
            norm._parameters = {name: nn.Parameter(p * 3) for name, p in norm._parameters.items()}
        elif what == "all of another":
            other = copy.deepcopy(norm)
            other.weight.data.mul_(3)
            norm.__dict__.update(other.__dict__)
        else:
            norm.register_forward_hook(lambda module, given, out: 3 * out)
        after = tiny.feature(tiny.model, x)
        assert not torch.allclose(before, after, atol=1e-4)
        assert len(gathered) == handle.depth
        with plain_linear():
            torch.testing.assert_close(after, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("where", ["mlp", "in_proj"])
def test_weights_that_are_computed_go_their_own_way(where, runs):
    """They may be others at the next forward, and nothing says so."""
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    block = tiny.model.transformer.resblocks[1]
    module, name = (block.mlp[0], "weight") if where == "mlp" else (block.attn, "in_proj_weight")
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        tiny.feature(tiny.model, x)
        nn.utils.parametrizations.weight_norm(module, name)
        runs.clear()
        before = tiny.feature(tiny.model, x)
        assert len(runs) == handle.depth - 1
        with torch.no_grad():
            getattr(module.parametrizations, name).original0.mul_(0.5)
        assert_moved(tiny, x, before)


def test_weights_without_an_address_go_their_own_way(runs):
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle, torch.no_grad():
        before = tiny.feature(tiny.model, x)
        layer = parts_of(tiny.model)[1].mlp[0]
        layer.weight = nn.Parameter(layer.weight.to_sparse_csr(), requires_grad=False)
        for _ in range(2):
            runs.clear()
            torch.testing.assert_close(tiny.feature(tiny.model, x), before, atol=1e-5, rtol=1e-4)
            assert len(runs) == handle.depth - 1


def test_an_activation_of_somebodys_own_sees_its_tokens_in_rows(runs):
    """Parts of the hidden units may be shown only to what looks at each number by itself."""

    class Softmax(nn.Module):
        def forward(self, x):
            return x.softmax(dim=-1)

    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        tiny.model.transformer.resblocks[1].mlp[1] = Softmax()
        found = tiny.feature(tiny.model, x)
        assert len(runs) == handle.depth - 1
        with plain_linear():
            torch.testing.assert_close(found, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


def test_the_same_memory_seen_otherwise():
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        before = tiny.feature(tiny.model, x)
        out = parts_of(tiny.model)[1].out
        out.weight.data = out.weight.data.T
        assert_moved(tiny, x, before)


def test_settings_may_be_anything():
    """Numbers of numpy count, and what is no setting of ours is never compared."""
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    norm = tiny.model.transformer.resblocks[1].ln_2
    norm.eps, norm.note, norm.other = np.float32(1e-5), None, 0.0
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        before = tiny.feature(tiny.model, x)
        norm.note, norm.other = np.ones(3), torch.ones(3)
        assert torch.equal(tiny.feature(tiny.model, x), before)
        norm.eps = np.float32(10.0)
        assert_moved(tiny, x, before)


def test_a_block_that_is_replaced():
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        before = tiny.feature(tiny.model, x)
        blocks = tiny.model.transformer.resblocks
        other = copy.deepcopy(blocks[2])
        other.mlp[0].weight.data.mul_(3)
        blocks._modules["2"] = other
        assert_moved(tiny, x, before)


@pytest.mark.parametrize("threads", [3, 4])
def test_more_threads(threads, runs, gathered):
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        before = tiny.feature(tiny.model, x)
        torch.set_num_threads(threads)
        found = tiny.feature(tiny.model, x)
        assert (len(gathered), len(runs)) == (handle.depth, 2 * handle.depth)  # nothing in them depends on threads
        torch.testing.assert_close(found, before, atol=1e-5, rtol=1e-4)


def test_gradients_that_are_switched_on_on_the_way(runs):
    """The last blocks are trained on features of the first, inside a no_grad."""
    tiny = tiny_model("openclip")
    blocks = tiny.model.transformer.resblocks
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        hook = blocks[2].register_forward_pre_hook(lambda *_: torch.set_grad_enabled(True) and None)
        out = tiny.model(tiny.images(1))
        hook.remove()
        assert len(runs) == 2
        out.sum().backward()
        torch.set_grad_enabled(False)
    assert blocks[2].mlp[0].weight.grad.abs().sum() > 0
    assert blocks[1].mlp[0].weight.grad is None


@pytest.mark.parametrize(("name", "attention"), [("timm", "attn"), ("transformers_clip", "self_attn")])
def test_a_scale_that_can_be_written_to(name, attention, runs):
    tiny = tiny_model(name)
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        block = next(m for m in tiny.model.modules() if getattr(m, "_sieve_index", None) == 1)
        scale = torch.tensor(getattr(block, attention).scale)
        getattr(block, attention).scale = scale
        before = tiny.feature(tiny.model, x)
        assert len(runs) == handle.depth - 1
        scale.mul_(3)
        assert not torch.allclose(before, tiny.feature(tiny.model, x), atol=1e-4)


def test_functions_of_the_weights():
    """torch.func: derivatives without gradients, and many models at once."""
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "grid", keep=0.5):
        weights = dict(tiny.model.named_parameters())
        call = partial(torch.func.functional_call, tiny.model)
        two = {name: torch.stack([p, 0.5 * p]) for name, p in weights.items()}
        found = torch.vmap(lambda given: call(given, x))(two)
        with plain_linear():
            wanted = torch.stack([call({name: p[i] for name, p in two.items()}, x) for i in range(2)])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        with sdpa_kernel(SDPBackend.MATH):  # the fused one has no tangents
            out, slope = torch.func.jvp(lambda given: call(given, x), (weights,), (weights,))
        torch.testing.assert_close(out, found[0], atol=1e-5, rtol=1e-4)
        assert slope.abs().sum() > 0


def test_weights_that_change_while_others_run():
    """Two threads, and a third that loads weights all the time: nobody stumbles, and the numbers are some of either."""
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    state = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    stop = threading.Event()
    with tokensieve.attach(tiny.model, "evit", keep=0.5), ThreadPoolExecutor(3) as pool:
        wanted = tiny.feature(tiny.model, x)

        def load():
            while not stop.is_set():
                tiny.model.load_state_dict(state)

        def run():
            with torch.no_grad():
                return [tiny.feature(tiny.model, x) for _ in range(60)]

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            loading = pool.submit(load)
            found = [future.result() for future in [pool.submit(run) for _ in range(2)]]
        finally:
            stop.set()
            sys.setswitchinterval(before)
        loading.result()
        for feature in (*found[0], *found[1]):
            torch.testing.assert_close(feature, wanted, atol=1e-5, rtol=1e-4)


def test_a_replica_has_lean_blocks_of_its_own():
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        tiny.feature(tiny.model, tiny.images(1))
        blocks = tiny.model.transformer.resblocks
        twin = blocks._replicate_for_data_parallel()
        assert twin.lean is not blocks.lean
        assert twin.lean._known is None
        assert blocks.lean._known is not None


def test_a_hook_that_has_gone_is_forgotten(runs):
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        for module in parts_of(tiny.model)[1].mlp:
            hook = module.register_forward_hook(lambda *_: None)
            runs.clear()
            tiny.feature(tiny.model, x)
            assert len(runs) == handle.depth - 1
            hook.remove()
            runs.clear()
            tiny.feature(tiny.model, x)
            assert len(runs) == handle.depth


def test_weights_can_be_loaded_in_any_way():
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        tiny.feature(tiny.model, x)
        known = tiny.model.transformer.resblocks.lean
        other = {name: value * 0.5 for name, value in tiny.model.state_dict().items()}
        torch.__future__.set_swap_module_params_on_conversion(True)  # fails where somebody else holds the weights
        try:
            tiny.model.load_state_dict(other)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert known._known is None
        with plain_linear():
            wanted = tiny.feature(tiny.model, x)
        torch.testing.assert_close(tiny.feature(tiny.model, x), wanted, atol=1e-5, rtol=1e-4)


def test_gathered_in_inference_mode_and_used_after_a_step_of_training():
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        with torch.inference_mode():
            before = tiny.model(x).clone()
        optimizer = torch.optim.SGD(tiny.model.parameters(), lr=1.0)
        with torch.enable_grad():
            tiny.model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            after = tiny.model(x)
            with plain_linear():
                torch.testing.assert_close(after, tiny.model(x), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(before, after, atol=1e-3)


def test_weights_that_were_left_are_not_held():
    """`.to()`, removal and copies let go of the views; copies have weights of their own."""
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    handle = tokensieve.attach(tiny.model, "evit", keep=0.5)
    tiny.feature(tiny.model, x)
    blocks = tiny.model.transformer.resblocks
    assert len(blocks.lean._known[2]) == handle.depth
    twin = copy.deepcopy(tiny.model)
    assert not twin.transformer.resblocks.lean._known
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    wanted = tiny.feature(tiny.model, x)
    assert not torch.allclose(tiny.feature(twin, x), wanted, atol=1e-3)
    assert torch.equal(tiny.feature(tiny.model, x), wanted)
    known = blocks.lean
    tiny.model.double()
    assert known._known is None
    tiny.model.float()
    tiny.feature(tiny.model, x)
    assert known._known
    assert blocks.last.known is None
    handle.remove()
    assert "lean" not in blocks.__dict__
