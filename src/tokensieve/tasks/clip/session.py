"""One run's model: loaded, copied with shared weights, reduced, timed; and what is to be said about it afterwards."""

from __future__ import annotations

import warnings
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.attach import attach
from tokensieve.models.encoder.handle import EncoderHandle
from tokensieve.models.handle import Handle
from tokensieve.tasks.bench.models import twin
from tokensieve.tasks.clip.config import SieveConfig
from tokensieve.tasks.clip.engine import EngineEncoder
from tokensieve.tasks.clip.load import Loaded, Loader
from tokensieve.tasks.clip.speed import Speed

__all__ = ["Session"]

_TEXT_METHODS = ("cdpruner",)


class Session:
    """What one run loads and measures.

    The loaded model is never touched: the run gets a twin, whose modules are its own and whose weights are the same.
    So the untouched model is at hand for every comparison, and for the next run.
    """

    def __init__(self, config: SieveConfig, loader: Loader, model_type: str, speed_batches: int) -> None:
        self.config, self.loader, self.model_type, self.speed_batches = config, loader, model_type, speed_batches
        self.handle: Handle | None = None
        self.speed: Speed | None = None
        self.text: str | None = None
        self.notes: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._stock: nn.Module | None = None

    def load(self, model_name: str, pretrained: str, cache_dir: str | None, device: str) -> Loaded:
        """As clip_benchmark calls its loaders: the model comes back with the method attached."""
        loaded = self.loader.load(self.model_type, model_name, pretrained, cache_dir, device)
        self._stock = loaded.model
        model = twin(loaded.model)
        if not self.config.is_baseline:
            self.handle = self._attach(model)
        stock = None if self.config.is_baseline else loaded.model
        c = self.config
        on = None if c.engine == "torch" else partial(EngineEncoder, config=c)
        if on is None and c.threads is not None:
            torch.set_num_threads(c.threads)
        self.speed = Speed(model, stock, self.speed_batches, device, on)
        return loaded._replace(model=model)

    def _attach(self, model: nn.Module) -> Handle:
        c = self.config
        keep = list(c.keep) if isinstance(c.keep, tuple) else c.keep
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = attach(
                model, c.method, keep=keep, keep_average=c.keep_average, at=c.at, schedule=c.schedule,
                mode=c.mode, fuse_weight=c.fuse_weight, **c.options,  # type: ignore[arg-type]
            )  # fmt: skip
        self.warnings += [str(warning.message) for warning in caught]
        return handle

    def set_text(self, features: Tensor) -> None:
        """Give methods that select by a text the class prompts' features (classes, E)."""
        if self.handle is None:
            return
        if self.handle.project is not None:
            self.handle.text = features
            self.text = "class prompts" if self.config.method in _TEXT_METHODS else None
        elif self.config.method in _TEXT_METHODS:
            name = cast(EncoderHandle, self.handle).family.name
            raise UnsupportedModelError(f"--method {self.config.method}: {name} has no joint space for single patches")

    def facts(self) -> dict[str, Any]:
        """What was reduced, what it costs, how fast it ran: flat, None where it does not apply."""
        speed = self.speed.facts() if self.speed else Speed.nothing()
        cost = self._cost()
        gained = speed["speedup"] / cost["possible"] if speed["speedup"] and cost["possible"] else None
        return self._settings() | cost | speed | {"gained": gained, "text": self.text} | self.notes

    def _settings(self) -> dict[str, Any]:
        c, h = self.config, self.handle
        keep = h.keep if h else c.keep
        options = {f.name: getattr(h.method, f.name) for f in fields(h.method) if f.init} if h else dict(c.options)
        return {
            "method": c.method,
            "mode": None if c.is_baseline else c.mode,
            "keep": ",".join(map(str, keep)) if isinstance(keep, list | tuple) else keep,
            "keep_average": c.keep_average,
            "schedule": h.schedule if h else c.schedule,
            "at": ",".join(map(str, h.at)) if h else None,
            "fuse_weight": c.fuse_weight if c.mode == "fuse" else None,
            "engine": c.engine,
            "quantize": c.quantize,
            "engine_threads": c.threads,
            **{f"option_{name}": _plain(value) for name, value in options.items()},
        }

    def _cost(self) -> dict[str, Any]:
        handle = self.handle or self._look()
        if handle is None:
            names = ("patches", "tokens_per_layer", "tokens_average", "gmacs", "gmacs_full", "possible")
            return {"reduced": False} | dict.fromkeys(names)
        cost, tokens = handle.cost(), handle.tokens_per_layer
        return {
            "reduced": min(tokens) < handle.prefix + handle.patches,
            "patches": handle.patches,
            "tokens_per_layer": " ".join(map(str, tokens)),
            "tokens_average": sum(tokens) / len(tokens),
            "gmacs": cost.macs / 1e9,
            "gmacs_full": cost.macs_full / 1e9,
            "possible": cost.possible,
        }

    def _look(self) -> Handle | None:
        """The untouched model's token counts; None for towers without a token sequence."""
        if self._stock is None:
            return None
        try:
            return attach(twin(self._stock), "grid", keep=1.0, mode="analyse")
        except UnsupportedModelError:
            return None


def _plain(value: Any) -> Any:
    """A value that fits into one cell of a table."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
