"""What happens to a variable where the model reads it: cast, gathered, and reduced backward."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from shardwise.module import AccessHook, path_name
from shardwise.precision import dtype_at_use
from shardwise.sharding import Placement, at_use, mapped_axes, reshard, without
from shardwise.state import StateSpec
from shardwise.step.fsdp import gather_parameter


def access_hooks(
    spec: StateSpec, compute_dtype: DTypeLike | None = None
) -> dict[str, AccessHook]:
    """Return for each variable the function that its value passes through where the model reads it.

    The hook casts a parameter to the compute dtype and gathers it over the batch axes. The model
    does not know about it. Inside `nnx.scan` the hook sees the slice of one layer; inside
    `nnx.remat` the gather is repeated in the backward pass, so that gathered parameters are not
    kept in memory.
    """
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    # Arrays outside of variables keep their dtype, because the trace of the loss reads them so.
    arrays = {path_name(path) for path in spec.definition.arrays}
    return {
        path: _Access(spec, placement, None if path in arrays else dtype, is_parameter)
        for leaves, is_parameter in (
            (spec.params, True),
            (spec.frozen, True),
            (spec.other, False),
        )
        for path, placement in leaves.items()
    }


@dataclass(frozen=True, eq=False)
class _Access:
    """A hook that casts and gathers forward, and casts and reduces backward.

    NNX compares the hooks of two variables when `jax.tree.map` is applied to two modules. All hooks
    of a step are therefore equal.

    Attributes:
        spec: the abstract state.
        placement: the placement of the variable.
        dtype: the dtype that parameters are cast to; None leaves them as they are.
        is_parameter: whether the variable is a trained or frozen parameter. An `nnx.Param` always
            counts as one, also if it is not trained.
    """

    spec: StateSpec
    placement: Placement
    dtype: jnp.dtype | None
    is_parameter: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Access) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Mesh, jnp.dtype | None]:
        return self.spec.mesh, self.dtype

    def __call__(
        self, variable: nnx.Variable[jax.Array], value: jax.Array
    ) -> jax.Array:
        """Return the value that the model reads."""
        is_parameter = self.is_parameter or isinstance(variable, nnx.Param)
        dtype = self.dtype if is_parameter else None
        cast_dtype = dtype_at_use(variable, value.dtype, dtype)
        stored, shape = self.placement.spec, self.placement.shape
        used = PartitionSpec()
        if is_parameter:
            used = at_use(self.placement, self.spec.rules)
        # Inside of a pipeline, the parameters were gathered before its loop.
        used, stored = (without(spec, mapped_axes()) for spec in (used, stored))
        used_sharding = self.spec.sharding(_spec_of_slice(used, shape, value.shape))
        stored_sharding = self.spec.sharding(_spec_of_slice(stored, shape, value.shape))

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            shardings = stored_sharding, used_sharding
            return gather_parameter(x.astype(cast_dtype), self.spec, *shardings)

        def forward(x: jax.Array) -> tuple[jax.Array, None]:
            return gather(x), None

        def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
            # First the sharding of use, then that of storage. With the second alone, the
            # partitioner shards the activations instead. `step.fsdp` looks for the pair.
            grad = reshard(grad.astype(value.dtype), used_sharding)
            return (reshard(grad, stored_sharding),)

        gather.defvjp(forward, backward)
        return gather(value)


def _spec_of_slice(
    spec: PartitionSpec, full_shape: tuple[int, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the spec of a variable for the slice of it that a model reads.

    A scan over layers removes leading dims. A dim that was sliced to another size is replicated.
    """
    removed = len(full_shape) - len(shape)
    if removed < 0:
        return PartitionSpec()
    entries = (*spec, *(None,) * (len(full_shape) - len(spec)))
    dims = zip(entries[removed:], full_shape[removed:], shape, strict=True)
    return PartitionSpec(
        *(entry if full == size else None for entry, full, size in dims)
    )
