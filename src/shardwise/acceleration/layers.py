"""The layers that accelerated functions call in place of those of JAX, Flax and Optax.

They take tokens as (N, D) or as sequences (B, T, D), and call the kernels with one row per token.

Shapes: B sequences, T tokens, N = B * T, D width, F another width, H heads, K head width, V
vocabulary size.
"""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardwise.kernels import activation, attention, cross_entropy, lookup, norm
from shardwise.kernels.linear import matmuls
from shardwise.kernels.tokens import merge_tokens, split_tokens
from shardwise.tree import DType

Array = jax.Array


def _rows(x: Array) -> Array:
    return merge_tokens(x) if x.ndim > 2 else x


def _like(rows: Array, x: Array) -> Array:
    """Undo `_rows`: return rows (N, ...) for the tokens of `x`."""
    return split_tokens(rows, *x.shape[:2]) if x.ndim > 2 else rows


def _matrix(kernel: Array, num_in: int) -> Array:
    """Return the weights (*ins, *outs) of a linear layer as a matrix."""
    return kernel.reshape(math.prod(kernel.shape[:num_in]), -1)


def linear_layer(x: Array, kernel: Array, bias: Array | None = None) -> Array:
    """Return `x` (B, T, *ins) times a kernel (*ins, *outs), and add a bias (*outs)."""
    num_in = x.ndim - 2
    rows = merge_tokens(x.reshape(*x.shape[:2], -1)) @ _matrix(kernel, num_in)
    if bias is not None:
        rows = rows + bias.reshape(-1)
    return split_tokens(rows, *x.shape[:2]).reshape(
        *x.shape[:2], *kernel.shape[num_in:]
    )


def linear_layers(x: Array, *operands: Array | tuple[bool, ...]) -> list[Array]:
    """Return the results of several linear layers for tokens (B, T, D).

    Args:
        x: the tokens.
        *operands: all kernels (D, *outs), then the biases (*outs) of layers that have one, and
            whether each layer has one.
    """
    *arrays, has_bias = cast(tuple[Array, ...], operands)
    kernels = arrays[: len(has_bias)]
    rest = iter(arrays[len(has_bias) :])
    rows = matmuls(merge_tokens(x), [_matrix(kernel, 1) for kernel in kernels])
    outputs = []
    for y, kernel, is_biased in zip(rows, kernels, has_bias, strict=True):
        # As rows, so that the matmul adds the bias in its epilogue.
        if is_biased:
            y = y + next(rest).reshape(-1)
        shape = x.shape[:2]
        outputs.append(split_tokens(y, *shape).reshape(*shape, *kernel.shape[1:]))
    return outputs


def gelu_mlp(x: Array, up: Array, bias: Array, down: Array) -> Array:
    """Return `gelu(x @ up + bias) @ down` for tokens (..., D)."""
    return _like(activation.gelu_mlp(_rows(x), up, bias, down), x)


def plain_gelu_mlp(x: Array, up: Array, bias: Array, down: Array) -> Array:
    """Return `gelu_mlp` with matmuls that policies of `jax.checkpoint` see."""
    return _like(activation.plain_gelu_mlp(_rows(x), up, bias, down), x)


def bias_gelu(x: Array, bias: Array) -> Array:
    """Return `gelu(x + bias)` for tokens (..., F)."""
    return _like(activation.bias_gelu(_rows(x), bias), x)


def layer_norm(
    x: Array, scale: Array, *rest: Array | DType | float
) -> tuple[Array, Array]:
    """Return tokens (..., D), and their layer norm.

    Args:
        x: the tokens.
        scale: (D,).
        *rest: the bias (D,) if there is one, the dtype of the norm, and its epsilon.
    """
    return _layer_norm(x, _rows(x), None, scale, *rest)


def add_layer_norm(
    x: Array,
    branch: Array,
    pending_bias: Array,
    scale: Array,
    *rest: Array | DType | float,
) -> tuple[Array, Array]:
    """Return `x + branch + pending_bias` for tokens (..., D), and its layer norm.

    Args:
        x: the residual stream.
        branch: like `x`.
        pending_bias: (D,).
        scale: (D,).
        *rest: as for `layer_norm`.
    """
    return _layer_norm(x, _rows(x) + _rows(branch), pending_bias, scale, *rest)


def _layer_norm(
    x: Array,
    rows: Array,
    pending_bias: Array | None,
    scale: Array,
    *rest: Array | DType | float,
) -> tuple[Array, Array]:
    *biases, dtype, epsilon = cast(tuple[Any, ...], rest)
    bias = biases[0] if biases else jnp.zeros_like(scale)
    stream, normalized = norm.residual_norm(
        rows, pending_bias, scale, bias, epsilon, has_barrier=False
    )
    return _like(stream, x), _like(normalized.astype(dtype), x)


def attention_layer(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """Return attention of queries, keys and values (B, T, H, K)."""
    return attention.attention(q, k, v, causal=causal)


def look_up(table: Array, indices: Array) -> Array:
    """Look up tokens in an embedding table (V, D)."""
    return lookup.look_up(table, indices)


def token_losses(logits: Array, labels: Array, dtype: DType) -> Array:
    """Return the cross entropy of logits (..., V) in a dtype."""
    return cross_entropy.cross_entropy(logits, labels).astype(dtype)


def linear_token_losses(
    features: Array, weights: Array, labels: Array, dtype: DType, is_table: bool
) -> Array:
    """Return the cross entropy of the logits of features (..., D) in a dtype.

    Args:
        features: the input of the output layer.
        weights: its weights, (V, D) if `is_table`, or else (D, V).
        labels: (...).
        dtype: the dtype of the result.
        is_table: how the weights are stored.
    """
    table = weights if is_table else weights.T
    nats = cross_entropy.linear_cross_entropy(features, table, labels)
    return nats.astype(dtype)
