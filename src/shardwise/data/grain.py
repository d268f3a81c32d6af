"""Grain datasets and loaders as the data of a run.

Grain is not imported here, because that takes seconds: an object of Grain can exist only if the
user has imported it. Graphs of datasets are walked by the names of their classes, because most of
the classes are private.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypeGuard

from shardwise.errors import ConfigError, DataError
from shardwise.runtime import protect_output

# An endlessly repeated dataset has 2**63 - 1 elements, divided by the batch size.
ENDLESS = 2**40
# A node in a graph of datasets, or a loader. Grain has no type for both.
Node: TypeAlias = Any


class MapDataset(Protocol):
    """The part of `grain.MapDataset` that is used here."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def is_map_dataset(data: object) -> TypeGuard[MapDataset]:
    """Return whether `data` is a `grain.MapDataset`."""
    return _is_instance(data, "MapDataset")


def is_dataset(data: object) -> bool:
    """Return whether `data` is a dataset or a loader of Grain, which can be read repeatedly."""
    return _is_instance(data, "MapDataset", "IterDataset", "DataLoader")


def is_iterator(data: object) -> bool:
    """Return whether `data` is an iterator over a dataset or a loader of Grain."""
    return _is_instance(data, "DatasetIterator", "DataLoaderIterator")


def _is_instance(data: object, *names: str) -> bool:
    grain: ModuleType | None = sys.modules.get("grain")
    kinds = (getattr(grain, name, None) for name in names)
    return isinstance(data, tuple(kind for kind in kinds if isinstance(kind, type)))


@dataclass(frozen=True)
class MapBatches:
    """A batched `grain.MapDataset` as a function from the step to its batch.

    After its last batch a dataset starts over. Grain shuffles each epoch differently.

    Attributes:
        dataset: the dataset; its elements are batches.

    Raises:
        ConfigError: if no transformation of the dataset makes batches.
        DataError: if the dataset is empty.
    """

    dataset: MapDataset

    def __post_init__(self) -> None:
        if not makes_batches(self.dataset):
            raise ConfigError(
                "the data is a Grain MapDataset without batch(): its elements may be examples or "
                "batches. Use dataset.batch(batch_size, drop_remainder=True), "
                "Batches(dataset, batch_size=...), or lambda step: dataset[step] if its elements "
                "are batches."
            )
        if not len(self.dataset):
            raise DataError(
                "the Grain MapDataset has no batches. With drop_remainder=True it needs at least "
                "as many examples as a batch."
            )

    def __call__(self, step: int) -> Any:
        """Return the batch of a step, counted from 0.

        Raises:
            DataError: if there is none, because a filter has removed it.
        """
        batch = self.dataset[step]
        if batch is None:
            raise DataError(
                f"batch {step} of the Grain MapDataset is None: a filter leaves gaps. Use "
                "dataset.to_iter_dataset(), which skips them."
            )
        return batch

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None for an endlessly repeated dataset."""
        return None if is_endless(self.dataset) else len(self.dataset)


def makes_batches(data: Node) -> bool:
    """Return whether a transformation of a dataset or loader makes batches, by its name."""
    return any("batch" in type(node).__name__.lower() for node in _walk(data))


def is_endless(data: Node) -> bool:
    """Return whether a dataset or loader repeats endlessly, as far as its graph shows."""
    node = _root(data)
    kind = type(node).__name__
    if is_map_dataset(node):
        return len(node) >= ENDLESS
    if "Limit" in kind:
        return False
    if kind == "RepeatIterDataset" and node._num_epochs is None:
        return True
    inputs = _inputs(node)
    # A mix ends with its first input, an interleaved dataset with its last.
    combine = any if "Interleave" in kind else all
    return bool(inputs) and combine(map(is_endless, inputs))


def _root(data: Node) -> Node:
    # A `DataLoader` builds a dataset.
    return getattr(data, "_dataset", data)


def _inputs(node: Node) -> tuple[Node, ...]:
    # `InterleaveIterDataset`, which `mp_prefetch` makes, has no parents.
    datasets = getattr(node, "_datasets", ())
    more = tuple(datasets) if isinstance(datasets, list | tuple) else ()
    return (*getattr(node, "parents", ()), *more)


def _walk(data: Node) -> Iterator[Node]:
    node = _root(data)
    yield node
    for parent in _inputs(node):
        yield from _walk(parent)


def prepare_workers(data: object) -> None:
    """Prepare a dataset or a loader for worker processes. Call this before it is iterated."""
    flags: ModuleType | None = sys.modules.get("absl.flags")
    # Grain 0.2.18 reads an absl flag when it starts a worker process. In a script that does not
    # use absl.app, nobody has parsed flags, and Grain fails with UnparsedFlagAccessError.
    if "grain" in sys.modules and flags is not None and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    if not is_dataset(data):
        return
    for node in _walk(data):
        start = getattr(node, "_worker_init_fn", None)
        if hasattr(node, "_worker_init_fn") and not isinstance(start, StartWorker):
            node._worker_init_fn = StartWorker(start)


@dataclass(frozen=True)
class StartWorker:
    """What a worker process of Grain calls first.

    Attributes:
        first: what it would have called otherwise.
    """

    first: Callable[[], None] | None

    def __call__(self) -> None:
        """Ignore signals of the terminal, and end when the parent ends."""
        if self.first is not None:
            self.first()
        # These signals reach the whole process group; the parent decides what happens.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        protect_output()
        # Workers of a parent that was killed would wait forever for room in their queue.
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def close(iterator: Node) -> None:
    """Stop the threads and worker processes of an iterator of Grain."""
    # `DataLoaderIterator` does not define `close`.
    owner = iterator if hasattr(iterator, "close") else iterator._iterator
    owner.close()
