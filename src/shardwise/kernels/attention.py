"""Causal attention by the kernel that suits the devices it is traced for, which need not be those of this machine.

Shapes: B rows, T tokens, H heads of queries, G heads of keys and values (H a multiple of G), K width of a head.

On TPUs JAX's own attention keeps scores of shape (B, H, T, T); `tpu_attention` runs the Pallas kernel that comes with JAX
("splash"), which keeps a block of them at a time. A kernel is opaque to XLA's partitioner, so it runs inside `jax.shard_map`.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardwise.axes import BATCH, TENSOR
from shardwise.kernels.platform import platform

Array = jax.Array
LANES = 128  # of a TPU's registers: widths and lengths of the kernel come in multiples of it
BLOCK = 512  # queries, and keys, that the kernel works on at once
PARTS = (
    4  # of the queries, on CPUs: three eighths of the work lie behind the last keys that they see
)
HIDDEN = -1e30  # the score of a key that a query must not see


def causal_attention(q: Array, k: Array, v: Array, segment_ids: Array | None = None) -> Array:
    """q (B, T, H, K), k and v (B, T, G, K) -> (B, T, H, K). Of several documents in a row, `segment_ids` (B, T) tell them apart.

    The result is named "attention" for policies of `jax.checkpoint`.
    """
    where, half = platform(), q.dtype in (jnp.bfloat16, jnp.float16)
    in_step = (
        not jax.sharding.get_abstract_mesh().empty
    )  # elsewhere nothing says how the kernel for TPUs is to be cut
    if where == "tpu" and in_step and q.shape[1] % LANES == 0:
        return tpu_attention(q, k, v, segment_ids)
    if where == "cpu":
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        return jax.jit(cpu_attention)(
            q, k, v, segment_ids
        )  # a call that `count_flops` knows by its name
    mask = (
        None
        if segment_ids is None
        else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    )  # (B, 1, T, T)
    implementation: Any = "cudnn" if where == "gpu" and half else None
    out = jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, implementation=implementation
    )
    return checkpoint_name(out, "attention")


@jax.custom_vjp
def cpu_attention(q: Array, k: Array, v: Array, segment_ids: Array | None = None) -> Array:
    """As `causal_attention`, for as many heads of keys as of queries, with a backward pass that suits XLA's products on CPUs.

    The queries come in parts, each of which looks at no keys behind its last.
    """
    return _cpu_forward(q, k, v, segment_ids)[0]


def _parts(length: int) -> list[tuple[int, int]]:
    edges = sorted({length * i // PARTS for i in range(PARTS + 1)})
    return list(pairwise(edges))


def _cpu_forward(q: Array, k: Array, v: Array, segment_ids: Array | None) -> tuple[Array, Any]:
    q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[3] ** -0.5, k, v))  # (B, H, T, K)
    parts = []
    for start, end in _parts(q.shape[2]):
        seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        if segment_ids is not None:
            seen = seen & (
                segment_ids[:, None, start:end, None] == segment_ids[:, None, None, :end]
            )
        scores = jnp.einsum(
            "bhtk,bhsk->bhts", q[:, :, start:end], k[:, :, :end], preferred_element_type=jnp.float32
        )
        scores += jnp.where(seen, 0, HIDDEN)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        weights = weights.astype(v.dtype)
        out = (
            jnp.einsum(
                "bhts,bhsk->bhtk", weights, v[:, :, :end], preferred_element_type=jnp.float32
            )
            / total
        )
        parts.append((weights, total, checkpoint_name(out.astype(v.dtype), "attention")))
    return jnp.concatenate([out.swapaxes(1, 2) for *_, out in parts], axis=1), (q, k, v, parts)


def _cpu_backward(saved: Any, grad: Array) -> tuple[Array, Array, Array, None]:
    """The weights are not divided by their totals: the gradient is, which is smaller."""
    q, k, v, parts = saved
    dq, dk, dv = [], jnp.zeros_like(grad), jnp.zeros_like(grad)
    for (start, end), (weights, total, out) in zip(_parts(q.shape[2]), parts, strict=True):
        g = (grad[:, start:end].swapaxes(1, 2) / total).astype(grad.dtype)
        to_weights = jnp.einsum(
            "bhtk,bhsk->bhts", g, v[:, :, :end], preferred_element_type=jnp.float32
        )
        to_scores = (
            weights * (to_weights - (g * out).sum(-1, keepdims=True, dtype=jnp.float32))
        ).astype(q.dtype)
        dq.append(
            (jnp.einsum("bhts,bhsk->bhtk", to_scores, k[:, :, :end]) * q.shape[3] ** -0.5).swapaxes(
                1, 2
            )
        )
        dk += _over_queries(to_scores, q[:, :, start:end], grad.shape[1])
        dv += _over_queries(weights, g, grad.shape[1])
    return jnp.concatenate(dq, axis=1), dk, dv, None


def _over_queries(scores: Array, x: Array, length: int) -> Array:
    """(B, H, T, S) and (B, H, T, K) -> (B, S, H, K), with zeros up to `length` keys.

    A product of matrices as they lie in memory, rows by columns, is what XLA has fast kernels for.
    """
    product = jnp.einsum("bhkt,bhts->bhks", x.swapaxes(2, 3), scores)
    return jnp.pad(
        product.transpose(0, 3, 1, 2), ((0, 0), (0, length - product.shape[3]), (0, 0), (0, 0))
    )


cpu_attention.defvjp(_cpu_forward, _cpu_backward)


def tpu_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None = None,
    *,
    batch: tuple[str, ...] = BATCH,
    heads: tuple[str, ...] = TENSOR,
    block: int = BLOCK,
    interpret: bool = False,
) -> Array:
    """As `causal_attention`, on TPUs; T must be a multiple of 128.

    Each device works on the rows and heads it holds: `batch` and `heads` name the mesh axes that split them. "attention" names all
    that the backward pass needs besides q, k and v: where a policy keeps that, the forward kernel does not run again.

    interpret: carry out the kernel on any device, slowly, to check its results.
    """
    if q.shape[1] % LANES:
        raise ValueError(
            f"tpu_attention takes lengths that are multiples of {LANES}, not {q.shape[1]}; pad the rows."
        )
    mesh = jax.sharding.get_abstract_mesh()
    rows, cut = (
        tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1) for axes in (batch, heads)
    )
    if q.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
        rows = ()  # the last rows of an evaluation: every device takes all of them
    pieces = math.prod(mesh.shape[axis] for axis in cut)
    if (
        k.shape[2] % pieces
    ):  # fewer heads of keys than devices: each device gets a copy of the one it needs
        k, v = (jnp.repeat(x, pieces // math.gcd(pieces, k.shape[2]), axis=2) for x in (k, v))
    kernel = partial(_local, block=block, interpret=interpret)
    if not rows and not cut:
        return kernel(q, k, v, segment_ids)
    spec, ids = (
        PartitionSpec(rows or None, None, cut or None, None),
        PartitionSpec(rows or None, None),
    )
    # Kernels do not say which axes their results vary over, so JAX cannot check it.
    return jax.shard_map(
        kernel, mesh=mesh, in_specs=(spec, spec, spec, ids), out_specs=spec, check_vma=False
    )(q, k, v, segment_ids)


def _local(
    q: Array, k: Array, v: Array, segment_ids: Array | None, *, block: int, interpret: bool
) -> Array:
    """The kernel for what one device holds."""
    # Here, because it takes 0.1 s that a start elsewhere than on a TPU need not wait for.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, num_heads, width = q.shape[1:]
    size = math.gcd(length, block)
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads)
    kernel = splash.make_splash_mha_single_device(
        mask=mask, block_sizes=sizes, residual_checkpoint_name="attention", interpret=interpret
    )
    missing = -width % LANES  # zeros at the end of each head change no product
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))).swapaxes(1, 2)
        for x in (q * width**-0.5, k, v)
    )  # (B, H, T, K)
    ids = () if segment_ids is None else (splash.SegmentIds(segment_ids, segment_ids),)
    with jax.named_scope(
        "causal"
    ):  # tells a plan that the kernel skips what lies above the diagonal
        return jax.vmap(kernel)(q, k, v, *ids).swapaxes(1, 2)[..., :width]
