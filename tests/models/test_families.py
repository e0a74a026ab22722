"""Every supported family: real sequence lengths, hooks and hidden states, gradient checkpointing, analytic MACs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tokensieve
from helpers.extra_token import OneMore
from tokensieve.errors import UnsupportedModelError
from tokensieve.testing import TinyModel, tiny_model, tiny_models

ROTARY = [f for f in tiny_models() if "eva" in f or f in ("timm_rope_mixed", "timm_naflex", "transformers_mlcd")]
ROTARY += ["transformers_dinov3", "transformers_vjepa2"]


def lengths(tiny: TinyModel) -> list[int]:
    """Tokens that leave each block's cut in one forward: those that enter its MLP, where that comes after it."""
    seen: list[int] = []
    hooks = [m.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1])) for m in tiny.mlps(tiny.model)]
    with torch.no_grad():
        tiny.feature(tiny.model, tiny.images(2))
    for hook in hooks:
        hook.remove()
    if tiny.late:  # an MLP beside attention sees what the block before left; the last cut shows in nothing
        handle = tokensieve.attachment_of(tiny.model)
        last = tiny.prefix + 36 if handle is None else handle.tokens_per_layer[-1]
        seen = [*seen[1:], last]
    return seen


@pytest.mark.parametrize("family", tiny_models())
def test_lengths_are_what_the_budget_says(family: str) -> None:
    tiny = tiny_model(family)
    p = tiny.prefix
    assert lengths(tiny) == [p + 36] * 4
    with tokensieve.attach(tiny.model, "grid", keep=[20, 7], at=[1, 3]) as handle:
        assert handle.tokens_per_layer == [p + 36, p + 20, p + 20, p + 7]
        assert lengths(tiny) == handle.tokens_per_layer
    with tokensieve.attach(tiny.model, "grid", keep=0.5) as handle:
        assert lengths(tiny) == [p + 32, p + 27, p + 23, p + 18] == handle.tokens_per_layer
    with tokensieve.attach(tiny.model, "random", keep=0.5) as handle:  # every third block, from the first
        assert lengths(tiny) == [p + 27, p + 27, p + 27, p + 18] == handle.tokens_per_layer
    with tokensieve.attach(tiny.model, "grid", keep=9, at=0):
        assert lengths(tiny) == [p + 9] * 4
    assert lengths(tiny) == [p + 36] * 4


@pytest.mark.parametrize("family", [f for f in tiny_models() if f not in ROTARY])
def test_a_made_token_is_carried_along(family: str) -> None:
    tiny = tiny_model(family)
    with tokensieve.attach(tiny.model, OneMore(), keep=[20, 7], at=[1, 3]) as handle:
        assert lengths(tiny) == [tiny.prefix + n for n in (36, 21, 21, 8)] == handle.tokens_per_layer


def test_prefix_tokens_survive_at_their_place() -> None:
    """What enters the block after a cut starts with CLS and the registers, in both libraries."""
    for family in ("timm_registers", "transformers_dinov2_registers"):
        tiny = tiny_model(family)
        with tokensieve.attach(tiny.model, "grid", keep=5, at=3) as handle:
            last = list(handle.blocks.children())[-1]
            seen = []
            hook = last.norm2.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0]))
            with torch.no_grad():
                tiny.feature(tiny.model, tiny.images(2))
            hook.remove()
            kept = handle.kept[3]
        seen_whole = []
        hook = last.norm2.register_forward_hook(lambda _, args, __, seen=seen_whole: seen.append(args[0]))
        with torch.no_grad():
            tiny.feature(tiny.model, tiny.images(2))
        hook.remove()
        rows = torch.cat([torch.arange(4), kept[0] + 4])
        assert torch.allclose(seen[0], seen_whole[0][:, rows], atol=1e-5)


def test_hooks_on_blocks_fire_once_a_forward() -> None:
    tiny = tiny_model("timm")
    calls = []
    hooks = [b.register_forward_hook(lambda *_: calls.append(1)) for b in tiny.model.blocks]
    with torch.no_grad(), tokensieve.attach(tiny.model, "tome", keep=18):
        tiny.model(tiny.images(1))
    for hook in hooks:
        hook.remove()
    assert len(calls) == 4


IMAGES = ("transformers_clip", "transformers_siglip", "transformers_dinov2", "transformers_vit", "transformers_dinov3")


