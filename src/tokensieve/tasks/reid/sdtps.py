"""SDTPS: each modality's patch tokens compressed to about a fifth, guided by the other modalities.

After LAPS (CVPR 2024) and SEPS (arXiv 2511.01390), with other modalities (RGB, NIR, TIR) where those have texts. A
module with trained parts that reads several images at once, hence not one of the methods that `attach` takes by name.
Departs from the papers where `use_gumbel` is on: the choice is a relaxed Bernoulli for each token, of bounded gradient.

Imports core only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.relax import keep_gate
from tokensieve.core.score import cosine, minmax
from tokensieve.core.select import top
from tokensieve.errors import OptionError, UnknownNameError, nearest
from tokensieve.methods.base import check
from tokensieve.utils.processes import drawn_for_batch

__all__ = ["FORMULAS", "SDTPS", "Sparse", "TokenAggregation", "TokenSparse", "attention_score", "sdtps_counts"]

FORMULAS = ("paper", "convex")
_ATTENTION = 4.0  # what the attention scores weigh together, in units of beta: one each of two others and two its own
_FLAT = 1e-5  # cosines nearer to each other than this are equal: what is left is rounding


def sdtps_counts(tokens: int, sparse_ratio: float, aggr_ratio: float) -> tuple[int, int]:
    """(N_s, N_c): tokens that are selected, tokens they are aggregated to. 128, 0.5, 0.4 -> (64, 25).

    Products are rounded first: 100 * 0.07 is 7.000000000000001, and its ceiling would be 8.
    """
    check(tokens >= 1, "tokens", tokens, "at least one")
    check(0.0 < sparse_ratio <= 1.0, "sparse_ratio", sparse_ratio, "above 0, at most 1")
    check(0.0 < aggr_ratio <= 1.0, "aggr_ratio", aggr_ratio, "above 0, at most 1")
    selected = math.ceil(round(tokens * sparse_ratio, 6))
    aggregated = math.floor(round(tokens * sparse_ratio * aggr_ratio, 6))
    if aggregated < 1:
        raise OptionError(f"{tokens} tokens x {sparse_ratio} x {aggr_ratio} leave none to aggregate to: raise a ratio")
    return selected, aggregated


@torch.no_grad()
def attention_score(tokens: Tensor, features: Tensor) -> Tensor:
    """How near each token is to each global feature: cosines, scaled to [0, 1] for each image. No gradient.

    tokens: (B, N, D), features: (B, F, D). Returns (B, F, N) float32; 0.5 where all tokens are equally near.
    """
    near = cosine(features.float(), tokens.float())
    span = near.amax(dim=-1, keepdim=True) - near.amin(dim=-1, keepdim=True)
    return torch.where(span <= _FLAT, 0.5, minmax(near))


class Sparse(NamedTuple):
    """What TokenSparse makes of (B, N, D) tokens.

    tokens: the selected ones (B, N_s, D); with a gate all of them (B, N, D), since each still has a say in training.
    gate: (B, N), 1 where selected and 0 elsewhere, with a gradient; None where the selection has none.
    extra: (B, 1, D), what the others are averaged into; None where nothing is left out.
    reduction: the same as data, without gradient; applied to the tokens it gives the selected ones and the extra one.
    """

    tokens: Tensor
    gate: Tensor | None
    extra: Tensor | None
    reduction: Reduction


class TokenSparse(nn.Module):
    """Keep the best ceil(ratio * N) tokens, average the others into one by the softmax of their scores.

    A token's score: what a small network predicts from it, and how near it is to its own image's global feature and to
    those of the other modalities. `paper`: (1 - 2b) predicted + b (sum of the others' + 2 own), its weights sum to
    1 + 2b. `convex`: the same with b / 2, weights sum to 1. For other numbers of modalities, or where some are missing,
    the attention scores of those that are there are scaled to the same sum.

    use_gumbel: in training, noise of the scale tau is added to the scores and the choice passes its gradient on.
    Without, the predictor learns through the extra token's weights alone.
    """

    def __init__(
        self, dim: int, sparse_ratio: float = 0.5, beta: float = 0.25, use_gumbel: bool = False,
        formula: str = "paper", tau: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        check(dim >= 4, "dim", dim, "at least 4")
        check(0.0 < sparse_ratio <= 1.0, "sparse_ratio", sparse_ratio, "above 0, at most 1")
        check(0.0 <= beta <= 0.5, "beta", beta, "from 0 to 1/2")
        check(tau > 0.0, "tau", tau, "above 0")
        if formula not in FORMULAS:
            raise UnknownNameError(f"unknown formula {formula!r}.{nearest(formula, FORMULAS)}")
        self.sparse_ratio, self.beta, self.use_gumbel = sparse_ratio, beta, use_gumbel
        self.formula, self.tau = formula, tau
        self.predictor = nn.Sequential(nn.Linear(dim, dim // 4), nn.GELU(), nn.Linear(dim // 4, 1))

    def score(self, tokens: Tensor, own: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
        """(B, N) float32. tokens: (B, N, D), own and each of others: (B, D)."""
        predicted: Tensor = self.predictor(tokens).squeeze(-1).float().sigmoid()
        near = attention_score(tokens, torch.stack([own, *others], dim=1))  # (B, 1 + others, N)
        weight = self.beta * _ATTENTION / (2 + len(others))
        if self.formula == "convex":
            weight = weight / 2.0
        return (1.0 - 2.0 * self.beta) * predicted + weight * (near.sum(dim=1) + near[:, 0])

    def forward(self, tokens: Tensor, own: Tensor, others: Sequence[Tensor] = ()) -> Sparse:
        """tokens: (B, N, D), own and each of others: (B, D) global features."""
        n = tokens.shape[1]
        keep = math.ceil(round(n * self.sparse_ratio, 6))
        score = self.score(tokens, own, others)
        gated = self.use_gumbel and self.training and keep < n
        choice = score + self.tau * _gumbel_like(score) if gated else score
        index = top(choice.detach(), keep)
        gate = keep_gate(choice, Reduction(index).mask(n), self.tau) if gated else None
        if keep == n:
            return Sparse(tokens, None, None, Reduction(index, scores=score.detach()))
        weights = _extra_weights(score, index, gate)
        extra = torch.bmm(weights.to(tokens.dtype), tokens)
        reduction = Reduction(index, extra=weights.detach(), scores=score.detach())
        return Sparse(tokens if gated else take_tokens(tokens, index), gate, extra, reduction)


def _gumbel_like(score: Tensor) -> Tensor:
    """Standard Gumbel noise. Added to logits, the k highest are a sample of k without replacement."""
    uniform = drawn_for_batch(score, Tensor.uniform_).clamp(1e-6, 1.0 - 1e-6)
    return -(-uniform.log()).log()


def _extra_weights(score: Tensor, keep: Tensor, gate: Tensor | None) -> Tensor:
    """(B, 1, N) the softmax of the dropped tokens' scores, 0 at the kept ones.

    Where gated, the gradient has that a token which would stay leaves the average.
    """
    rest = torch.ones_like(score).scatter(1, keep, 0.0) if gate is None else 1.0 - gate
    mass = score.exp() * rest  # scores are at most 1 + 2 beta: no overflow
    return (mass / mass.sum(dim=1, keepdim=True)).unsqueeze(1)


class TokenAggregation(nn.Module):
    """Average tokens into `keeped_patches` new ones, by weights that a small network gives each token for each of them.

    W = softmax over the tokens of MLP(tokens) * scale; the result is W^T tokens.
    """

    def __init__(self, dim: int = 512, keeped_patches: int = 25, dim_ratio: float = 0.2) -> None:
        super().__init__()
        hidden = int(round(dim * dim_ratio, 6))
        check(keeped_patches >= 1, "keeped_patches", keeped_patches, "at least 1")
        check(hidden >= 1, "dim_ratio", dim_ratio, f"leaves no hidden unit of {dim}")
        self.weight = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, keeped_patches)
        )
        self.scale = nn.Parameter(torch.ones(1, 1, 1))

    def forward(self, tokens: Tensor, gate: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, keeped_patches, D).

        gate: (B, N), 1 for tokens that count and 0 for those that do not, at least one 1 a row. The result is then that
        of the former alone; a token with 0 passes on the gradient of what it would change, as if its logits were at
        most the highest of those that count, which bounds it.
        """
        logits = (self.weight(tokens) * self.scale).float()  # (B, N, C)
        if gate is None:
            weights = logits.softmax(dim=1)
        else:
            gate = gate.float().unsqueeze(-1)
            highest = logits.detach().masked_fill(gate <= 0.5, -torch.inf).amax(dim=1, keepdim=True)
            mass = (logits - highest).clamp_max(0.0).exp() * gate
            weights = mass / mass.sum(dim=1, keepdim=True)
        return torch.bmm(weights.transpose(1, 2).to(tokens.dtype), tokens)


class SDTPS(nn.Module):
    """TokenSparse and TokenAggregation for each modality: N tokens -> N_c aggregated ones and one extra.

    dim: of the tokens and the global features. tokens: N, patches of one image. 128 tokens at the default ratios become
    26: 64 selected, aggregated to 25, and what the other 64 are averaged into. With sparse_ratio=1 nothing is left out
    and there is no extra token. Gradients flow to the tokens; only the attention scores have none.
    """

    def __init__(
        self,
        dim: int = 512,
        tokens: int = 128,
        sparse_ratio: float = 0.5,
        aggr_ratio: float = 0.4,
        beta: float = 0.25,
        use_gumbel: bool = False,
        formula: str = "paper",
        modalities: Sequence[str] = ("rgb", "nir", "tir"),
        tau: float = 0.1,
    ) -> None:
        super().__init__()
        check(len(modalities) >= 1 and len(set(modalities)) == len(modalities), "modalities", modalities,
              "at least one name, each once")  # fmt: skip
        self.dim, self.tokens, self.modalities = dim, tokens, tuple(modalities)
        self.selected, self.aggregated = sdtps_counts(tokens, sparse_ratio, aggr_ratio)
        self.sparse = nn.ModuleDict(
            {name: TokenSparse(dim, sparse_ratio, beta, use_gumbel, formula, tau) for name in modalities}
        )
        self.aggregation = nn.ModuleDict({name: TokenAggregation(dim, self.aggregated) for name in modalities})

    @property
    def out_tokens(self) -> int:
        """Tokens of one modality afterwards."""
        return self.aggregated + (self.selected < self.tokens)

    def forward(
        self, tokens: Mapping[str, Tensor], globals: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Reduction]]:
        """Tokens (B, N, D) and global features (B, D) by modality -> tokens (B, out_tokens, D) and what was selected.

        A modality that is missing is missing in both; the result has those that are there. A selection's `keep` are the
        N_s selected patches, its `extra` the weights of the token that the others are averaged into.
        """
        self._check(tokens, globals)
        compressed, selections = {}, {}
        for name in (name for name in self.modalities if name in tokens):
            others = [globals[other] for other in self.modalities if other in tokens and other != name]
            found: Sparse = self.sparse[name](tokens[name], globals[name], others)
            out = self.aggregation[name](found.tokens, found.gate)
            compressed[name] = out if found.extra is None else torch.cat([out, found.extra], dim=1)
            selections[name] = found.reduction
        return compressed, selections

    def _check(self, tokens: Mapping[str, Tensor], globals: Mapping[str, Tensor]) -> None:
        if not tokens:
            raise OptionError(f"no modality is there; give tokens of at least one of {', '.join(self.modalities)}")
        if set(tokens) != set(globals):
            odd = ", ".join(sorted(set(tokens) ^ set(globals)))
            raise OptionError(f"tokens and global features must be of the same modalities; one of the two lacks {odd}")
        for name, x in tokens.items():
            if name not in self.modalities:
                raise UnknownNameError(f"unknown modality {name!r}.{nearest(name, self.modalities)}")
            if x.dim() != 3 or tuple(x.shape[1:]) != (self.tokens, self.dim):
                raise OptionError(
                    f"{name} has tokens of the shape {tuple(x.shape)}, expected (B, {self.tokens}, {self.dim})"
                )
            if tuple(globals[name].shape) != (x.shape[0], self.dim):
                raise OptionError(
                    f"{name} has a global feature of the shape {tuple(globals[name].shape)}, "
                    f"expected {(x.shape[0], self.dim)}"
                )
