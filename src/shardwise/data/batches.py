"""Batches of a source. The examples of a step depend on (seed, step) alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from shardwise.data.files import BadRecord
from shardwise.data.grain import MapBatches, is_map_dataset
from shardwise.data.shuffle import order
from shardwise.data.sources import (
    Examples,
    Source,
    SourceLike,
    as_source,
    map_columns,
)
from shardwise.data.stream import Batch, Stream
from shardwise.errors import ConfigError, DataError
from shardwise.text import Json

# (first, last) ranges of the examples of a batch.
Ranges: TypeAlias = Sequence[tuple[int, int]]
# (first, last, seed, shuffle) -> indices of the examples at these positions.
Order: TypeAlias = Callable[[int, int, int, bool], np.ndarray]
BatchFunction: TypeAlias = Callable[[int], Batch]


@dataclass(frozen=True)
class Batches:
    """A function from the step to its batch, shuffled over the whole source.

    `batches(step)` returns the batch of a step. Every epoch has a new order, and batches continue
    from one epoch into the next, so that each epoch has every example exactly once. The step is all
    that must be remembered to resume, and nothing depends on processes or devices.

    Attributes:
        source: a `Source`, a mapping of arrays with a common first dimension, or any object with a
            length that returns an example for an index: a dictionary, a tuple or an array (a list,
            a Grain `MapDataset`, a Hugging Face data set).
        batch_size: examples per batch, over all devices and processes.
        seed: selects the order.
        shuffle: whether to shuffle.
        skip_bad: how many records that cannot be read are tolerated. Each is replaced by the next
            readable example of the source.
        skipped: the records that were skipped, by name, with the reason.

    Raises:
        ConfigError: if `batch_size` is less than 1.
        DataError: if the source has fewer examples than one batch.

    Example:
        >>> batches = Batches({"x": np.arange(10)}, batch_size=4, shuffle=False)
        >>> batches(2)["x"]
        array([8, 9, 0, 1])
    """

    source: Any
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    skip_bad: int = 0
    skipped: dict[str, str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _order: Order = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", as_source(self.source))
        object.__setattr__(self, "_order", order_of(self.source))
        size = len(self.source)
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}; it must be at least 1.")
        if size < self.batch_size:
            raise DataError(
                f"the source has {size} examples, too few for a batch of {self.batch_size}."
            )

    def __call__(self, step: int) -> Examples:
        """Return the batch of a step, counted from 0."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, first: int, last: int) -> Examples:
        """Return examples `first` to `last - 1` of the batch of a step, reading no others."""
        return self.in_ranges(step, [(first, last)])

    def in_ranges(self, step: int, ranges: Ranges) -> Examples:
        """Return some examples of the batch of a step, reading no others.

        Args:
            step: the step.
            ranges: first and last (exclusive) example of each range.
        """
        start = step * self.batch_size
        # One call of the source: it may return the same arrays at each call.
        parts = [
            self._order(start + first, start + last, self.seed, self.shuffle)
            for first, last in ranges
        ]
        return self._read(np.concatenate(parts))

    def example(self) -> Examples:
        """Return arrays with the shapes and dtypes of a batch; reads one example."""
        example = self._read(self._order(0, 1, self.seed, self.shuffle))

        def repeat(array: np.ndarray) -> np.ndarray:
            return np.broadcast_to(array, (self.batch_size, *array.shape[1:]))

        return map_columns(repeat, example)

    def in_order(self, first: int, ranges: Ranges) -> Examples:
        """Return some examples of the unshuffled batch that starts at example `first`.

        Args:
            first: index of the first example of the batch.
            ranges: which examples of the batch to read.
        """
        parts = [np.arange(first + start, first + end) for start, end in ranges]
        return self._read(np.concatenate(parts))

    def once(self) -> Iterator[Examples]:
        """Yield every example once, in order. The last batch may be smaller."""
        for first in range(0, len(self.source), self.batch_size):
            last = min(first + self.batch_size, len(self.source))
            yield self._read(np.arange(first, last))

    def fingerprint(self) -> Json:
        """Return what the batches depend on. Equal fingerprints mean equal batches."""
        return {
            "rows": len(self.source),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "source": fingerprint_of(self.source),
        }

    def note(self, skipped: dict[str, str]) -> None:
        """Count records as skipped.

        Raises:
            BadRecord: if there are more than `skip_bad` in total.
        """
        self.skipped.update(skipped)
        count = len(self.skipped)
        if count > self.skip_bad:
            name, reason = list(self.skipped.items())[-1]
            if self.skip_bad:
                reason += f"; {count} bad records exceed skip_bad={self.skip_bad}"
            raise BadRecord(name, reason)

    def _read(self, indices: np.ndarray) -> Examples:
        source: Source = self.source
        try:
            return source.rows(indices)
        except BadRecord:
            if not self.skip_bad:
                raise
        return source.rows(np.array([self._readable(int(index)) for index in indices]))

    def _readable(self, index: int) -> int:
        """Return `index`, or the index of the next example that can be read."""
        while True:
            try:
                self.source.rows(np.array([index]))
                return index
            except BadRecord as error:
                self.note({error.name: error.why})
                index = (index + 1) % len(self.source)


