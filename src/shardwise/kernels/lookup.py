"""Embedding lookup whose gradient is accurate and fast when some tokens occur thousands of times.

The gradient of an embedding is, for each token of the vocabulary, a sum over its occurrences. It is
summed in float32. XLA would add the occurrences to the table one by one: on a GPU, the threads that
update the embedding of a frequent token wait for each other. GPT-2 124M with 65,536 bytes of text
per step on an H200 spent 27 of 137 ms on this, and 0.3 ms with sorted tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp

from shardwise.kernels.partitioning import partitioned
from shardwise.kernels.platform import platform

Array = jax.Array


@jax.custom_vjp
def look_up(table: Array, indices: Array) -> Array:
    """Look up tokens in an embedding table.

    Args:
        table: (V, D), one embedding per token of the vocabulary.
        indices: integers of any shape.

    Returns:
        An array of shape `(*indices.shape, D)`.
    """
    return jnp.take(table, indices, axis=0)


def _look_up_forward(table: Array, indices: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.take(table, indices, axis=0), (table, indices)


def _look_up_backward(
    residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, None]:
    table, indices = residuals
    if platform() == "tpu":
        return _one_hot_matmul(table, indices, grad), None
    indices = indices.reshape(-1)
    grad = grad.reshape(-1, grad.shape[-1])
    if platform() == "gpu":
        sum_shard = partial(_sum_sorted, len(table))
        (sums,) = partitioned(sum_shard, "n, n d -> v d", replicated="v")(indices, grad)
    else:
        sums = (
            jnp.zeros(table.shape, jnp.float32)
            .at[indices]
            .add(grad.astype(jnp.float32))
        )
    return sums.astype(table.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def _one_hot_matmul(table: Array, indices: Array, grad: Array) -> Array:
    """Return the gradient of the table as a matmul, which TPUs do best. They fuse the one-hot."""
    one_hot = (indices[..., None] == jnp.arange(len(table))).astype(grad.dtype)
    token_dims = tuple(range(indices.ndim))
    contracted = (token_dims, token_dims)
    return jax.lax.dot_general(one_hot, grad, (contracted, ((), ()))).astype(
        table.dtype
    )


def _sum_sorted(vocab_size: int, indices: Array, grad: Array) -> tuple[Array]:
    """Sort the tokens first, so that the threads of a GPU do not compete for frequent tokens."""
    order = jnp.argsort(indices)
    sums = jax.ops.segment_sum(
        grad[order].astype(jnp.float32),
        indices[order],
        vocab_size,
        indices_are_sorted=True,
    )
    return (sums,)
