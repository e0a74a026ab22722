"""A model that nobody here has thought of, and the description that makes it work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import UnknownNameError, UnsupportedModelError
from tokensieve.models.encoder.form import BlockForm
from tokensieve.models.families import registry, table


class Mixer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.to_out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return self.to_out((logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Pre-norm with scales that are bare parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_a, self.mixer, self.scale_a = (
            nn.LayerNorm(width),
            Mixer(width, heads),
            nn.Parameter(torch.rand(width)),
        )
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.norm_b, self.scale_b = nn.LayerNorm(width), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale_a * self.mixer(self.norm_a(x))
        return x + self.scale_b * self.feed(self.norm_b(x))


class Plain(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.stem, self.across = nn.Conv2d(3, width, 8, 8), (6, 6)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.where = nn.Parameter(torch.randn(1, 36, width))
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2) + self.where
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class PlainFamily(tokensieve.Family):
    name = "a plain ViT"
    needs = ("stem", "class_token")
    blocks_at = "layers"
    forms = (
        BlockForm(
            before=("norm_a",), attn="mixer", qkv=("to_qkv",), heads="heads", out=("to_out",), after=("scale_a",),
            mlp=("norm_b", "feed", "scale_b"),
        ),
    )  # fmt: skip

    def prefix(self, tower: nn.Module) -> int:
        return 1

    def grid(self, tower: Any) -> tuple[int, int]:
        return tower.across


class WrongFamily(PlainFamily):
    forms = (
        BlockForm(
            before=("norm_a",), attn="mixer", qkv=("to_qkv",), heads="heads", out=("to_out",), mlp=("norm_b", "feed"),
        ),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", [])


def test_a_described_model_is_reduced_exactly() -> None:
    torch.manual_seed(0)
    model, images = Plain().eval(), torch.randn(2, 3, 48, 48)
    with pytest.raises(UnsupportedModelError, match="no token sequence to reduce in Plain"):
        tokensieve.attach(model, "tome", keep=0.5)
    tokensieve.register_family(PlainFamily)
    with torch.no_grad():
        untouched = model(images)
        with tokensieve.attach(model, "grid", keep=9, at=1) as handle:
            got = model(images)
            kept = handle.kept[1]
            assert handle.tokens_per_layer == [37, 10, 10, 10]
        x = torch.cat([model.class_token.expand(2, -1, -1), model.stem(images).flatten(2).mT + model.where], dim=1)
        x = model.layers[0](x)
        x = x + model.layers[1].scale_a * model.layers[1].mixer(model.layers[1].norm_a(x))
        x = torch.stack([row[[0, *(k + 1).tolist()]] for row, k in zip(x, kept, strict=True)])
        x = x + model.layers[1].scale_b * model.layers[1].feed(model.layers[1].norm_b(x))
        for layer in model.layers[2:]:
            x = layer(x)
        assert torch.allclose(got, model.head(x[:, 0]), atol=1e-5)
        assert torch.equal(model(images), untouched)


def test_a_wrong_description_is_refused() -> None:
    tokensieve.register_family(WrongFamily)
    with pytest.raises(UnsupportedModelError, match=r"a plain ViT: block Layer is not computed .* differs by"):
        tokensieve.attach(Plain(), "tome", keep=0.5)


def test_registered_families_are_listed() -> None:
    assert "plain ViT" not in table.listed()
    tokensieve.register_family(PlainFamily)
    assert table.listed().startswith("plain ViT")


def test_the_page_of_models_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert page.read_text() == table.markdown() + "\n", "write it again: tokensieve models --markdown > docs/models.md"


def test_one_class_by_name() -> None:
    assert "supported, as a transformers SigLIP 2" in table.describe("Siglip2VisionModel")
    assert "rectangles" in table.describe("transformers.SwinModel")
    with pytest.raises(UnknownNameError, match="Siglip2VisionModel"):
        table.describe("Siglip2VisonModel")
