"""Directions that treat parameters as matrices, such as that of Muon, and how a mesh shares the
work.

A Newton-Schulz iteration multiplies a matrix by its transpose. On a matrix that is sharded, each
matmul would gather or reduce. Therefore matrices of one shape are stacked, and the stack is sharded
by matrix: each device receives complete matrices, works on them alone, and returns them. This is
one all-to-all for each mesh axis that shards the matrix, and one back. Devices that hold the same
matrices (data parallelism) share them too if that pays: each works on some of them, and all gather
the results.

Optax does not know shardings. The step passes them in a context, `parameters_stored_as`. Outside
of a step, each matrix is computed where it is.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from shardwise.optim.groups import map_with_path, param_path
from shardwise.sharding import axes_of_dims, spec_of_dims
from shardwise.tree import OptState, Params, PyTree, matches, named_leaves

# Mesh axes of each dim.
_Dims: TypeAlias = tuple[tuple[str, ...], ...]

# Devices that hold the same matrices share the work if no side of a matrix is shorter. Five
# iterations cost about 5 FLOP for each byte of the result and each row of the shorter side. A TPU
# v5e, with the lowest rate of links to matmuls, computes about 2,000 FLOP while it gathers a byte.
SHORTEST_SIDE = 512

# Pairs of the name and the sharding of each parameter of the step that is being traced. JAX's
# caches of traces depend on it.
_STORED = jax.make_user_context(default_value=())


@contextmanager
def parameters_stored_as(shardings: PyTree) -> Iterator[None]:
    """Set how parameters are sharded, while the update of an optimizer is traced.

    Args:
        shardings: the `NamedSharding` of each parameter, as a tree like the parameters.
    """
    with _STORED(tuple(named_leaves(shardings).items())):
        yield


@dataclass(frozen=True)
class _Matrices:
    """A parameter as a batch of matrices.

    Attributes:
        shape: `(shards, layers, *dims)`: the layers of each shard of the layer dim. A parameter
            that is not stacked is one layer in one shard.
        sharding: the sharding of the parameter; None outside of a step.
        dims: the mesh axes of each dim of `shape` that have more than one device.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding | None
    dims: _Dims

    @property
    def is_sharded(self) -> bool:
        """Whether single matrices are sharded."""
        return any(self.dims[2:])

    @property
    def replicas(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold the same matrices, and have fast links to each other."""
        is_small = min(matrix_shape(self.shape[2:])) < SHORTEST_SIDE
        if self.sharding is None or is_small:
            return ()
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh), "a step has devices"
        used = {axis for names in self.dims for axis in names}
        return tuple(
            axis
            for axis, size in mesh.shape.items()
            if size > 1 and axis not in used and _is_fast(mesh, axis)
        )


def map_matrices(
    function: Callable[..., tuple[jax.Array, ...]],
    arrays: Mapping[str, tuple[jax.Array, ...]],
    stacked: Sequence[str] = (),
    num_matrices: int = 1,
) -> dict[str, tuple[jax.Array, ...]]:
    """Apply a function to each parameter as a matrix.

    Args:
        function: a function of the arrays of a parameter, which returns as many, of the same
            shapes. All of them have leading dims for several matrices.
        arrays: the arrays of each parameter, by path. The first ones have the shape and the
            layout of the parameter, and the function takes them as matrices, see `matrix_shape`.
            The others, if the parameter is stacked, have a first dim for layers too.
        stacked: patterns of parameters whose first dim counts layers. Each layer is a matrix.
        num_matrices: how many arrays have the shape of the parameter.

    Returns:
        The results by path, of the shapes of the arrays. Those of the shape of the parameter are
        in its layout.
    """
    shardings: Mapping[str, NamedSharding] = dict(_STORED.value)
    parts: dict[str, _Matrices] = {}
    groups: dict[object, list[str]] = {}
    for path, (x, *_) in arrays.items():
        part = _as_matrices(x.shape, shardings.get(path), is_stack(path, stacked))
        parts[path] = part
        # To join the layers of several parameters would move those that are sharded by layer.
        is_alone = not _pays_to_stack(part) or part.shape[0] > 1
        kind = path if is_alone else (part.shape[2:], part.dims)
        groups.setdefault(kind, []).append(path)

    done: list[list[jax.Array]] = []
    for members in groups.values():
        columns = [
            [_split(x, path, parts, stacked) for x in arrays[path]] for path in members
        ]
        # Each group starts when the one before the last is done, so that the temporary arrays of
        # few groups are in memory at once.
        if len(done) > 1:
            columns, done[-2] = jax.lax.optimization_barrier((columns, done[-2]))
        stacks = [
            jnp.concatenate(column, 1) if len(column) > 1 else column[0]
            for column in zip(*columns, strict=True)
        ]
        done.append(_apply(function, stacks, parts[members[0]], num_matrices))

    results = {}
    for members, stacks in zip(groups.values(), done, strict=True):
        start = 0
        for path in members:
            end = start + parts[path].shape[1]
            results[path] = tuple(
                stack[:, start:end].reshape(x.shape)
                for stack, x in zip(stacks, arrays[path], strict=True)
            )
            start = end
    return results


def _split(
    x: jax.Array, path: str, parts: Mapping[str, _Matrices], stacked: Sequence[str]
) -> jax.Array:
    """Return an array of a parameter with leading dims for shards and layers."""
    if not is_stack(path, stacked):
        return x[None, None]
    return x.reshape(*parts[path].shape[:2], *x.shape[1:])


def named_params(tree: PyTree) -> dict[str, jax.Array]:
    """Return the arrays of a tree like the parameters, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {param_path(path): x for path, x in leaves}


def is_stack(path: str, stacked: Sequence[str]) -> bool:
    """Return whether the first dim of a parameter counts layers.

    Args:
        path: the path of the parameter.
        stacked: patterns of such parameters.
    """
    return any(matches(pattern, path) for pattern in stacked)


def _as_matrices(
    shape: tuple[int, ...], sharding: NamedSharding | None, is_stacked: bool
) -> _Matrices:
    """Return a parameter as a batch of matrices."""
    axes: _Dims = ((),) * len(shape)
    shards = 1
    if sharding is not None:
        axes = axes_of_dims(sharding, len(shape))
        shards = math.prod(sharding.mesh.shape[axis] for axis in axes[0])
    if not is_stacked:
        return _Matrices((1, 1, *shape), sharding, ((), (), *axes))
    split = (shards, shape[0] // shards, *shape[1:])
    return _Matrices(split, sharding, (axes[0], (), *axes[1:]))


def _is_fast(mesh: Mesh, axis: str) -> bool:
    """Return whether an axis stays within TPU slices, or within processes on other platforms."""

    def place(device: jax.Device) -> int:
        if device.platform == "tpu":
            return int(getattr(device, "slice_index", None) or 0)
        return int(device.process_index)

    places = np.vectorize(place, otypes=[int])(mesh.devices)
    dim = mesh.axis_names.index(axis)
    return bool((places == places.take([0], dim)).all())


def _pays_to_stack(part: _Matrices) -> bool:
    """Return whether a step should join parameters of this kind.

    It saves collectives, and fills a GPU, for which single matrices are too small. A CPU computes
    single matrices faster.
    """
    if part.sharding is None:
        return False
    platform = part.sharding.mesh.devices.flat[0].platform
    return part.is_sharded or bool(part.replicas) or platform == "gpu"


def _apply(
    function: Callable[..., tuple[jax.Array, ...]],
    stacks: list[jax.Array],
    like: _Matrices,
    num_matrices: int,
) -> list[jax.Array]:
    """Apply a function to stacks of matrices, each matrix complete on one device.

    Args:
        function: a function of matrices.
        stacks: each of shape `(shards, layers, ...)`.
        like: a parameter of the stacks.
        num_matrices: how many of them have the shape of the parameter.
    """
    layers = stacks[0].shape[1]
    moves = _moves(like, layers)
    shardings: list[NamedSharding] = []
    missing = 0
    if len(moves) > 1:
        assert like.sharding is not None
        mesh = like.sharding.mesh
        missing = -layers % math.prod(mesh.shape[axis] for axis in moves[-1][1])
        shardings = [NamedSharding(mesh, spec_of_dims(dims)) for dims in moves]
    matrix = matrix_shape(like.shape[2:])

    def moved(
        index: int, x: jax.Array, shardings: Sequence[NamedSharding]
    ) -> jax.Array:
        for sharding in shardings:
            if index >= num_matrices:
                # Only the first two dims of other arrays are sharded, if any.
                spec = PartitionSpec(*sharding.spec[:2])
                sharding = NamedSharding(sharding.mesh, spec)
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    inputs = []
    for index, x in enumerate(stacks):
        x = jnp.pad(x, [(0, missing if dim == 1 else 0) for dim in range(x.ndim)])
        x = moved(index, x, shardings)
        is_matrix = index < num_matrices
        inputs.append(x.reshape(*x.shape[:2], *matrix) if is_matrix else x)
    results = []
    for index, (x, stack) in enumerate(zip(function(*inputs), stacks, strict=True)):
        x = x.reshape(*x.shape[:2], *stack.shape[2:])
        results.append(moved(index, x, shardings[::-1])[:, :layers])
    return results


def _moves(like: _Matrices, layers: int) -> list[_Dims]:
    """Return shardings that lead to matrices that are complete on each device.

    Each step adds one mesh axis to dim 1. First come axes of replicas, along which every device
    keeps a part of the matrices, which needs no collective. Then each axis that shards a matrix
    moves, the last axis of a dim first. XLA makes that one all-to-all. If two axes moved at
    once, it would gather.

    Args:
        like: a parameter of the stack.
        layers: the number of matrices in each shard of the stack.
    """
    moves = [like.dims]
    if like.sharding is None:
        return moves
    sizes = like.sharding.mesh.shape
    num_devices = math.prod(sizes[axis] for names in like.dims[2:] for axis in names)
    for axis in like.replicas:
        # Not if most devices would have no matrix: their padding is gathered too.
        num_devices *= sizes[axis]
        if num_devices > 2 * layers:
            break
        now = list(moves[-1])
        now[1] = (*now[1], axis)
        moves.append(tuple(now))
    for dim in range(2, len(like.dims)):
        for _ in like.dims[dim]:
            now = list(moves[-1])
            *rest, axis = now[dim]
            now[1] = (*now[1], axis)
            now[dim] = tuple(rest)
            moves.append(tuple(now))
    return moves


def orthogonalize(
    steps: int = 5,
    rms: float | None = None,
    stacked: tuple[str, ...] = (),
    dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """Return the direction of Muon: each matrix becomes approximately the nearest orthogonal one.

    A parameter with more than two dims is reshaped to a matrix. Of all ways to split its dims into
    inputs and outputs, the one nearest to a square is used.

    Args:
        steps: the number of Newton-Schulz iterations.
        rms: the root mean square of the result. 0.2 suits learning rates of AdamW. By default the
            result is scaled by sqrt(max(1, outputs / inputs)).
        stacked: patterns of parameters whose first dim counts layers. Each layer is a matrix.
        dtype: the dtype of the iterations. bfloat16 is faster, but its rounding differs between
            meshes.

    Example:
        >>> import optax
        >>> tx = optax.chain(optax.trace(0.95), orthogonalize(rms=0.2), optax.scale(-1e-3))
    """

    def orthogonal(x: jax.Array) -> tuple[jax.Array, ...]:
        return (_newton_schulz(x, steps),)

    def scaled(path: str, update: jax.Array, x: jax.Array) -> jax.Array:
        inputs, outputs = matrix_shape(x.shape[is_stack(path, stacked) :])
        if rms is None:
            scale = math.sqrt(max(1, outputs / inputs))
        else:
            scale = rms * math.sqrt(max(inputs, outputs))
        return (scale * x.astype(jnp.float32)).astype(update.dtype)

    # `shardwise.optim.read` reads the settings from the variables that this function uses.
    def update(
        updates: PyTree, state: OptState, params: Params = None
    ) -> tuple[PyTree, OptState]:
        arrays = {path: (x.astype(dtype),) for path, x in named_params(updates).items()}
        results = map_matrices(orthogonal, arrays, stacked)
        return map_with_path(
            lambda path, x: scaled(path, x, *results[path]), updates
        ), state

    return optax.GradientTransformation(optax.init_empty_state, update)


class Neurons(NamedTuple):
    """State of `normalize_neurons`.

    Attributes:
        nu: for each parameter, the mean square of the updates of each output. It has the shape of
            the parameter, with size 1 for the dims of inputs.
    """

    nu: PyTree


def normalize_neurons(
    b2: float = 0.95,
    rms: float = 0.2,
    stacked: tuple[str, ...] = (),
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Return the second part of NorMuon: the updates of all outputs of a matrix get one size.

    Each output of a matrix, the weights of one neuron, is divided by the root mean square of its
    recent updates. Then the complete matrix is scaled.

    Args:
        b2: the decay of the mean square.
        rms: the root mean square of the result. 0.2 suits learning rates of AdamW.
        stacked: patterns of parameters whose first dim counts layers. Each layer is a matrix.
        eps: a small number that is added to the denominators.

    Example:
        >>> import optax
        >>> tx = optax.chain(optax.trace(0.95), orthogonalize(), normalize_neurons())
    """

    def dims(path: str, x: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the dims of inputs, and those of inputs and outputs."""
        first = int(is_stack(path, stacked))
        inputs = tuple(range(first, first + num_input_dims(x.shape[first:])))
        return inputs, tuple(range(first, x.ndim))

    def zeros(path: str, x: jax.Array) -> jax.Array:
        inputs, _ = dims(path, x)
        shape = [1 if dim in inputs else size for dim, size in enumerate(x.shape)]
        return jnp.zeros(shape, jnp.float32)

    def mean_square(path: str, x: jax.Array, nu: jax.Array) -> jax.Array:
        inputs, _ = dims(path, x)
        square = jnp.square(x.astype(jnp.float32))
        return b2 * nu + (1 - b2) * jnp.mean(square, inputs, keepdims=True)

    def normalized(path: str, x: jax.Array, nu: jax.Array) -> jax.Array:
        _, both = dims(path, x)
        y = x.astype(jnp.float32) / (jnp.sqrt(nu) + eps)
        size = jnp.sqrt(jnp.mean(jnp.square(y), both, keepdims=True))
        return (rms * y / (size + eps)).astype(x.dtype)

    def init(params: Params) -> Neurons:
        return Neurons(map_with_path(zeros, params))

    # `shardwise.optim.read` reads the settings from the variables that this function uses.
    def update(
        updates: PyTree, state: Neurons, params: Params = None
    ) -> tuple[PyTree, Neurons]:
        nu = map_with_path(mean_square, updates, state.nu)
        return map_with_path(normalized, updates, nu), Neurons(nu)

    return optax.GradientTransformation(init, update)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (inputs, outputs) for the split of the dims that is nearest to a square.

    Of two equal splits, the one with fewer inputs is used.

    Example:
        >>> matrix_shape((768, 3, 12, 64))
        (768, 2304)
    """
    split = num_input_dims(shape)
    return math.prod(shape[:split]), math.prod(shape[split:])


def num_input_dims(shape: tuple[int, ...]) -> int:
    """Return how many dims of a parameter are inputs, see `matrix_shape`."""

    def ratio(split: int) -> float:
        sides = math.prod(shape[:split]), math.prod(shape[split:])
        return max(sides) / max(1, min(sides))

    return min(range(1, len(shape)), key=ratio)


def _newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """Return `x` with every singular value pushed towards 1.

    With these coefficients, five iterations reach about 0.7 to 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    size = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = x / (size + 1e-7).astype(x.dtype)
    # The Gram matrix is smaller if the rows are the shorter side.
    is_tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -2, -1) if is_tall else x
    identity = jnp.eye(x.shape[-2], dtype=x.dtype)

    def iterate(_: int, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, -2, -1)
        # `a` is on the diagonal of the small matrix: `a * x` would read and write all of `x` again.
        return (a * identity + b * gram + c * gram @ gram) @ x

    x = jax.lax.fori_loop(0, steps, iterate, x, unroll=True)
    return jnp.swapaxes(x, -2, -1) if is_tall else x
