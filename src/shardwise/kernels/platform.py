"""The platform that a computation is traced for."""

import jax
from jax.sharding import AbstractMesh


def platform() -> str:
    """Return `"cpu"`, `"gpu"` or `"tpu"`: the platform that the current trace is compiled for.

    A shardwise step sets the mesh that it is compiled for, and that mesh knows its devices even
    when they are not attached to this machine. Outside a step this is the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def step_mesh() -> AbstractMesh | None:
    """Return the mesh that the current trace is compiled for, or None outside a step.

    A loss that is traced only to analyze it has a mesh without devices. Its trace must not depend
    on the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.abstract_device is None else mesh
