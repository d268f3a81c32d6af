"""Attention for Hopper GPUs (H100, H200), written in Mosaic GPU.

The kernels keep one tile of scores on chip at a time, as cuDNN's do. There are two differences:

- They compute the same bits every time. The gradients of the queries, and those of keys and values,
  have a kernel each, so no sum depends on the order in which programs finish.
- Packed documents need no mask of size (T, T). `block_ranges` says which blocks of keys a tile of
  queries visits, and the kernels skip all others.

Shapes: B sequences, T tokens, H query heads, G key and value heads, K head width.

Keys and values are two arrays (B, T, G, K), or one (B, T, 2 * G, K) with the heads of the values
after those of the keys, as a single matmul computes them.

The kernels need jax 0.11 or newer, as those in `kernels.hopper`.
"""

from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwise.kernels.flash_kernels import (
    ROWS,
    BlockRange,
    Forward,
    KeyGradient,
    QueryGradient,
    Tiles,
    call,
)
from shardwise.kernels.hopper import is_available
from shardwise.kernels.mask import Mask

Array = jax.Array
ArrayOrShape: TypeAlias = jax.Array | jax.ShapeDtypeStruct
# Keys and values: two arrays, or one with the heads of both.
KeysValues: TypeAlias = tuple[Array] | tuple[Array, Array]

# Tiles of the forward kernel, of the gradient of the queries, and of that of keys and values, by
# head width.
TILES = {
    64: (Tiles(2, 128, 3), Tiles(2, 128, 2), Tiles(2, 128, 2)),
    128: (Tiles(2, 128, 2), Tiles(2, 64, 2), Tiles(2, 64, 2, buffers=1)),
}


def block_ranges(
    tiles: Tiles,
    mask: Mask,
    length: int,
    segment_ids: Array | None = None,
    *,
    of_keys: bool = False,
) -> Array:
    """Return which blocks each warpgroup visits with its rows.

    Args:
        tiles: the sizes of tiles and blocks.
        mask: which keys a query attends to, by position.
        length: the number of tokens, T.
        segment_ids: the document of each token, (B, T).
        of_keys: the rows are keys, and the blocks are blocks of queries.

    Returns:
        (B or 1, T / ROWS, 6), int32: the fields of `BlockRange`.
    """
    some, every = _visible_blocks(
        mask, length, ROWS, tiles.columns, segment_ids, of_keys
    )
    block = jnp.arange(some.shape[2])
    first = jnp.argmax(some, -1)
    end = jnp.max(jnp.where(some, block + 1, 0), -1)
    full_end = jnp.max(jnp.where(every, block + 1, 0), -1)
    # Documents need not be in order, so there may be partly visible blocks between full ones.
    is_gap = ~every & (block < full_end[..., None])
    full_first = jnp.max(jnp.where(is_gap, block + 1, 0), -1)
    # A causal mask hides the end of a row from queries, and the start from keys.
    nothing = end if of_keys else first
    has_full = every.any(-1)
    full_first = jnp.where(has_full, jnp.maximum(full_first, first), nothing)
    full_end = jnp.where(has_full, full_end, nothing)
    shape = -1, length // tiles.rows, tiles.warpgroups
    load_first = first.reshape(shape).min(-1).repeat(tiles.warpgroups, 1)
    load_end = end.reshape(shape).max(-1).repeat(tiles.warpgroups, 1)
    ranges = BlockRange(load_first, first, full_first, full_end, end, load_end)
    return jnp.stack(ranges, -1).astype(jnp.int32)


