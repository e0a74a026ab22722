"""sieve, our own method. Imports core only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.core.merge import slot_of
from tokensieve.core.reduction import Reduction, complement, take_tokens
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method, check

__all__ = ["SieveMethod", "unit_keys"]


@dataclass(kw_only=True)
class SieveMethod(Method):
    """Merge each patch that a more important one already stands for into the patch it is most like.

    Order the patches by importance (CLS attention). The price of losing patch i is its distance to the nearest patch
    that is more important, times its own importance to the power `weight`:

        price_i = (1 - max over j more important of cos(key_i, key_j)) * importance_i ** weight

    with the cosine averaged over groups of heads. The cheapest go, each averaged by size into the most similar patch
    that is more important than itself and stays.

    Why this and not something else. *Redundancy*: like ToMe it merges what is alike, but any patch may merge into any
    better one; two alternating sets forbid half of the pairs and more than half of the tokens. *Importance*: an early
    error in a patch that CLS reads costs more than one elsewhere; a mild weight (0.35) does most of the good, a full
    one (1.0) harms. *Coverage*: a patch far from everything more important has a high price however unimportant it is;
    that is the order in which max-min would pick, in one step instead of N. Keys are compared in `parts` groups of
    heads: their mean over all heads, ToMe's space, loses some of what tells patches apart, and every head by itself
    costs more time than it gives. The removal is geometric by default, the same share at every block, which was best
    for ToMe too. Evidence: benchmarks/sieve.md.

    Between a vision tower and a language model patches are compared after the projector, as that model will see them.

    log(size) counts a little less than fully in later attention (0.85): the patches behind a merged token are alike,
    not equal, and its mean key draws more attention than they did one by one.
    """

    weight: float = 0.35
    parts: int = 2
    proportional: float = 0.85
    schedule: ClassVar[str] = "geometric"

    def __post_init__(self) -> None:
        check(0.0 <= self.weight <= 2.0, "weight", self.weight, "the power of importance lies in [0, 2]")
        check(isinstance(self.parts, int) and self.parts >= 1, "parts", self.parts, "at least 1 group of heads")

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        n, r = view.n, view.n - keep
        if r == 0:
            return Reduction(keep=torch.arange(n, device=view.tokens.device).expand(view.batch, -1))
        order, alike, price = self.rank(view)
        gone = price.topk(r, dim=1, largest=False).indices  # (B, r) ranks; the first rank always stays
        left = torch.zeros_like(price).scatter(1, gone, -4.0).unsqueeze(1)
        target = take_tokens(alike, gone).add(left).argmax(dim=-1)
        drop = order.gather(1, gone)
        stay = complement(drop, n)
        shown = torch.minimum(price, price[:, 1:].amax(dim=1, keepdim=True))  # the first's is only higher than any
        scores = torch.empty_like(price).scatter(1, order, shown)
        return Reduction(keep=stay, drop=drop, into=slot_of(stay, order.gather(1, target), n), scores=scores)

    def rank(self, view: TokenView) -> tuple[Tensor, Tensor, Tensor]:
        """What the choice is made by, the patches ordered by falling importance.

        Returns the order (B, N), cosines (B, N, N) and prices (B, N). Cosines to patches that are not more important
        are 8 lower, out of everyone's reach. The first has only such: it is far from all, and its price the highest.
        """
        importance, order = view.importance().sort(dim=1, descending=True)
        keys = self._compared(view, order)
        alike = torch.baddbmm(keys.new_full((view.n, view.n), -8.0).triu_(), keys, keys.transpose(1, 2))
        distance = (1.0 - alike.amax(dim=-1)).clamp_min(0.0)
        share = importance / importance.mean(dim=1, keepdim=True)
        return order, alike, self.price(view, order, distance, share)

    def _compared(self, view: TokenView, order: Tensor) -> Tensor:
        """(B, N, C) unit vectors of the patches in this order, whose products say how alike they are."""
        if view.stage == "projector":
            return F.normalize(take_tokens(view.joint, order), dim=-1)
        # rows as the projection left them, all heads of a token side by side: taking them orders them in one pass
        keys = take_tokens(view.k.transpose(1, 2).flatten(2), order + view.prefix)
        return unit_keys(keys, view.k.shape[1], self.parts)

    def price(self, view: TokenView, order: Tensor, distance: Tensor, share: Tensor) -> Tensor:
        """(B, N) what losing each of the patches `order` costs, the first more than any. All arguments are (B, N).

        distance: to the nearest patch that is more important. share: importance over its mean, falling.
        """
        return distance * share**self.weight


def unit_keys(keys: Tensor, heads: int, parts: int) -> Tensor:
    """(B, N, H * d) -> (B, N, G * d): means of neighbouring heads, each of length 1 / sqrt(G).

    Products are cosines averaged over the G groups of heads. G: `parts`, or the next smaller number that divides H.
    """
    groups = next(g for g in range(min(parts, heads), 0, -1) if heads % g == 0)
    batch, n, width = keys.shape
    split = keys.view(batch, n, groups, heads // groups, width // heads)
    mean = split.mean(dim=3) if groups < heads else split.squeeze(3)  # (B, N, G, d)
    length: Tensor = torch.linalg.vector_norm(mean, dim=-1, keepdim=True)
    return (mean / (length * math.sqrt(groups)).clamp_min(torch.finfo(keys.dtype).tiny)).flatten(2)
