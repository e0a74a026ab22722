"""Blocks for few tokens: the same numbers as the block's own way, and its own way wherever there is a surprise."""

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
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tokensieve
from tokensieve.adapters import few_rows, lean
from tokensieve.adapters.few_rows import plain_linear
from tokensieve.adapters.lean import LeanBlock
from tokensieve.testing.models import tiny_model, tiny_models

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="made for MKL"),
    pytest.mark.usefixtures("two_threads"),
]

# rotations, norms of queries and keys, an attention class of its own: these go their own way
OWN_WAY = {"openclip_custom", "timm_eva", "timm_qknorm"}


@pytest.fixture
def runs(monkeypatch):
    """The tokens of each MLP that was run lean."""
    seen: list[int] = []
    mlp = LeanBlock.mlp
    monkeypatch.setattr(LeanBlock, "mlp", lambda block, x: seen.append(x.shape[1]) or mlp(block, x))
    return seen


def parts_of(model: nn.Module) -> list[lean.Parts]:
    return [p for m in model.modules() if hasattr(m, "sieve_parts") and (p := m.sieve_parts()) is not None]


@pytest.mark.parametrize("name", tiny_models())
@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_numbers_in_every_family(name, batch, runs):
    tiny = tiny_model(name)
    x = tiny.images(batch)
    with tokensieve.attach(tiny.model, "tome", keep=0.5) as handle:
        found = tiny.feature(tiny.model, x)
        sizes = handle.sizes
        assert runs == ([] if name in OWN_WAY else handle.tokens_per_layer)
        with plain_linear():
            wanted = tiny.feature(tiny.model, x)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(sizes, handle.sizes)


