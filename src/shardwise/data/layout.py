"""How a batch in host memory becomes sharded arrays on the mesh, padded where necessary."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise.errors import ConfigError, DataError
from shardwise.sharding import (
    Rules,
    batch_spec,
    context_axes,
    num_batch_shards,
    put,
)
from shardwise.tree import Batch, Leaf, PyTree, leaf_name, named_leaves


@dataclass(frozen=True)
class BatchLayout:
    """The size and the sharding of a batch.

    Arrays have one entry per example. A number, or an array of shape (), is one value for all
    examples: it is replicated and never padded.

    A batch whose size the mesh does not divide is padded with copies of its last example. The loss
    excludes them, see `mask`.

    Attributes:
        rows: the number of examples in the global batch.
        padded_rows: the number of examples including padding; equal to `rows` without padding.
        sharding: the sharding of every array of the batch along its first dimension. Arrays of
            shape () are replicated.
        is_local: whether each process supplies only the examples of its devices (`ranges`),
            and not the global batch.
        context: the mesh axes that shard the tokens of each sequence.
        length: the number of tokens in a sequence. Arrays with this number of entries in their
            second dimension are sharded over `context` along it.
    """

    rows: int
    padded_rows: int
    sharding: NamedSharding
    is_local: bool = False
    context: tuple[str, ...] = ()
    length: int | None = None

    def sharding_of(self, x: Leaf) -> NamedSharding:
        """Return the sharding of one array of the batch."""
        mesh = self.sharding.mesh
        if not x.ndim:
            return NamedSharding(mesh, PartitionSpec())
        if self.context and x.ndim > 1 and x.shape[1] == self.length:
            return NamedSharding(
                mesh, PartitionSpec(self.sharding.spec[0], self.context)
            )
        return self.sharding

    def per_process(self) -> "BatchLayout":
        """Return the same layout for batches with only the examples of `ranges`.

        In a custom loop over local batches, use `step.layout.per_process().place`.
        """
        return replace(self, is_local=True)

    def place(self, batch: Batch, *, copy: bool = True) -> Batch:
        """Start the transfer of a batch to the devices and return at once.

        Args:
            batch: host arrays with all examples of the global batch, or only with those of
                `ranges` if `is_local`.
            copy: whether to copy the host arrays first, so that they may change at once. Without
                a copy, arrays on a CPU may share the memory of `batch`.

        Returns:
            Arrays on the mesh, with `padded_rows` examples.

        Raises:
            DataError: if the batch has another number of examples, or integers that do not fit
                into the 32 bits that they have on a device.
        """
        if self._takes_as_is(batch):
            return put(batch, self.sharding, copy=copy)
        batch = as_arrays(batch)
        num_read = self.check(batch)
        check_integers(batch)
        if num_read == self.rows == self.padded_rows:
            shardings = jax.tree.map(self.sharding_of, batch)
            return put(batch, shardings, copy=copy)
        positions = self._positions(num_read)

        def place_leaf(x: np.ndarray) -> jax.Array:
            sharding = self.sharding_of(x)
            if not x.ndim:
                scalar: jax.Array = put(x, sharding, copy=copy)
                return scalar

            def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                examples: np.ndarray = x[positions[index[0]]]
                return examples[(slice(None), *index[1:])]

            shape = (self.padded_rows, *x.shape[1:])
            return jax.make_array_from_callback(shape, sharding, read_shard)

        return jax.tree.map(place_leaf, batch)

    def _takes_as_is(self, batch: Batch) -> bool:
        """Return whether every array of `batch` is right and has the sharding of the layout.

        Most batches are. The complete checks take as long as the transfer of a small batch.
        """
        if self.context or self.padded_rows != self.rows:
            return False
        size = self.num_local if self.is_local else self.rows
        return size == self.rows and all(
            isinstance(x, np.ndarray)
            and x.ndim
            and x.shape[0] == size
            and x.dtype in _UNCHANGED
            for x in jax.tree.leaves(batch)
        )

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

    @property
    def num_local(self) -> int:
        """The number of examples that the devices of this process hold."""
        return sum(last - first for first, last in self.ranges)

    def check(self, batch: Batch) -> int:
        """Return the number of examples that `batch` must have, once it has been checked.

        Raises:
            DataError: if it has another number of examples.
        """
        size = self.num_local if self.is_local else self.rows
        leaves = array_leaves(batch)
        if all(x.shape[0] == size for x in leaves.values()):
            return size
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        if self.is_local:
            raise DataError(
                f"a batch has arrays of shape {shapes}, but the devices of this process hold "
                f"{size} of the {self.rows} examples of a batch. All batches of a run must have "
                "the same size."
            )
        remedy = "All batches of a run must have the same size."
        if all(x.shape[0] == self.num_local for x in leaves.values()):
            remedy = (
                f"{self.num_local} is the number of examples for the devices of this process. If "
                'the data is sharded by process, set Run(data_scope="process"); in a custom loop '
                "use step.layout.per_process().place."
            )
        raise DataError(
            f"a batch has arrays of shape {shapes}, but the step was compiled for "
            f"{self.rows} examples per batch. {remedy}"
        )

    def mask(self) -> jax.Array | None:
        """Return booleans of shape `(padded_rows,)`, False for padding; None without padding."""
        if self.padded_rows == self.rows:
            return None
        return jnp.arange(self.padded_rows) < self.rows

    def abstract(self, batch: Batch) -> Batch:
        """Return shapes, dtypes and shardings of `batch` after `place`."""

        def abstract_leaf(x: Leaf) -> jax.ShapeDtypeStruct:
            shape = (self.padded_rows, *x.shape[1:]) if x.ndim else ()
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding_of(x))

        return jax.tree.map(abstract_leaf, as_arrays(batch))

    def shardings(self, batch: Batch) -> PyTree:
        """Return the shardings of `batch` after `place`, as `jax.jit` takes them."""
        batch = as_arrays(batch)
        if not self.context and all(x.ndim for x in jax.tree.leaves(batch)):
            # One for all leaves, so that the structure of the batch may change.
            return self.sharding
        return jax.tree.map(self.sharding_of, batch)


def make_layout(
    batch: Batch, rows: int, padded_rows: int, mesh: Mesh, rules: Rules
) -> BatchLayout:
    """Return the layout of batches like `batch` on a mesh.

    The examples are sharded over the batch axes if they divide `padded_rows`, and replicated
    otherwise. On a mesh with a context axis, the largest second dimension of an array is the number
    of tokens in a sequence.

    Args:
        batch: a batch, as arrays or shapes.
        rows: the number of examples.
        padded_rows: the number of examples including padding.
        mesh: the device mesh.
        rules: the sharding rules.

    Raises:
        ConfigError: if the context axes do not divide the number of tokens.
    """
    is_sharded = padded_rows % num_batch_shards(mesh, rules) == 0
    spec = batch_spec(mesh, rules) if is_sharded else PartitionSpec(None)
    layout = BatchLayout(rows, padded_rows, NamedSharding(mesh, spec))
    context = context_axes(mesh, rules)
    if not context:
        return layout
    lengths = {
        name: leaf.shape[1]
        for name, leaf in array_leaves(batch).items()
        if leaf.ndim > 1
    }
    if not lengths:
        raise ConfigError(
            f"mesh axis '{context[0]}' shards the tokens of each sequence, which are the second "
            "dimension of the arrays of a batch, and all arrays of this batch have one dimension. "
            f"Use a mesh without '{context[0]}'."
        )
    name, length = max(lengths.items(), key=lambda item: item[1])
    size = math.prod(mesh.shape[axis] for axis in context)
    if length % size:
        raise ConfigError(
            f"array '{name}' of the batch has {length} tokens per sequence, which is not divisible "
            f"by mesh axis '{' x '.join(context)}' (size {size}). Use sequences of "
            f"{max(length // size, 1) * size} tokens, or another size of the axis."
        )
    return replace(layout, context=context, length=length)


def num_tokens(batch: Batch) -> int | None:
    """Return the number of tokens in a sequence, or None if the examples are not sequences.

    Examples are sequences if the batch has an integer array of two dimensions, such as token ids.
    Tools propose a context axis only then. A mesh that names the axis shards other batches, too.

    Args:
        batch: a batch, as arrays or shapes.
    """
    lengths = [
        leaf.shape[1]
        for leaf in array_leaves(batch).values()
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    return max(lengths, default=None)


def batch_shapes(batch: Batch, rows: int | None = None) -> Batch:
    """Return shapes and dtypes of `batch`, with the dtypes that arrays have on a device.

    Args:
        batch: a batch, as arrays or shapes.
        rows: the number of examples; by default that of `batch`.

    Raises:
        DataError: if a leaf is not an array of examples.
    """
    array_leaves(batch)

    def shape_of(x: Leaf) -> jax.ShapeDtypeStruct:
        shape = x.shape if rows is None or not x.ndim else (rows, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(shape_of, as_arrays(batch))


def as_arrays(batch: Batch) -> Batch:
    """Return `batch` with its numbers as arrays of shape ()."""
    return jax.tree.map(lambda x: np.asarray(x) if _is_number(x) else x, batch)


def map_rows(function: Callable[[Leaf], object], batch: Batch) -> Batch:
    """Apply `function` to the arrays with one entry per example; numbers stay as they are."""
    return jax.tree.map(lambda x: function(x) if np.ndim(x) else x, batch)


def num_rows(batch: Batch) -> int:
    """Return the number of examples, which is the first dimension of every array of `batch`.

    Raises:
        DataError: if the arrays disagree, or if there are no examples.
    """
    leaves = array_leaves(batch)
    if not leaves:
        raise DataError(
            f"a batch has no array with one entry per example: {_show(batch)}. Supply at least one."
        )
    sizes = {leaf.shape[0] for leaf in leaves.values()}
    if len(sizes) != 1 or 0 in sizes:
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        raise DataError(
            f"the arrays of a batch have shapes {shapes}. All of them must have the same number of "
            "examples (first dimension), at least 1."
        )
    return int(sizes.pop())


def array_leaves(batch: Batch) -> dict[str, Leaf]:
    """Return the arrays of a batch with one entry per example, by name.

    Raises:
        DataError: if a leaf is neither an array nor a number.
    """
    _check_lists(batch)
    leaves = named_leaves(batch)
    for name, leaf in leaves.items():
        where = f"leaf '{name}' of the batch" if name else "the batch"
        if _is_number(leaf):
            continue
        if not isinstance(leaf, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
            raise DataError(f"{where} is {_show(leaf)}. {_remedy(leaf)}")
        # Strings, bytes, objects, dates and durations.
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "USOMm":
            raise DataError(
                f"{where} is an array of dtype {leaf.dtype}, which no device has. Convert it to "
                "numbers, for example tokens, or remove it from the batch."
            )
    return {name: leaf for name, leaf in leaves.items() if np.ndim(leaf)}


def scalar_leaves(batch: Batch) -> dict[str, Leaf]:
    """Return the numbers of a batch, which all examples share, as arrays by name."""
    leaves = named_leaves(as_arrays(batch))
    return {name: leaf for name, leaf in leaves.items() if not leaf.ndim}


def _is_number(leaf: object) -> bool:
    is_number = isinstance(leaf, bool | int | float | complex | np.generic)
    return is_number and np.asarray(leaf).dtype.kind in "biufcV"


def _check_lists(batch: Batch) -> None:
    """Raise for a list of numbers: each of them would be a separate number for all examples."""
    lists = jax.tree_util.tree_leaves_with_path(
        batch, is_leaf=lambda node: isinstance(node, list)
    )
    for path, node in lists:
        if isinstance(node, list) and any(
            _is_number(value) or getattr(value, "shape", None) == () for value in node
        ):
            raise DataError(
                f"leaf '{leaf_name(path)}' of the batch is a list of {len(node)} numbers. Use "
                "np.array(values), with one entry per example."
            )


def _show(leaf: object) -> str:
    text = repr(leaf)
    kind = type(leaf).__name__
    return f"{kind} {text}" if len(text) <= 40 else f"of type {kind}"


def _remedy(leaf: object) -> str:
    if isinstance(leaf, str | bytes):
        return "Convert text to arrays of tokens, or remove it from the batch."
    return "Every leaf must be a NumPy or JAX array: convert it, for example with np.asarray."


# The types that arrays have on a device too.
_UNCHANGED = frozenset(
    np.dtype(name)
    for name in (
        "bool",
        "int8",
        "uint8",
        "int16",
        "int32",
        "uint32",
        "float16",
        "float32",
    )
)

# The integer types that JAX narrows, unless jax_enable_x64 is set.
_NARROWED = {"int64": np.iinfo(np.int32), "uint64": np.iinfo(np.uint32)}


def check_integers(batch: Batch) -> None:
    """Check that integers of 64 bits survive the conversion to 32 bits on the way to a device.

    It takes 23 us for 64 x 1024 numbers of 64 bits, and 5 us if there are none (CPU).

    Raises:
        DataError: if a number is out of range. JAX would silently drop its upper 32 bits.
    """
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return
    for name, leaf in named_leaves(batch).items():
        if not isinstance(leaf, np.ndarray) or not leaf.size:
            continue
        limits = _NARROWED.get(leaf.dtype.name)
        if limits is None:
            continue
        for value in (int(leaf.min()), int(leaf.max())):
            if not limits.min <= value <= limits.max:
                raise DataError(
                    f"leaf '{name}' of the batch is {leaf.dtype} and has the value {value:,}. On "
                    f"a device it would be {limits.dtype} and wrap around to "
                    f"{int(np.array(value, leaf.dtype).astype(limits.dtype)):,}. Use smaller "
                    "numbers, split them into two arrays, or set jax_enable_x64."
                )
