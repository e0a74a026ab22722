"""What an exported file says of itself: model, method, budget, preprocessing, tokens per layer. Imports models."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tokensieve._version import VERSION
from tokensieve.engines.preprocess import Preprocess
from tokensieve.errors import DataError, UnsupportedModelError
from tokensieve.models.attach import attach, attachment_of
from tokensieve.models.handle import Handle

__all__ = ["FORMAT", "KEY", "About", "describe"]

FORMAT = "tokensieve-engine-1"
KEY = "tokensieve"  # of the metadata of a file


@dataclass(frozen=True, kw_only=True)
class About:
    """Plain facts of one exported model.

    size: height and width of its images; batches are free. kept: whether the indices of the remaining patches are a
    second output. method None: the untouched model. quantize: None, "int8" or "int8-static"; float_ops: operations that
    were kept in float. tokens_per_layer, macs: None where the model has no token sequence.
    """

    model: str
    size: tuple[int, int]
    method: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    tokens_per_layer: tuple[int, ...] | None = None
    grid: tuple[int, int] | None = None
    macs: int | None = None
    macs_full: int | None = None
    kept: bool = False
    quantize: str | None = None
    float_ops: tuple[str, ...] = ()
    version: str = VERSION

    @property
    def mac_ratio(self) -> float | None:
        """MACs of the untouched model / MACs of this one."""
        return self.macs_full / self.macs if self.macs and self.macs_full else None

    def text(self) -> str:
        """As JSON, for a file."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {"format": FORMAT, "preprocess": self.preprocess and self.preprocess.plain()}
        return json.dumps(data)

    @classmethod
    def read(cls, text: str | None, path: object) -> About:
        """From the text in a file; a file of somebody else is an error."""
        try:
            data = json.loads(text or "")
        except ValueError:
            data = None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise DataError(f"{path} was not written by `tokensieve export` (no {FORMAT!r} in its metadata)")
        for name in ("size", "tokens_per_layer", "grid", "float_ops"):
            data[name] = None if data[name] is None else tuple(data[name])
        data["preprocess"] = data["preprocess"] and Preprocess.of(data["preprocess"])
        return cls(**data)


def describe(model: nn.Module, name: str, size: tuple[int, int], preprocess: Preprocess | None, kept: bool) -> About:
    """The facts of a model as it is, which has run once on images of this size."""
    handle = attachment_of(model)
    found = About(model=name, size=size, preprocess=preprocess, kept=kept)
    if handle is not None:
        return dataclasses.replace(found, method=_name(handle), settings=_settings(handle), **_cost(handle))
    try:
        with attach(model, "grid", keep=1.0, mode="analyse") as look:
            return dataclasses.replace(found, **_cost(look))
    except UnsupportedModelError:  # a model without a token sequence can be exported too
        return found


def _cost(handle: Handle) -> dict[str, Any]:
    cost = handle.cost()
    return {
        "tokens_per_layer": tuple(cost.tokens_per_layer), "grid": handle.grid, "macs": cost.macs,
        "macs_full": cost.macs_full,
    }  # fmt: skip


def _name(handle: Handle) -> str:
    from tokensieve.methods.registry import list_methods, method_class

    for name in list_methods("encoder"):
        if method_class(name) is type(handle.method):
            return name
    return type(handle.method).__name__


def _settings(handle: Handle) -> dict[str, Any]:
    """Budget and options as plain values; what is not plain is written as text."""
    options = {f.name: getattr(handle.method, f.name) for f in dataclasses.fields(handle.method) if f.init}
    settings = {
        "keep": handle.keep, "keep_average": handle.keep_average, "at": list(handle.at), "schedule": handle.schedule,
        "mode": handle.mode, "fuse_weight": handle.fuse_weight if handle.mode == "fuse" else None,
        "text": None if handle.text is None else list(handle.text.shape), "options": options,
    }  # fmt: skip
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain
