"""Batches of a source: which rows a step sees depends on (seed, step) alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import numpy as np

from shardwise.data.files import BadRecord
from shardwise.data.shuffle import order
from shardwise.data.sources import as_source
from shardwise.errors import ConfigError, DataError

Ranges = Sequence[tuple[int, int]]  # (first, last) rows of a batch


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
    _order: Callable[[int, int, int, bool], np.ndarray] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", as_source(self.source))
        object.__setattr__(self, "_order", order_of(self.source))
        size = len(self.source)
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}; it must be at least 1.")
        if size < self.batch_size:
            raise DataError(
                f"the source has {size} rows, too few for a batch of {self.batch_size}."
            )

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, first: int, last: int) -> dict[str, np.ndarray]:
        """Rows `first` to `last` of the batch of a step, without reading the others."""
        start = step * self.batch_size
        return self._read(self._order(start + first, start + last, self.seed, self.shuffle))

    def example(self) -> dict[str, np.ndarray]:
        """An array like each of a batch, for its shape and dtype; reads one row."""
        row = self._read(self._order(0, 1, self.seed, self.shuffle))
        return {
            name: np.broadcast_to(value, (self.batch_size, *value.shape[1:]))
            for name, value in row.items()
        }

    def in_order(self, first: int, ranges: Ranges) -> dict[str, np.ndarray]:
        """These rows of the batch that begins at row `first` of the source. For evaluation."""
        return self._read(
            np.concatenate([np.arange(first + start, first + end) for start, end in ranges])
        )

    def once(self) -> Iterator[dict[str, np.ndarray]]:
        """Each row once, in order; the last batch may be shorter. For evaluation."""
        for first in range(0, len(self.source), self.batch_size):
            yield self._read(np.arange(first, min(first + self.batch_size, len(self.source))))

    def fingerprint(self) -> dict[str, Any]:
        """What the batches depend on, for JSON: two runs with equal fingerprints see the same batches."""
        own = {
            "rows": len(self.source),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
        }
        return {**own, "source": fingerprint_of(self.source)}

    def note(self, skipped: dict[str, str]) -> None:
        """Counts records as skipped; more than `skip_bad` in all are refused."""
        self.skipped.update(skipped)
        if len(self.skipped) > self.skip_bad:
            count, (name, why) = len(self.skipped), list(self.skipped.items())[-1]
            budget = (
                f"; {count} bad records are more than skip_bad={self.skip_bad}"
                if self.skip_bad
                else ""
            )
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
    return (
        source.fingerprint()
        if hasattr(source, "fingerprint")
        else {"type": type(source).__qualname__, "rows": len(source)}
    )


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
                raise DataError(
                    f"the data ended after {step} batches; batch {step} was asked for."
                ) from None
        elif step != self._step:
            raise DataError(
                f"batch {step} was asked for, and a plain iterator stands at {self._step + 1}: it cannot resume. "
                f"Give a function of the step, such as Batches(...), to a run that shall."
            )
        return self._batch


def as_batches(data: Any) -> Callable[[int], Any]:
    """A function of the step as it is; a plain iterable as a `Stream`."""
    return data if callable(data) else Stream(data)


@dataclass(frozen=True)
class Part:
    """Of each batch only the rows that the devices of this process need; the others are never read."""

    batches: Batches
    ranges: Ranges

    def __call__(self, step: int) -> Any:
        parts = [self.batches.rows(step, first, last) for first, last in self.ranges]
        return (
            parts[0]
            if len(parts) == 1
            else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        )

    @property
    def skipped(self) -> dict[str, str]:
        return self.batches.skipped

    def note(self, skipped: dict[str, str]) -> None:
        self.batches.note(skipped)


def part_of(batches: Callable[[int], Any], ranges: Ranges) -> Callable[[int], Any]:
    """The part of the batches that these rows are, if they can be read alone; what is not `Batches` gives whole ones."""
    is_whole = is_plain(batches) and tuple(ranges) == ((0, batches.batch_size),)
    return Part(batches, ranges) if is_plain(batches) and not is_whole else batches


def is_plain(batches: Any) -> TypeGuard[Batches]:
    """Whether rows of a batch can be read alone: not if a subclass makes the batches its own way."""
    return (
        isinstance(batches, Batches)
        and type(batches).__call__ is Batches.__call__
        and type(batches).once is Batches.once
    )
