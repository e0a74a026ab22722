"""How SmolLaVA is trained, as settings. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokensieve.errors import OptionError
from tokensieve.utils.processes import world_size

__all__ = ["QuestionConfig", "SmolConfig"]

_SIDE = 16  # patches of a picture, across and down


@dataclass(frozen=True)
class QuestionConfig:
    """side: the picture's tokens are pooled to side x side. batch: pictures a step, over all processes.

    photos_until: share of the steps with single photos alone. rank, alpha: of the LoRA.
    """

    steps: int
    side: int = 8
    seed: int = 0
    batch: int = 4
    lr: float = 5e-4
    projector_lr: float = 1e-4
    photos_until: float = 0.05
    rank: int = 16
    alpha: int = 32

    def __post_init__(self) -> None:
        if self.side < 1 or _SIDE % self.side:
            raise OptionError(f"side={self.side}: a divisor of {_SIDE}")
        if self.batch < 1 or self.batch % world_size():
            raise OptionError(f"batch={self.batch}: a multiple of the {world_size()} process(es)")


@dataclass(frozen=True)
class SmolConfig:
    """The recipe. pictures: for training; regression: how many of them the projector starts from. batch: pictures a
    step, over all processes. pooled_steps with 64 tokens, full_steps with 256 at full_lr. judge: held-out pictures."""

    seed: int = 0
    pictures: int = 4080
    regression: int = 2200
    batch: int = 6
    pooled_steps: int = 240
    full_steps: int = 60
    lr: float = 1e-3
    full_lr: float = 3e-4
    judge: int = 60
    every: int = 60
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        names = (
            "pictures", "regression", "batch", "pooled_steps", "full_steps", "judge", "every", "checkpoint_every",
        )  # fmt: skip
        for name in names:
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: at least 1")
        if self.regression > self.pictures:
            raise OptionError(f"regression={self.regression}: at most pictures={self.pictures}")
        if self.lr <= 0 or self.full_lr <= 0:
            raise OptionError(f"lr={self.lr}, full_lr={self.full_lr}: above 0")

    def stages(self) -> dict[str, QuestionConfig]:
        more: dict[str, Any] = {"seed": self.seed, "batch": self.batch}
        return {
            "pooled": QuestionConfig(steps=self.pooled_steps, side=8, lr=self.lr, photos_until=0.04, **more),
            "full": QuestionConfig(steps=self.full_steps, side=16, lr=self.full_lr, photos_until=0.0, **more),
        }
