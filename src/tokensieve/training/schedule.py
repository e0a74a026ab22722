"""Learning rates as a function of the step. No torch."""

from __future__ import annotations

import math

from tokensieve.errors import OptionError

__all__ = ["warmup_cosine"]


def warmup_cosine(step: int, steps: int, warmup: int, floor: float = 0.0) -> float:
    """What to multiply the target rate by at a step: 1 / warmup, 2 / warmup, ... 1, then a half cosine down to `floor`.

    Never above 1. The last step is the last before the cosine's end, so that no step is wasted at rate 0.
    """
    if not 0 <= warmup <= steps:
        raise OptionError(f"a warm-up of {warmup} steps does not fit in {steps} steps")
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
