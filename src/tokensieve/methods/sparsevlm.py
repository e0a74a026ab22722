"""SparseVLM: Visual Token Sparsification for Efficient VLM Inference (arXiv 2410.04417). Imports core only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensieve.core.density import density_peaks
from tokensieve.core.merge import slot_of
from tokensieve.core.reduction import Reduction, WeightedReduction, cluster_sums, complement, take_tokens
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method, check

__all__ = ["SparseVLM"]


@dataclass(kw_only=True)
class SparseVLM(Method):
    """Keep what the raters among the text tokens attend to; recycle the best of the dropped into a few cluster means.

    Raters: text tokens whose share of softmax_text(v t^T), averaged over the vision tokens v, both as they enter the
    language model, is not under the mean. Layers 2 / 6 / 15 of 32 run whole and rank by their own attention; the cut
    comes after them, before 3 / 7 / 16, scaled to the depth. Of the dropped, the best `recycle` are clustered (DPC-KNN,
    density by as many neighbours as there are clusters) into `clusters` times as many tokens, the clusters' means.

    Departs: a cluster's token stands at its centre's position and counts in the budget; in the released code it stands
    behind the others, and positions are numbered anew.
    Departs: the counts are what the budget asks for, the same share at each cut; the released code has a list of them.
    """

    summary: ClassVar[str] = "top by the text's attention, some dropped recycled"
    paper: ClassVar[str] = "2410.04417"
    recycle: float = 0.3
    clusters: float = 0.1

    schedule: ClassVar[str] = "geometric"
    stages: ClassVar[tuple[str, ...]] = ("decoder",)
    reads_text: ClassVar[bool] = True
    reads_attention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(0.0 <= self.recycle <= 1.0, "recycle", self.recycle, "a share in [0, 1]")
        check(0.0 <= self.clusters <= 1.0, "clusters", self.clusters, "a share in [0, 1]")

    def layers(self, depth: int) -> tuple[int, ...]:
        return tuple(sorted({min(depth - 1, max(1, round(depth * layer / 32))) for layer in (3, 7, 16)}))

    def score(self, view: TokenView) -> Tensor:
        """(B, N) mean attention of the raters."""
        if view.text is None:  # a prompt that is all image but for its last token
            return view.attention_from_last()
        text = view.text if view.text.dim() == 3 else view.text.expand(view.batch, -1, -1)
        valid = view.text_valid
        if valid is None:
            valid = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        like = (view.joint.float() @ text.float().transpose(-1, -2)).masked_fill(~valid.unsqueeze(1), float("-inf"))
        share = like.softmax(dim=-1).mean(dim=1)  # (B, T), sums to 1
        raters = valid & (share >= (1.0 - 1e-6) / valid.sum(dim=1, keepdim=True))
        weight = raters / raters.sum(dim=1, keepdim=True)
        return torch.einsum("bt,btn->bn", weight.float(), view.attention_from_text().float())

    def made(self, n: int, keep: int) -> tuple[int, int]:
        """Of a cut from n to keep: how many of the dropped are recycled, and into how many of the kept tokens."""
        share = self.recycle * self.clusters
        made = keep - 1 if share == 1.0 else min(keep - 1, round(share * (n - keep) / (1.0 - share)))
        return (max(made, round(self.recycle * (n - keep + made))), made) if made > 0 else (0, 0)

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.check_keep(view, keep)
        scores = self.score(view)
        recycled, made = self.made(view.n, keep)
        if not made:
            return Reduction(keep=top(scores, keep), scores=scores)
        best = top(scores, keep - made)
        rest = complement(best, view.n)
        pool = rest.gather(1, top(scores.gather(1, rest), recycled))  # (B, R)
        centre, belongs = density_peaks(take_tokens(view.x, pool), made)
        centres = pool.gather(1, centre)
        index = torch.cat([best, centres], dim=1).sort(dim=1).values
        slot = slot_of(index, centres, view.n).gather(1, belongs)  # (B, R), the slot each recycled token goes to
        # a centre is in the pool as well: it goes to itself with the weight of any other, and its own share is 0
        size = cluster_sums(torch.ones_like(slot, dtype=torch.float32), slot, keep)
        return WeightedReduction(
            keep=index, drop=pool, goal=slot, weight=1.0 / size.gather(1, slot), own=(size == 0).float(), scores=scores
        )
