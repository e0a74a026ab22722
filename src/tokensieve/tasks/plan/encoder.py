"""A vision encoder over many images: GPU hours and money. Builds the model without weights."""

from __future__ import annotations

from typing import Any

import torch

from tokensieve.models.attach import attach
from tokensieve.tasks.bench.models import build_model
from tokensieve.tasks.plan.rates import Rates

__all__ = ["plan_encoder"]


def plan_encoder(name: str, images: float, rates: Rates, reduction: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rows, without and with. reduction: what `attach` takes, `method` among it."""
    with torch.device("meta"):
        tower, side = build_model(name, device="meta")
    with attach(tower, **reduction) as handle:
        cost = handle.cost()
        tokens = {"without": handle.prefix + handle.patches, "with": cost.tokens_per_layer[-1]}
    seconds = {
        "without": rates.compute_seconds(cost.macs_full),
        "with": rates.reduced_seconds(cost.macs, cost.macs_full),
    }
    macs = {"without": cost.macs_full, "with": cost.macs}
    return [
        {
            "part": "encoder", "reduction": which, "pixels": side, "tokens_end": tokens[which],
            "gmacs": macs[which] / 1e9, "images_per_second": 1 / seconds[which],
            **rates.hours_and_dollars(images * seconds[which]),
            "possible": cost.macs_full / macs[which], "speedup": seconds["without"] / seconds[which],
        }
        for which in ("without", "with")
    ]  # fmt: skip
