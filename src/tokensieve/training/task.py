"""What the loop wants of a task: its parts, its batches, its losses, its validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Step", "Task", "Validation"]


@dataclass(frozen=True)
class Step:
    """One step's losses, by the name of the optimiser that each of them drives, and numbers to log beside them.

    A loss reaches the parameters of its own optimiser alone, whatever else it was computed from.
    """

    losses: Mapping[str, Tensor]
    scalars: Mapping[str, float | Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """An evaluation on held-out data: the score that chooses the best step, higher is better, and all its figures."""

    score: float
    metrics: Mapping[str, float]


class Task(Protocol):
    """Something that can be trained.

    modules: what the checkpoints hold, by name; trained or not, all on one device.
    optimisers: by name; the learning rates of their groups are the targets that the schedule warms up to.
    """

    @property
    def modules(self) -> Mapping[str, nn.Module]: ...

    @property
    def optimisers(self) -> Mapping[str, Optimizer]: ...

    def batches(self, start: int) -> Iterator[Any]:
        """This process's share of the batches of step `start`, `start` + 1 and so on, without an end.

        A batch must depend on its step and the configuration alone: a resumed run then sees what it would have seen.
        """

    def step(self, batch: Any, step: int) -> Step:
        """The losses of one batch, which is on the device already. Modules are in training mode.

        With several processes a loss is such that the mean over them is that of the whole batch. All generators were
        set, everywhere alike; noise for samples is drawn by `core.processes.drawn_for_batch`.
        """

    def validate(self) -> Validation | None:
        """Evaluate the modules as they are, in evaluation mode, without gradients. None: there is nothing to
        evaluate on.

        Called in every process; one that shares the work out gathers what came of it, each sample once.
        """

    def facts(self) -> dict[str, Any]:
        """What a run can only be resumed with: plain data, compared with what is in the checkpoint."""

    def export(self, path: Path) -> None:
        """Write the trained model, whole or not at all, for those who use it."""
