"""The loss of a language model: cross entropy of all logits, or of one chunk of them at a time.

The logits are the largest array in the step of a small model, so the time depends on how often they
pass through memory. The output layer writes them, the loss reads them once and overwrites them with
their gradient, and the two matmuls of the backward pass read this gradient. If the loss also knows
the input of the output layer (`linear_cross_entropy`), exponentials are written instead of logits.

Shapes: N tokens, D width, V vocabulary size.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from shardwise.axes import TENSOR
from shardwise.kernels import hopper
from shardwise.kernels.float8 import (
    GRADIENTS,
    matmul8,
    narrow,
    narrow_exactly,
    uses_float8,
)
from shardwise.kernels.lookup import count_from_end
from shardwise.kernels.partitioning import (
    Ref,
    Residuals,
    interpret,
    partitioned,
    pl,
    triton,
)
from shardwise.kernels.platform import platform, step_mesh
from shardwise.kernels.tokens import merge_tokens, split_tokens
from shardwise.tree import DType

Array = jax.Array

# Logits that a program of the Triton kernel works on at once.
COLUMNS = 4096
# In 8 bits, exponentials are multiplied by this number. They are relative to `_offset`: those of
# tokens with a probability above 1e-6 do not vanish, and those up to e**8.2 do not saturate.
EXPONENTIAL_SCALE = 16.0
# The offset of a token's exponentials depends on the largest of its logits for at least this many
# labels of the batch, if there are so many.
NUM_SAMPLED = 1024
LN_2 = math.log(2)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return the negative log-likelihood of each label, in nats.

    When this is differentiated on a GPU, a kernel replaces the logits by their gradient in the
    forward pass already, rounded to their dtype. The backward pass scales it by the gradient of the
    losses.

    Args:
        logits: (..., V), of any floating dtype.
        labels: (...), integers from 0 to V - 1. Negative ones count from the end. The loss of a
            label that does not exist is NaN, as that of Optax is.

    Returns:
        The losses (...), float32.

    Example:
        >>> cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]))
        Array([1.3862944, 1.3862944], dtype=float32)
    """
    labels, zero = _existing(labels, logits.shape[-1])
    nats: Array = _cross_entropy(logits, labels)
    return nats + zero


def _existing(labels: Array, size: int) -> tuple[Array, Array]:
    """Return labels from 0 to V - 1, and for each of them 0, or NaN if it did not exist."""
    labels = count_from_end(labels, size)
    existing = jnp.minimum(labels, size - 1)
    return existing, jnp.where(existing == labels, jnp.float32(0), jnp.nan)


@jax.custom_vjp
def _cross_entropy(logits: Array, labels: Array) -> Array:
    return _forward(logits, labels)[0]


