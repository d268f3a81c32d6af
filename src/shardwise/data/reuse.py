"""Batches whose arrays stay as they are, also if a data function fills the same arrays again."""

import threading
from collections import deque

import numpy as np

from shardwise.data.batches import BatchFunction, LocalBatches, is_plain
from shardwise.data.combine import Subset
from shardwise.data.sources import Source
from shardwise.data.stream import Batch, Stream, copied
from shardwise.errors import DataError

# The first calls of a function are made one after the other, to see whether it reuses its arrays.
NUM_ALONE = 2


def owned(
    batches: BatchFunction, threads: int = 1, in_flight: int = 2
) -> BatchFunction:
    """Return a function whose arrays nobody else changes.

    Args:
        batches: the function from a step to its batch.
        threads: the number of threads that call it.
        in_flight: the number of batches that may be read at the same time.
    """
    if isinstance(batches, Stream | Copied) or _is_fresh(batches):
        return batches
    return Copied(batches, threads, in_flight)


def _is_fresh(batches: BatchFunction) -> bool:
    """Return whether every batch has new arrays: those of all sources of shardwise have."""
    if isinstance(batches, LocalBatches):
        batches = batches.batches
    if not is_plain(batches):
        return False
    source: Source = batches.source
    while isinstance(source, Subset):
        source = source.source
    return type(source).__module__.startswith("shardwise.")


class Copied:
    """Batches of a user's function, copied as soon as it returns.

    One thread at a time calls the function, so that it may return the same arrays at each step.
    With `threads` above 1 it is called by several at once, and must return new arrays.

    Args:
        batches: the function.
        threads: the number of threads that read for a run.
        in_flight: the number of batches that may be read at the same time.
    """

    def __init__(self, batches: BatchFunction, threads: int, in_flight: int):
        self.batches = batches
        self._is_shared = threads > 1
        self._alone = threading.Lock()
        # Guards the fields below.
        self._lock = threading.Lock()
        self._num_read = 0
        # Steps with the arrays that the function returned and the copies of them. The arrays stay
        # alive: otherwise new arrays could have the addresses of old ones.
        self._recent: deque[tuple[int, list[np.ndarray], list[np.ndarray]]] = deque(
            maxlen=max(in_flight, threads)
        )

    def __call__(self, step: int) -> Batch:
        """Return a copy of the batch of a step.

        Raises:
            DataError: if several threads read, and the function has overwritten an earlier batch.
        """
        if self._is_shared and self._num_read >= NUM_ALONE:
            return self._read(step)
        with self._alone:
            return self._read(step)

    def _read(self, step: int) -> Batch:
        batch = self.batches(step)
        copy = copied(batch)
        if self._is_shared:
            self._compare(step, _arrays(batch), _arrays(copy))
        return copy

    def _compare(
        self, step: int, arrays: list[np.ndarray], copies: list[np.ndarray]
    ) -> None:
        """Raise if `arrays` share memory with those of another step, which have changed."""
        with self._lock:
            self._num_read += 1
            recent = [entry for entry in self._recent if entry[0] != step]
            self._recent.append((step, arrays, copies))
        for other, originals, before in recent:
            for original, old in zip(originals, before, strict=True):
                is_shared = any(np.may_share_memory(original, x) for x in arrays)
                # The content decides: a function may return the same constant array at each step.
                if is_shared and original.tobytes() != old.tobytes():
                    raise DataError(
                        f"the data function returned the same memory for batches {other} and "
                        f"{step} (an array of shape {original.shape}), and has overwritten batch "
                        f"{other}. Several threads call it at once: return new arrays, or set "
                        "data_threads=1."
                    )


def _arrays(batch: Batch) -> list[np.ndarray]:
    # Data processes import this module, and they need no JAX.
    import jax

    return [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
