"""Models that other libraries have wrapped, hooked, quantised or compiled are reduced, or refused in one line."""

from __future__ import annotations

import copy
import types
import warnings

import pytest
import torch
from torch import nn

import tokensieve
from tokensieve.errors import UnsupportedModelError
from tokensieve.testing import TinyModel, tiny_model
from tokensieve.testing.vlm import tiny_llava

pytestmark = pytest.mark.filterwarnings("ignore:.*device_map keys")
FAMILIES = (
    "openclip",
    "openclip_custom",
    "openclip_timm",
    "timm_eva",
    "transformers_clip_whole",
    "transformers_dinov2",
)


# -- accelerate -------------------------------------------------------------------------------------------------------


def dispatched(model: nn.Module) -> nn.Module:
    from accelerate import dispatch_model

    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def dispatched_by_block(model: nn.Module) -> nn.Module:
    """Every block a place of its own, as `device_map="auto"` makes them."""
    from accelerate import dispatch_model

    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) == 4]
    places = {f"{lists[0]}.{i}": "cpu" for i in range(4)}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        if not name.startswith(lists[0]):
            places[name] = "cpu"
    return dispatch_model(model, places, main_device="cpu", force_hooks=True)


def offloaded(model: nn.Module) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def unhooked(model: nn.Module) -> nn.Module:
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    return model


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("hook", [dispatched, dispatched_by_block, offloaded])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*meta device")
def test_hooked_forwards_are_reduced(family: str, hook, order: str) -> None:
    if hook is offloaded and family == "openclip":
        pytest.skip("accelerate cannot run nn.MultiheadAttention offloaded: it reads weights past the hooks")
    tiny = tiny_model(family)
    images, seen = tiny.images(2), []
    with torch.no_grad():
        untouched = tiny.feature(tiny.model, images)
        with tokensieve.attach(tiny.model, "random", keep=9, at=[0, 2]) as handle:
            wanted, counts, kept = tiny.feature(tiny.model, images), handle.tokens_per_layer, handle.kept[2]
        if order == "before":
            hook(tiny.model)
        handle = tokensieve.attach(tiny.model, "random", keep=9, at=[0, 2])
        if order == "after":
            hook(tiny.model)
        for mlp in tiny.mlps(tiny.model):
            mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
        torch.testing.assert_close(tiny.feature(tiny.model, images), wanted)
        assert seen == handle.tokens_per_layer == counts
        assert torch.equal(handle.kept[2], kept)
        handle.remove()
        torch.testing.assert_close(tiny.feature(tiny.model, images), untouched)
        unhooked(tiny.model)
        torch.testing.assert_close(tiny.feature(tiny.model, images), untouched)


@pytest.mark.parametrize("family", ["openclip", "transformers_dinov2"])
def test_hooks_that_are_removed_while_attached(family: str) -> None:
    """accelerate leaves the class's own forward in the instance."""
    tiny = tiny_model(family)
    images = tiny.images(2)
    with torch.no_grad():
        untouched = tiny.feature(tiny.model, images)
        dispatched_by_block(tiny.model)
        handle = tokensieve.attach(tiny.model, "random", keep=9, at=0)
        reduced = tiny.feature(tiny.model, images)
        unhooked(tiny.model)
        assert torch.equal(tiny.feature(tiny.model, images), reduced)
        assert handle.tokens_per_layer == [tiny.prefix + 9] * 4
        handle.remove()
        assert torch.equal(tiny.feature(tiny.model, images), untouched)
        with tokensieve.attach(tiny.model, "random", keep=9, at=0) as handle:
            assert torch.equal(tiny.feature(tiny.model, images), reduced)
        assert torch.equal(tiny.feature(tiny.model, images), untouched)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_hooked_vision_language_model(order: str) -> None:
    tiny = tiny_llava()
    prompts = tiny.prompts([(3, 1, 5)])
    with torch.no_grad():
        untouched = tiny.model(**prompts).logits
        with tokensieve.attach(tiny.model, "fastv", keep=9, at=1) as handle:
            wanted, counts = tiny.model(**prompts).logits, handle.tokens_per_layer
        if order == "before":
            dispatched(tiny.model)
        handle = tokensieve.attach(tiny.model, "fastv", keep=9, at=1)
        if order == "after":
            dispatched(tiny.model)
        torch.testing.assert_close(tiny.model(**prompts).logits, wanted)
        assert handle.stats.tokens_per_layer == counts
        handle.remove()
        torch.testing.assert_close(tiny.model(**prompts).logits, untouched)


# -- forwards in the instance -----------------------------------------------------------------------------------------


def first_block(model: nn.Module) -> nn.Module:
    return model.transformer.resblocks[1]  # type: ignore[union-attr,index,return-value]


@pytest.mark.parametrize("kind", ["compiled", "function", "partial"])
def test_a_forward_of_the_instance_is_refused_and_nothing_changes(kind: str) -> None:
    tiny = tiny_model("openclip")
    block = first_block(tiny.model)
    own = block.forward
    if kind == "compiled":
        block.forward = torch.compile(own, backend="eager")
    elif kind == "function":
        block.forward = lambda x, attn_mask=None: own(x, attn_mask)
    else:
        block.forward = types.MethodType(lambda self, x, attn_mask=None: own(x, attn_mask), block)
    kinds = [type(m) for m in tiny.model.modules()]
    with pytest.raises(
        UnsupportedModelError, match=r"forward of its own in the instance.*del module.forward"
    ) as caught:
        tokensieve.attach(tiny.model, "random", keep=9)
    assert "\n" not in str(caught.value)
    assert [type(m) for m in tiny.model.modules()] == kinds
    assert tokensieve.attachment_of(tiny.model) is None


