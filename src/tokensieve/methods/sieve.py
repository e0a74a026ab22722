"""sieve, our own method. Imports core only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.merge import slot_of
from tokensieve.core.reduction import Reduction, complement, take_tokens
from tokensieve.core.score import unit
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
    costs more time than it gives. The removal is geometric by default, the same share at every cut, and a cut comes at
    every second block: in the same time that is within 4 % of every block's error, less beyond 2x, and better for
    single images where a decision costs much. Evidence: benchmarks/sieve.md.

    Between a vision tower and a language model patches are compared after the projector, as that model will see them.

    log(size) counts a little less than fully in later attention (0.85): the patches behind a merged token are alike,
    not equal, and its mean key draws more attention than they did one by one.
    """

    summary: ClassVar[str] = "ours: merge what a more important patch stands for already"
    weight: float = 0.35
    parts: int = 2
    proportional: float = 0.85
    schedule: ClassVar[str] = "geometric"

    def __post_init__(self) -> None:
        check(0.0 <= self.weight <= 2.0, "weight", self.weight, "the power of importance lies in [0, 2]")
        check(isinstance(self.parts, int) and self.parts >= 1, "parts", self.parts, "at least 1 group of heads")

    def spacing(self) -> int:
        return 2  # measured: in the same time about as good as every block, and better where a decision costs much

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        n, r = view.n, view.n - keep
        if r == 0:
            return Reduction(keep=torch.arange(n, device=view.tokens.device).expand(view.batch, -1))
        order, alike, price = self.rank(view)
        gone = price.topk(r, dim=1, largest=False).indices  # (B, r) ranks; the first rank always stays
        left = take_tokens(alike, gone).scatter_(2, gone.unsqueeze(1).expand(-1, r, -1), -1.0)  # these do not stay
        drop, goal = order.gather(1, gone), order.gather(1, left.argmax(dim=-1))
        stay = complement(drop, n)
        scores = torch.empty_like(price).scatter_(1, order, price)
        return Reduction(keep=stay, drop=drop, into=slot_of(stay, goal, n), scores=scores)

    def rank(self, view: TokenView) -> tuple[Tensor, Tensor, Tensor]:
        """What the choice is made by, the patches ordered by falling importance.

        Returns the order (B, N), 1 + cosines (B, N, N), 0 to those that are not more important, and prices (B, N). The
        first has nobody more important: it is as far from all as can be, 2, and its price the highest.
        """
        importance, order = view.importance().sort(dim=1, descending=True)
        keys = take_tokens(self._compared(view), order)
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))  # 1 + cosine is coarse in half precision
        alike = torch.baddbmm(keys.new_ones(()), keys, keys.transpose(1, 2)).tril_(-1)
        return order, alike, self.price(view, order, 2.0 - alike.amax(dim=-1), importance)

    def _compared(self, view: TokenView) -> Tensor:
        """(B, N, C) unit vectors of the patches, whose products say how alike they are."""
        if view.stage == "projector":
            return unit(view.joint)
        return unit_keys(view.k[:, :, view.prefix : view.prefix + view.n], self.parts)

    def price(self, view: TokenView, order: Tensor, distance: Tensor, importance: Tensor) -> Tensor:
        """(B, N) what losing each of the patches `order` costs, the first more than any. All arguments are (B, N).

        distance: to the nearest patch that is more important. importance: falling, 1 / N on average.
        """
        return distance * (importance * view.n) ** self.weight


def groups(heads: int, parts: int) -> int:
    """How many equal groups of heads: `parts`, or the next smaller number that divides them."""
    return next(g for g in range(min(parts, heads), 0, -1) if heads % g == 0)


def unit_keys(keys: Tensor, parts: int) -> Tensor:
    """(B, H, N, d) -> (B, N, G * d): sums of neighbouring heads, each of length 1 / sqrt(G).

    Products are cosines averaged over the G groups of heads. G: `groups(H, parts)`.
    """
    rows = keys.transpose(1, 2)  # (B, N, H, d), as projections leave them
    batch, n, heads, d = rows.shape
    count = groups(heads, parts)
    some = rows.view(batch, n, count, heads // count, d).sum(dim=3) if count < heads else rows  # (B, N, G, d)
    length: Tensor = torch.linalg.vector_norm(some, dim=-1, keepdim=True)
    return (some / (length * math.sqrt(count)).clamp_min(torch.finfo(keys.dtype).tiny)).flatten(2)
