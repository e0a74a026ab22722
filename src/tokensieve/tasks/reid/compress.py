"""What stands where SDTPS stands, to compare it with: as many tokens, chosen at random or averaged from neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.score import image_hash, unit_noise
from tokensieve.core.select import top
from tokensieve.tasks.reid.config import ModelSection
from tokensieve.tasks.reid.sdtps import SDTPS, sdtps_counts
from tokensieve.utils.processes import drawn_for_batch

__all__ = ["MeanTokens", "RandomTokens", "build_compressor"]

Compressed = tuple[dict[str, Tensor], dict[str, Reduction]]


class RandomTokens(nn.Module):
    """Keep `out_tokens` patches at random: drawn anew in training, by the image's content in evaluation."""

    def __init__(self, out_tokens: int) -> None:
        super().__init__()
        self.out_tokens = out_tokens

    def forward(self, tokens: Mapping[str, Tensor], globals: Mapping[str, Tensor]) -> Compressed:
        selections = {name: Reduction(top(self._noise(x), self.out_tokens)) for name, x in tokens.items()}
        return {name: take_tokens(x, selections[name].keep) for name, x in tokens.items()}, selections

    def _noise(self, x: Tensor) -> Tensor:
        if self.training:
            return drawn_for_batch(x[..., 0].float(), Tensor.uniform_)
        place = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        return unit_noise(image_hash(x.detach()), place, seed=0)


class MeanTokens(nn.Module):
    """Average runs of neighbouring patches, row by row of the grid, into `out_tokens`. Nothing is selected."""

    def __init__(self, out_tokens: int) -> None:
        super().__init__()
        self.out_tokens = out_tokens

    def forward(self, tokens: Mapping[str, Tensor], globals: Mapping[str, Tensor]) -> Compressed:
        means = {n: F.adaptive_avg_pool1d(x.transpose(1, 2), self.out_tokens) for n, x in tokens.items()}
        return {name: x.transpose(1, 2) for name, x in means.items()}, {}


def build_compressor(
    config: ModelSection, dim: int, tokens: int, modalities: Sequence[str]
) -> SDTPS | RandomTokens | MeanTokens | None:
    """What the configuration asks for; None for the baseline."""
    if not config.USE_SDTPS:
        return None
    if config.SELECTION == "sdtps":
        return SDTPS(
            dim, tokens, config.SDTPS_SPARSE_RATIO, config.SDTPS_AGGR_RATIO, config.SDTPS_BETA, config.SDTPS_USE_GUMBEL,
            config.SDTPS_FORMULA, modalities, config.SDTPS_TAU,
        )  # fmt: skip
    selected, aggregated = sdtps_counts(tokens, config.SDTPS_SPARSE_RATIO, config.SDTPS_AGGR_RATIO)
    out = aggregated + (selected < tokens)
    return RandomTokens(out) if config.SELECTION == "random" else MeanTokens(out)
