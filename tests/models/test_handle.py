"""One interface: what is documented of a handle is there for vision encoders and for vision-language models."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import tokensieve
from tokensieve.errors import OptionError
from tokensieve.models.handle import Handle
from tokensieve.testing import tiny_model
from tokensieve.testing.vlm import tiny_llava


def documented() -> list[str]:
    """Public members of `Handle` and the attributes that its docstring names."""
    named = re.findall(r"(?:^|[;.,] )([a-z_]+)(?=(?:, [a-z_]+)*:)", inspect.getdoc(Handle) or "", re.M)
    return sorted({*named, *(name for name in vars(Handle) if not name.startswith("_")), *Handle.__annotations__})


def encoder() -> tuple[Handle, object]:
    tiny = tiny_model("openclip")
    return tokensieve.attach(tiny.model, "tome", keep=0.6), lambda: tiny.model(tiny.images(2))


def vlm() -> tuple[Handle, object]:
    tiny = tiny_llava()
    return tokensieve.attach(tiny.model, "fastv", keep=0.6, at=1), lambda: tiny.model(**tiny.prompts([(3, 1, 5)]))


@pytest.mark.parametrize("make", [encoder, vlm])
def test_every_documented_attribute_is_there(make) -> None:
    names = documented()
    assert {"method", "positions", "timing", "first", "kept", "stats", "vision_tokens_per_layer"} <= set(names)
    handle, forward = make()
    assert isinstance(handle, tokensieve.Attachment)
    with handle, torch.no_grad():
        forward()  # type: ignore[operator]
        for name in names:
            getattr(handle, name)
        assert handle.stats.tokens_per_layer is not None
        assert len(handle.vision_tokens_per_layer) == len(handle.tokens_per_layer) == handle.depth
        assert handle.vision_tokens_per_layer[-1] < handle.patches
    assert not handle.installed


def test_an_encoders_stats_are_of_what_ran() -> None:
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, "evit", keep=9, at=1) as handle:
        with pytest.raises(RuntimeError, match="no forward yet"):
            _ = handle.stats
        tiny.model(tiny.images(3))
        assert handle.stats.images == 3
        assert handle.stats.tokens_per_layer == (37, 10, 10, 10)
        assert handle.vision_tokens_per_layer == [36.0, 9.0, 9.0, 9.0]
        assert handle.stats.seconds is None
        handle.timing = True
        tiny.model(tiny.images(3))
        assert handle.stats.seconds > 0


@pytest.mark.parametrize("kind", ["encoder", "vlm"])
@pytest.mark.parametrize("at", [torch.tensor(1), torch.tensor([1.0]), [torch.tensor(1)], "1", None.__class__])
def test_places_are_integers(kind, at) -> None:
    model, method = (tiny_model("openclip").model, "grid") if kind == "encoder" else (tiny_llava().model, "fastv")
    with pytest.raises(OptionError, match="at="):
        tokensieve.attach(model, method, keep=0.5, at=at)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_text_features_are_finite(wrong: float) -> None:
    tiny = tiny_model("openclip")
    text = torch.randn(3, 16)
    text[1, 2] = wrong
    with pytest.raises(OptionError, match="text has NaN or infinite features"):
        tokensieve.attach(tiny.model, "cdpruner", keep=9, text=text)
