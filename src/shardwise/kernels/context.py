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
from typing import TypeAlias, TypeVar

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
# exponentials of their scores, (B, T, H).
Partial: TypeAlias = tuple[Array, Array]
# Queries, (B, T, H, K), with their documents, (B, T), and positions, (1, T).
_Queries: TypeAlias = tuple[Array, Array, Array]
# The same, and the gradient of the output, (B, T, H, K), the logarithm of the sum of exponentials
# of all scores, (B, T, H), and the sum of output times gradient, (B, T, H).
_GradientQueries: TypeAlias = tuple[Array, Array, Array, Array, Array, Array]
# Keys and values, (B, T, G, K), with their documents, (B, T), and positions, (1, T).
_Keys: TypeAlias = tuple[Array, Array, Array, Array]
# What goes around the ring: keys, values and documents.
_Travelling: TypeAlias = tuple[Array, Array, Array]
_Residuals: TypeAlias = tuple[Array, Array, Array, Array, Array, Array]
Q = TypeVar("Q", _Queries, _GradientQueries)
K = TypeVar("K", bound=_Keys)


def context_attention(
    kernel: Kernel,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    mask: Mask | None,
) -> Array | None:
    """Return attention over sharded tokens, or None if no mesh axis shards them alike.

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
    # Keys of another sequence, as in cross attention, are not sharded like the queries.
    if tiles is None or layout is None or q.shape[1] != k.shape[1]:
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
    arrays = (
        _to_front_and_back(x, axes, size)
        for x in (q * q.shape[3] ** -0.5, k, v, segments)
    )
    return _to_natural_order(_around(mask, axes, size, *arrays), axes, size)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _around(
    mask: Mask,
    axes: MeshAxes,
    size: int,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
) -> Array:
    """Return the outputs of two chunks of tokens, see `_to_front_and_back`.

    The backward pass goes around the ring once more and computes the scores again. Without it, JAX
    would save keys, values and outputs of every step.
    """
    return _around_forward(mask, axes, size, q, k, v, segments)[0]


def _around_forward(
    mask: Mask,
    axes: MeshAxes,
    size: int,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
) -> tuple[Array, _Residuals]:
    device = axis_index(axes)
    queries = (q, segments, _positions(device, size, q.shape[1]))

    def add(
        carry: tuple[Partial, _Travelling], count: Array
    ) -> tuple[tuple[Partial, _Travelling], None]:
        result, (k, v, segments) = carry
        k, v, segments = (_pass_on(x, axes, size) for x in (k, v, segments))
        source = (device - count) % size
        keys = (k, v, segments, _positions(source, size, k.shape[1]))
        if mask.causal:
            is_earlier = source < device
            pairs = _pairs(queries, keys, is_earlier)
            new = _both_chunks(jax.vmap(partial(_attend, mask))(*pairs), is_earlier)
        else:
            new = _attend(mask, queries, keys)
        return (_combine(result, new), (k, v, segments)), None

    own = _attend(mask, queries, (k, v, segments, queries[2]))
    start = (own, (k, v, segments))
    ((out, log_total), _), _ = jax.lax.scan(add, start, jnp.arange(1, size))
    out = out.astype(q.dtype)
    return out, (q, k, v, segments, out, log_total)


def _around_backward(
    mask: Mask, axes: MeshAxes, size: int, residuals: _Residuals, grad: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, log_total = residuals
    device = axis_index(axes)
    correction = (grad * out).sum(-1, dtype=jnp.float32)
    positions = _positions(device, size, q.shape[1])
    queries = (q, segments, positions, grad, log_total, correction)

    def add(
        carry: tuple[Array, _Travelling, tuple[Array, Array]], count: Array
    ) -> tuple[tuple[Array, _Travelling, tuple[Array, Array]], None]:
        dq, *travelling = carry
        (k, v, segments), (dk, dv) = jax.tree.map(
            lambda x: _pass_on(x, axes, size), tuple(travelling)
        )
        source = (device - count) % size
        keys = (k, v, segments, _positions(source, size, k.shape[1]))
        if mask.causal:
            is_earlier = source < device
            pairs = _pairs(queries, keys, is_earlier)
            gradients = jax.vmap(partial(_attend_backward, mask))(*pairs)
            # The first pair has queries of the back chunk and keys of the front chunk.
            new_q = _sum_of_chunks(gradients[0], is_earlier, first_in_front=False)
            new_k, new_v = (
                _sum_of_chunks(x, is_earlier, first_in_front=True)
                for x in gradients[1:]
            )
        else:
            new_q, new_k, new_v = _attend_backward(mask, queries, keys)
        return (dq + new_q, (k, v, segments), (dk + new_k, dv + new_v)), None

    own = _attend_backward(mask, queries, (k, v, segments, queries[2]))
    start = (own[0], (k, v, segments), own[1:])
    (dq, _, grads), _ = jax.lax.scan(add, start, jnp.arange(1, size))
    # After the last step they are one device away from their keys and values.
    dk, dv = (_pass_on(x, axes, size) for x in grads)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_around.defvjp(_around_forward, _around_backward)


def _pass_on(x: Array, axes: MeshAxes, size: int) -> Array:
    """Return what the previous device of the ring has."""
    passed: Array = ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])
    return passed


def _positions(device: Array, size: int, length: int) -> Array:
    """Return the positions of the tokens that a device works on, (1, T).

    See `_to_front_and_back`.
    """
    half = length // 2
    chunks = jnp.stack([device, 2 * size - 1 - device])
    return (chunks[:, None] * half + jnp.arange(half)).reshape(1, length)


def _pairs(queries: Q, keys: K, is_earlier: Array) -> tuple[Q, K]:
    """Return the two pairs of chunks that attend to each other under a causal mask.

    Both chunks of queries see the front chunk of an earlier device. The back chunk of the queries
    sees both chunks of a later device. So the first pair is the same for both: queries in the back,
    keys in front. The second is front with front, or back with back.

    Args:
        queries: arrays (B, T, ...) that belong to the queries of this device.
        keys: arrays (B, T, ...) that belong to the keys of another device.
        is_earlier: whether the other device has an earlier front chunk.

    Returns:
        Both, as arrays (2, B, T / 2, ...).
    """

    def front(x: Array) -> Array:
        return x[:, : x.shape[1] // 2]

    def back(x: Array) -> Array:
        return x[:, x.shape[1] // 2 :]

    def second(x: Array) -> Array:
        return jnp.where(is_earlier, front(x), back(x))

    query_pairs: Q = jax.tree.map(lambda x: jnp.stack([back(x), second(x)]), queries)
    key_pairs: K = jax.tree.map(lambda x: jnp.stack([front(x), second(x)]), keys)
    return query_pairs, key_pairs


def _both_chunks(pairs: Partial, is_earlier: Array) -> Partial:
    """Return attention for both chunks of queries from that of `_pairs`."""
    (first_out, second_out), (first_total, second_total) = pairs
    nothing = jnp.zeros_like(second_out), jnp.full_like(second_total, MASKED_SCORE)
    to_front, to_back = (
        (
            jnp.where(is_there, second_out, nothing[0]),
            jnp.where(is_there, second_total, nothing[1]),
        )
        for is_there in (is_earlier, ~is_earlier)
    )
    in_back = _combine((first_out, first_total), to_back)
    out, total = (
        jnp.concatenate(chunks, axis=1)
        for chunks in zip(to_front, in_back, strict=True)
    )
    return out, total


def _sum_of_chunks(pairs: Array, is_earlier: Array, first_in_front: bool) -> Array:
    """Return gradients of both chunks from those of `_pairs`."""
    first, second = pairs
    front = jnp.where(is_earlier, second, 0)
    back = jnp.where(is_earlier, 0, second)
    chunks = [front + first, back] if first_in_front else [front, back + first]
    return jnp.concatenate(chunks, axis=1)


def _scores(mask: Mask, queries: _Queries, keys: _Keys) -> tuple[Array, Array]:
    """Return the scores of all heads, and which of them count; (B, H, queries, keys)."""
    q, query_segments, query_positions = queries
    k, _, key_segments, key_positions = keys
    is_visible = mask.visible(query_positions[0], key_positions[0])
    is_visible = is_visible & same_document(query_segments, key_segments)
    k = _for_all_heads(k, q)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
    return scores, is_visible


def _for_all_heads(x: Array, q: Array) -> Array:
    """Return keys or values (B, T, G, K) for the H heads of the queries."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _attend(mask: Mask, queries: _Queries, keys: _Keys) -> Partial:
    """Return attention to some keys. A query that sees none of them has an output of zeros."""
    scores, is_visible = _scores(mask, queries, keys)
    scores = jnp.where(is_visible, scores, MASKED_SCORE)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.where(is_visible, jnp.exp(scores - largest), 0)
    total = weights.sum(-1, keepdims=True)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    v = _for_all_heads(keys[1], queries[0])
    out = jnp.einsum(
        "bhts,bshk->bthk",
        (weights / total).astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    log_total = jnp.where(is_empty, MASKED_SCORE, jnp.log(total) + largest)
    return out, log_total[..., 0].swapaxes(1, 2)


def _attend_backward(
    mask: Mask, queries: _GradientQueries, keys: _Keys
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values, float32."""
    q, segments, positions, grad, log_total, correction = queries
    k, v, _, _ = keys
    scores, is_visible = _scores(mask, (q, segments, positions), keys)
    weights = jnp.exp(scores - log_total.swapaxes(1, 2)[..., None])
    weights = jnp.where(is_visible, weights, 0)
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
    dweights = einsum("bthk,bshk->bhts", grad, _for_all_heads(v, q))
    dscores = weights * (dweights - correction.swapaxes(1, 2)[..., None])
    dscores, weights = dscores.astype(q.dtype), weights.astype(q.dtype)
    dq = einsum("bhts,bshk->bthk", dscores, _for_all_heads(k, q))
    dk = einsum("bhts,bthk->bshk", dscores, q)
    dv = einsum("bhts,bthk->bshk", weights, grad)
    # Each key and value head belongs to several query heads.
    shape = (*k.shape[:3], q.shape[2] // k.shape[2], k.shape[3])
    return dq, dk.reshape(shape).sum(3), dv.reshape(shape).sum(3)


def _combine(a: Partial, b: Partial) -> Partial:
    """Return attention to the keys of both."""
    (out_a, total_a), (out_b, total_b) = a, b
    total = jnp.logaddexp(total_a, total_b)

    def weight(part: Array) -> Array:
        return jnp.exp(part - total)[..., None]

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
    front = jnp.where(is_even, even, odd)
    back = jnp.where(is_even, odd, even)
    return jnp.concatenate([front, back], axis=1)


def _to_natural_order(x: Array, axes: MeshAxes, size: int) -> Array:
    """Undo `_to_front_and_back`."""
    front, back = jnp.split(x, 2, axis=1)
    is_even = axis_index(axes) % 2 == 0
    even = jnp.where(is_even, front, back)
    odd = jnp.where(is_even, back, front)
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
