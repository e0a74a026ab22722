"""pruner: learned heads between decoder layers that score vision tokens by the question. Imports core only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.budget import Keep
from tokensieve.core.merge import fold
from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.methods.base import Selector, check
from tokensieve.methods.trained.adapter_file import fill, read_adapter
from tokensieve.methods.trained.networks import ScoreNetwork

__all__ = ["PART", "LayerPruners", "Pruner", "load_pruners", "pruned_counts"]

PART = "layer_pruners"


class LayerPruners(nn.Module):
    """One head for each of `layers` of a language model of `depth` layers and width `width`.

    patches: vision tokens of one image. keep: the share of the tokens that come to it that each head was trained to
    leave.
    """

    def __init__(
        self, width: int, depth: int, layers: Sequence[int], patches: int, inner: int = 512, heads: int = 4,
        keep: float = 0.65,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.depth, self.layers, self.patches = width, depth, tuple(sorted(layers)), patches
        self.inner, self.heads, self.keep = inner, heads, keep
        self.scores = nn.ModuleDict({str(layer): ScoreNetwork(width, width, inner, heads) for layer in self.layers})

    def shape(self) -> dict[str, Any]:
        """What to build the same with."""
        return {
            "width": self.width, "depth": self.depth, "layers": list(self.layers), "patches": self.patches,
            "inner": self.inner, "heads": self.heads, "keep": self.keep,
        }  # fmt: skip

    def counts(self, enters: int) -> list[int]:
        """Tokens of an image that are left from each of the layers on, `enters` of them before the first."""
        return pruned_counts(enters, len(self.layers), self.keep)

    def forward(self, layer: int, x: Tensor, text: Tensor | None, valid: Tensor | None) -> Tensor:
        """(B, N) scores of the vision tokens x (B, N, D) that come to a layer; text: (B, T, D) the question there."""
        if str(layer) not in self.scores:
            raise OptionError(f"no pruner was trained for layer {layer}, only for {', '.join(map(str, self.layers))}")
        scores: Tensor = self.scores[str(layer)](x, text, valid)
        return scores

    def macs(self, layer: int, n: int, text: int) -> int:
        """Multiplications of the head of a layer for n vision tokens and that many of text, and of folding."""
        head = self.scores[str(layer)]
        assert isinstance(head, ScoreNetwork)
        left = pruned_counts(n, 1, self.keep)[0]
        return head.macs(n, text) + (n - left) * left * self.width


def pruned_counts(enters: int, times: int, keep: float) -> list[int]:
    """What is left of `enters` tokens after each of that many cuts to `keep`, fractions dropped, one at least."""
    counts = []
    for _ in range(times):
        enters = max(1, int(enters * keep + 1e-9))
        counts.append(enters)
    return counts


@dataclass(kw_only=True)
class Pruner(Selector):
    """Before each of its layers a small head lets vision tokens look at the question's tokens, and keeps the best.

    The heads were trained by `tokensieve train vlm` (docs/vlm.md), each for its layer. Budgets are exact; without one,
    they are what the training aimed at. What is dropped is folded into the most similar token that stays, which weighs
    as much more from there on: a language model that counts by how its attention is shared out still can.

    adapter: the file or folder that training wrote (or the networks themselves). It belongs to one model.
    """

    summary: ClassVar[str] = "ours: learned heads that read the question, needs adapter=FILE"
    budget_options: ClassVar[tuple[str, ...]] = ("adapter",)
    adapter: str | Path | LayerPruners = ""
    fold: bool = True
    stages: ClassVar[tuple[str, ...]] = ("decoder",)
    schedule: ClassVar[str] = "geometric"
    differentiable: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(bool(self.adapter), "adapter", self.adapter, "give the file that `tokensieve train vlm` wrote")
        self.network = self.adapter if isinstance(self.adapter, LayerPruners) else load_pruners(self.adapter)

    def check_decoder(self, depth: int, width: int, vision_width: int) -> None:
        mine = self.network
        if (mine.depth, mine.width) != (depth, width):
            raise UnsupportedModelError(
                f"adapter {self._name} is for a language model of {mine.depth} layers and width {mine.width}, "
                f"this one has {depth} layers and width {width}"
            )

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.network.layers

    def own_keep(self) -> Keep:
        return self.network.counts(self.network.patches)

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        index, scores = self.select(view, keep)
        if not self.fold or keep == view.n:
            return Reduction(keep=index, scores=scores)
        # by the residual stream, without gradients: keys of a language model are turned by their positions
        return fold(index, F.layer_norm(view.x.detach().float(), view.x.shape[-1:]), scores)

    def score(self, view: TokenView, keep: int) -> Tensor:
        if view.sentence is None:
            raise OptionError("pruner works between the layers of a language model")
        place, valid = view.sentence.text, view.sentence.text_valid
        text = None if place is None else view.sentence.states(place)
        self.network.to(view.x.device)
        scores: Tensor = self.network(round(view.depth * self.network.depth), view.x, text, valid)
        return scores

    @property
    def _name(self) -> str:
        return "in memory" if isinstance(self.adapter, LayerPruners) else str(self.adapter)


def load_pruners(path: str | Path) -> LayerPruners:
    """The pruner heads in a file."""
    shape, weights, _ = read_adapter(path, PART)
    try:
        network = LayerPruners(**shape)
    except TypeError:
        raise OptionError(f"adapter {path}: its header does not describe pruners: {shape}") from None
    fill(network, weights, path)
    return network
