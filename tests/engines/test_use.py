"""Engines behind eval, extract, bench and view: what a configuration says, what is refused, what is called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tokensieve
from tokensieve.cli.main import main
from tokensieve.engines.export import make_engine
from tokensieve.errors import OptionError, UnknownNameError, UnsupportedModelError
from tokensieve.tasks.bench.config import BenchConfig
from tokensieve.tasks.bench.speed import Candidate, candidates_of, speed_rows, target_of
from tokensieve.tasks.clip.config import BASELINE, SieveConfig
from tokensieve.tasks.clip.engine import EngineEncoder, refuse_amp
from tokensieve.tasks.clip.speed import Speed
from tokensieve.testing import tiny_model


def test_an_engine_is_part_of_a_configuration_only_where_it_is_asked_for() -> None:
    assert not {"engine", "quantize", "threads"} & BASELINE.plain().keys()
    config = SieveConfig(method="sieve", keep=0.5, engine="onnxruntime", quantize="int8", threads=2)
    assert config.plain().items() >= {"engine": "onnxruntime", "quantize": "int8", "threads": 2}.items()
    assert config.slug == "sieve-onnxruntime-int8-0.5"
    assert SieveConfig(engine="openvino").slug == "none-openvino"


def test_wrong_engines_are_named() -> None:
    with pytest.raises(UnknownNameError, match='Did you mean "openvino"'):
        SieveConfig(engine="openvin")
    with pytest.raises(OptionError, match="onnxruntime and openvino"):
        SieveConfig(quantize="int8")
    with pytest.raises(OptionError, match="threads=0"):
        SieveConfig(threads=0)
    with pytest.raises(OptionError, match="--amp"):
        refuse_amp(SieveConfig(engine="openvino"), True)
    with pytest.raises(OptionError, match="--speed"):
        BenchConfig(engine="onnxruntime", parts=("memory",))


def test_the_torch_engine_is_the_model() -> None:
    tiny = tiny_model("openclip_whole")
    images = tiny.images(3)
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", keep=[20, 14], at=[0, 2]) as handle:
        engine = make_engine(tiny.model, "torch", with_kept=True)
        features, kept = engine(images)
        assert torch.equal(features, tiny.model.encode_image(images))
        assert torch.equal(kept, handle.kept[2])
        assert engine.path is None


def test_speed_times_both_models_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The untouched model is on the same engine, each engine is made once, and the features are the engine's."""
    from tokensieve.tasks.clip import engine as module

    made = []

    def make(model, name, **settings):
        made.append((model, name, settings))
        return lambda images: images.flatten(1)[:, :2] * (len(made))

    monkeypatch.setattr(module, "make_engine", make)
    own, stock = tiny_model("openclip_whole").model, tiny_model("openclip_whole").model
    config = SieveConfig(method="evit", keep=0.5, engine="onnxruntime", threads=1)
    Speed(own, stock, 2, "cpu", on=lambda model: EngineEncoder(model, config))
    images = torch.rand(2, 3, 48, 48)
    for _ in range(3):
        own.encode_image(images)
    assert {id(model) for model, _, _ in made} == {id(own), id(stock)}
    assert len(made) == 2
    assert made[0][1:] == ("onnxruntime", {"quantize": None, "threads": 1})
    assert torch.allclose(own.encode_image(images, normalize=True).norm(dim=-1), torch.ones(2))


def test_a_coca_is_refused() -> None:
    model = tiny_model("openclip_whole").model
    model._encode_image = model.encode_image
    with pytest.raises(UnsupportedModelError, match="only torch"):
        EngineEncoder(model, SieveConfig(engine="openvino"))


def test_the_baseline_of_an_engine_is_stock_on_it() -> None:
    config = BenchConfig(methods=("evit",), keep=(0.5,), engine="onnxruntime")
    found = candidates_of(tiny_model("openclip").model, config)
    assert [candidate.method for candidate in found] == ["stock", "evit"]
    rows = speed_rows("m", 16, found, {found[0].name: [2.0, 2.0], found[1].name: [1.0, 1.0]}, "onnxruntime")
    assert rows[0]["possible"] == 1.0
    assert rows[1]["speedup"] == 2.0
    assert rows[1]["speedup_sdpa"] is None
    assert rows[1]["target"] == target_of("evit", 0.5, 16, "onnxruntime") == 0.95
    assert isinstance(found[0], Candidate)
    assert rows[0]["tokens_per_layer"] == [37] * 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "-o", "vit.tflite"], ".onnx, .xml, .pt2"),
        (["export", "-o", "vit.onnx", "--model", "ViT-B-16"], "--pretrained"),
        (["export", "-o", "vit.onnx", "--method", "seive"], "sieve"),
        (["extract", "clip", "x.tar", "-o", "f", "--engine", "none.onnx"], "none.onnx"),
        (["extract", "clip", "x.tar", "-o", "f", "--engine", "none.onnx", "--method", "evit"], "used together"),
        (["bench", "--engine", "tensorrt"], "tensorrt"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
