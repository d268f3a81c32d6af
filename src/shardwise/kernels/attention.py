"""Attention with the kernel that suits the platform that it is traced for.

Shapes: B sequences, T tokens, H query heads, G key and value heads (H is a multiple of G), K head
width.

- Hopper GPUs: the kernels in `kernels.flash`. Other GPUs, and shapes that they do not take:
  cuDNN, called through `jax.nn.dot_product_attention`.
- TPUs: the Pallas kernel "splash attention" that comes with JAX. JAX's own attention would keep the
  scores, (B, H, T, T), in memory; the kernel keeps one block of them at a time.
- CPUs: plain JAX with a custom backward pass.

On a mesh that shards tokens, `context_attention` brings all tokens of some heads together first.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardwise.axes import BATCH, CONTEXT, TENSOR
from shardwise.kernels import flash
from shardwise.kernels.context import context_attention
from shardwise.kernels.mask import MASKED_SCORE, Mask, same_document
from shardwise.kernels.platform import has_gpu_kernels, platform, step_mesh
from shardwise.sharding import mapped_axes, step_layout

Array = jax.Array

# Lanes of a TPU's vector registers: the kernel takes head widths and lengths that are multiples.
LANES = 128

# Queries, and keys, that the TPU kernel works on at once.
BLOCK = 512

# Blocks of queries on CPUs. With 4 blocks, 3/8 of all scores are not computed, because those keys
# come after the last query of the block.
QUERY_BLOCKS = 4

# For each block of queries: exponentials of the scores, their sums, and the output of the block.
_Blocks: TypeAlias = list[tuple[Array, Array, Array]]
_CpuResiduals: TypeAlias = tuple[Array, Array, Array, _Blocks]


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array | None = None
) -> Array:
    """Return causal attention.

    The result has the name `"attention"` for the policies of `jax.checkpoint`.

    Args:
        q: queries, (B, T, H, K).
        k: keys, (B, T, G, K).
        v: values, (B, T, G, K).
        segment_ids: (B, T), the document of each token when several documents are packed into a
            sequence. Tokens attend to their own document only.

    Returns:
        The outputs of the heads, (B, T, H, K).
    """
    return attention(q, k, v, segment_ids=segment_ids)


def supports_joined_kv(queries: jax.ShapeDtypeStruct) -> bool:
    """Return whether `causal_attention_joined_kv` works here, with as many heads of each kind.

    Args:
        queries: shape and dtype of the queries, (B, T, H, K).
    """
    mesh = step_mesh()
    if mesh is None:
        is_unsharded = jax.device_count() == 1
    else:
        # Each device has all heads and tokens of its sequences.
        used = {axis for axis, size in mesh.shape.items() if size > 1}
        is_unsharded = used <= set(_batch_axes())
    return has_gpu_kernels() and is_unsharded and flash.supports(queries, queries)


def causal_attention_joined_kv(
    q: Array, kv: Array, segment_ids: Array | None = None
) -> Array:
    """Return `causal_attention` of keys and values from a single matmul.

    Its output need not be split, and the gradients need not be joined.

    Args:
        q: queries, (B, T, H, K), see `supports_joined_kv`.
        kv: the keys of all heads, and then the values, (B, T, 2 * H, K).
        segment_ids: as for `causal_attention`.
    """
    return attention_on_shards(_joined_attention, q, kv, None, segment_ids)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Array | None = None,
) -> Array:
    """Return attention, on any mesh, also if a context axis shards the tokens.

    On a context axis, heads are exchanged for tokens with an all-to-all. If there are fewer heads
    than devices in the context and tensor axes, keys and values travel around a ring instead.

    Args:
        query: (B, T, H, K).
        key: (B, T, G, K). H is a multiple of G.
        value: (B, T, G, K).
        causal: whether a token attends to itself and earlier tokens only.
        window: a token attends to itself and `window - 1` tokens before it, and also after it if
            not `causal`. None does not limit it.
        segment_ids: (B, T), the document of each token when several documents are packed into a
            sequence. Tokens attend to their own document only.

    Returns:
        The outputs of the heads, (B, T, H, K).

    Raises:
        ValueError: if `window` is less than 1.
        ConfigError: if the mesh cannot divide heads or tokens.

    Example:
        >>> q = k = v = jnp.ones((2, 16, 4, 8))
        >>> attention(q, k, v).shape
        (2, 16, 4, 8)
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window}; it must be at least 1, or None.")
    mask = Mask(causal, window)
    kernel = partial(_attention, mask=mask)
    out = context_attention(kernel, query, key, value, segment_ids, mask)
    return kernel(query, key, value, segment_ids) if out is None else out


