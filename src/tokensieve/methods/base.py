"""The one abstract method a new member supplies. Imports core only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensieve.core import merge
from tokensieve.core.budget import Keep
from tokensieve.core.reduction import Reduction
from tokensieve.core.select import top
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods.built_in import STAGES

__all__ = ["STAGES", "Method", "Selector", "check"]


def check(condition: bool, option: str, value: object, rule: str) -> None:
    """Raise an error that names the option, its value and the rule it breaks."""
    if not condition:
        raise OptionError(f"{option}={value!r}: {rule}")


@dataclass(kw_only=True)
class Method(ABC):
    """Decides what happens to the patches of one layer. Subclasses are dataclasses: their fields are the options.

    proportional: add this times log(size) to later attention. 1 (the papers' way): a merged token weighs as many
        patches as it stands for; 0: as one.
    """

    proportional: float = 1.0

    summary: ClassVar[str] = ""  # one line for lists; empty: the docstring's first
    paper: ClassVar[str] = ""  # its arXiv id
    budget_options: ClassVar[tuple[str, ...]] = ()  # options that are a budget by themselves: see own_keep
    one_cut: ClassVar[bool] = False  # default place: one cut at half depth, instead of spread over the depth
    schedule: ClassVar[str] = "constant"  # how a ratio is spread where nothing is said
    reads_importance: ClassVar[bool] = True  # asks what matters; where no CLS tells, that takes attention received
    needs_log_sum: ClassVar[bool] = False  # reads attention columns: the adapter keeps the kernel's log-sum-exp
    uses_positions: ClassVar[bool] = False  # permuting the patches does not simply permute the result
    differentiable: ClassVar[bool] = False  # gradients flow through the decision, not only through the tokens
    stages: ClassVar[tuple[str, ...]] = STAGES  # where it can work
    reads_text: ClassVar[bool] = False  # looks at view.text where there is one
    reads_attention: ClassVar[bool] = False  # inside a language model: needs a layer before it

    @abstractmethod
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        """Reduce view.n patches to exactly `keep`, 1 <= keep <= view.n; keep == view.n is the identity."""

    def floor(self, n: int, prefix: int) -> int:
        """The fewest patches that one reduction of n can leave."""
        return 1

    def extra_tokens(self) -> int:
        """How many tokens a reduction adds to the patches it keeps."""
        return 0

    def check_keep(self, view: TokenView, keep: int) -> None:
        """Raise where one reduction of view.n patches cannot leave `keep`."""
        low = self.floor(view.n, view.prefix)
        if not low <= keep <= view.n:
            raise BudgetError(f"keep={keep} of {view.n} patches: one reduction can leave {low} to {view.n} of them")

    def check_encoder(self, depth: int, width: int) -> None:  # noqa: B027
        """Raise where the method was made for an encoder of another depth or width. Called when it is attached."""

    def check_decoder(self, depth: int, width: int, vision_width: int) -> None:  # noqa: B027
        """Raise where the method was made for a language model of another depth or width, or another vision tower."""

    def layers(self, depth: int) -> tuple[int, ...]:
        """The layers of a language model of `depth` layers before which it cuts, where none are named."""
        return (min(2, depth - 1),)

    @property
    def reads_next_layer(self) -> bool:
        """Whether queries, keys and attention are those of the layer after the cut, on all the tokens still there.

        Inside a language model and before the projector; false: those of the layer before.
        """
        return False

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks of an encoder of `depth` blocks at which it cuts, where none are named."""
        if self.one_cut:
            return (max(0, depth // 2 - 1),)
        return tuple(range(0, depth, self.spacing()))

    def spacing(self) -> int:
        """By default a spread budget cuts at every n-th block, from the first on.

        1: merging is gentler the more often it is done. Where plain dropping loses nothing by cutting at every third
        block, that saves two thirds of what deciding costs.
        """
        return 1

    def own_keep(self) -> Keep | None:
        """The budget that the method's own options ask for, where none is given."""
        return None


@dataclass(kw_only=True)
class Selector(Method):
    """A method that scores patches and keeps the best; the rest is dropped, or folded into what stays.

    fold: average each dropped patch into its nearest kept one (key cosine, weighted by size) instead of dropping it.
    """

    fold: bool = False

    @abstractmethod
    def score(self, view: TokenView, keep: int) -> Tensor:
        """(B, N), the `keep` highest stay."""

    def select(self, view: TokenView, keep: int) -> tuple[Tensor, Tensor | None]:
        """(B, keep) ascending indices and the scores (B, N) they were chosen by."""
        scores = self.score(view, keep)
        return top(scores, keep), scores

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        index, scores = self.select(view, keep)
        if self.fold and keep < view.n:
            return merge.fold(index, view.keys, scores)
        return Reduction(keep=index, scores=scores)
