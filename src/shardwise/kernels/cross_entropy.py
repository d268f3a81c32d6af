"""The loss of a language model: cross entropy of the logits, whole or a part of them at a time.

For V words the logits of N tokens are the largest array of a small model's step, so what counts is how often they pass
through memory: written by the output layer, read and overwritten by their gradient once, read by the two products of the
backward pass. Where the loss is given what goes into the output layer, its exponentials are written instead of the logits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.axes import TENSOR
from shardwise.kernels import hopper
from shardwise.kernels.partitioning import by_rows, interpret, pl, triton
from shardwise.kernels.platform import platform

Array = jax.Array
COLUMNS = 4096  # of the logits that a program looks at at once


@jax.custom_vjp
def cross_entropy(logits: Array, labels: Array) -> Array:
    """Negative log-likelihood of each label (from 0 to V - 1), float32, whatever the dtype of the logits.

    Under differentiation a kernel on GPUs puts the gradient in the place of the logits as soon as it knows their sum. It is
    rounded to their dtype there, and scaled in the backward pass by what comes from above; nothing is left to do for a sum.
    """
    return _forward(logits, labels)[0]


def _forward(logits: Array, labels: Array) -> tuple[Array, Array]:
    log_total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return log_total - picked.astype(jnp.float32), log_total


def _gradient(logits: Array, labels: Array, log_total: Array) -> Array:
    """That of the sum of the losses, float32."""
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.exp(logits.astype(jnp.float32) - log_total[..., None]) - is_label


def _rows_are_whole() -> bool:
    """No mesh axis cuts the logits of a token, which the kernels hold or sum as a whole."""
    shape = jax.sharding.get_abstract_mesh().shape
    return all(shape.get(axis, 1) == 1 for axis in TENSOR)


def _forward_rule(logits: Array, labels: Array) -> tuple[Array, Any]:
    if platform() == "gpu" and _rows_are_whole():
        nats, gradient = fused_cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        )
        return nats.reshape(labels.shape), (gradient.reshape(logits.shape),)
    nats, log_total = _forward(logits, labels)
    return nats, (logits, labels, log_total)


def _backward_rule(saved: Any, g: Array) -> tuple[Array, None]:
    gradient = saved[0].astype(jnp.float32) if len(saved) == 1 else _gradient(*saved)
    return (gradient * g[..., None]).astype(saved[0].dtype), None


cross_entropy.defvjp(_forward_rule, _backward_rule)


def fused_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Logits (N, V) and labels (N,) -> losses (N,) and the gradient of their sum, in the place of the logits."""
    gradient, nats = by_rows(_fused, "n v, n -> n v, n", whole="v")(logits, labels)
    return nats, gradient


