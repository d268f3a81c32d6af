"""Measure how the initial weights of a model change with its width."""

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.module import build_module, split_module
from shardwise.run import Run
from shardwise.scaling.trace import Model
from shardwise.tree import named_leaves

# Parameters with fewer entries than this are drawn several times, to measure them precisely.
FEW_ENTRIES = 4096
NUM_DRAWS = 16


def initial_sizes(run: Run, model: Model) -> dict[str, float]:
    """Return the root mean square of each parameter after initialization.

    Args:
        run: the run whose factory builds the model.
        model: its model.

    Returns:
        The sizes by path. Zero for parameters that start at zero.
    """
    few = {
        path
        for path, leaf in named_leaves(model.params).items()
        if leaf.size < FEW_ENTRIES
    }

    def squares(key: jax.Array) -> dict[str, jax.Array]:
        _, params, _ = split_module(build_module(run.model, key), run.wrt)
        leaves = named_leaves(params).items()
        return {path: _mean_square(leaf) for path, leaf in leaves}

    def of_few(keys: jax.Array) -> dict[str, jax.Array]:
        drawn = jax.vmap(squares)(keys)
        return {path: jnp.mean(drawn[path]) for path in few}

    with on_cpu():
        key = jax.random.key(0)
        keys = jax.random.split(key, NUM_DRAWS)
        # The rest of the model is not computed for them: its results are not used.
        measured = compiled_fast(squares)(key) | compiled_fast(of_few)(keys)
    return {path: float(np.sqrt(value)) for path, value in measured.items()}


def _mean_square(leaf: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.abs(leaf).astype(jnp.float32)))


def on_cpu() -> "jax.default_device":
    """Return a context in which small computations run on the CPU of this process."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def compiled_fast(function):  # type: ignore[no-untyped-def]
    """Return a jitted function that runs once, so that its compile time matters most."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options)
