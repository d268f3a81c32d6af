"""Validation batches from anything that can be read once from its start, repeatedly."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

from shardwise.data import grain
from shardwise.data.batches import Batches
from shardwise.data.layout import num_rows
from shardwise.data.stream import Batch, copied
from shardwise.errors import ConfigError, DataError

# What `as_evaluation` accepts, besides datasets and loaders of Grain, which are iterable.
EvaluationData: TypeAlias = Batches | Iterable[Batch] | Callable[[], Iterable[Batch]]


class Once:
    """Validation batches; every evaluation reads them once, from the start.

    Every process supplies the complete batches.

    Args:
        read: returns the batches from the start.
        batches: all batches, if they are in memory.

    Attributes:
        first: the first two batches, or all that are in memory.
        sizes: the numbers of examples of these batches.

    Raises:
        DataError: if there are no batches.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Batch]],
        batches: Sequence[Batch] | None = None,
    ):
        self._read = read
        self.first = list(islice(self, 2)) if batches is None else batches
        self.sizes = [num_rows(batch) for batch in self.first]
        if not self.first:
            raise DataError(
                "eval_data has no batches, so there is nothing to evaluate."
            )

    def __iter__(self) -> Iterator[Batch]:
        batches = self._read()
        _check_finite(batches)
        grain.prepare_workers(batches)
        iterator = iter(batches)
        try:
            for batch in iterator:
                # The iterable may fill the same arrays again for its next batch.
                yield copied(batch)
        finally:
            if grain.is_iterator(iterator):
                grain.close(iterator)


def as_evaluation(data: EvaluationData) -> Batches | Once:
    """Return validation data as `Batches`, or as batches that can be read again.

    Args:
        data: `Batches`, a list of batches, a function that returns an iterable of batches, or a
            finite dataset or loader of Grain.

    Raises:
        ConfigError: if `data` is endless, can be read only once, or is a function of the step.
        DataError: if there are no batches.
    """
    if isinstance(data, Batches):
        return data
    kind = type(data).__name__
    if grain.is_map_dataset(data) and not grain.makes_batches(data):
        raise ConfigError(
            "eval_data is a Grain MapDataset without batch(): its elements may be examples or "
            "batches. Use dataset.batch(batch_size), Batches(dataset, batch_size=...), or "
            "lambda: dataset if its elements are batches."
        )
    if callable(data):
        _check_arguments(data)
        return Once(data)
    if hasattr(data, "__next__"):
        raise ConfigError(
            f"eval_data is a {kind}, which can be read only once, and every evaluation reads it "
            "from its start. Use a function that returns it, for example "
            "eval_data=lambda: make_batches(), a list of batches, or Batches(...)."
        )
    if isinstance(data, dict) or not hasattr(data, "__iter__"):
        raise ConfigError(
            f"eval_data is a {kind}, which is not a collection of batches. Use "
            "Batches(examples, batch_size=...), a list of batches, or a function that returns an "
            "iterable of batches."
        )
    return Once(lambda: data, data if isinstance(data, list | tuple) else None)


def _check_finite(batches: object) -> None:
    if grain.is_dataset(batches) and grain.is_endless(batches):
        raise ConfigError(
            f"eval_data is a Grain {type(batches).__name__} that repeats endlessly, and an "
            "evaluation reads all of it. Remove repeat() (in a DataLoader: num_epochs=1 of the "
            "sampler), or take a part: dataset[:n] of a MapDataset, "
            "grain.experimental.LimitIterDataset(dataset, n) of an IterDataset."
        )


def _check_arguments(function: Callable[[], Iterable[Batch]]) -> None:
    try:
        inspect.signature(function).bind()
    except ValueError:
        # A function in C has no signature.
        return
    except TypeError:
        raise ConfigError(
            "eval_data is a function with arguments. An evaluation calls it without arguments, and "
            "it returns an iterable of batches. For a function of the step, use "
            "lambda: map(function, range(num_batches))."
        ) from None
