"""The ReID model against the backbones' own forwards, with modalities missing, cut in the middle, saved and loaded."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tokensieve.errors import MissingMaterialError, OptionError, RecordError, UnknownNameError
from tokensieve.tasks.reid.backbones import build_backbone, pixel_stats
from tokensieve.tasks.reid.config import ModelSection, parse_config
from tokensieve.tasks.reid.model import ReidModel, load_checkpoint, save_model

NAMES = ("rgb", "nir", "tir")
SIZE = (32, 16)
SMALL = ["MODEL.PATCH=4", "MODEL.WIDTH=24", "MODEL.DEPTH=3", "MODEL.HEADS=2"]


def model(*overrides, names=NAMES, seed=0):
    torch.manual_seed(seed)
    made = ReidModel(parse_config({}, [*SMALL, *overrides]), SIZE, names, classes=7, cameras=3)
    with torch.no_grad():  # patches must differ, and attention be peaked
        for parameter in made.backbone.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return made.eval()


def images(names=NAMES, batch=3, seed=0):
    torch.manual_seed(seed)
    return {name: torch.randn(batch, 3, *SIZE) for name in names}


CAMERAS = torch.tensor([0, 2, 1])


@torch.no_grad()
def test_the_baseline_is_the_mean_of_the_patches_of_a_plain_vit():
    m = model("MODEL.USE_SDTPS=False", "MODEL.SIE_CAMERA=False")
    x = images()
    out = m(x)
    wanted = torch.cat([m.backbone.vit.forward_features(x[name])[:, 1:].mean(1) for name in NAMES], dim=1)
    torch.testing.assert_close(out.feature, wanted)
    torch.testing.assert_close(out.embedding, wanted / (1 + 1e-5) ** 0.5)  # statistics as they start
    torch.testing.assert_close(out.logits, out.embedding @ m.classifier.weight.T)
    assert out.selections == {}
    assert out.feature.shape == (3, 72)


@torch.no_grad()
def test_sdtps_stands_between_the_vit_and_the_mean():
    m = model("MODEL.SIE_CAMERA=False", "MODEL.SDTPS_FORMULA=convex")
    x = images()
    out = m(x)
    tokens = {name: m.backbone.vit.forward_features(x[name]) for name in NAMES}
    made, selections = m.compressor({n: t[:, 1:] for n, t in tokens.items()}, {n: t[:, 0] for n, t in tokens.items()})
    assert made["rgb"].shape == (3, 7, 24)  # 32 patches: 16 selected, 6 aggregated, 1 for the rest
    torch.testing.assert_close(out.feature, torch.cat([made[name].mean(1) for name in NAMES], dim=1))
    assert torch.equal(out.selections["nir"].keep, selections["nir"].keep)
    assert m.tokens_out() == 7


@torch.no_grad()
def test_in_a_middle_block_later_blocks_see_fewer_tokens():
    m = model("MODEL.SDTPS_AT=1", "MODEL.SIE_CAMERA=False")
    x = images()
    seen = []
    for block in m.backbone.vit.blocks:
        block.norm1.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        block.norm2.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    out = m(x)
    assert seen == [33, 33, 33, 8, 8, 8]
    tokens = {}
    for name in NAMES:  # one modality at a time, by the parts of timm's blocks
        vit = m.backbone.vit
        t = vit.blocks[0](vit.norm_pre(vit._pos_embed(vit.patch_embed(x[name]))))
        tokens[name] = t + vit.blocks[1].attn(vit.blocks[1].norm1(t))
    made, selections = m.compressor({n: t[:, 1:] for n, t in tokens.items()}, {n: t[:, 0] for n, t in tokens.items()})
    for i, name in enumerate(NAMES):
        t = torch.cat([tokens[name][:, :1], made[name]], dim=1)
        t = t + vit.blocks[1].mlp(vit.blocks[1].norm2(t))
        wanted = vit.norm(vit.blocks[2](t))[:, 1:].mean(1)
        torch.testing.assert_close(out.feature[:, 24 * i : 24 * (i + 1)], wanted)
    assert torch.equal(out.selections["tir"].keep, selections["tir"].keep)


@torch.no_grad()
def test_the_camera_is_added_to_cls_alone():
    m = model("MODEL.USE_SDTPS=False")
    x = images(("rgb",))["rgb"]
    row = m.camera(CAMERAS)
    plain, moved = m.backbone.embed(x, None), m.backbone.embed(x, row)
    torch.testing.assert_close(moved[:, 0] - plain[:, 0], row)
    assert torch.equal(moved[:, 1:], plain[:, 1:])
    assert m.camera.weight.shape == (3, 24)
    assert not torch.equal(m({"rgb": x}, CAMERAS).feature, m({"rgb": x}).feature)


# -- missing modalities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [("rgb",), ("nir", "tir"), ("tir", "rgb")], ids="+".join)
@pytest.mark.parametrize("at", ["null", "1"])
@torch.no_grad()
def test_a_missing_modality_leaves_a_block_of_zeros(left, at):
    m = model(f"MODEL.SDTPS_AT={at}")
    m.neck.norm.running_mean.fill_(1.0)  # so that the neck would fill the block
    out = m({name: x for name, x in images().items() if name in left}, CAMERAS)
    for i, name in enumerate(NAMES):
        block = slice(24 * i, 24 * (i + 1))
        assert bool(out.feature[:, block].any()) == bool(out.embedding[:, block].any()) == (name in left)
    assert set(out.selections) == set(left)


@torch.no_grad()
def test_samples_may_lack_different_modalities():
    m = model()
    x = images(batch=4)
    cameras = torch.tensor([0, 1, 2, 0])
    present = {"rgb": torch.tensor([1, 1, 0, 1]).bool(), "nir": torch.tensor([1, 0, 1, 1]).bool(),
               "tir": torch.tensor([1, 1, 1, 1]).bool()}  # fmt: skip
    out = m(x, cameras, present)
    for b in range(4):
        alone = m({n: x[n][b : b + 1] for n in NAMES if present[n][b]}, cameras[b : b + 1])
        torch.testing.assert_close(out.feature[b], alone.feature[0])
        torch.testing.assert_close(out.embedding[b], alone.embedding[0])
        assert torch.equal(out.selections["tir"].keep[b], alone.selections["tir"].keep[0])
    assert set(out.selections) == {"tir"}
    with pytest.raises(OptionError, match="none of the modalities"):
        m({"rgb": x["rgb"]}, cameras, present)


# -- what SDTPS is compared with ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_random_patches_are_drawn_anew_in_training_and_fixed_in_evaluation():
    m = model("MODEL.SELECTION=random", "MODEL.SIE_CAMERA=False")
    x = images()
    out = m(x)
    tokens = m.backbone.vit.forward_features(x["nir"])[:, 1:]
    keep = out.selections["nir"].keep
    assert keep.shape == (3, 7)
    assert len({tuple(row) for row in keep.tolist()}) == 3
    wanted = torch.stack([tokens[b, keep[b]].mean(0) for b in range(3)])
    torch.testing.assert_close(out.feature[:, 24:48], wanted)
    assert torch.equal(m({n: v[1:2] for n, v in x.items()}).selections["nir"].keep[0], keep[1])
    m.train()
    assert not torch.equal(m(x).selections["nir"].keep, m(x).selections["nir"].keep)


@torch.no_grad()
def test_mean_averages_neighbours_to_as_many_tokens():
    m = model("MODEL.SELECTION=mean")
    tokens = torch.randn(2, 32, 24)
    made, selections = m.compressor({"rgb": tokens}, {"rgb": tokens[:, 0]})
    assert made["rgb"].shape == (2, 7, 24)
    torch.testing.assert_close(made["rgb"][:, 0], tokens[:, :5].mean(1))
    assert selections == {}


def test_gradients_reach_every_part():
    m = model("MODEL.SDTPS_USE_GUMBEL=True", "MODEL.SDTPS_AT=1").train()
    out = m(images(), CAMERAS)
    (out.logits.square().sum() + out.feature.square().sum()).backward()
    without = {name for name, p in m.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())}
    assert without == set()
    assert not m.neck.norm.bias.requires_grad


# -- other backbones ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory):
    """A checkpoint of a tiny open_clip model for square images, and its name."""
    import open_clip

    folder = tmp_path_factory.mktemp("clip")
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
    (folder / "tiny-reid-clip.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    whole = open_clip.create_model("tiny-reid-clip")
    torch.save(whole.state_dict(), folder / "tiny.pt")
    return "tiny-reid-clip", folder / "tiny.pt", whole.eval()


@torch.no_grad()
def test_open_clip_weights_with_interpolated_positions(tiny_clip):
    name, path, whole = tiny_clip
    square = build_backbone(ModelSection(TRANSFORMER_TYPE=name, PRETRAIN_PATH=str(path)), (32, 32)).eval()
    x = torch.randn(2, 3, 32, 32)
    t = square.embed(x, None)
    for block in range(square.depth):
        t = square.feed(block, square.attend(block, t))
    torch.testing.assert_close(square.finish(t)[:, 0], whole.visual(x))
    high = build_backbone(ModelSection(TRANSFORMER_TYPE=name, PRETRAIN_PATH=str(path)), (64, 32))
    assert high.grid == (8, 4)
    table, wanted = high.visual.positional_embedding, whole.visual.positional_embedding
    assert table.shape == (33, 32)
    torch.testing.assert_close(table[0], wanted[0])
    grid = torch.nn.functional.interpolate(
        wanted[1:].reshape(1, 4, 4, 32).permute(0, 3, 1, 2), (8, 4), mode="bicubic", antialias=True, align_corners=False
    )
    torch.testing.assert_close(table[1:], grid[0].flatten(1).T, rtol=1e-4, atol=1e-4)
    # as many patches in another shape are other positions, and half precision is not an obstacle
    torch.save({key: value.half() for key, value in whole.state_dict().items()}, path.with_name("half.pt"))
    flat = build_backbone(ModelSection(TRANSFORMER_TYPE=name, PRETRAIN_PATH=str(path.with_name("half.pt"))), (16, 64))
    assert flat.grid == (2, 8)
    assert not torch.allclose(flat.visual.positional_embedding, wanted, atol=1e-3)


def test_open_clip_files_that_are_wrong(tiny_clip, tmp_path):
    name, _, _ = tiny_clip
    with pytest.raises(MissingMaterialError, match=r"PRETRAIN_PATH.*no such file"):
        build_backbone(ModelSection(TRANSFORMER_TYPE=name), (32, 32))
    (tmp_path / "wrong.pt").write_bytes(b"no weights")
    with pytest.raises(MissingMaterialError, match=r"wrong\.pt: no checkpoint of tiny-reid-clip"):
        build_backbone(ModelSection(TRANSFORMER_TYPE=name, PRETRAIN_PATH=str(tmp_path / "wrong.pt")), (32, 32))
    torch.save({"visual.conv1.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(MissingMaterialError, match="no checkpoint of"):
        build_backbone(ModelSection(TRANSFORMER_TYPE=name, PRETRAIN_PATH=str(tmp_path / "other.pt")), (32, 32))
    with pytest.raises(UnknownNameError, match='Did you mean "ViT-B-16"'):
        build_backbone(ModelSection(TRANSFORMER_TYPE="ViT-B16"), (32, 32))
    with pytest.raises(OptionError, match="not a plain vision transformer"):
        build_backbone(ModelSection(TRANSFORMER_TYPE="RN50"), (32, 32))
    with pytest.raises(OptionError, match="patch size 8"):
        build_backbone(ModelSection(TRANSFORMER_TYPE=name), (36, 32))


@torch.no_grad()
def test_the_real_vit_keeps_its_weights():
    from tokensieve.zoo import vit_s14

    try:
        whole = vit_s14.vit_s14_timm(56)
    except MissingMaterialError as error:
        pytest.skip(str(error))
    made = build_backbone(ModelSection(TRANSFORMER_TYPE="vit-s14"), (56, 56)).eval()
    x = torch.randn(1, 3, 56, 56)
    torch.testing.assert_close(made.vit.forward_features(x), whole.forward_features(x))
    assert build_backbone(ModelSection(TRANSFORMER_TYPE="vit-s14"), (56, 28), pretrained=False).grid == (4, 2)
    assert pixel_stats("vit-s14") == (vit_s14.MEAN, vit_s14.STD)


# -- cost, files, mistakes ---------------------------------------------------------------------------------------------


def test_macs_are_those_of_the_linear_layers_and_the_attention():
    m = model("MODEL.SDTPS_AT=1", "MODEL.SIE_CAMERA=False")
    counted = 0

    def count(module, args, out):
        nonlocal counted
        counted += module.weight.numel() * out.numel() // module.weight.shape[0]

    for module in m.backbone.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.register_forward_hook(count)
    m(images(batch=1))
    attention = 3 * 2 * 24 * (33**2 + 33**2 + 8**2)
    assert m.cost().macs == counted + attention
    baseline = model("MODEL.USE_SDTPS=False").cost()
    assert m.cost().macs_full == baseline.macs == baseline.macs_full
    assert m.cost().tokens_per_layer == (33, 8, 8)
    after = model()
    assert after.cost().macs == baseline.macs  # tokens, not compute
    assert after.compressor_macs() > 0 == model("MODEL.SELECTION=random").compressor_macs()


@torch.no_grad()
def test_saved_and_loaded_it_is_the_same(tmp_path):
    m = model("MODEL.SDTPS_AT=1")
    save_model(m, tmp_path / "m.safetensors")
    again, config = load_checkpoint(tmp_path / "m.safetensors")
    assert config == m.config
    assert not again.training
    assert (again.size, again.modalities, again.classes, again.cameras) == (SIZE, NAMES, 7, 3)
    assert torch.equal(again(images(), CAMERAS).feature, m(images(), CAMERAS).feature)


def test_files_that_are_no_model(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(MissingMaterialError, match="no such file"):
        load_checkpoint(path)
    save_model(model(), path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RecordError, match="truncated or not a safetensors file"):
        load_checkpoint(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(RecordError, match="has the format None"):
        load_checkpoint(path)


def test_inputs_that_do_not_fit():
    m = model()
    with pytest.raises(OptionError, match="no modality is there"):
        m({})
    with pytest.raises(UnknownNameError, match='Did you mean "rgb"'):
        m({"rbg": torch.zeros(1, 3, *SIZE)})
    with pytest.raises(OptionError, match=r"expected \(B, 3, 32, 16\)"):
        m({"rgb": torch.zeros(1, 3, 16, 32)})
    with pytest.raises(OptionError, match="camera 3: the model knows cameras 0 to 2"):
        m(images(), torch.tensor([0, 3, 1]))
    with pytest.raises(OptionError, match="SDTPS_AT 3"):
        model("MODEL.SDTPS_AT=3")
    with pytest.raises(OptionError, match="patch size 5"):
        model("MODEL.PATCH=5")
