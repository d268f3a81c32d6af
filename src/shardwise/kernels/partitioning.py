"""What the kernels for GPUs have in common: their rows are independent, so each device works on those that it holds.

XLA knows nothing of what a kernel does and would run all of it on every device. A rule such as "n f, f -> n f, f" says how
it may be cut: arrays that share the dim n are cut along it alike, and results without it are summed over the devices.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array


class _Late:
    """A module that is imported when something of it is used: Pallas takes 0.15 s of every start, and only GPUs need it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


pl, triton = _Late("jax.experimental.pallas"), _Late("jax.experimental.pallas.triton")
gpu = _Late("jax.experimental.pallas.mosaic_gpu")


def by_rows(local: Callable[..., Any], rule: str, whole: str = "") -> Callable[..., Any]:
    """`local`, a function of arrays, for arrays that are spread over a mesh: the dims named in `whole` stay in one piece.

    Its results are a tuple, also of one. `n` names the rows; every other dim may be cut too, where the devices compute what
    is theirs without each other.
    """
    arguments, results = ([part.split() for part in side.split(",")] for side in rule.split("->"))

    def partition(mesh: Any, args: Any, _: Any) -> Any:
        cut: dict[str, Any] = {}  # the mesh axes of each dim
        for names, arg in zip(arguments, args, strict=True):
            for name, axes in zip(names, arg.sharding.spec, strict=False):
                if name not in whole.split() and axes is not None:
                    cut.setdefault(name, axes)

        def shard(*arrays: Array) -> tuple[Array, ...]:
            found = local(*arrays)
            if "n" not in cut:
                return tuple(found)
            return tuple(
                x if "n" in names else jax.lax.psum(x, cut["n"])
                for names, x in zip(results, found, strict=True)
            )

        layouts = [
            [NamedSharding(mesh, PartitionSpec(*map(cut.get, names))) for names in side]
            for side in (arguments, results)
        ]
        return mesh, shard, tuple(layouts[1]), tuple(layouts[0])

    function = custom_partitioning(lambda *arrays: tuple(local(*arrays)))
    function.def_partition(
        partition=partition, sharding_rule=rule, need_replication_factors=tuple(whole.split())
    )
    return function


def interpret() -> bool:
    """Elsewhere than on a GPU a kernel is carried out step by step: slow, and good for checking it."""
    return jax.default_backend() != "gpu"