@pytest.mark.parametrize("act", ["gelu", "gelu tanh", "relu"])
@pytest.mark.parametrize("scaled", [True, False])
def test_each_stretch_against_a_double_referee(act, scaled):
    tiny = tiny_model("timm")
    draw = torch.Generator().manual_seed(4)
    with tokensieve.attach(tiny.model, "random", keep=0.5):
        parts = parts_of(tiny.model)[0]
        between = {"gelu": nn.GELU(), "gelu tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}[act]
        scale = torch.rand(32, generator=draw) if scaled else None
        first, _, _, _, second, _ = parts.mlp
        parts = parts._replace(mlp=(first, between, second), after_out=(scale,), after_mlp=(None, scale))
        x, heads = (torch.randn(shape, generator=draw) for shape in ((2, 21, 32), (2, 4, 21, 8)))
        block = LeanBlock(parts)
        found = (*block.qkv(x), block.attended(x, heads), block.mlp(x))

    double = copy.deepcopy(parts)
    for module in (double.norm1, *double.qkv, double.norm2, double.out, *double.mlp):
        module.double()
    factor = 1.0 if scale is None else scale.double()
    qkv, x, heads = double.qkv[0], x.double(), heads.double()
    three = (double.norm1(x) @ qkv.weight.T + qkv.bias).view(2, 21, 3, 4, 8).permute(2, 0, 3, 1, 4)
    after = x + factor * (heads.transpose(1, 2).flatten(2) @ double.out.weight.T + double.out.bias)
    first, between, second = double.mlp
    hidden = between(double.norm2(x) @ first.weight.T + first.bias)
    for one, referee in zip(found, (*three, after, x + factor * (hidden @ second.weight.T + second.bias)), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), referee, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("where", ["norm1", "out", "norm2", "mlp", "after_out", "after_mlp", "around"])
@pytest.mark.parametrize("kind", ["after", "before"])
def test_a_hook_is_called_and_obeyed(where, kind, runs):
    """Whichever part somebody watches, its block goes its own way, and what the hook returns counts."""
    tiny = tiny_model("timm_registers")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        before = tiny.feature(tiny.model, x)
        assert len(runs) == handle.depth
        part = getattr(parts_of(tiny.model)[1], where)
        modules = [m for m in (part if isinstance(part, tuple) else (part,)) if isinstance(m, nn.Module)]
        assert modules
        for module in modules:
            runs.clear()
            add = module.register_forward_hook if kind == "after" else module.register_forward_pre_hook
            hook = add(lambda *_: None)
            torch.testing.assert_close(tiny.feature(tiny.model, x), before, atol=1e-5, rtol=1e-4)
            assert len(runs) == handle.depth - 1
            hook.remove()
        mlp = tiny.mlps(tiny.model)[1]
        with mlp.register_forward_hook(lambda *_: torch.zeros(())):
            assert not torch.allclose(tiny.feature(tiny.model, x), before, atol=1e-3)


def test_a_hook_on_all_modules_is_called(runs):
    tiny = tiny_model("openclip")
    seen: list[str] = []
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        try:
            tiny.feature(tiny.model, tiny.images(1))
        finally:
            hook.remove()
    assert not runs
    assert sum("Linear" in name for name in seen) == 12  # output projections and both layers of four MLPs


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


@pytest.fixture
def gathered(monkeypatch):
    """The blocks that were gathered."""
    seen: list[lean.Parts] = []
    build = LeanBlock.__init__
    monkeypatch.setattr(LeanBlock, "__init__", lambda block, parts: seen.append(parts) or build(block, parts))
    return seen


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
        after = tiny.feature(tiny.model, x)
        assert not torch.allclose(before, after, atol=1e-3)
        with plain_linear():
            torch.testing.assert_close(after, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


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
        after = tiny.feature(tiny.model, x)
        assert not torch.allclose(before, after, atol=1e-3)
        with plain_linear():
            torch.testing.assert_close(after, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


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
        after = tiny.feature(tiny.model, x)
        assert not torch.allclose(before, after, atol=1e-3)
        with plain_linear():
            torch.testing.assert_close(after, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


def test_a_block_that_is_replaced():
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        before = tiny.feature(tiny.model, x)
        blocks = tiny.model.transformer.resblocks
        other = copy.deepcopy(blocks[2])
        other.mlp[0].weight.data.mul_(3)
        blocks._modules["2"] = other
        after = tiny.feature(tiny.model, x)
        assert not torch.allclose(before, after, atol=1e-3)
        with plain_linear():
            torch.testing.assert_close(after, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("threads", [3, 4])
def test_more_threads(threads, runs, gathered):
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        before = tiny.feature(tiny.model, x)
        torch.set_num_threads(threads)
        found = tiny.feature(tiny.model, x)
        assert len(gathered) == len(runs) == 2 * handle.depth
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
    assert len(blocks.lean._known[1]) == handle.depth
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


def test_dropout_in_force_goes_its_own_way(runs):
    tiny = tiny_model("timm")
    for module in tiny.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        tiny.model.train()
        assert not torch.allclose(tiny.feature(tiny.model, x), tiny.feature(tiny.model, x), atol=1e-3)
        assert not runs
        tiny.model.eval()
        assert torch.equal(tiny.feature(tiny.model, x), tiny.feature(tiny.model, x))
        assert runs


def test_a_norm_of_the_users_own_goes_its_own_way(runs):
    class Twice(nn.LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    tiny = tiny_model("openclip")
    block = tiny.model.transformer.resblocks[1]
    own = Twice(32)
    own.load_state_dict(block.ln_2.state_dict())
    block.ln_2 = own
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        found = tiny.feature(tiny.model, tiny.images(1))
        assert len(runs) == handle.depth - 1
        with plain_linear():
            torch.testing.assert_close(found, tiny.feature(tiny.model, tiny.images(1)), atol=1e-5, rtol=1e-4)


def test_it_begins_where_the_tokens_have_become_few(runs, monkeypatch):
    tiny = tiny_model("openclip")
    monkeypatch.setattr(few_rows, "_MOST", 60)
    x = tiny.images(2)
    with tokensieve.attach(tiny.model, "evit", keep=[36, 20, 20, 10], at=[0, 1, 2, 3]) as handle:
        found = tiny.feature(tiny.model, x)
        entering = [37, *handle.tokens_per_layer[:-1]]
        assert len(runs) == sum(2 * tokens <= 60 for tokens in entering) == 2
        with plain_linear():
            torch.testing.assert_close(found, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


class Wrapped(nn.Module):
    """A layer with more to it, under the names of the layer: as adapters of weights are made."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x):
        return 2 * self.layer(x)


class Loud(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class AlwaysDropout(nn.Dropout):
    def forward(self, x):
        return 0.5 * x


class OwnLayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x * self.gamma.exp()


def surprise(tiny, what: str) -> None:
    """Change the second block of a tiny model in a way that its parts' weights do not tell."""
    if tiny.name == "openclip":
        block = tiny.model.transformer.resblocks[1]
        if what == "mlp":
            block.mlp = Loud(*block.mlp)
        elif what == "another mlp":
            block.mlp = nn.ModuleDict({"inner": block.mlp})
            block.mlp.forward = lambda x: 2 * block.mlp["inner"](x)
        else:
            block.ls_2 = OwnLayerScale()
    elif tiny.name == "timm":
        block = tiny.model.blocks[1]
        if what == "projection":
            block.attn.qkv = Wrapped(block.attn.qkv)
        elif what == "forward":
            before = block.mlp.fc1.forward
            block.mlp.fc1.forward = lambda x: 2 * before(x)
        elif what == "drop":
            block.mlp.drop1 = AlwaysDropout()
        else:
            from timm.layers import LayerNormAct

            norm = LayerNormAct(32)
            norm.load_state_dict(block.norm2.state_dict())
            block.norm2 = norm
    else:
        layer = tiny.model.vision_model.encoder.layers[1] if hasattr(tiny.model, "vision_model") else None
        layer = tiny.model.encoder.layers[1] if layer is None else layer
        if what == "projection":
            layer.self_attn.v_proj = Wrapped(layer.self_attn.v_proj)
        else:
            layer.mlp.fc2 = Wrapped(layer.mlp.fc2)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("openclip", "mlp"),
        ("openclip", "another mlp"),
        ("openclip", "scale"),
        ("timm", "projection"),
        ("timm", "forward"),
        ("timm", "drop"),
        ("timm", "norm"),
        ("transformers_clip", "projection"),
        ("transformers_clip", "layer"),
    ],
)
def test_what_weights_do_not_tell_goes_its_own_way(name, what, runs):
    """Layers, norms and steps that do more than their class of that name: as exact as without a lean form."""
    tiny = tiny_model(name)
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        usual = tiny.feature(tiny.model, x)
    surprise(tiny, what)
    runs.clear()
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        found = tiny.feature(tiny.model, x)
        assert len(runs) == handle.depth - 1
        assert not torch.allclose(found, usual, atol=1e-3)
        with plain_linear():
            torch.testing.assert_close(found, tiny.feature(tiny.model, x), atol=1e-5, rtol=1e-4)


def test_heads_of_a_width_of_their_own():
    from timm.layers.attention import Attention

    tiny = tiny_model("timm")
    torch.manual_seed(0)
    for block in tiny.model.blocks:
        block.attn = Attention(32, num_heads=4, attn_head_dim=16, qkv_bias=True).eval()
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        found = tiny.feature(tiny.model, tiny.images(1))
        with plain_linear():
            torch.testing.assert_close(found, tiny.feature(tiny.model, tiny.images(1)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 5])
def test_other_numbers_of_threads_go_their_own_way(threads, runs):
    tiny = tiny_model("openclip")
    torch.set_num_threads(threads)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        tiny.feature(tiny.model, tiny.images(1))
    assert not runs


def test_gradients_go_their_own_way(runs):
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", keep=0.5), torch.enable_grad():
        tiny.feature(tiny.model, tiny.images(1)).sum().backward()
    assert not runs
    assert all(p.grad is not None for p in tiny.model.transformer.parameters())
