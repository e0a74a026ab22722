"""Lean blocks: the same numbers as the block's own way, and its own way wherever there is a surprise."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import go
from lean_parts import parts_of
from torch import nn

import tokensieve
from tokensieve.adapters import linear
from tokensieve.adapters.lean_blocks import PartsBlock, lean_block
from tokensieve.adapters.linear import Way, plain_linear
from tokensieve.testing.models import tiny_model, tiny_models

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="made for MKL"),
    pytest.mark.usefixtures("way"),
]

# rotations, norms of queries and keys, an attention class of its own: these go their own way
OWN_WAY = {"openclip_custom", "timm_eva", "timm_qknorm"}


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
def test_each_stretch_against_a_double_referee(act, scaled, way):
    tiny = tiny_model("timm")
    draw = torch.Generator().manual_seed(4)
    with tokensieve.attach(tiny.model, "random", keep=0.5):
        parts = parts_of(tiny.model)[0]
        between = {"gelu": nn.GELU(), "gelu tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}[act]
        scale = torch.rand(32, generator=draw) if scaled else None
        first, _, _, _, second, _ = parts.mlp
        parts = parts._replace(mlp=(first, between, second), after_out=(scale,), after_mlp=(None, scale))
        x, heads = (torch.randn(shape, generator=draw) for shape in ((2, 21, 32), (2, 4, 21, 8)))
        block = lean_block(parts, way)
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


def test_parts_begin_where_the_tokens_have_become_few(runs, monkeypatch):
    go(Way.PARTS, monkeypatch)
    tiny = tiny_model("openclip")
    monkeypatch.setattr(linear, "_MOST", 60)
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
def test_parts_are_for_two_to_four_threads(threads, runs, way):
    tiny = tiny_model("openclip")
    torch.set_num_threads(threads)
    with tokensieve.attach(tiny.model, "evit", keep=0.5):
        tiny.feature(tiny.model, tiny.images(1))
    assert bool(runs) == (way is Way.ONEDNN)


def test_onednn_that_is_switched_off(runs, monkeypatch, way):
    tiny = tiny_model("openclip")
    x = tiny.images(1)
    with tokensieve.attach(tiny.model, "evit", keep=0.5) as handle:
        before = tiny.feature(tiny.model, x)
        blocks = handle.blocks.lean._known[2]
        with torch.backends.mkldnn.flags(enabled=False):
            torch.testing.assert_close(tiny.feature(tiny.model, x), before, atol=1e-5, rtol=1e-4)
        others = handle.blocks.lean._known[2]
        assert {type(block) for block in others.values()} == {PartsBlock}
        assert (others is blocks) == (way is Way.PARTS)  # gathered anew for another way
        assert torch.equal(tiny.feature(tiny.model, x), before)


def test_gradients_go_their_own_way(runs):
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", keep=0.5), torch.enable_grad():
        tiny.feature(tiny.model, tiny.images(1)).sum().backward()
    assert not runs
    assert all(p.grad is not None for p in tiny.model.transformer.parameters())
