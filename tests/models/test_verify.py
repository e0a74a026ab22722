"""The check of a block's form: what it finds, what it leaves untouched, what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import UnsupportedModelError
from tokensieve.models import verify
from tokensieve.models.verify import module_key, random_like, verification_copy, verify_forms
from tokensieve.testing import tiny_model
from tokensieve.utils.torchvision import declare_missing_schemas


class Branch(nn.Module):
    """x + scale * linear(norm(x)), with a LayerScale that starts near zero."""

    def __init__(self, width: int = 8, start: float = 1e-6) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), start))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.drop(self.linear(self.norm(x)))


def form(block: Branch, x: Tensor, slip: float = 0.0) -> Tensor:
    return x + block.scale * block.linear(block.norm(x)) * (1.0 + slip)


def check(block: Branch, slip: float = 0.0, key: object = None) -> None:
    copy = verification_copy(block)
    verify_forms("Branch", copy, lambda x: form(copy, x, slip), (random_like(copy, 2, 5, 8),), key=key)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equal_forms_pass_and_others_are_named(dtype: torch.dtype) -> None:
    block = Branch().to(dtype).train()
    check(block)
    with pytest.raises(UnsupportedModelError, match=r"Branch is not computed .* differs by"):
        check(block, slip=0.01)


def test_what_starts_at_zero_hides_nothing() -> None:
    block = Branch(start=0.0)
    nn.init.zeros_(block.linear.weight)
    with pytest.raises(UnsupportedModelError, match="differs"):
        check(block, slip=0.01)


def test_a_forward_that_fails_is_named() -> None:
    copy = verification_copy(Branch())
    with pytest.raises(UnsupportedModelError, match=r"its own forward fails on random tokens \(RuntimeError"):
        verify_forms("Branch", copy, lambda x: x, (torch.randn(2, 5, 9),))
    with pytest.raises(UnsupportedModelError, match=r"our form of it fails on random tokens \(KeyError"):
        verify_forms("Branch", copy, lambda x: {}[1], (torch.randn(2, 5, 8),))
    with pytest.raises(UnsupportedModelError, match=r"returns \(2, 5, 8\), our form of it \(1, 5, 8\)"):
        verify_forms("Branch", copy, lambda x: form(copy, x)[:1], (torch.randn(2, 5, 8),))
    with pytest.raises(UnsupportedModelError, match="differs by nan"):
        verify_forms("Branch", copy, lambda x: x * torch.nan, (torch.randn(2, 5, 8),))


def test_no_trace_on_the_model() -> None:
    block = Branch().train()
    calls: list[int] = []
    block.norm.register_forward_hook(lambda *_: calls.append(1))
    block.register_buffer("count", torch.zeros(1))
    before, state = {k: v.clone() for k, v in block.state_dict().items()}, torch.random.get_rng_state()
    attributes = {n: sorted(vars(m)) for n, m in block.named_modules()}
    check(block)
    assert calls == []
    assert all(m.training for m in block.modules())
    assert {n: sorted(vars(m)) for n, m in block.named_modules()} == attributes
    assert all(torch.equal(v, before[k]) for k, v in block.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in block.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_kind_is_checked_once() -> None:
    runs: list[int] = []

    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return x

    for _ in range(3):
        verify_forms("same", counted, lambda x: x, (torch.randn(1, 2, 3),), key="a kind of its own")
    assert len(runs) == 1
    for _ in range(2):  # a refusal is remembered too
        with pytest.raises(UnsupportedModelError):
            verify_forms("other", counted, lambda x: x + 1, (torch.randn(1, 2, 3),), key="another kind")
    assert len(runs) == 2


def test_the_key_knows_configuration_but_not_weights() -> None:
    one, two = Branch(), Branch()
    nn.init.ones_(two.linear.weight)
    assert module_key(one) == module_key(two)
    two.norm.eps = 1.0
    assert module_key(one) != module_key(two)
    assert module_key(one) != module_key(Branch(width=16))
    assert module_key(one) != module_key(one, "another form")


def test_look_alikes_are_refused_by_name() -> None:
    declare_missing_schemas()
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, attn_layer="diff")
    with pytest.raises(UnsupportedModelError, match=r"block Block is not computed as its parts suggest: .*differs"):
        tokensieve.attach(model, "tome", keep=0.5)


def test_x_clip_is_refused_by_name() -> None:
    from transformers import XCLIPVisionConfig, XCLIPVisionModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = XCLIPVisionModel(XCLIPVisionConfig(**sizes, image_size=32, patch_size=8, num_frames=2))
    with pytest.raises(UnsupportedModelError, match="XCLIPVisionEncoderLayer is not computed"):
        tokensieve.attach(model, "tome", keep=0.5)


@pytest.mark.parametrize("family", ["openclip", "timm_eva", "transformers_dinov2"])
def test_attach_leaves_no_trace_of_the_check(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_results", {})
    tiny = tiny_model(family)
    tiny.model.train()
    calls: list[int] = []
    for module in tiny.mlps(tiny.model):
        module.register_forward_hook(lambda *_: calls.append(1))
    state, weights = torch.random.get_rng_state(), {k: v.clone() for k, v in tiny.model.state_dict().items()}
    with torch.no_grad(), tokensieve.attach(tiny.model, "tome", keep=0.5):
        assert len(verify._results) == 1, "one kind of block, one check"
    assert calls == []
    assert all(m.training for m in tiny.model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(v, weights[k]) for k, v in tiny.model.state_dict().items())
    assert all(p.grad is None for p in tiny.model.parameters())


def test_on_the_meta_device_it_is_skipped_and_said_so() -> None:
    declare_missing_schemas()
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    with pytest.warns(UserWarning, match="meta device: its blocks were not verified"):
        tokensieve.attach(model, "tome", keep=0.5).remove()
