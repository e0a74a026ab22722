"""Exported files against the model in torch: features, kept patches, metadata, and refusals of one line."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tokensieve
from tokensieve.engines.about import About
from tokensieve.engines.preprocess import Preprocess
from tokensieve.errors import DataError, MissingMaterialError, OptionError, TokensieveError, UnsupportedModelError
from tokensieve.testing import tiny_model

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow  # an export takes seconds
BUDGET = {"keep": [20, 14], "at": [0, 2]}
PREPARED = Preprocess((48, 48), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bilinear", 50)

# one per kind of operation that a method or a family brings; benchmarks/engines.py --matrix runs all of them
PAIRS = [
    ("transformers_clip_whole", "sieve", {}),
    ("timm_eva", "anchor", {"fold": True}),
]


@pytest.mark.parametrize(("family", "method", "options"), PAIRS, ids=[f"{f}-{m}" for f, m, _ in PAIRS])
def test_onnx_and_openvino_compute_what_torch_does(family: str, method: str, options: dict, tmp_path: Path) -> None:
    """Features and kept patches, for one image and for another batch than the one that was traced."""
    pytest.importorskip("openvino")
    from tokensieve.engines.onnx_engine import load_onnx
    from tokensieve.engines.openvino_engine import OpenVinoEngine, read_onnx

    tiny = tiny_model(family)
    with torch.no_grad(), tokensieve.attach(tiny.model, method, **BUDGET, **options) as handle:
        file = tmp_path / "model.onnx"
        first = tokensieve.export(tiny.model, file, with_kept=True)
        for engine in (first, load_onnx(file), OpenVinoEngine(read_onnx(file), first.about)):
            for images in (tiny.images(5, seed=3), tiny.images(1, seed=4)):
                wanted = tiny.feature(tiny.model, images)
                features, kept = engine(images)
                assert torch.allclose(features, wanted, atol=1e-4)
                assert torch.equal(kept, handle.kept[2])
                assert not torch.allclose(features, tiny.feature(tiny.model, images.flip(3)), atol=1e-2)
        assert first.about.tokens_per_layer == tuple(handle.tokens_per_layer)
        assert first.about.mac_ratio == pytest.approx(handle.cost().possible)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one attached model in all three formats."""
    pytest.importorskip("openvino")
    folder = tmp_path_factory.mktemp("exported")
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", **BUDGET):
        for ending in (".onnx", ".xml", ".pt2"):
            tokensieve.export(tiny.model, folder / f"vit{ending}", preprocess=PREPARED, name="tiny")
    assert not [file for file in folder.iterdir() if file.name.startswith(".")], "drafts were left behind"
    return folder


@pytest.mark.parametrize("ending", [".onnx", ".xml", ".pt2"])
def test_a_file_needs_nothing_else(exported: Path, ending: str) -> None:
    engine = tokensieve.load_engine(exported / f"vit{ending}", threads=1)
    about = engine.about
    assert (about.model, about.method, about.size) == ("tiny", "evit", (48, 48))
    assert about.settings["keep"] == [20, 14]
    assert about.settings["at"] == [0, 2]
    assert about.settings["options"]["fuse"] is True
    assert about.version == tokensieve.__version__
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 60, 3), dtype=np.uint8))
    pixels = engine.preprocess(photo)
    assert torch.equal(pixels, PREPARED(photo))
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", **BUDGET) as handle:
        assert torch.allclose(engine(pixels[None]), tiny.model(pixels[None]), atol=1e-4)
        assert about.tokens_per_layer == tuple(handle.tokens_per_layer)


def test_the_facts_survive_as_text(exported: Path) -> None:
    about = tokensieve.load_engine(exported / "vit.onnx").about
    assert About.read(about.text(), "x") == about


@pytest.mark.parametrize("ending", [".onnx", ".xml", ".pt2"])
def test_wrong_images_are_named(exported: Path, ending: str) -> None:
    engine = tokensieve.load_engine(exported / f"vit{ending}")
    for images in (torch.zeros(1, 3, 48, 40), torch.zeros(3, 48, 48), torch.zeros(0, 3, 48, 48)):
        with pytest.raises(OptionError, match=r"takes \(B, 3, 48, 48\)"):
            engine(images)
    with pytest.raises(OptionError, match="float32"):
        engine(torch.zeros(1, 3, 48, 48, dtype=torch.float16))


@pytest.mark.parametrize("ending", [".onnx", ".xml", ".pt2"])
def test_wrong_files_are_named(exported: Path, ending: str, tmp_path: Path) -> None:
    with pytest.raises(MissingMaterialError, match=f"none{ending}"):
        tokensieve.load_engine(tmp_path / f"none{ending}")
    cut = tmp_path / f"cut{ending}"
    data = (exported / f"vit{ending}").read_bytes()
    for length in (0, len(data) // 2):
        cut.write_bytes(data[:length])
        if ending == ".xml":
            cut.with_suffix(".bin").write_bytes((exported / "vit.bin").read_bytes())
        with pytest.raises(DataError, match=f"cut{ending}") as found:
            tokensieve.load_engine(cut)
        assert "\n" not in str(found.value)


def test_half_an_openvino_model_is_named(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "vit.xml").write_bytes((exported / "vit.xml").read_bytes())
    with pytest.raises(DataError, match=r"vit\.bin is missing"):
        tokensieve.load_engine(tmp_path / "vit.xml")


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    def value(name: str):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 48, 48])

    node = helper.make_node("Relu", ["images"], ["features"])
    graph = helper.make_graph([node], "g", [value("images")], [value("features")])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "other.onnx"
    )
    with pytest.raises(DataError, match="not written by `tokensieve export`"):
        tokensieve.load_engine(tmp_path / "other.onnx")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(DataError, match=r"other\.pt2"):
        tokensieve.load_engine(tmp_path / "other.pt2")


