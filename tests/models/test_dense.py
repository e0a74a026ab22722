"""Features that a caller lays out as a grid have their full size: every patch holds the token that stands for it."""

from __future__ import annotations

import copy

import pytest
import torch

import tokensieve
from helpers.extra_token import OneMore
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.grid import grid_of, nearest_kept, places_in
from tokensieve.testing import tiny_model

SIDE = 6  # patches of a tiny model's image, down and across


def blocks_of(handle) -> list:
    return list(handle.blocks.children())


def block_outputs(handle, forward) -> list[torch.Tensor]:
    """What each block returns in a forward that asks for no features."""
    seen: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: seen.append(out)) for block in blocks_of(handle)]
    forward()
    for hook in hooks:
        hook.remove()
    return seen


def filled(tokens: torch.Tensor, kept: torch.Tensor, prefix: int) -> torch.Tensor:
    """(B, P+K, D) -> (B, P+N, D), patch by patch: its own token, or that of the nearest kept patch."""
    out = []
    for image, mine in zip(tokens, kept.tolist(), strict=True):
        rows = list(image[:prefix])
        for patch in range(SIDE * SIDE):
            apart = [(patch // SIDE - i // SIDE) ** 2 + (patch % SIDE - i % SIDE) ** 2 for i in mine]
            rows.append(image[prefix + apart.index(min(apart))])
        out.append(torch.stack(rows))
    return torch.stack(out)


def timm_layers(tiny, images):
    maps = tiny.model.get_intermediate_layers(images, n=4, reshape=False, return_prefix_tokens=True)
    return [torch.cat([prefix, patches], dim=1) for patches, prefix in maps]


def timm_intermediates(tiny, images):
    maps = tiny.model.forward_intermediates(images, return_prefix_tokens=True, intermediates_only=True)
    return [torch.cat([prefix, patches.flatten(2).transpose(1, 2)], dim=1) for patches, prefix in maps]


def openclip_intermediates(tiny, images):
    out = tiny.model.forward_intermediates(images, output_fmt="NLC", output_extra_tokens=True)
    return [
        torch.cat([prefix, patches], dim=1)
        for prefix, patches in zip(out["image_intermediates_prefix"], out["image_intermediates"], strict=True)
    ]


def hidden_states(tiny, images):
    return list(tiny.model(pixel_values=images, output_hidden_states=True).hidden_states[1:])


CALLS = {
    "timm": timm_intermediates,
    "timm_registers": timm_layers,
    "timm_eva": timm_intermediates,
    "openclip": openclip_intermediates,
    "transformers_clip": hidden_states,
    "transformers_siglip": hidden_states,
    "transformers_dinov2_registers": hidden_states,
}


@pytest.mark.parametrize("family", CALLS)
def test_dropped_patches_take_their_nearest_kept_one(family: str) -> None:
    tiny = tiny_model(family)
    images = tiny.images(3)
    with torch.no_grad(), tokensieve.attach(tiny.model, "random", keep=[20, 7], at=[1, 2]) as handle:
        plain = block_outputs(handle, lambda: tiny.feature(tiny.model, images))
        counts = handle.tokens_per_layer
        maps = CALLS[family](tiny, images)
        assert handle.tokens_per_layer == counts, "inside the blocks there are as few tokens as ever"
        assert [len(m[0]) for m in maps] == [tiny.prefix + 36] * 4
        assert torch.equal(maps[0], plain[0])
        for block, kept in ((1, 1), (2, 2), (3, 2)):
            torch.testing.assert_close(maps[block], filled(plain[block], handle.kept[kept], tiny.prefix))


@pytest.mark.parametrize("method", ["tome", "sieve", OneMore()], ids=["tome", "sieve", "extra"])
@pytest.mark.parametrize("family", ["timm_registers", "openclip", "transformers_dinov2_registers"])
def test_merged_patches_are_copies_as_restore_gives_them(family: str, method) -> None:
    tiny = tiny_model(family)
    images = tiny.images(2)
    with torch.no_grad(), tokensieve.attach(tiny.model, method, keep=14, at=[0, 1, 2]) as handle:
        last = block_outputs(handle, lambda: tiny.feature(tiny.model, images))[-1]
        wanted = handle.restore(last)
        got = CALLS[family](tiny, images)[-1]
        if isinstance(method, OneMore):  # dropped patches are 0 in restore
            wanted = torch.where(wanted == 0, got, wanted)
            assert torch.equal(got, filled(last, handle.kept[2], tiny.prefix))
        torch.testing.assert_close(got, wanted)


def test_a_plain_forward_is_the_same_before_and_after() -> None:
    tiny = tiny_model("timm")
    images = tiny.images(2)
    with torch.no_grad(), tokensieve.attach(tiny.model, OneMore(), keep=9, at=1) as handle:
        before = tiny.feature(tiny.model, images)
        final, _ = tiny.model.forward_intermediates(images)
        assert final.shape == (2, 37, 32)
        assert torch.equal(tiny.feature(tiny.model, images), before)
        assert handle.tokens_per_layer == [37, 11, 11, 11]
        with pytest.raises(AssertionError):
            tiny.model.forward_intermediates(images, indices=[9])
        assert torch.equal(tiny.feature(tiny.model, images), before)  # an error does not leave it in that state


def test_a_call_that_stops_early_counts_what_ran() -> None:
    tiny = tiny_model("timm")
    with torch.no_grad(), tokensieve.attach(tiny.model, "random", keep=9, at=1) as handle:
        tiny.model.forward_intermediates(tiny.images(1), indices=[1], stop_early=True, intermediates_only=True)
        assert handle.tokens_per_layer == [37, 10]
        assert handle.cost().macs < handle.cost().macs_full


def test_a_backbone_of_transformers() -> None:
    from transformers import Dinov2Backbone, Dinov2Config

    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, mlp_ratio=2, image_size=48, patch_size=8,
        out_features=["stage2", "stage4"], apply_layernorm=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Dinov2Backbone(config).eval()
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad(), tokensieve.attach(model, "random", keep=9, at=[1]) as handle:
        maps = model(images).feature_maps
        assert [tuple(m.shape) for m in maps] == [(2, 32, 6, 6)] * 2
        assert handle.tokens_per_layer == [37, 10, 10, 10]
        for row in maps[1].flatten(2).transpose(1, 2):
            assert len(row.unique(dim=0)) == 9
        wide = model(torch.randn(1, 3, 32, 72)).feature_maps  # 4 x 9 patches: as many as usual, in another grid
        assert wide[0].shape == (1, 32, 4, 9)
        assert model(torch.randn(1, 3, 64, 40)).feature_maps[0].shape == (1, 32, 8, 5)


def test_gradients_and_checkpointing_with_full_size_features() -> None:
    """A block that is computed again takes the same tokens: extra ones, and those of its own cuts only."""
    tiny = tiny_model("timm")
    images, grads = tiny.images(2), []
    for checkpoint in (False, True):
        model = copy.deepcopy(tiny.model).train()
        model.set_grad_checkpointing(checkpoint)
        with tokensieve.attach(model, OneMore(), keep=[20, 9], at=[0, 2]):
            out = model.forward_intermediates(images, intermediates_only=True)
            sum(m.square().mean() for m in out).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


def test_the_nearest_kept_patch_and_the_grid() -> None:
    grid = (2, 3, 4)
    origin = torch.tensor([[1, 9, 22], [0, 3, 12]])
    place = [(f, r, c) for f in range(2) for r in range(3) for c in range(4)]
    for image, kept in zip(nearest_kept(origin, grid).tolist(), origin.tolist(), strict=True):
        for patch, slot in enumerate(image):
            apart = [sum((a - b) ** 2 for a, b in zip(place[patch], place[i], strict=True)) for i in kept]
            assert slot == apart.index(min(apart))
        assert places_in(origin, grid)[0].tolist() == [list(place[i]) for i in origin[0].tolist()]
    assert places_in(torch.tensor([[23, 24 + 5, -1]]), grid).tolist() == [[[1, 2, 3], [0, 1, 1], [-1, -1, -1]]]
    assert grid_of(36, (6, 6), (48, 48)) == (6, 6)
    assert grid_of(36, (6, 6), (32, 72)) == (4, 9)
    assert grid_of(40, (6, 6), (64, 40)) == (8, 5)
    assert grid_of(100, (6, 6), ()) == (10, 10)
    with pytest.raises(UnsupportedModelError, match="37 patches"):
        grid_of(37, (6, 6), (64, 40))


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}


def depth_model(kind: str):
    import transformers

    backbone = transformers.Dinov2Config(
        **SMALL, mlp_ratio=2, image_size=48, patch_size=8, out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False, apply_layernorm=False,
    )  # fmt: skip
    sizes = {"backbone_config": backbone, "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    if kind == "DPT":
        config = transformers.DPTConfig(**sizes, hidden_size=32, is_hybrid=False, backbone_out_indices=None)
        return transformers.DPTForDepthEstimation(config)
    config = transformers.DepthAnythingConfig(**sizes, reassemble_hidden_size=32, patch_size=8)
    return transformers.DepthAnythingForDepthEstimation(config)


def text_model(kind: str):
    import transformers

    vision = {**SMALL, "intermediate_size": 64, "image_size": 48, "patch_size": 8}
    text = {**SMALL, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 8}
    more = {"projection_dim": 32}
    if kind == "CLIPSeg":
        more |= {"extract_layers": [1, 2, 3], "reduce_dim": 8, "decoder_num_attention_heads": 2}
        more |= {"decoder_intermediate_size": 16}
        text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **more)
    task = "ForImageSegmentation" if kind == "CLIPSeg" else "ForObjectDetection"
    return getattr(transformers, f"{kind}{task}")(config)


@pytest.mark.parametrize("method", ["sieve", "random"])
@pytest.mark.parametrize("kind", ["DPT", "DepthAnything", "CLIPSeg", "OwlViT", "Owlv2"])
def test_dense_models_run_reduced_and_give_full_size_maps(kind: str, method: str) -> None:
    torch.manual_seed(0)
    model = (depth_model if kind in ("DPT", "DepthAnything") else text_model)(kind).eval()
    inputs = {"pixel_values": tiny_model("timm").images(1)}
    if kind not in ("DPT", "DepthAnything"):
        inputs["input_ids"] = torch.tensor([[1, 5, 2]])
    with torch.no_grad():
        full, hidden = model(**inputs), []
        with tokensieve.attach(model, method, keep=14) as handle:
            blocks_of(handle)[-1].register_forward_hook(lambda _, __, out: hidden.append(out))
            got = model(**inputs)
            assert hidden[0].shape == (1, 37, 32)
            patches = hidden[0][0, 1:].unique(dim=0)
            assert len(patches) == 14, "one token for each patch, of 14 different ones"
            assert handle.tokens_per_layer[-1] == 15
    for name in ("predicted_depth", "logits", "pred_boxes"):
        if full.get(name) is not None:
            assert got[name].shape == full[name].shape
            assert got[name].isfinite().all()
            assert not torch.equal(got[name], full[name])