def _visible_blocks(
    mask: Mask,
    length: int,
    rows: int,
    columns: int,
    segment_ids: Array | None,
    of_keys: bool,
) -> tuple[Array, Array]:
    """Return for blocks of rows and columns whether any and whether all of their pairs are visible.

    Both results are (B or 1, T / rows, T / columns).
    """
    query_size, key_size = (columns, rows) if of_keys else (rows, columns)
    first_query, last_query = _edges(length, query_size)
    first_key, last_key = _edges(length, key_size)
    # How far a key is before a query.
    nearest = first_query[:, None] - last_key
    farthest = last_query[:, None] - first_key
    some = jnp.ones_like(nearest, bool)
    every = some
    if mask.causal:
        some &= farthest >= 0
        every &= nearest >= 0
    if mask.window is not None:
        some &= (nearest < mask.window) & (farthest > -mask.window)
        every &= (farthest < mask.window) & (nearest > -mask.window)
    some, every = some[None], every[None]
    if segment_ids is not None:
        queries, keys = (
            segment_ids.reshape(-1, length // size, size)
            for size in (query_size, key_size)
        )
        low_q = queries.min(-1)[:, :, None]
        high_q = queries.max(-1)[:, :, None]
        low_k = keys.min(-1)[:, None]
        high_k = keys.max(-1)[:, None]
        some &= (low_q <= high_k) & (low_k <= high_q)
        every &= (low_q == high_q) & (low_k == high_k) & (low_q == low_k)
    if of_keys:
        return some.swapaxes(1, 2), every.swapaxes(1, 2)
    return some, every


def _edges(length: int, size: int) -> tuple[Array, Array]:
    """Return the first and the last token of each block of `size` tokens."""
    first = jnp.arange(0, length, size)
    return first, first + size - 1


def supports(q: ArrayOrShape, k: ArrayOrShape) -> bool:
    """Return whether the kernels compute attention of q (B, T, H, K) and k (B, T, G, K) here."""
    tiles = TILES.get(q.shape[3], ())
    sizes = [size for tile in tiles for size in (tile.rows, tile.columns)]
    return (
        bool(sizes)
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[1] == k.shape[1]
        and all(q.shape[1] % size == 0 for size in sizes)
        and is_available()
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash_attention(
    q: Array, kv: KeysValues, segment_ids: Array | None, mask: Mask
) -> Array:
    """Return attention on one Hopper GPU.

    All values that the backward pass needs in addition to q, k and v have the name `"attention"`
    for the policies of `jax.checkpoint`. If a policy saves them, the forward kernel does not run
    again.

    Args:
        q: queries, (B, T, H, K), see `supports`.
        kv: keys and values.
        segment_ids: the document of each token, (B, T), or None.
        mask: which keys a query attends to.

    Returns:
        The outputs of the heads, (B, T, H, K).
    """
    out: Array = forward(q, kv, segment_ids, mask=mask)[0]
    return out


_Residuals: TypeAlias = tuple[Array, KeysValues, Array | None, Array, Array]


def _forward_rule(
    q: Array, kv: KeysValues, segment_ids: Array | None, mask: Mask
) -> tuple[Array, _Residuals]:
    out, log_sums = forward(q, kv, segment_ids, mask=mask)
    out = checkpoint_name(out, "attention")
    log_sums = checkpoint_name(log_sums, "attention")
    return out, (q, kv, segment_ids, out, log_sums)


def _backward_rule(
    mask: Mask, residuals: _Residuals, grad: Array
) -> tuple[Array, KeysValues, None]:
    return (*backward(*residuals, grad, mask=mask), None)


flash_attention.defvjp(_forward_rule, _backward_rule)


def _num_key_heads(kv: KeysValues) -> int:
    heads: int = sum(x.shape[2] for x in kv)
    return heads // 2


@partial(jax.jit, static_argnames="mask")
def forward(
    q: Array, kv: KeysValues, segment_ids: Array | None, *, mask: Mask
) -> tuple[Array, Array]:
    """Return attention, and what the backward pass needs.

    Args:
        q: queries, (B, T, H, K).
        kv: keys and values.
        segment_ids: the document of each token, (B, T), or None.
        mask: which keys a query attends to.

    Returns:
        The outputs of the heads, (B, T, H, K), and the logarithms to base 2 of the sums of
        exponentials, (B, H, T), float32.
    """
    tiles = TILES[q.shape[3]][0]
    statistics = jax.ShapeDtypeStruct((*q.shape[::2], q.shape[1]), jnp.float32)
    out, log_sums = call(Forward, tiles, mask, _num_key_heads(kv), (q, statistics))(
        q, kv[0], kv[-1], *_mask_inputs(tiles, mask, q.shape[1], segment_ids)
    )
    return out, log_sums


@partial(jax.jit, static_argnames="mask")
def backward(
    q: Array,
    kv: KeysValues,
    segment_ids: Array | None,
    out: Array,
    log_sums: Array,
    grad: Array,
    *,
    mask: Mask,
) -> tuple[Array, KeysValues]:
    """Return the gradients of queries, and of keys and values.

    Args:
        q: as in `forward`.
        kv: as in `forward`.
        segment_ids: as in `forward`.
        out: the first result of `forward`.
        log_sums: the second result of `forward`.
        grad: the gradient of `out`.
        mask: as in `forward`.
    """
    _, tiles_q, tiles_k = TILES[q.shape[3]]
    length, key_heads = q.shape[1], _num_key_heads(kv)
    # The gradient of a score is its weight times (the gradient of the weight minus this).
    dots = jnp.einsum(
        "bthk,bthk->bht", out.astype(jnp.float32), grad.astype(jnp.float32)
    )
    inputs = q, kv[0], kv[-1], grad, log_sums, dots
    (dq,) = call(QueryGradient, tiles_q, mask, key_heads, (q,))(
        *inputs, *_mask_inputs(tiles_q, mask, length, segment_ids)
    )
    dkv = call(KeyGradient, tiles_k, mask, key_heads, kv)(
        *inputs,
        *_mask_inputs(tiles_k, mask, length, segment_ids, of_keys=True),
    )
    return dq, cast(KeysValues, tuple(dkv))


def _mask_inputs(
    tiles: Tiles,
    mask: Mask,
    length: int,
    segment_ids: Array | None,
    of_keys: bool = False,
) -> tuple[Array, ...]:
    """Return the inputs of a kernel that describe the mask."""
    if segment_ids is not None:
        segment_ids = segment_ids.astype(jnp.int32)
    ranges = block_ranges(tiles, mask, length, segment_ids, of_keys=of_keys)
    return (ranges,) if segment_ids is None else (ranges, segment_ids)
