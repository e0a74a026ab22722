"""GPUs as their makers describe them. A leaf: plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tokensieve.errors import UnknownNameError, nearest

__all__ = ["GPUS", "Gpu", "find_gpu"]


@dataclass(frozen=True)
class Gpu:
    """teraflops: dense fp16 / bf16 on tensor cores, a multiply-add counted as two. memory: GB of 1e9 bytes.
    bandwidth: GB/s of that memory. price: US dollars an hour, a round figure to be replaced by your own.
    """

    name: str
    teraflops: float
    memory: float
    bandwidth: float
    price: float


# makers' data sheets, without sparsity; the prices are assumptions, printed as such
_KNOWN = (
    Gpu("t4", 65, 16, 320, 0.40),
    Gpu("v100", 125, 16, 900, 1.50),
    Gpu("a10", 125, 24, 600, 0.90),
    Gpu("l4", 121, 24, 300, 0.70),
    Gpu("rtx3090", 71, 24, 936, 0.30),
    Gpu("rtx4090", 165, 24, 1008, 0.50),
    Gpu("l40s", 362, 48, 864, 1.20),
    Gpu("a100-40", 312, 40, 1555, 1.50),
    Gpu("a100", 312, 80, 2039, 2.00),
    Gpu("h100", 989, 80, 3350, 3.00),
    Gpu("h200", 989, 141, 4800, 3.80),
    Gpu("mi300x", 1307, 192, 5300, 3.00),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}


def find_gpu(name: str) -> Gpu:
    """By name, whatever the case."""
    found = GPUS.get(name.lower())
    if found is None:
        raise UnknownNameError(f"unknown GPU {name!r}.{nearest(name.lower(), GPUS)}")
    return found
