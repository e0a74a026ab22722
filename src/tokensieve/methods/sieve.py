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

    with the cosine averaged over heads. The cheapest go, each averaged by size into the most similar patch that stays.

    Why this and not something else. *Redundancy*: like ToMe it merges what is alike, but any patch may merge into any
    better one; two alternating sets forbid half of the pairs and more than half of the tokens. *Importance*: an early
    error in a patch that CLS reads costs more than one elsewhere; a mild weight (0.35) does most of the good, a full
    one (1.0) harms. *Coverage*: a patch far from everything more important has a high price however unimportant it is;
    that is the order in which max-min would pick, in one step instead of N. Keys are compared head by head: their mean
    over heads, ToMe's space, loses some of what tells patches apart. The removal is geometric by default, the same
    share at every block, which was best for ToMe too. Evidence: benchmarks/sieve.md.

    log(size) counts a little less than fully in later attention (0.85): the patches behind a merged token are alike,
    not equal, and its mean key draws more attention than they did one by one.
    """

    weight: float = 0.35
    proportional: float = 0.85
    schedule: ClassVar[str] = "geometric"

    def __post_init__(self) -> None:
        check(0.0 <= self.weight <= 2.0, "weight", self.weight, "the power of importance lies in [0, 2]")

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        n, r = view.n, view.n - keep
        if r == 0:
            return Reduction(keep=torch.arange(n, device=view.tokens.device).expand(view.batch, -1))
        order, alike, price = self.rank(view)
        gone = price.topk(r, dim=1, largest=False).indices  # (B, r), rank - 1
        rows = alike.gather(1, gone.unsqueeze(-1).expand(-1, -1, n))
        left = torch.zeros_like(alike[:, 0]).scatter(1, gone + 1, float("-inf"))
        target = (rows + left.unsqueeze(1)).argmax(dim=-1)  # by rank; never one that goes
        drop = order.gather(1, gone + 1)
        stay = complement(drop, n)
        paid = torch.cat([price.amax(dim=1, keepdim=True), price], dim=1)
        scores = torch.empty_like(paid).scatter(1, order, paid)
        return Reduction(keep=stay, drop=drop, into=slot_of(stay, order.gather(1, target), n), scores=scores)

    def rank(self, view: TokenView) -> tuple[Tensor, Tensor, Tensor]:
        """What the choice is made by, the patches ordered by falling importance.

        Returns the order (B, N), cosines (B, N-1, N) and prices (B, N-1), both without the first, which never goes.
        """
        importance, order = view.importance().sort(dim=1, descending=True)
        keys = take_tokens(unit_keys(view.k[:, :, view.prefix : view.prefix + view.n]), order)
        alike = keys[:, 1:] @ keys.transpose(1, 2)
        worse = torch.ones(alike.shape[1:], dtype=torch.bool, device=alike.device).triu(diagonal=1)
        distance = (1.0 - alike.masked_fill(worse, -1.0).amax(dim=-1)).clamp_min(0.0)
        share = importance / importance.mean(dim=1, keepdim=True)
        return order, alike, self.price(view, order[:, 1:], distance, share[:, 1:])

    def price(self, view: TokenView, order: Tensor, distance: Tensor, share: Tensor) -> Tensor:
        """(B, N-1) what losing each of the patches `order` costs. All arguments are (B, N-1).

        distance: to the nearest patch that is more important. share: importance over its mean.
        """
        return distance * share**self.weight


def unit_keys(k: Tensor) -> Tensor:
    """(B, H, N, d) -> (B, N, H * d), each head's part of length 1 / sqrt(H): products are mean cosines over heads."""
    return F.normalize(k, dim=-1).transpose(1, 2).flatten(2) / math.sqrt(k.shape[1])
