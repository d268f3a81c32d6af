"""How the GPU kernels run on a mesh, and the Pallas modules that they are written with.

XLA cannot see inside a kernel, so it would run the kernel on the complete arrays on every device.
`partitioned` declares how a kernel may be sharded.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise.kernels.platform import platform

Array = jax.Array

# A reference into device memory that a kernel reads or writes. Pallas has no public type for it.
Ref: TypeAlias = Any

# Values that the forward rule of a `jax.custom_vjp` saves for the backward rule.
Residuals: TypeAlias = tuple[Array, ...]


class _LazyModule:
    """A module that is imported on first use.

    Importing Pallas takes 0.15 s, and only GPUs need it.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


pl = _LazyModule("jax.experimental.pallas")
triton = _LazyModule("jax.experimental.pallas.triton")
gpu = _LazyModule("jax.experimental.pallas.mosaic_gpu")


class _ShardedArray(Protocol):
    """The shape and the sharding of an array, as `custom_partitioning` passes them."""

    @property
    def sharding(self) -> NamedSharding: ...


def partitioned(
    local: Callable[..., Sequence[Array]], rule: str, replicated: str = ""
) -> Callable[..., tuple[Array, ...]]:
    """Return `local` as a function of arrays that may be sharded over a mesh.

    Each device calls `local` on its own shards, which needs no communication: the dimension `n`
    counts independent tokens, and the results for a shard of any other sharded dimension depend on
    this shard alone. A result without the dimension `n` is a sum over tokens, so the partial sums
    of the devices are added with an all-reduce.

    Args:
        local: a function of arrays that returns a tuple of arrays, also for a single result.
        rule: the dimensions of arguments and results in the notation of `custom_partitioning`, such
            as `"n f, f -> n f, f"`. Arrays that share a dimension are sharded alike along it.
        replicated: the dimensions that must not be sharded, separated by spaces. XLA gathers them
            before the call if necessary.

    Returns:
        A function with the arguments of `local` that returns a tuple of arrays.
    """
    argument_dims, result_dims = (_parse_dims(side) for side in rule.split("->"))
    unsharded_dims = replicated.split()

    def partition(
        mesh: Mesh, args: Sequence[_ShardedArray], _: object
    ) -> tuple[object, ...]:
        mesh_axes: dict[str, str | tuple[str, ...]] = {}
        for dims, arg in zip(argument_dims, args, strict=True):
            for dim, axes in zip(dims, arg.sharding.spec, strict=False):
                if dim not in unsharded_dims and axes is not None:
                    mesh_axes.setdefault(dim, axes)

        def run_on_shards(*shards: Array) -> tuple[Array, ...]:
            # The compiler calls this outside of the step, and kernels ask for its devices.
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                results = local(*shards)
            if "n" not in mesh_axes:
                return tuple(results)
            return tuple(
                result if "n" in dims else jax.lax.psum(result, mesh_axes["n"])
                for dims, result in zip(result_dims, results, strict=True)
            )

        def shardings(arrays: list[list[str]]) -> tuple[NamedSharding, ...]:
            specs = [PartitionSpec(*map(mesh_axes.get, dims)) for dims in arrays]
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, run_on_shards, shardings(result_dims), shardings(argument_dims)

    function = custom_partitioning(lambda *arrays: tuple(local(*arrays)))
    function.def_partition(
        partition=partition,
        sharding_rule=rule,
        need_replication_factors=tuple(unsharded_dims),
    )
    return function


def _parse_dims(arrays: str) -> list[list[str]]:
    """Return the names of the dimensions of each array in `"n f, f"`."""
    return [array.split() for array in arrays.split(",")]


def interpret() -> bool:
    """Return whether Pallas has to interpret kernels, because no GPU can compile them.

    The interpreter is slow, but it lets tests check the kernels on any machine.
    """
    return platform() != "gpu"
