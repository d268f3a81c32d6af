"""A cache of the keys and values of previous tokens, so that each new token is computed once.

Shapes: L layers, B sequences, T new tokens, S capacity in tokens, H query heads, G key and value
heads, K head width.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from shardwise.kernels.mask import MASKED_SCORE
from shardwise.tree import DType

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of all layers. A jitted step that receives it donated updates it in place.

    Attributes:
        keys: (L, B, G, S, K).
        values: (L, B, G, S, K).
        length: int32, the number of valid tokens in each sequence. Entries after them are ignored.
    """

    keys: Array
    values: Array
    length: Array


def empty_cache(
    num_layers: int,
    batch_size: int,
    heads: int,
    capacity: int,
    width: int,
    dtype: DType,
) -> Cache:
    """Return a cache without tokens.

    Args:
        num_layers: L.
        batch_size: B, the number of sequences.
        heads: G, the number of key and value heads.
        capacity: S, the largest number of tokens per sequence.
        width: K, the width of a head.
        dtype: the dtype of keys and values.
    """
    shape = (num_layers, batch_size, heads, capacity, width)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))


def cached_attention(
    q: Array, k: Array, v: Array, cache: Cache, layer: int | Array
) -> tuple[Array, Cache]:
    """Return the causal attention of new tokens to themselves and to all tokens in the cache.

    Args:
        q: queries of the new tokens, (B, T, H, K).
        k: their keys, (B, T, G, K).
        v: their values, (B, T, G, K).
        cache: the cache, with space for T more tokens.
        layer: the index of the layer.

    Returns:
        The outputs of the heads, (B, T, H, K), and the cache with the new keys and values of this
        layer. Its length does not change, so that all layers write to the same positions; call
        `advance` after the last layer.
    """
    batch_size, num_tokens, num_heads, width = q.shape
    kv_heads, capacity = cache.keys.shape[2:4]
    position = (layer, 0, 0, cache.length, 0)
    keys, values = (
        jax.lax.dynamic_update_slice(
            old, new.swapaxes(1, 2)[None].astype(old.dtype), position
        )
        for old, new in ((cache.keys, k), (cache.values, v))
    )
    # (B, G, H/G * T, K): the queries of all heads that share a key head, one after the other.
    q = (
        (q * width**-0.5)
        .reshape(batch_size, num_tokens, kv_heads, -1, width)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch_size, kv_heads, -1, width)
    )
    scores = jnp.einsum(
        "bgtk,bgsk->bgts", q, keys[layer], preferred_element_type=jnp.float32
    )
    query_positions = cache.length + jnp.arange(num_tokens)[:, None]
    is_visible = query_positions >= jnp.arange(capacity)  # (T, S)
    scores += jnp.tile(
        jnp.where(is_visible, 0, MASKED_SCORE), (num_heads // kv_heads, 1)
    )
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    weighted_sum = jnp.einsum(
        "bgts,bgsk->bgtk",
        weights.astype(values.dtype),
        values[layer],
        preferred_element_type=jnp.float32,
    )
    out = (
        (weighted_sum / total)
        .reshape(batch_size, kv_heads, -1, num_tokens, width)
        .transpose(0, 3, 1, 2, 4)
        .reshape(batch_size, num_tokens, num_heads, width)
    )
    return out.astype(v.dtype), replace(cache, keys=keys, values=values)


def advance(cache: Cache, count: Array) -> Cache:
    """Return the cache with `count` more valid tokens."""
    return replace(cache, length=cache.length + count)
