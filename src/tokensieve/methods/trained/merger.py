"""merger: learned centres between vision tower and language model that take in the other tokens. Imports core only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.budget import Keep
from tokensieve.core.reduction import MixedReduction, Reduction, take_tokens
from tokensieve.core.relax import keep_probability
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.methods.base import Method, check
from tokensieve.methods.trained.adapter_file import fill, read_adapter
from tokensieve.methods.trained.networks import ScoreNetwork
from tokensieve.utils.processes import drawn_for_batch

__all__ = ["MERGERS", "PART", "Merger", "TokenMerger", "gumbel", "load_merger"]

PART = "token_merger"
MERGERS = ("simple", "question_aware")
_TINY = 1e-6  # a token's least weight: a centre's own share never vanishes
_WEIGHT = 0.35  # how much importance counts beside coverage, as in sieve
_SHARP = 0.1  # cosines are this much sharper than the temperature
_BLEND = -2.0  # sigmoid of it: how much of a token that is not a centre counts at first, beside a centre's own 1


def gumbel(like: Tensor) -> Tensor:
    """Noise whose top k are a draw without replacement from the softmax."""
    return -drawn_for_batch(like, Tensor.exponential_).clamp_min(1e-20).log()


class TokenMerger(nn.Module):
    """Importance of each token, and the similarity by which the others join the chosen ones.

    Centres are chosen as sieve chooses: by importance and by how far a token is from every more important one. What is
    merged into its like loses little, and it is of no use to keep two that are alike; the most important tokens alone
    are. Alike is what the projector makes alike, as that is what the language model will see.

    kind: "simple" looks at the token, "question_aware" at the question as well. temperature: of the choice and of the
    assignment; training lowers it, and it is used as it was left. ratio: the share of tokens it was trained to keep.
    """

    def __init__(
        self, width: int, text_width: int, inner: int = 512, heads: int = 4, kind: str = "simple", ratio: float = 0.5,
        temperature: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if kind not in MERGERS:
            raise OptionError(f"merger_type {kind!r}: one of {', '.join(MERGERS)}")
        self.kind, self.ratio, self.temperature = kind, ratio, temperature
        self.inner, self.heads, self.text_width = inner, heads, text_width
        self.importance = ScoreNetwork(width, text_width if kind == "question_aware" else 0, inner, heads)
        self.query = nn.Linear(width, inner, bias=False)
        nn.init.orthogonal_(self.query.weight)
        self.key = nn.Linear(width, inner, bias=False)
        with torch.no_grad():
            self.key.weight.copy_(0.1 * self.query.weight)  # what is learned beside the cosines begins small
        self.blend = nn.Parameter(torch.tensor(_BLEND))  # begin near pruning: means of everything blur what was seen

    def shape(self) -> dict[str, Any]:
        """What to build the same with."""
        return {
            "width": self.importance.width, "text_width": self.text_width, "inner": self.inner, "heads": self.heads,
            "kind": self.kind, "ratio": self.ratio, "temperature": self.temperature,
        }  # fmt: skip

    def forward(
        self, x: Tensor, keep: int, text: Tensor | None = None, valid: Tensor | None = None, joint: Tensor | None = None
    ) -> MixedReduction:
        """(B, N, D) -> `keep` < N centres, each the weighted mean of what is assigned to it.

        joint: (B, N, E) the tokens where they are compared; None: as they are. The scores are the importances. Noise on
        them in training mode only. A token's weight is its relaxed price, so what nobody needs changes no mean, and the
        importance learns from what a token's share in a centre does. Other tokens weigh less by a learned
        factor, the same for all.
        """
        score = self.importance(x, text, valid)
        drawn = score + self.temperature * gumbel(score) if self.training else score
        unit = F.normalize((x if joint is None else joint).detach().float(), dim=-1)
        alike = unit @ unit.transpose(1, 2)
        price = self.price(drawn, alike)
        index = top(price.detach(), keep)
        hard = torch.zeros_like(score, dtype=torch.bool).scatter(1, index, True)
        p = keep_probability(price, hard, self.temperature)
        share = self.assign(x, alike, index, p.gather(1, index))
        weighed = share * torch.where(hard, p, p * self.blend.sigmoid()).clamp_min(_TINY).unsqueeze(1)
        mix = weighed / weighed.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return MixedReduction(keep=index, scores=score, mix=mix, share=share)

    def price(self, score: Tensor, alike: Tensor) -> Tensor:
        """(B, N) log of the price of each token: of its distance to the nearest more important one, and importance.

        score: (B, N); alike: (B, N, N) cosines. Nothing is more important than the first, whose distance is 2.
        """
        rank = score.detach().argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        better = rank.unsqueeze(1) < rank.unsqueeze(2)  # (B, i, j): j before i
        distance = 1.0 - alike.masked_fill(~better, -1.0).amax(dim=-1)
        return distance.clamp_min(1e-6).log() + _WEIGHT * score

    def assign(self, x: Tensor, alike: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """(B, K, N) how far each token belongs to each centre: softmax over centres of their cosine, sharpened, and of
        q_j k_c / sqrt(d), both over the temperature, a centre counting by its weight (B, K). Columns sum to 1."""
        normed = F.layer_norm(x.float(), x.shape[-1:])
        query, key = self.query(normed), take_tokens(self.key(normed), index)
        logits = (query @ key.transpose(1, 2)).float() / self.inner**0.5  # (B, N, K)
        nearest = alike.gather(2, index.unsqueeze(1).expand(-1, alike.shape[1], -1)) / _SHARP
        logits = (logits + nearest) / self.temperature
        share: Tensor = (logits + weight.clamp_min(_TINY).log().unsqueeze(1)).softmax(dim=-1)
        return share.transpose(1, 2)

    def sparsity(self, score: Tensor) -> Tensor:
        """How far the mean keep probability is from the ratio, squared. score: (B, N)."""
        mean = (score / self.temperature).sigmoid().mean(dim=1)
        return (mean - self.ratio).square().mean()

    def macs(self, n: int, text: int, keep: int, projector: int) -> int:
        """Multiplications of one image of n tokens; projector: its weights, for all tokens to be compared after it."""
        width = self.importance.width
        assigned = n * self.query.weight.numel() + keep * self.key.weight.numel() + n * keep * (self.inner + width)
        return self.importance.macs(n, text) + assigned + n * projector + n * n * self.text_width


@dataclass(kw_only=True)
class Merger(Method):
    """Keep tokens that are important and unlike each other as centres; each becomes the weighted mean of its like.

    Importance and likeness were trained by `tokensieve train vlm` (docs/vlm.md). The budget is exact; without one, it
    is what the training aimed at. Works between vision tower and projector.

    adapter: the file or folder that training wrote (or the network itself). It belongs to one model.
    """

    summary: ClassVar[str] = "ours: learned centres that take in the rest, needs adapter=FILE"
    budget_options: ClassVar[tuple[str, ...]] = ("adapter",)
    adapter: str | Path | TokenMerger = ""
    stages: ClassVar[tuple[str, ...]] = ("projector",)
    differentiable: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(bool(self.adapter), "adapter", self.adapter, "give the file that `tokensieve train vlm` wrote")
        self.network = self.adapter if isinstance(self.adapter, TokenMerger) else load_merger(self.adapter)

    def check_decoder(self, depth: int, width: int, vision_width: int) -> None:
        mine = self.network
        if (mine.importance.width, mine.text_width) != (vision_width, width):
            raise UnsupportedModelError(
                f"adapter {self._name} is for a vision tower of width {mine.importance.width} and a language model of "
                f"width {mine.text_width}; this model's are {vision_width} and {width}"
            )

    def own_keep(self) -> Keep:
        return self.network.ratio

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        if keep == view.n:
            return Reduction(keep=torch.arange(view.n, device=view.x.device).expand(view.batch, -1))
        self.network.to(view.x.device)
        found: MixedReduction = self.network(view.x, keep, view.text, view.text_valid, view.joint)
        return found

    @property
    def _name(self) -> str:
        return "in memory" if isinstance(self.adapter, TokenMerger) else str(self.adapter)


def load_merger(path: str | Path) -> TokenMerger:
    """The merger in a file."""
    shape, weights, _ = read_adapter(path, PART)
    network = _built(shape, path)
    fill(network, weights, path)
    return network


def _built(shape: Mapping[str, Any], path: str | Path) -> TokenMerger:
    try:
        return TokenMerger(**shape)
    except TypeError:
        raise OptionError(f"adapter {path}: its header does not describe a merger: {dict(shape)}") from None