def order_of(source: Source) -> Order:
    """Return the function that orders a source: its own, if it has one, or epoch after epoch."""
    return getattr(source, "order", None) or partial(order, len(source))


def fingerprint_of(source: SourceLike) -> Json:
    """Return the fingerprint of a source. One without is identified by its type and length."""
    if hasattr(source, "fingerprint"):
        fingerprint: Json = source.fingerprint()
        return fingerprint
    return {"type": type(source).__qualname__, "rows": len(source)}


def as_batches(data: BatchFunction | Iterable[Batch]) -> BatchFunction:
    """Return `data` if it is a function of the step, or a `Stream` of it.

    Args:
        data: `Batches`, a function from a step to its batch, an iterable of batches, or a dataset,
            iterator or loader of Grain.

    Raises:
        ConfigError: if `data` is a collection, whose items are usually examples and not batches.
    """
    if callable(data):
        return data
    if is_map_dataset(data):
        return MapBatches(data)
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, data))
        raise ConfigError(
            f"the data is a dictionary of {names}, not a function from a step to its batch. Use "
            "Batches(data, batch_size=...) if it has all examples, or lambda step: data if it is "
            "the batch of every step."
        )
    is_indexable = hasattr(data, "__getitem__")
    if is_indexable and (hasattr(data, "__len__") or not hasattr(data, "__iter__")):
        size = f" of {_size_of(data)} items" if hasattr(data, "__len__") else ""
        raise ConfigError(
            f"the data is a {type(data).__name__}{size}, which may be examples or batches. Use "
            "Batches(data, batch_size=...) if its items are examples, or "
            "lambda step: data[step % len(data)] if they are batches."
        )
    if not hasattr(data, "__iter__"):
        raise ConfigError(
            f"the data is a {type(data).__name__}, neither a function from a step to its batch "
            "nor an iterable of batches. Use Batches(...)."
        )
    return Stream(data)


def _size_of(data: object) -> str:
    try:
        return f"{len(data):,}"  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        # An infinitely repeated data set has no length that Python can express.
        return "many"


@dataclass(frozen=True)
class LocalBatches:
    """The examples of each batch that the devices of this process need. No others are read.

    Attributes:
        batches: the global batches.
        ranges: which examples of a batch this process needs.
    """

    batches: Batches
    ranges: Ranges

    def __call__(self, step: int) -> Examples:
        """Return the examples of this process for a step."""
        return self.batches.in_ranges(step, self.ranges)

    @property
    def skipped(self) -> dict[str, str]:
        """The records that this process has skipped."""
        return self.batches.skipped

    def note(self, skipped: dict[str, str]) -> None:
        """Count records as skipped."""
        self.batches.note(skipped)


def part_of(batches: BatchFunction, ranges: Ranges) -> BatchFunction:
    """Return a function for the given examples of each batch, if they can be read alone.

    Batches that are not plain `Batches` are returned as they are.

    Args:
        batches: the function from a step to its batch.
        ranges: first and last (exclusive) example of each range.
    """
    if not is_plain(batches) or tuple(ranges) == ((0, batches.batch_size),):
        return batches
    return LocalBatches(batches, ranges)


def is_plain(batches: object) -> TypeGuard[Batches]:
    """Return whether single examples of a batch can be read: not if a subclass builds batches."""
    return (
        isinstance(batches, Batches)
        and type(batches).__call__ is Batches.__call__
        and type(batches).once is Batches.once
    )