def attention_fn(query: Array, key: Array, value: Array, **options: object) -> Array:
    """Return attention for `nnx.MultiHeadAttention(attention_fn=shardwise.attention_fn)`.

    It is `nnx.dot_product_attention`, with the tokens that a context axis shards brought together.

    Args:
        query: (B, T, H, K).
        key: (B, T, H, K).
        value: (B, T, H, K).
        **options: the options of `nnx.dot_product_attention`.

    Raises:
        ConfigError: if the mesh cannot divide heads or tokens.
    """

    def kernel(q: Array, k: Array, v: Array, _: Array | None) -> Array:
        out: Array = nnx.dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
        return out

    is_plain = all(options.get(name) is None for name in ("bias", "mask", "module"))
    has_dropout = options.get("dropout_rate") and not options.get("deterministic")
    mask = (
        Mask(bool(options.get("is_causal"))) if is_plain and not has_dropout else None
    )
    out = None
    # Queries and keys of different lengths are not sharded alike.
    if query.ndim == 4 and query.shape[1] == key.shape[1]:
        out = context_attention(kernel, query, key, value, None, mask)
    return kernel(query, key, value, None) if out is None else out


def _attention(
    q: Array, k: Array, v: Array, segment_ids: Array | None, *, mask: Mask
) -> Array:
    """Return attention on devices that hold all tokens of their sequences."""
    where = platform()
    is_half = q.dtype in (jnp.bfloat16, jnp.float16)
    # Outside a step no mesh says how to shard the TPU kernel.
    if where == "tpu" and step_mesh() is not None and q.shape[1] % LANES == 0:
        return tpu_attention(q, k, v, segment_ids, mask=mask)
    # Outside a step, arrays on several devices may be sharded in any way.
    is_placed = step_mesh() is not None or jax.device_count() == 1
    if has_gpu_kernels() and is_placed and flash.supports(q, k):
        kernel = partial(_flash_attention, mask=mask)
        return attention_on_shards(kernel, q, k, v, segment_ids)
    if where == "cpu" and mask == Mask():
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        # `count_flops` recognizes this call by its name.
        out: Array = jax.jit(cpu_attention)(q, k, v, segment_ids)
        return out
    is_same = None if segment_ids is None else same_document(segment_ids, segment_ids)
    # cuDNN has no windows that reach forward.
    is_supported = is_half and (mask.causal or mask.window is None)
    implementation: Literal["cudnn"] | None = (
        "cudnn" if where == "gpu" and is_supported else None
    )
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=is_same,
        is_causal=mask.causal,
        local_window_size=mask.local_window,
        implementation=implementation,
    )
    named: Array = checkpoint_name(out, "attention")
    return named


@jax.custom_vjp
def cpu_attention(
    q: Array, k: Array, v: Array, segment_ids: Array | None = None
) -> Array:
    """Return causal attention, with a backward pass that suits the matmuls of XLA on CPUs.

    The queries are processed in blocks, and each block computes only the scores of the keys up to
    its last query.

    Args:
        q: queries, (B, T, H, K).
        k: keys, (B, T, H, K): one head for each query head.
        v: values, (B, T, H, K).
        segment_ids: as for `causal_attention`.

    Returns:
        The outputs of the heads, (B, T, H, K).
    """
    return _cpu_forward(q, k, v, segment_ids)[0]


