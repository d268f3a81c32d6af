"""How a batch in host memory becomes sharded arrays on the mesh, padded where necessary."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardwise.errors import DataError
from shardwise.sharding import put
from shardwise.tree import Batch, named_leaves


@dataclass(frozen=True)
class BatchLayout:
    """The size and the sharding of a batch.

    A batch whose size the mesh does not divide is padded with copies of its last example. The loss
    excludes them, see `mask`.

    Attributes:
        rows: the number of examples in the global batch.
        padded_rows: the number of examples including padding; equal to `rows` without padding.
        sharding: the sharding of every array of the batch along its first dimension.
    """

    rows: int
    padded_rows: int
    sharding: NamedSharding

    def place(self, batch: Batch) -> Batch:
        """Start the transfer of a batch to the devices and return at once.

        Args:
            batch: host arrays with all examples of the global batch, or only with those of
                `ranges`.

        Returns:
            Arrays on the mesh, with `padded_rows` examples.

        Raises:
            DataError: if the batch has another number of examples.
        """
        num_read = self.check(batch)
        if num_read == self.rows == self.padded_rows:
            return put(batch, self.sharding)
        positions = self._positions(num_read)

        def place_leaf(x: np.ndarray) -> jax.Array:
            def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                examples: np.ndarray = x[positions[index[0]]]
                return examples[(slice(None), *index[1:])]

            shape = (self.padded_rows, *x.shape[1:])
            return jax.make_array_from_callback(shape, self.sharding, read_shard)

        return jax.tree.map(place_leaf, batch)

    def _positions(self, num_read: int) -> np.ndarray:
        """Return for each example of the padded batch its position in the arrays that were read."""
        if num_read == self.rows:
            read = np.arange(self.rows)
        else:
            read = np.concatenate(
                [np.arange(first, last) for first, last in self.ranges]
            )
        wanted = np.minimum(np.arange(self.padded_rows), self.rows - 1)
        return np.searchsorted(read, wanted)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The examples that the devices of this process hold, as few `(first, last)` ranges.

        Each range excludes `last`. A process that holds padding needs the last example of the
        batch. Data sources read these ranges only; nothing else in the data pipeline knows about
        processes.
        """
        needed = np.zeros(self.padded_rows, bool)
        indices = self.sharding.addressable_devices_indices_map((self.padded_rows,))
        for index in indices.values():
            needed[index] = True
        needed[self.rows - 1] |= needed[self.rows :].any()
        changes = np.diff(needed[: self.rows], prepend=False, append=False)
        edges = np.flatnonzero(changes).tolist()
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    def check(self, batch: Batch) -> int:
        """Return the number of examples in `batch`: the global batch, or those of `ranges`.

        Raises:
            DataError: if it is neither.
        """
        num_local = sum(last - first for first, last in self.ranges)
        for size in (self.rows, num_local):
            if all(x.shape[0] == size for x in jax.tree.leaves(batch)):
                return size
        shapes = {name: leaf.shape for name, leaf in named_leaves(batch).items()}
        raise DataError(
            f"a batch has arrays of shape {shapes}, but the step was compiled for "
            f"{self.rows} examples per batch. All batches of a run must have the same size."
        )

    def mask(self) -> jax.Array | None:
        """Return booleans of shape `(padded_rows,)`, False for padding; None without padding."""
        if self.padded_rows == self.rows:
            return None
        return jnp.arange(self.padded_rows) < self.rows

    def abstract(self, batch: Batch) -> Batch:
        """Return shapes, dtypes and shardings of `batch` after `place`."""

        def abstract_leaf(x: jax.Array) -> jax.ShapeDtypeStruct:
            shape = (self.padded_rows, *x.shape[1:])
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

        return jax.tree.map(abstract_leaf, batch)


def batch_shapes(batch: Batch) -> Batch:
    """Return shapes and dtypes of `batch`, with the dtypes that arrays have on a device."""

    def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(shape_of, batch)


def num_rows(batch: Batch) -> int:
    """Return the number of examples, which is the first dimension of every array of `batch`.

    Raises:
        DataError: if the arrays disagree, or if there are no examples.
    """
    leaves = named_leaves(batch)
    sizes = {leaf.shape[0] if leaf.shape else 0 for leaf in leaves.values()}
    if len(sizes) != 1 or 0 in sizes:
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        raise DataError(
            f"the arrays of a batch have shapes {shapes}. All of them must have the same number of "
            "examples (first dimension), at least 1."
        )
    return int(sizes.pop())
