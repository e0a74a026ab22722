"""Images a second inside an evaluation, with the untouched model encoding the same images right beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tokensieve.tasks.bench.timing import quartiles, settle

__all__ = ["Speed"]


class Speed:
    """Stands in for one model's image encoding, and times it.

    The first `batches` full batches are encoded by both models, in turn first and second, after one warm-up each: each
    gives one ratio. A batch is full that is as large as the first. Without `stock` the model is the untouched one.
    """

    def __init__(self, model: nn.Module, stock: nn.Module | None, batches: int, device: str) -> None:
        self.images = 0
        self.ratios: list[float] = []
        self.rates: list[float] = []
        self._batches, self._device, self._full = batches, device, 0
        # CoCa's captions go through `_encode_image`, and so does its `encode_image`
        name = "_encode_image" if hasattr(model, "_encode_image") else "encode_image"
        self._encode: Callable[..., Any] = getattr(model, name)
        self._stock: Callable[..., Any] | None = None if stock is None else getattr(stock, name)
        self.is_baseline = stock is None
        model.__dict__[name] = self  # of this instance alone, which lives as long as the run

    def __call__(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.images += len(images)
        if self._batches == 0:
            return self._encode(images, *args, **kwargs)

        def call(encode: Callable[..., Any]) -> tuple[float, Any]:
            settle(self._device)
            start = time.perf_counter()
            out = encode(images, *args, **kwargs)
            settle(self._device)
            return time.perf_counter() - start, out

        if not self._full:
            self._full = len(images)
            for encode in (self._encode, self._stock):
                if encode is not None:
                    call(encode)  # warm-up
        pairs = self._stock is not None and len(images) == self._full and len(self.ratios) < self._batches
        before = call(self._stock)[0] if self._stock and pairs and len(self.ratios) % 2 == 0 else None
        seconds, out = call(self._encode)
        if self._stock and pairs:
            beside = before if before is not None else call(self._stock)[0]
            self.ratios.append(beside / seconds)
        if len(images) == self._full:
            self.rates.append(len(images) / seconds)
        return out

    def facts(self) -> dict[str, float | None]:
        """Images a second and speed-up, each the median with its quartiles; None where nothing was measured."""
        ratios = [1.0] if self.is_baseline and self.rates else self.ratios
        return _three("images_per_second", self.rates) | _three("speedup", ratios)

    @staticmethod
    def nothing() -> dict[str, float | None]:
        """The same where no image was encoded."""
        return _three("images_per_second", []) | _three("speedup", [])


def _three(name: str, values: list[float]) -> dict[str, float | None]:
    low, mid, high = quartiles(values) if values else (None, None, None)
    return {name: mid, f"{name}_low": low, f"{name}_high": high}
