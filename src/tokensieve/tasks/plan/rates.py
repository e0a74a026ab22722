"""From MACs and bytes to seconds, hours and money. A leaf: plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tokensieve.errors import OptionError
from tokensieve.tasks.plan.gpus import Gpu

__all__ = ["Rates"]


@dataclass(frozen=True)
class Rates:
    """What is assumed of the machine.

    utilisation: the share of the GPU's arithmetic that the untouched model gets out of it. gained: the share of the
    speed-up made possible by fewer MACs that shows on the clock. bandwidth_use: the share of the memory's bandwidth
    that decoding gets. memory_use: the share of the memory that weights and cache may fill. price: dollars an hour.
    """

    gpu: Gpu
    utilisation: float = 0.4
    gained: float = 0.9
    bandwidth_use: float = 0.7
    memory_use: float = 0.9
    price: float | None = None

    def __post_init__(self) -> None:
        for name in ("utilisation", "gained", "bandwidth_use", "memory_use"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise OptionError(f"{name}={value:g}: a share, above 0 and at most 1")
        if self.price is not None and self.price < 0:
            raise OptionError(f"price={self.price:g}: dollars an hour, not below 0")

    @property
    def dollars_an_hour(self) -> float:
        return self.gpu.price if self.price is None else self.price

    def compute_seconds(self, macs: float) -> float:
        """Of work that the arithmetic bounds, without reduction."""
        return 2 * macs / (self.gpu.teraflops * 1e12 * self.utilisation)

    def reduced_seconds(self, macs: float, macs_full: float) -> float:
        """The same with fewer MACs. What removes nothing costs nothing; else `gained` of what is possible is got."""
        full = self.compute_seconds(macs_full)
        return full if macs >= macs_full else full / (self.gained * macs_full / macs)

    def read_seconds(self, size: float) -> float:
        """Of work that reading `size` bytes bounds."""
        return size / (self.gpu.bandwidth * 1e9 * self.bandwidth_use)

    @property
    def room(self) -> float:
        """Bytes for weights and cache."""
        return self.gpu.memory * 1e9 * self.memory_use

    def hours_and_dollars(self, seconds: float) -> dict[str, float]:
        hours = seconds / 3600
        return {"gpu_hours": hours, "dollars": hours * self.dollars_an_hour}
