"""The platform that a computation is traced for."""

import jax


def platform() -> str:
    """Return `"cpu"`, `"gpu"` or `"tpu"`: the platform that the current trace is compiled for.

    A shardwise step sets the mesh that it is compiled for, and that mesh knows its devices even
    when they are not attached to this machine. Outside a step this is the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
