"""Rows of a table by index, with a gradient that is right and fast where some rows are looked up thousands of times.

That gradient is a sum over the occurrences of each row, taken in float32. XLA adds them to the table one by one: on a GPU the threads
that meet at the row of a frequent word wait for each other. GPT-2 124M with 65,536 bytes of text a step on an H200: 27 of 137 ms;
sorted, 0.3 ms.
"""

from functools import partial

import jax
import jax.numpy as jnp

from shardwise.kernels.partitioning import by_rows
from shardwise.kernels.platform import platform

Array = jax.Array


@jax.custom_vjp
def look_up(table: Array, indices: Array) -> Array:
    """Rows of a table (V, D) for indices of any shape."""
    return jnp.take(table, indices, axis=0)


def _look_up_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    table, indices = saved
    if (
        platform() == "tpu"
    ):  # a product with rows that are 1 where the index is: what TPUs do best, and nothing of it is kept
        ones, over = (
            (indices[..., None] == jnp.arange(len(table))).astype(g.dtype),
            tuple(range(indices.ndim)),
        )
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
    return (
        jax.ops.segment_sum(
            g[order].astype(jnp.float32), indices[order], count, indices_are_sorted=True
        ),
    )


look_up.defvjp(
    lambda table, indices: (jnp.take(table, indices, axis=0), (table, indices)), _look_up_backward
)
