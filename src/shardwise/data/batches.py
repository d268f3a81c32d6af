"""Batches of a source. The order is Grain's index shuffle: a permutation that is computed, not stored."""

from collections.abc import Callable, Iterable, Iterator
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
        if self.batch_size < 1 or len(self.source) < 1:
            raise DataError(f"a source of {len(self.source)} rows in batches of {self.batch_size}: both must be at least 1.")

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        size = len(self.source)
        if size < self.batch_size:
            raise DataError(f"the source has {size} rows, too few for a batch of {self.batch_size}.")
        first = step * self.batch_size
        positions = range(first, first + self.batch_size)
        indices = [self._shuffled(position // size, position % size) if self.shuffle else position % size for position in positions]
        return self.source.rows(np.array(indices))

    def once(self) -> Iterator[dict[str, np.ndarray]]:
        """Each row once, in order; the last batch may be shorter. For evaluation."""
        for first in range(0, len(self.source), self.batch_size):
            yield self.source.rows(np.arange(first, min(first + self.batch_size, len(self.source))))

    def _shuffled(self, epoch: int, index: int) -> int:
        seed = (self.seed * 1_000_003 + epoch) % 2**32
        return int(grain.experimental.index_shuffle(index, max_index=len(self.source) - 1, seed=seed, rounds=4))


class Stream:
    """Batches from a plain iterable: `stream(step)` for one step after the other. It cannot go back, so it cannot resume."""

    def __init__(self, iterable: Iterable[Any]):
        self._iterator = iter(iterable)
        self._step = -1
        self._batch: Any = None

    def __call__(self, step: int) -> Any:
        if step == self._step + 1:
            try:
                self._step, self._batch = step, next(self._iterator)
            except StopIteration:
                raise DataError(f"the data ended after {step} batches; batch {step} was asked for.") from None
        elif step != self._step:
            raise DataError(
                f"batch {step} was asked for, and a plain iterator stands at {self._step + 1}: it cannot resume. "
                f"Give a function of the step, such as Batches(...), to a run that shall."
            )
        return self._batch


def as_batches(data: Any) -> Callable[[int], Any]:
    """A function of the step as it is; a plain iterable as a `Stream`."""
    return data if callable(data) else Stream(data)
