"""Keys and values of the tokens that a model has seen, so that the next token costs one token's work.

Shapes: L layers, B rows, T new tokens, S tokens that there is room for, H heads of queries, G of keys and values, K width of a head.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from shardwise.kernels.attention import HIDDEN

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Of all layers in one array, which a jitted step that it is donated to changes in place."""

    keys: Array  # (L, B, G, S, K)
    values: Array  # (L, B, G, S, K)
    length: Array  # int32: the tokens of each row that are in it; what stands behind them is not looked at


def empty_cache(
    num_layers: int, rows: int, heads: int, size: int, width: int, dtype: jnp.dtype
) -> Cache:
    shape = (num_layers, rows, heads, size, width)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))


def cached_attention(
    q: Array, k: Array, v: Array, cache: Cache, layer: int | Array
) -> tuple[Array, Cache]:
    """Attention of new tokens, q (B, T, H, K), to themselves and to all before them; and the cache with k and v (B, T, G, K) in it.

    `length` stays as it is, so that all layers write to the same place. There must be room for the tokens.
    """
    rows, count, num_heads, width = q.shape
    heads, size = cache.keys.shape[2:4]
    at = (layer, 0, 0, cache.length, 0)
    keys, values = (
        jax.lax.dynamic_update_slice(old, new.swapaxes(1, 2)[None].astype(old.dtype), at)
        for old, new in ((cache.keys, k), (cache.values, v))
    )
    q = (
        (q * width**-0.5)
        .reshape(rows, count, heads, -1, width)
        .transpose(0, 2, 3, 1, 4)
        .reshape(rows, heads, -1, width)
    )  # (B, G, H/G * T, K)
    scores = jnp.einsum("bgtk,bgsk->bgts", q, keys[layer], preferred_element_type=jnp.float32)
    seen = cache.length + jnp.arange(count)[:, None] >= jnp.arange(size)  # (T, S)
    scores += jnp.tile(jnp.where(seen, 0, HIDDEN), (num_heads // heads, 1))
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    mixed = (
        jnp.einsum(
            "bgts,bgsk->bgtk",
            weights.astype(values.dtype),
            values[layer],
            preferred_element_type=jnp.float32,
        )
        / total
    )
    mixed = (
        mixed.reshape(rows, heads, -1, count, width)
        .transpose(0, 3, 1, 2, 4)
        .reshape(rows, count, num_heads, width)
    )
    return mixed.astype(v.dtype), replace(cache, keys=keys, values=values)


def longer(cache: Cache, count: Array) -> Cache:
    """With `count` tokens more counted as seen."""
    return replace(cache, length=cache.length + count)
