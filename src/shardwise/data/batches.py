"""Batches of a source: which rows a step sees depends on (seed, step) alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardwise.data.files import BadRecord
from shardwise.data.shuffle import order
from shardwise.data.sources import as_source
from shardwise.errors import ConfigError, DataError


@dataclass(frozen=True)
class Batches:
    """`batches(step)` is the batch of that step: shuffled over the whole source, anew in each epoch, without end.

    Batches run on from one epoch into the next, so that every row is seen exactly once in each. Nothing but the step
    needs to be remembered, and nothing about processes or devices enters.

    Up to `skip_bad` records that cannot be read are each replaced by the next good row of the source; `skipped` holds
    the name of each and what is wrong with it.
    """

    source: Any  # a Source, a mapping of arrays, or whatever has a length and gives a dictionary for each index
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    skip_bad: int = 0
    skipped: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _order: Callable[[int, int, int, bool], np.ndarray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", as_source(self.source))
        object.__setattr__(self, "_order", order_of(self.source))
        size = len(self.source)
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}; it must be at least 1.")
        if size < self.batch_size:
            raise DataError(f"the source has {size} rows, too few for a batch of {self.batch_size}.")

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, first: int, last: int) -> dict[str, np.ndarray]:
        """Rows `first` to `last` of the batch of a step, without reading the others."""
        start = step * self.batch_size
        return self._read(self._order(start + first, start + last, self.seed, self.shuffle))

    def once(self) -> Iterator[dict[str, np.ndarray]]:
        """Each row once, in order; the last batch may be shorter. For evaluation."""
        for first in range(0, len(self.source), self.batch_size):
            yield self._read(np.arange(first, min(first + self.batch_size, len(self.source))))

    def fingerprint(self) -> dict[str, Any]:
        """What the batches depend on, for JSON: two runs with equal fingerprints see the same batches."""
        own = {"rows": len(self.source), "seed": self.seed, "batch_size": self.batch_size, "shuffle": self.shuffle}
        return {**own, "source": fingerprint_of(self.source)}

    def note(self, skipped: dict[str, str]) -> None:
        """Counts records as skipped; more than `skip_bad` in all are refused."""
        self.skipped.update(skipped)
        if len(self.skipped) > self.skip_bad:
            count, (name, why) = len(self.skipped), list(self.skipped.items())[-1]
            budget = f"; {count} bad records are more than skip_bad={self.skip_bad}" if self.skip_bad else ""
            raise BadRecord(name, why + budget)

    def _read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        try:
            return self.source.rows(indices)
        except BadRecord:
            if not self.skip_bad:
                raise
        return self.source.rows(np.array([self._good(int(index)) for index in indices]))

    def _good(self, index: int) -> int:
        """The index, or that of the next row that can be read."""
        while True:
            try:
                self.source.rows(np.array([index]))
                return index
            except BadRecord as error:
                self.note({error.name: error.why})
                index = (index + 1) % len(self.source)


def order_of(source: Any) -> Callable[[int, int, int, bool], np.ndarray]:
    """The function of (first, last, seed, shuffle) that gives the rows at these positions: epoch after epoch, unless the
    source has an order of its own."""
    return getattr(source, "order", None) or partial(order, len(source))


def fingerprint_of(source: Any) -> dict[str, Any]:
    """A source that has none of its own is known by its type and length."""
    return source.fingerprint() if hasattr(source, "fingerprint") else {"type": type(source).__qualname__, "rows": len(source)}


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