def _query_blocks(length: int) -> list[tuple[int, int]]:
    """Return the first and one past the last query of each block."""
    edges = sorted({length * i // QUERY_BLOCKS for i in range(QUERY_BLOCKS + 1)})
    return list(pairwise(edges))


def _cpu_forward(
    q: Array, k: Array, v: Array, segment_ids: Array | None
) -> tuple[Array, _CpuResiduals]:
    q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[3] ** -0.5, k, v))  # (B, H, T, K)
    blocks: _Blocks = []
    for start, end in _query_blocks(q.shape[2]):
        is_visible = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        if segment_ids is not None:
            query_segments = segment_ids[:, None, start:end, None]
            is_visible = is_visible & (
                query_segments == segment_ids[:, None, None, :end]
            )
        scores = jnp.einsum(
            "bhtk,bhsk->bhts",
            q[:, :, start:end],
            k[:, :, :end],
            preferred_element_type=jnp.float32,
        )
        scores += jnp.where(is_visible, 0, MASKED_SCORE)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        weights = weights.astype(v.dtype)
        weighted_sum = jnp.einsum(
            "bhts,bhsk->bhtk",
            weights,
            v[:, :, :end],
            preferred_element_type=jnp.float32,
        )
        out = weighted_sum / total
        blocks.append(
            (weights, total, checkpoint_name(out.astype(v.dtype), "attention"))
        )
    outputs = [out.swapaxes(1, 2) for _, _, out in blocks]
    return jnp.concatenate(outputs, axis=1), (q, k, v, blocks)


def _cpu_backward(
    residuals: _CpuResiduals, grad: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, blocks = residuals
    dq = []
    dk = jnp.zeros_like(grad)
    dv = jnp.zeros_like(grad)
    for (start, end), (weights, total, out) in zip(
        _query_blocks(q.shape[2]), blocks, strict=True
    ):
        # The saved weights are not normalized. It is cheaper to divide the gradient, which is
        # smaller.
        g = (grad[:, start:end].swapaxes(1, 2) / total).astype(grad.dtype)
        dweights = jnp.einsum(
            "bhtk,bhsk->bhts", g, v[:, :, :end], preferred_element_type=jnp.float32
        )
        correction = (g * out).sum(-1, keepdims=True, dtype=jnp.float32)
        dscores = (weights * (dweights - correction)).astype(q.dtype)
        dq_block = (
            jnp.einsum("bhts,bhsk->bhtk", dscores, k[:, :, :end]) * q.shape[3] ** -0.5
        )
        dq.append(dq_block.swapaxes(1, 2))
        dk += _sum_over_queries(dscores, q[:, :, start:end], grad.shape[1])
        dv += _sum_over_queries(weights, g, grad.shape[1])
    return jnp.concatenate(dq, axis=1), dk, dv, None


def _sum_over_queries(scores: Array, x: Array, length: int) -> Array:
    """Multiply (B, H, T, S) and (B, H, T, K) to (B, S, H, K), padded with zeros to `length` keys.

    Both matrices are multiplied as they are stored in memory, because XLA has fast CPU kernels for
    this order only.
    """
    result = jnp.einsum("bhkt,bhts->bhks", x.swapaxes(2, 3), scores)
    padding = (0, 0), (0, length - result.shape[3]), (0, 0), (0, 0)
    return jnp.pad(result.transpose(0, 3, 1, 2), padding)


cpu_attention.defvjp(_cpu_forward, _cpu_backward)


def tpu_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None = None,
    *,
    batch: tuple[str, ...] | None = None,
    heads: tuple[str, ...] = (*TENSOR, *CONTEXT),
    block: int = BLOCK,
    interpret: bool = False,
    mask: Mask = Mask(),  # noqa: B008
) -> Array:
    """Return attention, computed by the splash attention kernel for TPUs.

    The name `"attention"` covers all values that the backward pass needs in addition to q, k and v.
    If a policy of `jax.checkpoint` saves them, the forward kernel does not run again.

    Args:
        q: queries, (B, T, H, K). T must be a multiple of 128.
        k: keys, (B, T, G, K).
        v: values, (B, T, G, K).
        segment_ids: as for `causal_attention`.
        batch: the mesh axes that shard the sequences; None for those of the step.
        heads: the mesh axes that shard the heads.
        block: the number of queries, and of keys, that the kernel works on at once.
        interpret: interpret the kernel on any device, slowly, in order to test it.
        mask: which keys a query attends to.

    Returns:
        The outputs of the heads, (B, T, H, K).

    Raises:
        ValueError: if T is not a multiple of 128.
    """
    if q.shape[1] % LANES:
        raise ValueError(
            f"sequence length {q.shape[1]} is not a multiple of {LANES}, as tpu_attention "
            "requires. Pad the sequences."
        )
    kernel = partial(_splash_attention, mask=mask, block=block, interpret=interpret)
    return attention_on_shards(kernel, q, k, v, segment_ids, batch=batch, heads=heads)


