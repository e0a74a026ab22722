"""Clocks that wait for the device. Imports torch only."""

from __future__ import annotations

import time

import torch

__all__ = ["now"]


def now(device: torch.device, timing: bool = True) -> float:
    """Seconds on a clock that has waited for the device; 0.0 at once without `timing`."""
    if not timing:
        return 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