def test_a_forward_that_comes_after_attach() -> None:
    tiny = tiny_model("openclip")
    images, block = tiny.images(2), first_block(tiny.model)
    old = block.forward
    with torch.no_grad(), tokensieve.attach(tiny.model, "random", keep=9, at=0):
        wanted = tiny.feature(tiny.model, images)
        block.forward = torch.compile(block.forward, backend="eager")  # of the reduced one: understood
        torch.testing.assert_close(tiny.feature(tiny.model, images), wanted)
        block.forward = old  # of the block as it was: it would run with all tokens
        with pytest.raises(UnsupportedModelError, match="block 1 was given a forward of its own after attach"):
            tiny.feature(tiny.model, images)
        del block.forward
        assert torch.equal(tiny.feature(tiny.model, images), wanted)


# -- PEFT -------------------------------------------------------------------------------------------------------------


def with_lora(model: nn.Module, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    found = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return found.eval()


LORA = [
    ("openclip", ["attn"]),
    ("openclip_whole", ["attn"]),
    ("timm", ["qkv", "proj"]),
    ("openclip_timm", ["qkv", "fc1"]),
    ("transformers_clip_whole", ["q_proj", "v_proj"]),
]


@pytest.mark.parametrize(("family", "targets"), LORA)
def test_lora_is_honoured_and_the_tower_is_found(family: str, targets: list[str]) -> None:
    tiny = tiny_model(family)
    images = tiny.images(2)
    bare = copy.deepcopy(tiny.model)
    model = with_lora(tiny.model, targets)
    with torch.no_grad():
        merged = copy.deepcopy(model).merge_and_unload()
        assert not torch.allclose(tiny.feature(merged, images), tiny.feature(bare, images), atol=1e-2)
        with tokensieve.attach(merged, "tome", keep=14):
            wanted = tiny.feature(merged, images)
        with tokensieve.attach(model, "tome", keep=14) as handle:
            assert tokensieve.attachment_of(model) is handle
            torch.testing.assert_close(tiny.feature(model, images), wanted, rtol=1e-4, atol=1e-5)
            with model.disable_adapter():
                off = tiny.feature(model, images)
        with tokensieve.attach(bare, "tome", keep=14):
            torch.testing.assert_close(off, tiny.feature(bare, images))


def test_lora_that_comes_after_attach_learns() -> None:
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "tome", keep=14):
        model = with_lora(tiny.model, ["attn"])
        tiny.feature(model, tiny.images(2)).square().sum().backward()
        grads = [p.grad for name, p in model.named_parameters() if "lora_" in name]
        assert len(grads) == 16  # in_proj and out_proj of four blocks
        assert all(g is not None and g.abs().max() > 0 for g in grads)


# -- the user's hooks, quantisation, empty batches --------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_called_or_named(when: str) -> None:
    tiny = tiny_model("timm")
    block, calls = tiny.model.blocks[2], []

    def hook(name: str) -> None:
        getattr(block, name).register_forward_hook(lambda *_: calls.append(name))

    called = ["norm1", "norm2", "mlp"]
    with torch.no_grad():
        if when == "before":
            for name in called:
                hook(name)
            block.attn.register_forward_pre_hook(lambda *_: calls.append("attn"))
            with pytest.warns(UserWarning, match=r"hooks on attn of block 2 \(Attention\) are not called") as said:
                handle = tokensieve.attach(tiny.model, "random", keep=9)
            assert len(said) == 1
        else:
            handle = tokensieve.attach(tiny.model, "random", keep=9)
            for name in called:
                hook(name)
            block.attn.register_forward_pre_hook(lambda *_: calls.append("attn"))
            with pytest.warns(UserWarning, match="hooks on attn of block 2"):
                tiny.feature(tiny.model, tiny.images(1))
            calls.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            tiny.feature(tiny.model, tiny.images(1))
        assert calls == called
        handle.remove()
        calls.clear()
        tiny.feature(tiny.model, tiny.images(1))
        assert sorted(calls) == ["attn", "mlp", "norm1", "norm2"]


def quantised(tiny: TinyModel, model: nn.Module) -> tuple[nn.Module, list[str]]:
    torch.backends.quantized.engine = "onednn"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return found, [name for name, m in found.named_modules() if "quantized" in type(m).__module__]


@pytest.mark.parametrize("family", ["openclip", "timm", "transformers_clip", "transformers_dinov2"])
def test_dynamic_quantisation_before_and_after_attach(family: str) -> None:
    tiny = tiny_model(family)
    images = tiny.images(2)
    before, names = quantised(tiny, tiny.model)
    with torch.no_grad():
        macs = tokensieve.attach(before, "random", keep=9).cost().macs
        wanted = tiny.feature(before, images)
        with tokensieve.attach(tiny.model, "random", keep=9) as handle:
            after, others = quantised(tiny, tiny.model)
            assert macs == handle.cost().macs
    assert others == names
    assert len(names) >= 8
    with torch.no_grad():
        assert torch.equal(tiny.feature(after, images), wanted)


@pytest.mark.parametrize("method", ["sieve", "tome", "evit", "anchor", "divprune", "vispruner", "pitome"])
@pytest.mark.parametrize("family", ["timm", "openclip_timm_siglip"])  # the others fail untouched
def test_an_empty_batch(family: str, method: str) -> None:
    tiny = tiny_model(family)
    none = tiny.images(1)[:0]
    with torch.no_grad():
        wanted = tiny.feature(tiny.model, none)
        with tokensieve.attach(tiny.model, method, keep=20) as handle:
            assert tiny.feature(tiny.model, none).shape == wanted.shape
            assert handle.kept[max(handle.kept)].shape == (0, 20)
