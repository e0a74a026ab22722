"""What `attach` returns: one interface for vision encoders and vision-language models. Imports swap and methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, Literal

from torch import Tensor, nn

from tokensieve.core.budget import Keep
from tokensieve.core.cost import BlockShape, Cost
from tokensieve.errors import BudgetError, OptionError
from tokensieve.methods.base import Method
from tokensieve.models.grid import grid_of, places_in
from tokensieve.models.swap import Swap

__all__ = ["MODES", "Attachment", "Handle", "Mode", "listed_places"]

MODES = ("prune", "analyse", "fuse")
Mode = Literal["prune", "analyse", "fuse"]


def listed_places(at: Any, wanted: str) -> tuple[int, ...]:
    """`at` as integers: one, or several of them (numpy's too). wanted: what to say where they are none."""
    try:
        given = tuple(at) if isinstance(at, Iterable) else (at,)
    except TypeError:  # a tensor or an array without dimensions
        given = (at,)
    if not all(isinstance(place, Integral) and not isinstance(place, bool) for place in given):
        raise OptionError(f"at={at!r}: {wanted}")
    return tuple(map(int, given))


class Handle(ABC):
    """A method at work in one model. A context manager; `.remove()` puts everything back bit for bit.

    What it shows (`kept`, `scores`, `tokens_per_layer`, `stats`) is of the last forward.

    method, keep, keep_average, schedule, mode, text, fuse_weight: what was asked for.
    at: the blocks (of a language model: the layers) where tokens leave. depth: how many blocks there are.
    tower: the vision encoder; blocks: the list that holds the blocks or layers; shapes: what each of them costs.
    grid: patches down and across of the usual image (after the frames, in a video model).
    prefix: tokens before the patches (CLS, registers); has_cls:
        whether the first of them is a CLS; pools_patches: whether the feature is pooled over patches.
    project: takes patches into the space of the text, None where there is none.
    first, second: the methods before and inside a language model; None in an encoder. positions: what the tokens that
        stage 1 keeps count as, None in an encoder.
    timing: set it to True to have forwards timed (this waits for the device), into `stats`.
    """

    at: tuple[int, ...]
    depth: int
    schedule: str
    tower: nn.Module
    blocks: nn.Module
    shapes: list[BlockShape]
    grid: tuple[int, ...]
    prefix: int = 0
    has_cls: bool = False
    pools_patches: bool = False
    project: Callable[[Tensor], Tensor] | None = None
    first: Method | None = None
    second: Method | None = None
    positions: str | None = None

    def __init__(
        self,
        method: Method,
        *,
        keep: Keep | None,
        keep_average: int | float | None,
        mode: Mode = "prune",
        fuse_weight: float = 0.0,
        text: Tensor | None = None,
    ) -> None:
        """keep and keep_average: one of them, or neither where the method has a budget of its own."""
        if keep is not None and keep_average is not None:
            raise BudgetError("keep and keep_average are two ways to say one thing: give one")
        if keep is None and keep_average is None:
            keep = method.own_keep()
            if keep is None:
                raise BudgetError("no budget: give keep=0.5 (a ratio), keep=60 (a count) or keep_average=0.5")
        self.method, self.keep, self.keep_average = method, keep, keep_average
        self.mode, self.fuse_weight, self.text = mode, fuse_weight, text
        self.timing = False
        self._swaps: list[Swap] = []

    # -- budget ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def patches(self) -> int:
        """Patches of the usual image before any reduction."""

    @abstractmethod
    def counts(self, patches: int) -> dict[int, int]:
        """Patches after each cut, for an image of `patches`; what stage 1 of a language model leaves under -1."""

    @property
    def reduces(self) -> bool:
        """Whether this budget removes anything from an image of the usual size."""
        return self.mode == "prune" and min(self.counts(self.patches).values()) < self.patches

    # -- in and out -----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Change the model. `attach` calls it, once. Of a model that is refused half way, nothing stays changed."""
        try:
            self._change()
        except BaseException:
            self.remove()
            raise

    @abstractmethod
    def _change(self) -> None:
        """Swap what has to be swapped."""

    def swap(self, module: nn.Module, cls: type) -> None:
        """Give a module of the model another class until `remove`."""
        self._swaps.append(Swap(module, cls))

    @property
    def installed(self) -> bool:
        """Whether the model is changed now."""
        return bool(self._swaps)

    def remove(self) -> None:
        """Put the model back as it was. Calling it again does nothing. What was seen of the last forward stays."""
        for swap in reversed(self._swaps):
            swap.undo()
        self._swaps = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # -- what the last forward did --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def kept(self) -> dict[int, Tensor]:
        """cut -> (B, K) original indices of the patches that remain after it, ascending."""

    @property
    def places(self) -> dict[int, Tensor]:
        """cut -> (B, K, 2) row and column of the patches in `kept`; (B, K, 3) frame, row, column in a video model.

        Those of several images in one prompt count anew in each; -1 where `kept` has -1.
        """
        return {cut: places_in(index, self._grid_now()) for cut, index in self.kept.items()}

    def _grid_now(self) -> tuple[int, ...]:
        """The grid of the last forward's images."""
        return grid_of(self.patches, self.grid, ())

    @property
    @abstractmethod
    def scores(self) -> dict[int, Tensor]:
        """cut -> (B, N) scores of all patches, higher = rather kept; NaN where a patch had left before."""

    @property
    @abstractmethod
    def sizes(self) -> Tensor | None:
        """(B, K) patches that each remaining token stands for; None where nothing was merged."""

    @abstractmethod
    def restore(self, tokens: Tensor) -> Tensor:
        """(B, P+K, D) -> (B, P+N, D), back on the grid. A language model's tokens have none: refused."""

    @property
    @abstractmethod
    def tokens_per_layer(self) -> list[int]:
        """Tokens of each block or layer: of the last forward, before it as planned."""

    @property
    @abstractmethod
    def vision_tokens_per_layer(self) -> list[float]:
        """Patches of each block or layer, text and prefix not counted: of the last forward, before it as planned."""

    @property
    @abstractmethod
    def stats(self) -> Any:
        """Tokens (and seconds, where `timing` is set) of the last forward. Raises before there was one."""

    @abstractmethod
    def cost(self) -> Cost:
        """MACs with and without, the speed-up they make possible, and the tokens for each layer."""


Attachment = Handle  # its public name
