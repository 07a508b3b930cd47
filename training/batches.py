"""Which data each step sees: a pure function of (seed, step), so that a resumed run sees what an unbroken one would."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The steps `first`..`last`-1 of a run, as process `rank` of `world` sees them.

    `batch_size` counts all processes together; it must be a multiple of `world`.
    """

    first: int
    last: int
    batch_size: int
    seed: int = 0
    workers: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.world:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of the {self.world} processes")


class StepSampler(Sampler[list[int]]):
    """Indices of each step's batch: epochs of shuffled indices, end to end; a process gets every `world`-th of them."""

    def __init__(self, length: int, plan: BatchPlan) -> None:
        if length < 1:
            raise ValueError("the training data are empty")
        self.length, self.plan = length, plan

    def __len__(self) -> int:
        return self.plan.last - self.plan.first

    def __iter__(self) -> Iterator[list[int]]:
        plan, epoch, order = self.plan, -1, np.empty(0, dtype=np.int64)
        for step in range(plan.first, plan.last):
            batch = []
            for place in range(step * plan.batch_size + plan.rank, (step + 1) * plan.batch_size, plan.world):
                if place // self.length != epoch:
                    epoch = place // self.length
                    order = np.random.default_rng((plan.seed, epoch)).permutation(self.length)
                batch.append(int(order[place % self.length]))
            yield batch


def step_batches(
    data: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None
) -> Callable[[BatchPlan], Iterator[Any]]:
    """The batches of a map-style data set, for `TrainingLoop(batches=...)`. Its items may depend on the index alone."""

    def batches(plan: BatchPlan) -> Iterator[Any]:
        loader = DataLoader(
            data,
            batch_sampler=StepSampler(len(data), plan),  # type: ignore[arg-type]
            num_workers=plan.workers,
            collate_fn=collate,
            worker_init_fn=_ignore_signals,
        )
        return iter(loader)

    return batches


def _ignore_signals(worker: int) -> None:
    """A Ctrl-C goes to the workers too: the loop needs them until it has saved and left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