def _batch_axes() -> tuple[str, ...]:
    """Return the names of mesh axes that shard the sequences of the step."""
    layout = step_layout()
    return BATCH if layout is None else layout[1].batch


def attention_on_shards(
    kernel: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array | None,
    segment_ids: Array | None,
    *,
    batch: tuple[str, ...] | None = None,
    heads: tuple[str, ...] = (*TENSOR, *CONTEXT),
) -> Array:
    """Call an attention kernel on each device, with its own sequences and heads.

    XLA cannot partition a kernel, so it runs inside `jax.shard_map`.

    Args:
        kernel: a function of the four arrays.
        q: queries, (B, T, H, K).
        k: keys, (B, T, G, K).
        v: values, (B, T, G, K); None if `k` has them too, and no axis shards the heads.
        segment_ids: (B, T), or None.
        batch: the mesh axes that shard the sequences; None for those of the step.
        heads: the mesh axes that shard the heads.

    Returns:
        The outputs of the heads, (B, T, H, K).
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch = _batch_axes() if batch is None else batch
    batch_axes = tuple(axis for axis in batch if mesh.shape.get(axis, 1) > 1)
    head_axes = tuple(axis for axis in heads if mesh.shape.get(axis, 1) > 1)
    if q.shape[0] % math.prod(mesh.shape[axis] for axis in batch_axes):
        # The last batch of an evaluation: every device computes all of its sequences.
        batch_axes = ()
    head_shards = math.prod(mesh.shape[axis] for axis in head_axes)
    if v is not None and k.shape[2] % head_shards:
        # There are fewer key heads than devices, so each device gets a copy of the one it needs.
        copies = head_shards // math.gcd(head_shards, k.shape[2])
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    # In a pipeline, `vmap` adds its axes to the `shard_map`.
    if not batch_axes and not head_axes and not mapped_axes():
        return kernel(q, k, v, segment_ids)
    spec = PartitionSpec(batch_axes or None, None, head_axes or None, None)
    segment_spec = PartitionSpec(batch_axes or None, None)
    sharded_kernel = jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=(spec, spec, spec, segment_spec),
        out_specs=spec,
        # Kernels do not declare which axes their results vary over, so JAX cannot check it.
        check_vma=False,
    )
    return sharded_kernel(q, k, v, segment_ids)


def _joined_attention(
    q: Array, kv: Array, _: Array | None, segment_ids: Array | None
) -> Array:
    """Run the kernels on the sequences of one device."""
    return flash.flash_attention(q, (kv,), segment_ids, Mask())


def _flash_attention(
    q: Array, k: Array, v: Array, segment_ids: Array | None, *, mask: Mask
) -> Array:
    """Run the kernels on the sequences and heads of one device."""
    return flash.flash_attention(q, (k, v), segment_ids, mask)


def _splash_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    *,
    mask: Mask,
    block: int,
    interpret: bool,
) -> Array:
    """Run the kernel on the sequences and heads of one device."""
    # Imported here because it takes 0.1 s, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    length, num_heads, width = q.shape[1:]
    size = math.gcd(length, block)
    block_sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    shape = length, length
    head_mask: masks.Mask
    if mask.local_window is not None:
        head_mask = masks.LocalMask(shape, mask.local_window, 0)
    else:
        head_mask = masks.CausalMask(shape) if mask.causal else masks.FullMask(shape)
    kernel = splash.make_splash_mha_single_device(
        mask=masks.MultiHeadMask([head_mask] * num_heads),
        block_sizes=block_sizes,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    # Zeros at the end of each head change neither scores nor outputs.
    padding = (0, 0), (0, 0), (0, 0), (0, -width % LANES)
    q, k, v = (
        jnp.pad(x, padding).swapaxes(1, 2) for x in (q * width**-0.5, k, v)
    )  # (B, H, T, K)
    ids = () if segment_ids is None else (splash.SegmentIds(segment_ids, segment_ids),)
    # From this name, a plan knows that the kernel skips the scores above the diagonal.
    with jax.named_scope("causal" if mask.causal else "full"):
        out: Array = jax.vmap(kernel)(q, k, v, *ids)
        return out.swapaxes(1, 2)[..., :width]