def test_wrong_requests_are_named(tmp_path: Path) -> None:
    tiny = tiny_model("openclip")
    with pytest.raises(OptionError, match=r"\.onnx, \.xml, \.pt2"):
        tokensieve.export(tiny.model, tmp_path / "vit.tflite")
    with pytest.raises(OptionError, match="needs calibrate"):
        tokensieve.export(tiny.model, tmp_path / "vit.onnx", quantize="int8-static")
    with pytest.raises(TokensieveError, match="int8"):
        tokensieve.export(tiny.model, tmp_path / "vit.onnx", quantize="int4")
    with pytest.raises(OptionError, match="onnxruntime and openvino"):
        tokensieve.export(tiny.model, tmp_path / "vit.pt2", quantize="int8")
    with pytest.raises(OptionError, match="with_kept"):
        tokensieve.export(tiny.model, tmp_path / "vit.onnx", with_kept=True)
    with pytest.raises(UnsupportedModelError, match="float32"):
        tokensieve.export(tiny_model("openclip").model.half(), tmp_path / "vit.onnx")
    with pytest.raises(UnsupportedModelError, match="torch module"):
        tokensieve.export("vit", tmp_path / "vit.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_that_differs_from_torch_is_not_written(tmp_path: Path) -> None:
    """random's hash needs 64-bit products, which ONNX Runtime has; a tolerance of 0 no float file can keep."""
    tiny = tiny_model("openclip")
    with (
        tokensieve.attach(tiny.model, "grid", **BUDGET),
        pytest.raises(UnsupportedModelError, match="nothing was written"),
    ):
        tokensieve.export(tiny.model, tmp_path / "vit.onnx", tolerance=0.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("extra", ["onnxruntime", "openvino"])
def test_a_missing_extra_is_named(exported: Path, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, extra, None)
    file, name = ("vit.onnx", "onnx") if extra == "onnxruntime" else ("vit.xml", "openvino")
    with pytest.raises(MissingMaterialError, match=rf"tokensieve\[{name}\]"):
        tokensieve.load_engine(exported / file)


def test_large_weights_go_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokensieve.engines import onnx_engine

    tiny = tiny_model("openclip")
    file = tmp_path / "vit.onnx"
    monkeypatch.setattr(onnx_engine, "LIMIT", 1000)
    engine = tokensieve.export(tiny.model, file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit.onnx", "vit.onnx.data"]
    assert file.stat().st_size < file.with_suffix(".onnx.data").stat().st_size
    images = tiny.images(3)
    with torch.no_grad():
        assert torch.allclose(engine(images), tiny.model(images), atol=1e-4)


def test_int8_says_what_stayed_float(tmp_path: Path) -> None:
    """Against a naive simulation, and a product that int8 ruins is found by its measured error."""
    from tokensieve.engines.quantize import op_errors

    tiny = tiny_model("openclip")
    with torch.no_grad():  # one channel a thousand times the others: 8 bits leave nothing of the rest
        tiny.model.transformer.resblocks[1].ln_2.weight[0] = 3000.0
        tiny.model.transformer.resblocks[1].mlp.c_fc.weight[:, 0] = 0.0
    images = tiny.images(8)
    engine = tokensieve.export(tiny.model, tmp_path / "vit.onnx", quantize="int8", calibrate=images)
    assert engine.about.quantize == "int8"
    assert engine.about.float_ops, "the spoilt product should stay in float"
    tokensieve.export(tiny.model, tmp_path / "float.onnx")
    errors = op_errors(tmp_path / "float.onnx", images)
    worst = max(errors, key=errors.__getitem__)
    assert engine.about.float_ops[0] == worst
    assert errors[worst] > 5 * sorted(errors.values())[len(errors) // 2]
    with torch.no_grad():
        cosine = torch.cosine_similarity(engine(images), tiny.model(images), dim=-1).mean()
    assert cosine > 0.99
    assert (tmp_path / "vit.onnx").stat().st_size < (tmp_path / "float.onnx").stat().st_size


def test_a_transform_is_taken_apart_exactly() -> None:
    """A rounding of the resized photo moves features in the second digit, so the stored preparation is the same."""
    from open_clip.transform import image_transform

    from tokensieve.engines.preprocess import find_preprocess
    from tokensieve.zoo.vit_s14 import preprocess

    photo = Image.fromarray(np.random.default_rng(1).integers(0, 256, (211, 300, 3), dtype=np.uint8))
    for transform in (preprocess(), image_transform(224, False), image_transform(96, False, resize_mode="squash")):
        found = find_preprocess(torch.nn.Identity(), transform)
        assert found is not None
        assert torch.allclose(found(photo), transform(photo), atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="Resize, CenterCrop and Normalize"):
        find_preprocess(torch.nn.Identity(), image_transform(224, False, resize_mode="longest"))
