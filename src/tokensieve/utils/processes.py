"""Which of the processes that run together this one is, and noise that does not depend on how many there are.

Imports torch only; without torch.distributed, or where nothing was started, there is one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

__all__ = ["drawn_for_batch", "rank", "world_size"]


def world_size() -> int:
    """Processes that run together; 1 where none were started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This one's place among them, 0 for the first."""
    return dist.get_rank() if world_size() > 1 else 0


def drawn_for_batch(like: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """Noise of the shape of `like` (B, ...), B the rows of a batch that this process has.

    draw: fills an empty tensor. Each process draws for the rows of all and takes its own, so that, with generators that
    stand at the same place everywhere (the training loop sees to it), a sample's noise is the same however many
    processes share its batch. Nothing is sent.
    """
    rows, processes = len(like), world_size()
    whole = draw(like.new_empty(rows * processes, *like.shape[1:]))
    return whole[rank() * rows : (rank() + 1) * rows]
