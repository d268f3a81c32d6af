"""Attention on a mesh whose context axis shards the tokens of each sequence.

Two ways, both for tokens in their natural order:

- `exchange_heads`: an all-to-all gives every device all tokens of a part of the heads, and another
  one gives the outputs back. Any attention kernel works in between. It needs as many heads as
  there are devices in the context and tensor axes together.
- `ring_attention`: keys and values travel around the ring of context devices. It works with any
  number of heads.

Shapes: B sequences, T tokens, H query heads, G key and value heads (H is a multiple of G), K head
width.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import axis_index, ppermute, with_sharding_constraint
from jax.sharding import PartitionSpec

from shardwise.errors import ConfigError
from shardwise.kernels.mask import MASKED_SCORE, Mask, same_document
from shardwise.kernels.tokens import TokenTiles, token_tiles
from shardwise.sharding import MeshAxes, logical_axes, step_layout

Array = jax.Array
# A function of q, k, v and segment ids, which returns the outputs of the heads.
Kernel: TypeAlias = Callable[[Array, Array, Array, Array | None], Array]
# The output of attention to some keys, (B, T, H, K), float32, and the logarithm of the sum of
# exponentials of their scores, (B, H, T).
Partial: TypeAlias = tuple[Array, Array]


def context_attention(
    kernel: Kernel,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    mask: Mask | None,
) -> Array | None:
    """Return attention over sharded tokens, or None if no mesh axis shards tokens.

    Args:
        kernel: computes attention over all tokens, for some of the heads.
        q: queries, (B, T, H, K).
        k: keys, (B, T, G, K).
        v: values, (B, T, G, K).
        segment_ids: (B, T), the document of each token; None if all are of one document.
        mask: the mask that `kernel` applies. None if it does anything else that `ring_attention`
            cannot do.

    Raises:
        ConfigError: if there are too few heads for `exchange_heads`, and `ring_attention` cannot
            compute it either.
    """
    tiles = token_tiles(*q.shape[:2])
    layout = step_layout()
    if tiles is None or layout is None:
        return None
    mesh, rules = layout
    heads = logical_axes("heads", mesh, rules)
    head_shards = math.prod(mesh.shape[axis] for axis in heads)
    if q.shape[2] % (head_shards * tiles.num_context) == 0:
        shards = head_shards * tiles.num_context
        k, v = (_with_copies(x, shards) for x in (k, v))
        return exchange_heads(kernel, q, k, v, segment_ids, tiles, heads)
    fact = (
        f"the {q.shape[2]} heads of attention are not divisible by the {head_shards} x "
        f"{tiles.num_context} devices of the mesh axes {(*heads, *tiles.context)}"
    )
    if mask is None:
        raise ConfigError(
            f"{fact}. Attention with dropout, a bias or an array as mask needs that: use a "
            "smaller context axis, or shardwise.attention with causal, window and segment_ids."
        )
    if q.shape[1] % (2 * tiles.num_context):
        raise ConfigError(
            f"{fact}, and sequences of {q.shape[1]} tokens are not divisible by 2 x "
            f"{tiles.num_context}. Use sequences of another length, or a smaller context axis."
        )
    k, v = (_with_copies(x, head_shards) for x in (k, v))
    return ring_attention(q, k, v, segment_ids, mask, tiles, heads)


def _with_copies(x: Array, shards: int) -> Array:
    """Return keys or values with copies of heads, so that `shards` devices divide them."""
    copies = shards // math.gcd(shards, x.shape[2])
    return jnp.repeat(x, copies, axis=2) if copies > 1 else x


def exchange_heads(
    kernel: Kernel,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    tiles: TokenTiles,
    heads: MeshAxes,
) -> Array:
    """Return attention, where each device has all tokens of a part of the heads.

    The output needs a constraint as well. Without it, XLA moves the scores instead of the heads.

    Args:
        kernel: computes attention.
        q: queries, (B, T, H, K).
        k: keys, (B, T, G, K).
        v: values, (B, T, G, K).
        segment_ids: (B, T), or None.
        tiles: how tokens are sharded outside of attention.
        heads: the mesh axes that shard heads outside of attention.
    """
    batch = tiles.batch or None
    by_heads = PartitionSpec(batch, None, (*heads, *tiles.context), None)
    by_tokens = PartitionSpec(batch, tiles.context, heads or None, None)
    # Without the first constraint, XLA would move single keys and values before it copies them.
    q, k, v = (with_sharding_constraint(x, by_tokens) for x in (q, k, v))
    q, k, v = (with_sharding_constraint(x, by_heads) for x in (q, k, v))
    if segment_ids is not None:
        segment_ids = with_sharding_constraint(segment_ids, PartitionSpec(batch, None))
    out = with_sharding_constraint(kernel(q, k, v, segment_ids), by_heads)
    sharded: Array = with_sharding_constraint(out, by_tokens)
    return sharded


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    mask: Mask,
    tiles: TokenTiles,
    heads: MeshAxes,
) -> Array:
    """Return attention, where each device passes its keys and values on to the next one.

    A causal mask leaves most work to the devices with the last tokens. Therefore each sequence is
    cut into twice as many chunks as there are devices, and a device works on one chunk from the
    front and one from the back.

    Args:
        q: queries, (B, T, H, K).
        k: keys, (B, T, G, K).
        v: values, (B, T, G, K).
        segment_ids: (B, T), or None.
        mask: which keys a query attends to.
        tiles: how tokens are sharded.
        heads: the mesh axes that shard heads.
    """
    batch = tiles.batch or None
    tokens = PartitionSpec(batch, tiles.context)
    spec = PartitionSpec(batch, tiles.context, heads or None, None)
    if segment_ids is None:
        segment_ids = jnp.zeros(q.shape[:2], jnp.int32)
    ring = jax.shard_map(
        partial(_ring, mask=mask, axes=tiles.context, size=tiles.num_context),
        in_specs=(spec, spec, spec, tokens),
        out_specs=spec,
        check_vma=False,
    )
    out: Array = checkpoint_name(ring(q, k, v, segment_ids), "attention")
    return out


def _ring(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    *,
    mask: Mask,
    axes: MeshAxes,
    size: int,
) -> Array:
    """Return the outputs for the tokens of this device."""
    dtype = q.dtype
    q, k, v, segments = (
        _to_front_and_back(x, axes, size)
        for x in (q * q.shape[3] ** -0.5, k, v, segments)
    )
    device = axis_index(axes)
    half = q.shape[1] // 2
    neighbors = [(i, (i + 1) % size) for i in range(size)]
    front, back, both = slice(None, half), slice(half, None), slice(None)

    def attend(source: Array, queries: slice, keys: slice, *arrays: Array) -> Partial:
        """Return attention of some queries to some keys of device `source`."""
        k, v, key_segments = (x[:, keys] for x in arrays)
        is_visible = mask.visible(
            _positions(device, size, half)[queries],
            _positions(source, size, half)[keys],
        )
        is_visible = is_visible & same_document(segments[:, queries], key_segments)
        return _attend(q[:, queries], k, v, is_visible)

    def pass_on(
        carry: tuple[Partial, Array, Array, Array], count: Array
    ) -> tuple[tuple[Partial, Array, Array, Array], None]:
        (out, log_total), *arrays = carry
        arrays = [ppermute(x, axes, neighbors) for x in arrays]
        source = (device - count) % size

        def from_earlier_device() -> Partial:
            """Both chunks of queries see the front chunk of the keys."""
            new = attend(source, both, front, *arrays)
            return _combine((out, log_total), new)

        def from_later_device() -> Partial:
            """The back chunk of the queries sees both chunks of the keys."""
            new = attend(source, back, both, *arrays)
            combined = _combine((out[:, back], log_total[..., back]), new)
            return (
                jnp.concatenate([out[:, front], combined[0]], axis=1),
                jnp.concatenate([log_total[..., front], combined[1]], axis=2),
            )

        if mask.causal:
            is_earlier = source < device
            result = jax.lax.cond(is_earlier, from_earlier_device, from_later_device)
        else:
            result = _combine((out, log_total), attend(source, both, both, *arrays))
        k, v, key_segments = arrays
        return (result, k, v, key_segments), None

    start = (attend(device, both, both, k, v, segments), k, v, segments)
    # The backward pass computes the scores of each step again, and keeps none of them.
    ((out, _), *_), _ = jax.lax.scan(
        jax.checkpoint(pass_on), start, jnp.arange(1, size)
    )
    return _to_natural_order(out.astype(dtype), axes, size)


def _positions(device: Array, size: int, half: int) -> Array:
    """Return the positions of the tokens that a device works on, see `_to_front_and_back`."""
    chunks = jnp.stack([device, 2 * size - 1 - device])
    return (chunks[:, None] * half + jnp.arange(half)).reshape(-1)


def _attend(q: Array, k: Array, v: Array, is_visible: Array) -> Partial:
    """Return attention to some keys. A query that sees none of them has an output of zeros."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(is_visible, scores, MASKED_SCORE)
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(is_visible, jnp.exp(scores - largest), 0)
    total = weights.sum(-1, keepdims=True)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    out = jnp.einsum(
        "bhts,bshk->bthk",
        (weights / total).astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    log_total = jnp.where(is_empty, MASKED_SCORE, jnp.log(total) + largest)
    return out, log_total[..., 0]


def _combine(a: Partial, b: Partial) -> Partial:
    """Return attention to the keys of both."""
    (out_a, total_a), (out_b, total_b) = a, b
    total = jnp.logaddexp(total_a, total_b)

    def weight(part: Array) -> Array:
        return jnp.exp(part - total).swapaxes(1, 2)[..., None]

    return out_a * weight(total_a) + out_b * weight(total_b), total


def _to_front_and_back(x: Array, axes: MeshAxes, size: int) -> Array:
    """Return chunks d and 2 * size - 1 - d of each sequence, where d is the device.

    In natural order, device d holds the chunks 2 * d and 2 * d + 1.
    """
    half = x.shape[1] // 2
    even = ppermute(x[:, :half], axes, _moves(size, 0))
    odd = ppermute(x[:, half:], axes, _moves(size, 1))
    # Chunk d arrives with the even chunks if d is even. Chunk 2 * size - 1 - d is then odd.
    is_even = axis_index(axes) % 2 == 0
    front, back = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
    return jnp.concatenate([front, back], axis=1)


def _to_natural_order(x: Array, axes: MeshAxes, size: int) -> Array:
    """Undo `_to_front_and_back`."""
    front, back = jnp.split(x, 2, axis=1)
    is_even = axis_index(axes) % 2 == 0
    even, odd = jnp.where(is_even, front, back), jnp.where(is_even, back, front)
    even = ppermute(even, axes, [(to, at) for at, to in _moves(size, 0)])
    odd = ppermute(odd, axes, [(to, at) for at, to in _moves(size, 1)])
    return jnp.concatenate([even, odd], axis=1)


def _moves(size: int, parity: int) -> list[tuple[int, int]]:
    """Return, for even or odd chunks, the device that holds each and the one that works on it."""
    chunks = [2 * device + parity for device in range(size)]
    return [
        (device, min(chunk, 2 * size - 1 - chunk))
        for device, chunk in enumerate(chunks)
    ]
