"""Images per second inside an evaluation, with the untouched model encoding the same images right beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tokensieve.tasks.bench.timing import quartiles, settle

__all__ = ["Speed"]

_OWN, _STOCK = "own", "stock"


class Speed:
    """Stands in for one model's image encoding, and times it.

    The first `batches` full batches are encoded by both models, taking turns in who is first, after one warm-up each:
    each gives one ratio. A batch is full that is as large as the first. Without `stock` the model is the untouched one.
    on: puts a model's image encoding on an engine; None: it runs as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        stock: nn.Module | None,
        batches: int,
        device: str,
        on: Callable[[nn.Module], Callable[..., Any]] | None = None,
    ) -> None:
        self.images = 0
        self.ratios: list[float] = []  # seconds of the untouched model / own, by batch
        self.rates: list[float] = []
        self._batches, self._device, self._full, self._turn = batches, device, 0, 0
        # CoCa's captions go through `_encode_image`, and so does its `encode_image`
        name = "_encode_image" if hasattr(model, "_encode_image") else "encode_image"
        models = {_STOCK: stock, _OWN: model}
        self._encode: dict[str, Callable[..., Any]] = {
            who: getattr(one, name) if on is None else on(one) for who, one in models.items() if one is not None
        }
        self.is_baseline = stock is None
        model.__dict__[name] = self  # of this instance alone, which lives as long as the run

    def __call__(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.images += len(images)
        if self._batches == 0:
            return self._encode[_OWN](images, *args, **kwargs)

        def call(who: str) -> tuple[float, Any]:
            settle(self._device)
            start = time.perf_counter()
            out = self._encode[who](images, *args, **kwargs)
            settle(self._device)
            return time.perf_counter() - start, out

        names = list(self._encode)
        if not self._full:
            self._full = len(images)
            for who in names:
                call(who)  # warm-up
        if self.is_baseline or len(images) != self._full or self._turn >= self._batches:
            names = [_OWN]
        shift = self._turn % len(names)
        found = {who: call(who) for who in names[shift:] + names[:shift]}
        seconds, out = found[_OWN]
        if len(names) > 1:
            self._turn += 1
            self.ratios.append(found[_STOCK][0] / seconds)
        if len(images) == self._full:
            self.rates.append(len(images) / seconds)
        return out

    def facts(self) -> dict[str, float | None]:
        """Images per second and speed-ups, each the median with its quartiles; None where nothing was measured."""
        stock = [1.0] if self.is_baseline and self.rates else self.ratios
        return self._facts(self.rates, stock)

    @classmethod
    def nothing(cls) -> dict[str, float | None]:
        """The same where no image was encoded."""
        return cls._facts([], [])

    @staticmethod
    def _facts(rates: list[float], stock: list[float]) -> dict[str, float | None]:
        return _three("images_per_second", rates) | _three("speedup", stock)


def _three(name: str, values: list[float]) -> dict[str, float | None]:
    low, mid, high = quartiles(values) if values else (None, None, None)
    return {name: mid, f"{name}_low": low, f"{name}_high": high}