def _kernel(x_ref: Any, label_ref: Any, gradient_ref: Any, nats_ref: Any) -> None:
    row, width = pl.program_id(0), x_ref.shape[1]
    columns = min(COLUMNS, pl.next_power_of_2(width))
    label = label_ref[row]

    def part(i: Array) -> tuple[Array, Array]:
        column = i * columns + jnp.arange(columns)
        return column, triton.load(
            x_ref.at[row, column], mask=column < width, other=-jnp.inf
        ).astype(jnp.float32)

    def read(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = found
        _, x = part(i)
        higher = jnp.maximum(top, jnp.max(x))
        return higher, total * jnp.exp(top - higher) + jnp.sum(jnp.exp(x - higher))

    def write(i: Array, _: None) -> None:
        column, x = part(i)  # of which the cache still has most
        gradient = jnp.exp(x - log_total) - jnp.where(column == label, 1.0, 0.0)
        triton.store(
            gradient_ref.at[row, column], gradient.astype(gradient_ref.dtype), mask=column < width
        )

    picked = triton.load(x_ref.at[row, label]).astype(jnp.float32)
    top, total = jax.lax.fori_loop(
        0, pl.cdiv(width, columns), read, (jnp.float32(-jnp.inf), jnp.float32(0))
    )
    log_total = top + jnp.log(total)
    nats_ref[row] = log_total - picked
    jax.lax.fori_loop(0, pl.cdiv(width, columns), write, None)


def _fused(logits: Array, labels: Array) -> tuple[Array, Array]:
    if hopper.is_here() and hopper.holds_row(logits):
        return hopper.cross_entropy(logits, labels)
    shapes = (
        jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        jax.ShapeDtypeStruct(labels.shape, jnp.float32),
    )
    return pl.pallas_call(
        _kernel,
        out_shape=shapes,
        grid=(logits.shape[0],),
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret(),
        name="cross_entropy",
    )(logits, labels)


def linear_cross_entropy(features: Array, table: Array, labels: Array) -> Array:
    """`cross_entropy` of what goes into the output layer, (N, D) or (..., D), and of its weights, (V, D): on Hopper GPUs in fewer passes.

    There the product leaves the chip as exponentials, of the logits less that of the label: their sum is all that is missing, and goes
    into the backward pass as a number for each token. A label that is 60 nats less likely than other words counts as about that.
    """
    rows, flat = features.reshape(-1, features.shape[-1]), labels.reshape(-1)
    return (_fused_linear if _is_fused(rows, table) else _plain_linear)(rows, table, flat).reshape(
        labels.shape
    )


def _is_fused(features: Array, table: Array) -> bool:
    fits = features.dtype == table.dtype and hopper.can_multiply(features, table.shape[0])
    return fits and platform() == "gpu" and hopper.is_here() and _rows_are_whole()


def _logits(features: Array, table: Array) -> Array:
    return jax.lax.dot_general(features, table, (((1,), (1,)), ((), ())))


def _plain_linear(features: Array, table: Array, labels: Array) -> Array:
    return cross_entropy(_logits(features, table), labels)


@jax.custom_vjp
def _fused_linear(features: Array, table: Array, labels: Array) -> Array:
    """The value; differentiated, it is the rules."""
    return _plain_linear(features, table, labels)


def _linear_forward(features: Array, table: Array, labels: Array) -> tuple[Array, Any]:
    nats, gradient, scale = _nats_and_gradient(features, table, labels)
    return nats, (features, table, gradient, scale)


def _linear_backward(saved: Any, g: Array) -> tuple[Array, Array, None]:
    features, table, gradient, scale = saved
    return *_through_product(features, table, gradient, g * scale, table.dtype), None


_fused_linear.defvjp(_linear_forward, _linear_backward)


def _nats_and_gradient(features: Array, table: Array, labels: Array) -> tuple[Array, Array, Array]:
    """The losses, and what has to be multiplied by a number for each token to be the gradient of the logits: with those numbers."""
    if _is_fused(features, table):
        shares, total = by_rows(_shares, "n d, v d, n -> n v, n", whole="d v")(
            features, table, labels
        )
        return jnp.log(total), shares, 1 / total
    nats, saved = _forward_rule(_logits(features, table), labels)
    return nats, _backward_rule(saved, jnp.ones_like(nats))[0], jnp.ones_like(nats)


def _shares(features: Array, table: Array, labels: Array) -> tuple[Array, Array]:
    """How much likelier each word is than the label (for the label itself: what makes it the gradient), and the sum of that."""
    of_label = (features.astype(jnp.float32) * table[labels].astype(jnp.float32)).sum(1)
    if hopper.can_multiply(features, table.shape[0]):
        shares, total = hopper.product_exp(features, table, of_label)
    else:  # what one device holds may not be cut into tiles
        less = _logits(features, table).astype(jnp.float32) - of_label[:, None]
        shares = jnp.exp(jnp.minimum(less, hopper.CEILING))
        shares, total = shares.astype(features.dtype), shares.sum(1)
    return shares.at[jnp.arange(len(labels)), labels].set((1 - total).astype(shares.dtype)), total


def _through_product(
    features: Array, table: Array, gradient: Array, scale: Array, of_table: Any
) -> tuple[Array, Array]:
    """Gradients of features and table, the latter of a given dtype, from that of the logits, whose rows are still to be scaled."""
    weighted = (features * scale[:, None]).astype(features.dtype)
    to_table = jax.lax.dot_general(
        gradient, weighted, (((0,), (0,)), ((), ())), preferred_element_type=of_table
    )
    return ((gradient @ table) * scale[:, None]).astype(features.dtype), to_table


def chunked_cross_entropy(
    features: Array, table: Array, labels: Array, chunks: int, weights: Array | None = None
) -> Array:
    """The sum of `weights * cross_entropy(features @ table.T, labels)`, never holding more than one of `chunks` parts of the logits.

    Features (N, D), table (V, D), labels and weights (N,). Under differentiation the gradients of a part are computed while
    its logits are there, so nothing is computed twice: that is why the weights (default: ones) must be known here, and why
    there is one sum instead of a loss for each token. The gradient of the table is summed in float32.
    """
    if features.shape[0] % chunks:
        raise ValueError(f"{features.shape[0]} tokens are not divisible by {chunks} chunks")
    return _chunked(
        features,
        table,
        labels,
        jnp.ones(labels.shape, jnp.float32) if weights is None else weights,
        chunks,
    )


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(features: Array, table: Array, labels: Array, weights: Array, chunks: int) -> Array:
    def one(total: Array, part: Any) -> tuple[Array, None]:
        rows, labels, weights = part
        return total + (_plain_linear(rows, table, labels) * weights).sum(), None

    return jax.lax.scan(one, jnp.float32(0), _parts((features, labels, weights), chunks))[0]


def _chunked_forward(
    features: Array, table: Array, labels: Array, weights: Array, chunks: int
) -> tuple[Array, Any]:
    def one(sums: tuple[Array, Array], part: Any) -> tuple[Any, Any]:
        rows, labels, weights = part
        nats, gradient, scale = _nats_and_gradient(rows, table, labels)
        to_rows, to_table = _through_product(rows, table, gradient, weights * scale, jnp.float32)
        return (sums[0] + (nats * weights).sum(), sums[1] + to_table), (to_rows, nats)

    zeros = jnp.float32(0), jnp.zeros(table.shape, jnp.float32)
    (total, to_table), parts = jax.lax.scan(one, zeros, _parts((features, labels, weights), chunks))
    to_features, nats = (x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for x in parts)
    return total, (to_features, to_table.astype(table.dtype), nats)


def _chunked_backward(
    chunks: int, saved: tuple[Array, Array, Array], g: Array
) -> tuple[Array, Array, None, Array]:
    to_features, to_table, nats = saved
    return (
        to_features * g.astype(to_features.dtype),
        to_table * g.astype(to_table.dtype),
        None,
        nats * g,
    )


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _parts(arrays: tuple[Array, ...], chunks: int) -> tuple[Array, ...]:
    """Row i goes to part i % chunks, which moves no row off its device."""
    return tuple(
        x.reshape(x.shape[0] // chunks, chunks, *x.shape[1:]).swapaxes(0, 1) for x in arrays
    )