@pytest.mark.parametrize("family", IMAGES)
def test_hidden_states_are_of_full_size(family: str) -> None:
    tiny = tiny_model(family)
    model = getattr(tiny.model, "vision_model", tiny.model)
    p = tiny.prefix
    with torch.no_grad(), tokensieve.attach(tiny.model, "grid", keep=[20, 7], at=[1, 3]):
        out = model(pixel_values=tiny.images(2), output_hidden_states=True)
    assert [h.shape[1] for h in out.hidden_states] == [p + 36] * 5


def test_openclip_intermediates() -> None:
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, "grid", keep=[20, 7], at=[1, 3]):
        out = tiny.model.forward_intermediates(tiny.images(2), output_fmt="NLC")
    assert [x.shape[1] for x in out["image_intermediates"]] == [36] * 4


def set_checkpointing(tiny: TinyModel, on: bool) -> None:
    if tiny.name.startswith("transformers"):
        (tiny.model.gradient_checkpointing_enable if on else tiny.model.gradient_checkpointing_disable)()
    else:
        tiny.model.set_grad_checkpointing(on)


def gradients(tiny: TinyModel, *batches: torch.Tensor) -> list[torch.Tensor]:
    """Of a loss over one or more forwards, all run before the one backward."""
    tiny.model.zero_grad(set_to_none=True)
    features = [tiny.feature(tiny.model, images) for images in batches]
    sum((f.square() * torch.arange(1, f.shape[1] + 1)).sum() for f in features).backward()
    return [p.grad.clone() for p in tiny.model.parameters() if p.grad is not None]


CHECKPOINTED = ["openclip", "openclip_whole", "openclip_timm", "timm", "timm_eva", "timm_registers"]
CHECKPOINTED += ["transformers_clip", "transformers_siglip", "transformers_dinov2"]


@pytest.mark.parametrize("family", CHECKPOINTED)
@pytest.mark.parametrize("method", ["tome", "anchor"])
def test_checkpointing_gives_the_same_gradients(family: str, method: str) -> None:
    tiny = tiny_model(family)
    tiny.model.train()
    a, b = tiny.images(2), tiny.images(2, seed=1)
    with tokensieve.attach(tiny.model, method, keep=16):
        plain_one, plain_two = gradients(tiny, a), gradients(tiny, a, b)
        set_checkpointing(tiny, True)
        one, two = gradients(tiny, a), gradients(tiny, a, b)
    assert len(one) == len(plain_one) > 10
    for wanted, got in zip(plain_one + plain_two, one + two, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item() + 1e-6)


def counted_macs(tiny: TinyModel) -> float:
    tiny.model.requires_grad_(False)  # the counter follows modules by autograd hooks, and stumbles over bare parameters
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            tiny.feature(tiny.model, tiny.images(1))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("family", tiny_models())
@pytest.mark.parametrize("method", ["grid", "random", "fold"])
def test_macs_agree_with_the_flop_counter(family: str, method: str) -> None:
    """grid and random compute nothing that counts; folding does, so only the encoder's lengths are compared there."""
    tiny = tiny_model(family)
    full = counted_macs(tiny)
    name, options = ("grid", {"fold": True}) if method == "fold" else (method, {})
    with tokensieve.attach(tiny.model, name, keep=[20, 7], at=[1, 3], **options) as handle:
        planned = handle.cost()
        reduced, cost = counted_macs(tiny), handle.cost()
    assert planned.tokens_per_layer == cost.tokens_per_layer
    assert planned == cost or method == "fold", "only after merging does a tower pool over other lengths than planned"
    assert cost.macs_full == pytest.approx(full, rel=0.01)
    own = fold_macs(tiny) if method == "fold" else 0
    assert cost.macs == pytest.approx(reduced - own, rel=0.01)
    assert cost.macs < 0.9 * cost.macs_full


def fold_macs(tiny: TinyModel) -> int:
    """Cosines of the dropped to the kept, by mean keys of width 8: 16 to 20 patches, then 13 to 7."""
    return 8 * (16 * 20 + 13 * 7)


@pytest.mark.parametrize("family", ROTARY)
def test_a_rotary_tower_refuses_an_extra_token(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="rotary"):
        tokensieve.attach(tiny_model(family).model, OneMore(), keep=[20, 7], at=[1, 3])
