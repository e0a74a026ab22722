"""torch.export and ONNX: an attached model exports, and the file computes what the model does."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.testing import TinyModel, tiny_model


class Feature(nn.Module):
    """The image feature as a module's only output."""

    def __init__(self, tiny: TinyModel) -> None:
        super().__init__()
        self.model, self.feature = tiny.model, tiny.feature

    def forward(self, images: Tensor) -> Tensor:
        return self.feature(self.model, images)


EXPORTED = [
    ("openclip", "anchor", {}),
    ("openclip", "evit", {}),
    ("openclip", "tome", {}),
    ("openclip", "random", {}),
    ("openclip_timm_siglip", "anchor", {"fold": True}),
    ("timm", "tome", {}),
    ("timm_eva", "grid", {"fold": True}),
    ("transformers_clip", "evit", {}),
    ("transformers_dinov2", "sieve", {}),
    ("transformers_dinov2_registers", "tome", {}),
]


@pytest.mark.parametrize(("family", "method", "options"), EXPORTED, ids=[f"{f}-{m}" for f, m, _ in EXPORTED])
def test_export(family: str, method: str, options: dict) -> None:
    tiny = tiny_model(family)
    with torch.no_grad(), tokensieve.attach(tiny.model, method, keep=[20, 14], at=[0, 2], **options) as handle:
        program = torch.export.export(Feature(tiny), (tiny.images(2),)).module()
        other = tiny.images(2, seed=1)
        wanted = tiny.feature(tiny.model, other)
        assert torch.allclose(program(other), wanted, atol=1e-5)
        assert not isinstance(handle.kept[2], torch._subclasses.FakeTensor), "exporting left its tensors behind"


def test_export_of_a_fusing_model() -> None:
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", keep=14, at=1, mode="fuse"):
        program = torch.export.export(Feature(tiny), (tiny.images(2),)).module()
        other = tiny.images(2, seed=1)
        assert torch.allclose(program(other), tiny.feature(tiny.model, other), atol=1e-5)


ONNX = [
    *(("openclip", method, {}) for method in sorted(set(tokensieve.list_methods("encoder")) - {"learned"})),
    ("timm", "evit", {}),
    ("timm", "grid", {"fold": True}),
    ("transformers_dinov2", "sieve", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method", "options"), ONNX, ids=[f"{f}-{m}" for f, m, _ in ONNX])
def test_onnx(family: str, method: str, options: dict, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    tiny = tiny_model(family)
    file = str(tmp_path / "model.onnx")
    with torch.no_grad(), tokensieve.attach(tiny.model, method, keep=[20, 14], at=[0, 2], **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(Feature(tiny).eval(), (tiny.images(2),), file, dynamo=True, verbose=False)
        other = tiny.images(2, seed=1)
        wanted = tiny.feature(tiny.model, other)
    session = runtime.InferenceSession(file)
    (got,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    assert torch.allclose(torch.from_numpy(got), wanted, atol=1e-4), abs(torch.from_numpy(got) - wanted).max()
