"""Measure how the initial weights of a model change with its width."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.module import build_module, split_module
from shardwise.run import Run
from shardwise.scaling.trace import Model, cpu_device
from shardwise.tree import named_leaves

Result = TypeVar("Result")

# Parameters with fewer entries than this are drawn several times, to measure them precisely.
FEW_ENTRIES = 2**14
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

    def measured(keys: jax.Array) -> dict[str, jax.Array]:
        drawn = jax.vmap(squares)(keys)
        # The compiler drops the draws of all other parameters: their results are not used.
        of_few = {path: jnp.mean(drawn[path]) for path in few}
        return squares(keys[0]) | of_few

    with on_cpu():
        keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
        found = compiled_fast(measured)(keys)
    return {path: float(np.sqrt(value)) for path, value in found.items()}


def _mean_square(leaf: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.abs(leaf).astype(jnp.float32)))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Carry out small computations on the CPU of this process."""
    with jax.default_device(cpu_device()):
        yield


def compiled_fast(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a jitted function that runs a few times, so that its compile time matters most."""
    options = {"xla_backend_optimization_level": 0}
    jitted: Callable[..., Result] = jax.jit(function, compiler_options=options)
    return jitted
