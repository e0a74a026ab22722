"""What a generation cost: tokens, bytes, seconds. Imports timing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tokensieve.models.timing import now

__all__ = ["Stats", "now", "timed"]


@contextmanager
def timed(stats: Stats, name: str, device: torch.device, timing: bool) -> Iterator[None]:
    """Add the seconds that the block takes to one of the stats, where `timing` asks for it."""
    start = now(device, timing)
    try:
        yield
    finally:
        setattr(stats, name, getattr(stats, name) + now(device, timing) - start)


@dataclass
class Stats:
    """Of the last prompt and of what was generated from it.

    tokens_per_layer: tokens that each decoder layer ran on in the prefill, text and padding included.
    vision_tokens_per_layer: vision tokens among them, mean over the batch. vision_tokens: before any reduction.
    For each prompt: text_of_prompts, vision_of_prompts (before any reduction) and vision_left (layer by layer).
    kv_bytes_per_layer: the cache now, over the whole batch. Seconds: of the vision tower with its projector, of the
    prefill without it, of all decoding steps, and of the method's own work, which is part of the prefill's; 0.0 unless
    `handle.timing` was set to True before the forward, as taking time waits for the device.
    """

    batch: int = 0
    images: int = 0
    text_of_prompts: list[int] = field(default_factory=list)
    vision_of_prompts: list[int] = field(default_factory=list)
    vision_left: list[list[int]] = field(default_factory=list)
    tokens_per_layer: list[int] = field(default_factory=list)
    kv_bytes_per_layer: list[int] = field(default_factory=list)
    vision_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    overhead_seconds: float = 0.0

    @property
    def vision_tokens(self) -> float:
        """Vision tokens of a prompt before any reduction, mean over the batch."""
        return sum(self.vision_of_prompts) / max(1, len(self.vision_of_prompts))

    @property
    def vision_tokens_per_layer(self) -> list[float]:
        """Vision tokens that each decoder layer ran on, mean over the batch."""
        return [sum(rows) / max(1, len(rows)) for rows in self.vision_left]

    @property
    def vision_tokens_average(self) -> float:
        """Vision tokens on layer average: what papers call retained tokens."""
        return sum(self.vision_tokens_per_layer) / max(1, len(self.vision_tokens_per_layer))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(self.kv_bytes_per_layer)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens a second of the decoding steps, over the whole batch; None where there were none."""
        return self.batch * self.decode_steps / self.decode_seconds if self.decode_seconds else None

    def count_cache(self, cache: object) -> None:
        """Note how many bytes each layer of the cache holds."""
        layers = [(layer.keys, layer.values) for layer in getattr(cache, "layers", ())]
        self.kv_bytes_per_layer = [k.nbytes + v.nbytes if k is not None else 0 for k, v in layers]