def _forward(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the losses, and the logarithms of the sums of exponentials."""
    log_total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return log_total - label_logits.astype(jnp.float32), log_total


def _gradient(logits: Array, labels: Array, log_total: Array) -> Array:
    """Return the gradient of the sum of the losses, float32."""
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.exp(logits.astype(jnp.float32) - log_total[..., None]) - is_label


def _vocabulary_is_unsharded() -> bool:
    """Return whether each device has all logits of its tokens, as the kernels require."""
    mesh = step_mesh()
    return mesh is None or all(mesh.shape.get(axis, 1) == 1 for axis in TENSOR)


def _forward_rule(logits: Array, labels: Array) -> tuple[Array, Residuals]:
    """Save the gradient alone on GPUs; elsewhere logits, labels and sums."""
    if platform() == "gpu" and _vocabulary_is_unsharded():
        has_sequences = labels.ndim == 2
        nats, gradient = fused_cross_entropy(*_as_rows(has_sequences, logits, labels))
        shape = labels.shape
        gradient = _from_rows(has_sequences, gradient, shape)
        return _from_rows(has_sequences, nats, shape), (gradient,)
    nats, log_total = _forward(logits, labels)
    return nats, (logits, labels, log_total)


def _backward_rule(residuals: Residuals, g: Array) -> tuple[Array, None]:
    if len(residuals) == 1:
        gradient = residuals[0].astype(jnp.float32)
    else:
        gradient = _gradient(*residuals)
    return (gradient * g[..., None]).astype(residuals[0].dtype), None


_cross_entropy.defvjp(_forward_rule, _backward_rule)


def fused_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the losses and the gradient of their sum, computed by a GPU kernel.

    Args:
        logits: (N, V). Their memory is reused for the gradient.
        labels: (N,).

    Returns:
        The losses (N,), float32, and the gradient (N, V) of the dtype of the logits.
    """
    # The kernel for Hopper writes to a mutable array, which JAX cannot partition.
    local = _hopper if _is_on_hopper(logits) and _is_on_one_device() else _triton
    gradient, nats = partitioned(local, "n v, n -> n v, n", replicated="v")(
        logits, labels
    )
    return nats, gradient


def _is_on_hopper(logits: Array) -> bool:
    return hopper.is_available() and hopper.supports_cross_entropy(logits)


def _is_on_one_device() -> bool:
    """Return whether no array of this step can be sharded."""
    mesh = step_mesh()
    return (jax.device_count() if mesh is None else mesh.size) == 1


def _kernel(x_ref: Ref, label_ref: Ref, gradient_ref: Ref, nats_ref: Ref) -> None:
    """Read the logits of one token to sum them, and again to replace them by their gradient."""
    token = pl.program_id(0)
    width = x_ref.shape[1]
    columns = min(COLUMNS, pl.next_power_of_2(width))
    label = label_ref[token]

    def load(i: Array) -> tuple[Array, Array]:
        column = i * columns + jnp.arange(columns)
        x = triton.load(x_ref.at[token, column], mask=column < width, other=-jnp.inf)
        return column, x.astype(jnp.float32)

    def add_exponentials(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        maximum, total = carry
        _, x = load(i)
        new_maximum = jnp.maximum(maximum, jnp.max(x))
        scaled_total = total * jnp.exp(maximum - new_maximum)
        return new_maximum, scaled_total + jnp.sum(jnp.exp(x - new_maximum))

    def write_gradient(i: Array, _: None) -> None:
        # Most of these logits are still in the cache.
        column, x = load(i)
        gradient = jnp.exp(x - log_total) - jnp.where(column == label, 1.0, 0.0)
        triton.store(
            gradient_ref.at[token, column],
            gradient.astype(gradient_ref.dtype),
            mask=column < width,
        )

    label_logit = triton.load(x_ref.at[token, label]).astype(jnp.float32)
    start = jnp.float32(-jnp.inf), jnp.float32(0)
    maximum, total = jax.lax.fori_loop(
        0, pl.cdiv(width, columns), add_exponentials, start
    )
    log_total = maximum + jnp.log(total)
    nats_ref[token] = log_total - label_logit
    jax.lax.fori_loop(0, pl.cdiv(width, columns), write_gradient, None)


def _hopper(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the gradient and the losses of all tokens."""
    gradient, nats = hopper.cross_entropy(logits, labels)
    return gradient, nats


def _triton(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the gradient and the losses of the tokens of one device."""
    gradient, nats = pl.pallas_call(
        _kernel,
        out_shape=(
            jax.ShapeDtypeStruct(logits.shape, logits.dtype),
            jax.ShapeDtypeStruct(labels.shape, jnp.float32),
        ),
        grid=(logits.shape[0],),
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret(),
        name="cross_entropy",
    )(logits, labels)
    return gradient, nats


def linear_cross_entropy(features: Array, table: Array, labels: Array) -> Array:
    """Return `cross_entropy(features @ table.T, labels)`, in fewer passes on Hopper GPUs.

    There the matmul writes exponentials of the logits relative to the logit of the label. The
    gradient of the logits is these exponentials divided by their sum, and this division, one number
    per token, is left to the backward pass, which applies it to smaller arrays. Exponents are
    clipped at 60, so the loss of a label that is less likely by 60 nats than other tokens is about
    60 nats.

    Args:
        features: the input of the output layer, (..., D).
        table: the weights of the output layer, (V, D).
        labels: (...), as for `cross_entropy`.

    Returns:
        The losses in nats, (...), float32.
    """
    has_sequences = features.ndim == 3 and labels.ndim == 2
    labels, zero = _existing(labels, len(table))
    # Labels that are traced cannot index a NumPy array.
    table = jnp.asarray(table)
    rows, row_labels = _as_rows(has_sequences, features, labels)
    loss = _plain_linear
    if uses_float8():
        loss = _float8_linear
    elif _is_fused(rows, table):
        loss = _fused_linear
    nats = loss(rows, table, row_labels)
    return _from_rows(has_sequences, nats, labels.shape) + zero


def _as_rows(has_sequences: bool, features: Array, *others: Array) -> list[Array]:
    """Return features (..., D) and other values (...) of tokens with one row per token.

    Args:
        has_sequences: whether all arrays begin with (B, T).
        features: the input of the output layer, or its output.
        *others: labels, weights.
    """
    if has_sequences:
        return [merge_tokens(x) for x in (features, *others)]
    return [features.reshape(-1, features.shape[-1]), *(x.reshape(-1) for x in others)]


def _from_rows(has_sequences: bool, x: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_as_rows`: return values with one row per token in the shape of the labels."""
    if has_sequences:
        return split_tokens(x, *shape)
    return x.reshape(*shape, *x.shape[1:])


def _is_fused(features: Array, table: Array) -> bool:
    """Return whether `product_exp` computes the loss of features (N, D) and a table (V, D)."""
    return (
        features.dtype == table.dtype
        and hopper.supports_matmul(features, table.shape[0])
        and platform() == "gpu"
        and hopper.is_available()
        and _vocabulary_is_unsharded()
    )


def _logits(features: Array, table: Array, dtype: DType | None = None) -> Array:
    """Return the logits (N, V), in the dtype of the features or another one."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(features, table, dims, preferred_element_type=dtype)


def _exact_logits(features: Array, table: Array) -> Array:
    """Return the logits (N, V), float32.

    They are compared with those of `_label_logits`. If they were rounded to 16 bits, the loss of a
    label that is nearly certain could be negative, and its gradient far too large.
    """
    return _logits(features, table, jnp.dtype(jnp.float32))


def _label_logits(features: Array, table: Array, labels: Array) -> Array:
    """Return the logit of each label, (N,), float32."""
    rows = table[labels].astype(jnp.float32)
    return (features.astype(jnp.float32) * rows).sum(1)


def _plain_linear(features: Array, table: Array, labels: Array) -> Array:
    nats: Array = _cross_entropy(_logits(features, table), labels)
    return nats


@jax.custom_vjp
def _fused_linear(features: Array, table: Array, labels: Array) -> Array:
    """Return the losses. Only the forward and backward rules use the kernel."""
    return _plain_linear(features, table, labels)


def _linear_forward(
    features: Array, table: Array, labels: Array
) -> tuple[Array, Residuals]:
    nats, gradient, scale = _nats_and_gradient(features, table, labels)
    return nats, (features, table, gradient, scale)


def _linear_backward(residuals: Residuals, g: Array) -> tuple[Array, Array, None]:
    features, table, gradient, scale = residuals
    dfeatures, dtable = _matmul_backward(
        features, table, gradient, g * scale, table.dtype
    )
    return dfeatures, dtable, None


_fused_linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def _float8_linear(features: Array, table: Array, labels: Array) -> Array:
    """Return the losses, with a matmul of 8 bits for the gradient of the features.

    The logits use 16 bits. With a rounded table, the error of a logit is the same whenever similar
    features come again. Training may correct it in the table, which is then wrong for evaluations
    without rounding. See docs/float8.md for what was measured.

    The gradient of the table uses 16 bits too.
    """
    return _float8_forward(features, table, labels)[0]


def _float8_forward(
    features: Array, table: Array, labels: Array
) -> tuple[Array, Residuals]:
    is_on_hopper = platform() == "gpu" and hopper.is_available()
    call: Callable[..., tuple[Array, ...]] = _float8_exponentials
    if _vocabulary_is_unsharded():
        local = partial(_float8_exponentials, is_on_hopper=is_on_hopper)
        rule = "n d, v d, n, k -> n, n v, n v, n"
        call = partitioned(local, rule, replicated="d v k")
    # An argument, because a function that is partitioned must not have constants.
    factors = jnp.asarray([1, EXPONENTIAL_SCALE], jnp.float32)
    nats, *gradient = call(features, table, labels, factors)
    return nats, (nats, features, table, labels, *gradient)


def _float8_backward(residuals: Residuals, g: Array) -> tuple[Array, Array, None]:
    nats, features, table, labels, gradient, others8, total = residuals
    dtable = _table_gradient(features, gradient, g / total, table.dtype)
    # The gradient of the logits sums to 0, so the mean of the rows of the table does not change the
    # result. But the rows have much in common after training, and rounding that adds an error.
    mean = table.astype(jnp.float32).mean(0)
    table8, table_scale = narrow_exactly((table - mean).T)
    # The tensor cores of a Hopper GPU round sums, unless the precision is high. This sum is long.
    product = matmul8(
        others8,
        table8,
        ((1,), (1,)),
        1 / (table_scale * EXPONENTIAL_SCALE),
        features.dtype,
        precision=jax.lax.Precision.HIGHEST,
    )
    scale = g / _sum_of_narrow(others8, total, nats)
    # The probability of the label, minus 1.
    of_label = g * jnp.expm1(-nats)
    # The row of the label is rounded as all others are. If only the others were, their rounding
    # would not cancel on average over the labels: a bias in one direction, in every step.
    label_rows = narrow(table[labels] - mean, table_scale).astype(jnp.float32)
    of_label /= table_scale
    dfeatures = product * scale[:, None] + label_rows * of_label[:, None]
    return dfeatures.astype(features.dtype), dtable, None


_float8_linear.defvjp(_float8_forward, _float8_backward)


def _sum_of_narrow(others8: Array, total: Array, nats: Array) -> Array:
    """Return the sum of the exponentials of each token, (N,), as they are in 8 bits.

    It is their sum in 32 bits, unless one of them may be saturated. That is rare: the reference
    logit of a token is about its largest one. But all likely tokens may be missing among the labels
    of a batch. Then the array is read once more, to keep the sum of the probabilities.

    Args:
        others8: (N, V), times `EXPONENTIAL_SCALE`, and 0 at the label.
        total: their sum in 32 bits, with the label.
        nats: the losses (N,).
    """
    largest = float(jnp.finfo(GRADIENTS).max) / EXPONENTIAL_SCALE
    may_be_saturated = total > largest

    def read_again() -> Array:
        others = others8.astype(jnp.float32).sum(1) / EXPONENTIAL_SCALE
        of_label = total * jnp.exp(-nats)
        return jnp.where(may_be_saturated, others + of_label, total)

    sums: Array = jax.lax.cond(may_be_saturated.any(), read_again, lambda: total)
    return sums


def _float8_exponentials(
    features: Array,
    table: Array,
    labels: Array,
    factors: Array,
    *,
    is_on_hopper: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Return the losses, and the gradient of the logits in 16 and in 8 bits.

    Without the kernel, XLA can shard the vocabulary.

    Args:
        features: (N, D).
        table: (V, D).
        labels: (N,).
        factors: those of `hopper.product_exp8`.
        is_on_hopper: whether to use this kernel.

    Returns:
        The losses (N,), and with `total` (N,) as the last result: the gradient of the logits
        times `total`, (N, V), in the dtype of the features; the same in 8 bits times
        `EXPONENTIAL_SCALE`, and with 0 at the label.
    """
    label_logits = _label_logits(features, table, labels)
    offset = _offset(features, table, labels, label_logits)
    if is_on_hopper and hopper.supports_matmul(features, table.shape[0]):
        exponentials, total, others8 = hopper.product_exp8(
            features, table, offset, factors, dtype=GRADIENTS
        )
    else:
        exponents = _exact_logits(features, table) - offset[:, None]
        exponentials, total = _clipped_exp(exponents, features.dtype)
        others8 = narrow(exponentials, factors[1], GRADIENTS)
    nats = jnp.log(total) + offset - label_logits
    at_label = jnp.exp(label_logits - offset) - total
    gradient = _with_label(exponentials, labels, at_label)
    others8 = _with_label(others8, labels, jnp.zeros_like(total))
    return nats, gradient, others8, total


def _offset(features: Array, table: Array, labels: Array, label_logits: Array) -> Array:
    """Return a number for each token, (N,), that its exponentials are relative to.

    They must fit into 8 bits. So it is the logit of the label, or, if the label of another token
    has a larger one, about that: tokens that are likely anywhere are among the labels.

    Its distance from the logit of the label is a multiple of log(2). A shard of a batch has other
    labels to choose from, but its exponentials only differ by a power of two, so they are rounded
    to the same values. And the same context with another label is rounded in another way.
    """
    stride = max(1, len(labels) // NUM_SAMPLED)
    num_sampled = len(labels) // stride
    # Not a slice with a stride: on a mesh this one moves nothing.
    sample = labels[: num_sampled * stride].reshape(num_sampled, stride)[:, 0]
    largest = _logits(features, table[sample]).max(1).astype(jnp.float32)
    halvings = jnp.floor(jnp.maximum(largest - label_logits, 0) / LN_2)
    return label_logits + LN_2 * halvings


def _nats_and_gradient(
    features: Array, table: Array, labels: Array
) -> tuple[Array, Array, Array]:
    """Return the losses (N,), and the gradient of the logits: an array (N, V), a factor (N,)."""
    if _is_fused(features, table):
        rule = "n d, v d, n -> n v, n"
        gradient, total = partitioned(_exponentials, rule, replicated="d v")(
            features, table, labels
        )
        return jnp.log(total), gradient, 1 / total
    nats, residuals = _forward_rule(_logits(features, table), labels)
    return nats, _backward_rule(residuals, jnp.ones_like(nats))[0], jnp.ones_like(nats)


def _exponentials(features: Array, table: Array, labels: Array) -> tuple[Array, Array]:
    """Return the unscaled gradient of the logits, and its scale, on one device.

    The unscaled gradient is the probability of each token relative to that of the label, and
    `1 - total` at the label itself. Divided by the total, this is the softmax minus one-hot.
    """
    label_logits = _label_logits(features, table, labels)
    if hopper.supports_matmul(features, table.shape[0]):
        exponentials, total = hopper.product_exp(features, table, label_logits)
    else:
        # The tiles of the kernel divide the complete array, but not the shard of this device.
        exponents = _exact_logits(features, table) - label_logits[:, None]
        exponentials, total = _clipped_exp(exponents, features.dtype)
    return _with_label(exponentials, labels, 1 - total), total


def _clipped_exp(exponents: Array, dtype: DType) -> tuple[Array, Array]:
    """Return exponentials (N, V), and their sums (N,), as the kernels compute them."""
    exponentials = jnp.exp(jnp.minimum(exponents, hopper.MAX_EXPONENT))
    return exponentials.astype(dtype), exponentials.sum(1)


def _with_label(exponentials: Array, labels: Array, values: Array) -> Array:
    """Return exponentials (N, V) with a value for each token (N,) at its label."""
    token = jnp.arange(len(labels))
    # Without the promises, XLA would sort the indices in a deterministic step.
    return exponentials.at[token, labels].set(
        values.astype(exponentials.dtype),
        indices_are_sorted=True,
        unique_indices=True,
    )


def _matmul_backward(
    features: Array, table: Array, gradient: Array, scale: Array, table_dtype: DType
) -> tuple[Array, Array]:
    """Return the gradients of features (N, D) and table (V, D).

    The gradient of the logits is `gradient * scale[:, None]`, but the scale is applied to the
    smaller arrays before and after the matmuls.
    """
    dtable = _table_gradient(features, gradient, scale, table_dtype)
    return ((gradient @ table) * scale[:, None]).astype(features.dtype), dtable


def _table_gradient(
    features: Array, gradient: Array, scale: Array, dtype: DType
) -> Array:
    """Return the gradient of the table (V, D), see `_matmul_backward`."""
    scaled_features = (features * scale[:, None]).astype(features.dtype)
    return jax.lax.dot_general(
        gradient,
        scaled_features,
        (((0,), (0,)), ((), ())),
        preferred_element_type=dtype,
    )


def chunked_cross_entropy(
    features: Array,
    table: Array,
    labels: Array,
    chunks: int,
    weights: Array | None = None,
) -> Array:
    """Return the weighted sum of the losses, with the logits of only one chunk in memory at a time.

    When this is differentiated, the gradients of a chunk are computed while its logits exist, so
    nothing is computed twice. That is why the weights must be known here, and why the result is one
    sum instead of a loss for each token. The gradient of the table is summed in float32.

    Args:
        features: the input of the output layer, (B, T, D) or (N, D).
        table: the weights of the output layer, (V, D).
        labels: (B, T) or (N,), as for `cross_entropy`.
        chunks: the number of chunks. It must divide N.
        weights: like `labels`; ones by default.

    Returns:
        `(weights * cross_entropy(features @ table.T, labels)).sum()`, float32.

    Raises:
        ValueError: if `chunks` does not divide N.
    """
    if weights is None:
        weights = jnp.ones(labels.shape, jnp.float32)
    labels, zero = _existing(labels, len(table))
    table = jnp.asarray(table)
    absent = jnp.where(weights == 0, 0, zero).sum()
    has_sequences = features.ndim == 3 and labels.ndim == weights.ndim == 2
    features, labels, weights = _as_rows(has_sequences, features, labels, weights)
    num_tokens = features.shape[0]
    if num_tokens % chunks:
        raise ValueError(
            f"{num_tokens} tokens are not divisible by chunks={chunks}. Use a number of chunks "
            "that divides batch size times length."
        )
    return _chunked(features, table, labels, weights, chunks) + absent


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    features: Array, table: Array, labels: Array, weights: Array, chunks: int
) -> Array:
    def add_chunk(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, None]:
        features, labels, weights = chunk
        return total + (_plain_linear(features, table, labels) * weights).sum(), None

    inputs = _split((features, labels, weights), chunks)
    total: Array = jax.lax.scan(add_chunk, jnp.float32(0), inputs)[0]
    return total


def _chunked_forward(
    features: Array, table: Array, labels: Array, weights: Array, chunks: int
) -> tuple[Array, Residuals]:
    def add_chunk(
        sums: tuple[Array, Array], chunk: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        loss_sum, table_sum = sums
        features, labels, weights = chunk
        nats, gradient, scale = _nats_and_gradient(features, table, labels)
        dfeatures, dtable = _matmul_backward(
            features, table, gradient, weights * scale, jnp.dtype(jnp.float32)
        )
        return (loss_sum + (nats * weights).sum(), table_sum + dtable), (
            dfeatures,
            nats,
        )

    zeros = jnp.float32(0), jnp.zeros(table.shape, jnp.float32)
    inputs = _split((features, labels, weights), chunks)
    (total, dtable), outputs = jax.lax.scan(add_chunk, zeros, inputs)
    dfeatures, nats = (x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for x in outputs)
    return total, (dfeatures, dtable.astype(table.dtype), nats)


def _chunked_backward(
    chunks: int, residuals: Residuals, g: Array
) -> tuple[Array, Array, None, Array]:
    dfeatures, dtable, nats = residuals
    return (
        dfeatures * g.astype(dfeatures.dtype),
        dtable * g.astype(dtable.dtype),
        None,
        nats * g,
    )


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _split(arrays: tuple[Array, ...], chunks: int) -> tuple[Array, ...]:
    """Put token i into chunk `i % chunks`, so that every token stays on its device."""
    return tuple(
        x.reshape(x.shape[0] // chunks, chunks, *x.shape[1:]).swapaxes(0, 1)
        for x in arrays
    )
