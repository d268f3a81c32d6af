"""Gradients that are sums over all tokens: of a bias, and of a row of a table for each time it was looked up.

JAX adds them up in the dtype of the activations. In bfloat16, which has 8 bits, a sum stops growing when it is 256 times what
is added; among tens of thousands of tokens the gradients of biases and of frequent words are then wrong. Here they are summed in
float32 and rounded once.
"""

from functools import partial

import jax
import jax.numpy as jnp

from shardwise.models.attention import platform
from shardwise.models.kernels import by_rows

Array = jax.Array


@jax.custom_vjp
def add_bias(x: Array, bias: Array) -> Array:
    """x (N, F) + bias (F,)."""
    return x + bias


def _add_bias_backward(bias: Array, g: Array) -> tuple[Array, Array]:
    return g, g.sum(0, dtype=jnp.float32).astype(bias.dtype)


add_bias.defvjp(lambda x, bias: (x + bias, bias), _add_bias_backward)


@jax.custom_vjp
def look_up(table: Array, indices: Array) -> Array:
    """Rows of a table (V, D) for indices of any shape."""
    return jnp.take(table, indices, axis=0)


def _look_up_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    table, indices = saved
    if platform() == "tpu":  # a product with rows that are 1 where the index is: what TPUs do best, and nothing of it is kept
        ones, over = (indices[..., None] == jnp.arange(len(table))).astype(g.dtype), tuple(range(indices.ndim))
        return jax.lax.dot_general(ones, g, ((over, over), ((), ()))).astype(table.dtype), None
    indices, g = indices.reshape(-1), g.reshape(-1, g.shape[-1])
    if platform() == "gpu":
        (sums,) = by_rows(partial(_sum_sorted, len(table)), "n, n d -> v d", whole="v")(indices, g)
    else:
        sums = jnp.zeros(table.shape, jnp.float32).at[indices].add(g.astype(jnp.float32))
    return sums.astype(table.dtype), None


def _sum_sorted(count: int, indices: Array, g: Array) -> tuple[Array]:
    """Equal indices stand side by side: else thousands of threads of a GPU wait for each other at a frequent word's row."""
    order = jnp.argsort(indices)
    return (jax.ops.segment_sum(g[order].astype(jnp.float32), indices[order], count, indices_are_sorted=True),)


look_up.defvjp(lambda table, indices: (jnp.take(table, indices, axis=0), (table, indices)), _look_up_backward)
