"""PK batches: P identities with K images each, as batch-hard triplets want them. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from tokensieve.errors import DataError, OptionError

__all__ = ["PKSampler"]


class PKSampler:
    """Batches of `batch_size` / `instances` identities with `instances` images each.

    An epoch: each identity's images are shuffled and cut into groups of `instances` (an identity with fewer repeats
    some; a rest of a larger one is left to other epochs), and batches are drawn until too few identities have groups
    left. What an epoch is depends on the seed and its number alone. With several processes each gets its `rank`-th part
    of every batch: together they see the batches that one process would.
    """

    def __init__(
        self, labels: Sequence[int], batch_size: int, instances: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        self.batch_size, self.instances, self.seed, self.rank, self.world = batch_size, instances, seed, rank, world
        self._images: dict[int, list[int]] = defaultdict(list)
        for index, label in enumerate(labels):
            self._images[label].append(index)
        self.identities = batch_size // instances
        if batch_size % instances or self.identities < 1:
            raise OptionError(f"a batch of {batch_size} cannot hold identities of {instances} images each")
        if batch_size % world:
            raise OptionError(f"SOLVER.IMS_PER_BATCH {batch_size} cannot be split among {world} processes")
        if len(self._images) < self.identities:
            raise DataError(
                f"a batch wants {self.identities} identities, there are {len(self._images)} to train on: "
                "lower SOLVER.IMS_PER_BATCH or raise DATALOADER.NUM_INSTANCE"
            )

    def epoch(self, number: int) -> list[list[int]]:
        """This process's part of each batch of an epoch; never empty."""
        draw = np.random.default_rng((self.seed, number))
        groups = {label: self._groups(images, draw) for label, images in self._images.items()}
        batches = []
        while len(groups) >= self.identities:
            chosen = draw.choice(sorted(groups), self.identities, replace=False).tolist()
            batches.append([index for label in chosen for index in groups[label].pop()])
            groups = {label: left for label, left in groups.items() if left}
        share = self.batch_size // self.world
        return [batch[self.rank * share : (self.rank + 1) * share] for batch in batches]

    def _groups(self, images: list[int], draw: np.random.Generator) -> list[list[int]]:
        order = draw.permutation(images).tolist()
        if len(order) < self.instances:
            order += draw.choice(images, self.instances - len(order)).tolist()
        return [order[i : i + self.instances] for i in range(0, len(order) - self.instances + 1, self.instances)]

    def epochs(self, start: int) -> Iterator[tuple[int, list[list[int]]]]:
        """From step `start` on, without an end: an epoch's number, and those of its batches that are not yet done."""
        number, passed = 0, 0
        while True:
            batches = self.epoch(number)
            if passed + len(batches) > start:
                yield number, batches[max(0, start - passed) :]
            passed += len(batches)
            number += 1
