"""The platform that a computation is traced for."""

import jax
from jax.sharding import AbstractMesh

from shardwise.hardware import find_chip
from shardwise.sharding import mapped_axes

# Whether the current trace is only analyzed, and not compiled. JAX's caches of traces depend on it.
is_analyzed = jax.make_user_context(default_value=False)


def platform() -> str:
    """Return `"cpu"`, `"gpu"` or `"tpu"`: the platform that the current trace is compiled for.

    A shardwise step sets the mesh that it is compiled for, and that mesh knows its devices even
    when they are not attached to this machine. Outside a step this is the default backend.
    """
    mesh = step_mesh()
    return jax.default_backend() if mesh is None else mesh.abstract_device.platform


def has_gpu_kernels() -> bool:
    """Return whether the current trace can use the GPU kernels of `kernels.partitioning`.

    In a pipeline it cannot: JAX has no `vmap` of `custom_partitioning`.
    """
    return platform() == "gpu" and not mapped_axes()


def gpu_capability() -> str:
    """Return the compute capability of the GPU that the current trace is compiled for."""
    device = jax.devices()[0]
    mesh = step_mesh()
    if mesh is None or mesh.abstract_device.device_kind == device.device_kind:
        return str(getattr(device, "compute_capability", ""))
    # A plan for GPUs that are not attached.
    chip = find_chip(mesh.abstract_device.device_kind)
    known = None if chip is None else chip.architecture
    return "" if known is None else known.capability


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU that the current trace is compiled for."""
    mesh = step_mesh()
    if mesh is None:
        return int(jax.devices()[0].core_count)
    num_cores: int | None = mesh.abstract_device.num_cores
    assert num_cores is not None
    return num_cores


def step_mesh() -> AbstractMesh | None:
    """Return the mesh that the current trace is compiled for, or None outside a step.

    It is also None in a trace that is only analyzed, which must not depend on the devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if is_analyzed.value or mesh.abstract_device is None else mesh
