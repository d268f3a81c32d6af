"""Batches of a source. The order is Grain's index shuffle: a permutation that is computed, not stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from shardwise.data.sources import as_source
from shardwise.errors import DataError


@dataclass(frozen=True)
class Batches:
    """`batches(step)` is the batch of that step: shuffled over the whole source, anew in each epoch, without end.

    Batches run on from one epoch into the next, so that every row is seen exactly once in each. Nothing but the step
    needs to be remembered, and nothing about processes or devices enters.
    """

    source: Any  # a Source, or a mapping of arrays
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", as_source(self.source))
        if self.batch_size < 1 or len(self.source) < self.batch_size:
            raise DataError(f"the source has {len(self.source)} rows, too few for a batch of {self.batch_size}.")

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        size = len(self.source)
        first = step * self.batch_size
        positions = range(first, first + self.batch_size)
        indices = [self._shuffled(position // size, position % size) if self.shuffle else position % size for position in positions]
        return self.source.rows(np.array(indices))  # type: ignore[no-any-return]

    def once(self) -> Iterator[dict[str, np.ndarray]]:
        """Each row once, in order; the last batch may be shorter. For evaluation."""
        for first in range(0, len(self.source), self.batch_size):
            yield self.source.rows(np.arange(first, min(first + self.batch_size, len(self.source))))

    def _shuffled(self, epoch: int, index: int) -> int:
        seed = (self.seed * 1_000_003 + epoch) % 2**32
        return int(grain.experimental.index_shuffle(index, max_index=len(self.source) - 1, seed=seed, rounds=4))
