"""Layer norm that also returns its input, with one kernel forward and one backward on GPUs.

XLA splits the backward pass of a layer norm into several kernels that each read the activations
again: 5.7 ms of a 63 ms step of GPT-2 124M on an H200, where one read and one write of every tensor
takes 1.8 ms. Here the residual stream passes through the function, so the backward kernel also adds
the two gradients that meet at `x`.

The bias of the preceding layer can be added here, too (`pending`). Its gradient is a sum over
all tokens, which would be another pass over memory. The backward kernel of the norm reads the same
values anyway, so it computes this sum as well.

Shapes: N tokens, D width.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.kernels.float8 import WEIGHTS, Narrowed, narrow, uses_float8
from shardwise.kernels.partitioning import (
    Ref,
    Residuals,
    interpret,
    partitioned,
    pl,
    triton,
)
from shardwise.kernels.platform import has_gpu_kernels, platform

Array = jax.Array
Result = TypeVar("Result")

# A program of the GPU kernels holds a complete token in registers, so the width is limited.
MAX_WIDTH = 8192

# Number of values that a program of the forward kernel normalizes.
TILE = 2048

# The backward kernel starts about this many programs. Each of them loops over many tokens and adds
# up the gradients of scale and biases on the way.
PROGRAMS = 1024

# What a layer leaves to the next norm: a bias (D,), or the output of a branch (N, D) and its bias.
Pending: TypeAlias = Array | tuple[Array, Array] | None
_FusedResiduals: TypeAlias = tuple[Array, Pending, Array]


class ResidualNorm(nnx.LayerNorm):
    """Layer norm of a residual stream that also returns the stream."""

    def __call__(  # type: ignore[override]
        self, x: Array, pending: Pending = None
    ) -> tuple[Array, Array]:
        """Normalize a stream of tokens.

        Args:
            x: the residual stream, (N, D).
            pending: what the preceding layer has left to be added to the stream.

        Returns:
            The stream with `pending` added, and its normalized form, both (N, D).
        """
        assert self.scale is not None
        assert self.bias is not None
        return residual_norm(x, pending, self.scale[...], self.bias[...], self.epsilon)

    def for_matmul(
        self, x: Array, pending: Pending = None
    ) -> tuple[Array, Array | Narrowed]:
        """Return the results of a call, the second one in the form that the next matmul takes.

        That is an array, or a `Narrowed` one if matmuls use 8 bits.
        """
        if not uses_float8():
            return self(x, pending)
        if has_gpu_kernels() and x.shape[1] <= MAX_WIDTH:
            assert self.scale is not None
            assert self.bias is not None
            weights = self.scale[...], self.bias[...], self.epsilon
            x, normalized, eight = fused_layer_norm(x, pending, *weights, True)
        else:
            x, normalized = self(x, pending)
            eight = narrow(normalized)
        return x, Narrowed(normalized, jax.lax.stop_gradient(eight))


def residual_norm(
    x: Array,
    pending: Pending,
    scale: Array,
    bias: Array,
    epsilon: float,
    *,
    has_barrier: bool = True,
) -> tuple[Array, Array]:
    """Return the stream `x + pending` and its layer norm.

    Args:
        x: the residual stream, (N, D).
        pending: see `Pending`.
        scale: (D,).
        bias: (D,).
        epsilon: added to the variance.
        has_barrier: whether the stream passes through `stream_barrier` on CPUs.

    Returns:
        Two arrays (N, D) of the dtype of `x`.
    """
    if has_gpu_kernels() and x.shape[1] <= MAX_WIDTH:
        x, normalized = fused_layer_norm(x, pending, scale, bias, epsilon)
        return x, normalized
    x = add_pending(x, pending)
    if platform() != "cpu":
        return saving_layer_norm(x, scale, bias, epsilon)
    if not has_barrier:
        return x, _cpu_normalize(x, scale, bias, epsilon)
    return cpu_layer_norm(x, scale, bias, epsilon)


def add_pending(x: Array, pending: Pending) -> Array:
    """Return the stream `x` (N, D) with everything that is pending."""
    if pending is None:
        return x
    if isinstance(pending, tuple):
        branch, bias = pending
        # In this order, a matmul of 8 bits adds both in its epilogue.
        return x + (branch + bias)
    return x + pending


def plain_layer_norm(
    x: Array, scale: Array, bias: Array, epsilon: float
) -> tuple[Array, Array]:
    """Return `x` (N, D) and its layer norm, computed in float32 and rounded to the dtype of `x`."""
    centered = x.astype(jnp.float32) - x.astype(jnp.float32).mean(-1, keepdims=True)
    inverse_std = jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + epsilon)
    return x, (centered * inverse_std * scale + bias).astype(x.dtype)


def saving_layer_norm(
    x: Array, scale: Array, bias: Array, epsilon: float
) -> tuple[Array, Array]:
    """Return the result of `plain_layer_norm`, and keep only `x` for the backward pass.

    JAX alone would keep the centered and the normalized tokens too, in float32: for 16-bit tokens
    five times the memory.
    """
    layer_norm = partial(plain_layer_norm, epsilon=epsilon)
    return x, computed_again(layer_norm)(x, scale, bias)[1]


def computed_again(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function, computed again in the backward pass from its arguments."""
    # Barriers against common subexpressions would keep XLA from fusing it with its neighbors.
    return jax.checkpoint(function, prevent_cse=False)


@jax.jit
def stream_barrier(x: Array) -> Array:
    """Make XLA write the residual stream to memory once.

    Without it, XLA for CPUs computes the stream again from the first layer in every fusion that
    reads it, so the work grows with the square of the number of layers. `COMPILER_OPTIONS`
    keeps the barrier until after fusion; the step recognizes it by the name of this function.
    """
    written: Array = jax.lax.optimization_barrier(x)
    return written


def cpu_layer_norm(
    x: Array, scale: Array, bias: Array, epsilon: float
) -> tuple[Array, Array]:
    """Return the result of `plain_layer_norm`, with a backward pass that suits CPUs.

    It makes fewer passes over memory, which saves 5 % of a step of the default recipe.
    """
    x = stream_barrier(x)
    return x, _cpu_normalize(x, scale, bias, epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cpu_normalize(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    return plain_layer_norm(x, scale, bias, epsilon)[1]


def _cpu_forward(
    x: Array, scale: Array, bias: Array, epsilon: float
) -> tuple[Array, Residuals]:
    mean = x.astype(jnp.float32).mean(-1, keepdims=True)
    variance = jnp.square(x.astype(jnp.float32) - mean).mean(-1, keepdims=True)
    inverse_std = jax.lax.rsqrt(variance + epsilon)
    normalized = (x.astype(jnp.float32) - mean) * inverse_std * scale + bias
    return normalized.astype(x.dtype), (x, scale, mean, inverse_std)


def _cpu_backward(
    epsilon: float, residuals: Residuals, grad: Array
) -> tuple[Array, Array, Array]:
    """Compute the sums over a token as matmuls with the scale, so that each array is read once."""
    x, scale, mean, inverse_std = residuals
    g = grad.astype(jnp.float32)
    centered = x.astype(jnp.float32) - mean
    scale_over_width = scale.astype(jnp.float32) / x.shape[1]
    scale_grads = g * (centered * inverse_std)
    dx = inverse_std * (
        g * scale
        - (g @ scale_over_width)[:, None]
        - centered * (inverse_std * (scale_grads @ scale_over_width)[:, None])
    )
    return (
        dx.astype(x.dtype),
        scale_grads.sum(0).astype(scale.dtype),
        g.sum(0).astype(scale.dtype),
    )


_cpu_normalize.defvjp(_cpu_forward, _cpu_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def fused_layer_norm(
    x: Array,
    pending: Pending,
    scale: Array,
    bias: Array,
    epsilon: float,
    is_narrowed: bool = False,
) -> tuple[Array, ...]:
    """Return the stream `x + pending` and its layer norm, with the kernels for GPUs.

    Args:
        x: the residual stream, (N, D). D is at most `MAX_WIDTH`.
        pending: see `Pending`.
        scale: (D,).
        bias: (D,).
        epsilon: added to the variance.
        is_narrowed: whether to return the layer norm in 8 bits too.

    Returns:
        Two arrays (N, D) of the dtype of `x`, and the second one in 8 bits if asked to.
    """
    # Not in the kernel: the matmul that computes x adds the bias in its epilogue.
    x = add_pending(x, pending)
    forward = partial(_forward, epsilon=epsilon, is_narrowed=is_narrowed)
    rule = "n d, d, d -> n d, n d" if is_narrowed else "n d, d, d -> n d"
    return x, *partitioned(forward, rule, replicated="d")(x, scale, bias)


def _forward_rule(
    x: Array,
    pending: Pending,
    scale: Array,
    bias: Array,
    epsilon: float,
    is_narrowed: bool,
) -> tuple[tuple[Array, ...], _FusedResiduals]:
    results = fused_layer_norm(x, pending, scale, bias, epsilon, is_narrowed)
    if isinstance(pending, tuple):
        # The backward pass needs the form of what was pending, but not the branch.
        pending = pending[1], pending[1]
    return results, (results[0], pending, scale)


def _backward_rule(
    epsilon: float,
    is_narrowed: bool,
    residuals: _FusedResiduals,
    grads: tuple[Array, ...],
) -> tuple[Array, Pending, Array, Array]:
    x, pending, scale = residuals
    backward = partial(_backward, epsilon=epsilon)
    rule = "n d, d, n d, n d -> n d, k d"
    dx, sums = partitioned(backward, rule, replicated="d")(x, scale, *grads[:2])
    dscale, dbias, dstream = sums
    dpending: Pending = None
    if isinstance(pending, tuple):
        dpending = dx, dstream.astype(pending[1].dtype)
    elif pending is not None:
        dpending = dstream.astype(pending.dtype)
    return (
        dx,
        dpending,
        dscale.astype(scale.dtype),
        dbias.astype(scale.dtype),
    )


fused_layer_norm.defvjp(_forward_rule, _backward_rule)


def _tile_shape(width: int) -> tuple[int, int]:
    """Return the tokens and columns of a tile. Triton requires powers of two."""
    columns = pl.next_power_of_2(width)
    return max(1, TILE // columns), columns


def _tokens_per_program(num_tokens: int) -> int:
    """Return the number of tokens that a program of the backward kernel loops over."""
    return max(1, min(64, num_tokens // PROGRAMS))


def _forward_kernel(
    x_ref: Ref, scale_ref: Ref, bias_ref: Ref, *y_refs: Ref, epsilon: float
) -> None:
    """Normalize one tile of complete tokens. The second result, if any, has 8 bits."""
    num_tokens, width = x_ref.shape
    tile_tokens, tile_columns = _tile_shape(width)
    token = pl.program_id(0) * tile_tokens + jnp.arange(tile_tokens)[:, None]
    column = jnp.arange(tile_columns)[None]
    inside = (token < num_tokens) & (column < width)
    x = triton.load(x_ref.at[token, column], mask=inside, other=0).astype(jnp.float32)
    scale = triton.load(scale_ref.at[column], mask=column < width, other=0).astype(
        jnp.float32
    )
    bias = triton.load(bias_ref.at[column], mask=column < width, other=0).astype(
        jnp.float32
    )
    centered = jnp.where(inside, x - jnp.sum(x, axis=1, keepdims=True) / width, 0)
    variance = jnp.sum(centered * centered, axis=1, keepdims=True) / width
    inverse_std = jax.lax.rsqrt(variance + epsilon)
    y = centered * inverse_std * scale + bias
    for y_ref in y_refs:
        values = y.astype(y_ref.dtype)
        if y_ref.dtype == WEIGHTS:
            values = narrow(y)
        triton.store(y_ref.at[token, column], values, mask=inside)


def _backward_kernel(
    x_ref: Ref,
    scale_ref: Ref,
    gx_ref: Ref,
    gy_ref: Ref,
    dx_ref: Ref,
    sums_ref: Ref,
    *,
    epsilon: float,
) -> None:
    """Loop over tokens, one at a time, while the next one is being loaded.

    Statistics are computed again from `x`, which is cheaper than loading them.
    """
    num_tokens, width = x_ref.shape
    program = pl.program_id(0)
    column = jnp.arange(_tile_shape(width)[1])
    count = _tokens_per_program(num_tokens)
    scale = triton.load(scale_ref.at[column], mask=column < width, other=0).astype(
        jnp.float32
    )

    def locate(i: Array) -> tuple[Array, Array]:
        """Return the index of the i-th token of this program, and the mask of its values."""
        token = program * count + i
        return token, (token < num_tokens) & (i < count) & (column < width)

    def load(i: Array) -> list[Array]:
        token, inside = locate(i)
        return [
            triton.load(ref.at[token, column], mask=inside, other=0)
            for ref in (x_ref, gx_ref, gy_ref)
        ]

    def process_token(
        i: Array, carry: tuple[tuple[Array, Array, Array], list[Array]]
    ) -> tuple[tuple[Array, Array, Array], list[Array]]:
        (scale_sum, bias_sum, pending_sum), loaded = carry
        next_loaded = load(i + 1)
        token, inside = locate(i)
        x, gx, gy = (value.astype(jnp.float32) for value in loaded)
        centered = jnp.where(inside, x - jnp.sum(x) / width, 0)
        inverse_std = jax.lax.rsqrt(jnp.sum(centered * centered) / width + epsilon)
        normalized = centered * inverse_std
        g = gy * scale
        centered_grad = g - jnp.sum(g) / width
        tangent_grad = centered_grad - normalized * (jnp.sum(g * normalized) / width)
        dx = gx + tangent_grad * inverse_std
        triton.store(dx_ref.at[token, column], dx.astype(dx_ref.dtype), mask=inside)
        return (
            scale_sum + gy * normalized,
            bias_sum + gy,
            pending_sum + dx,
        ), next_loaded

    zeros = jnp.zeros(column.shape, jnp.float32)
    start = (zeros, zeros, zeros), load(jnp.int32(0))
    sums, _ = jax.lax.fori_loop(0, count, process_token, start)
    for i, total in enumerate(sums):
        triton.store(sums_ref.at[program, i, column], total, mask=column < width)


def _forward(
    x: Array, scale: Array, bias: Array, epsilon: float, is_narrowed: bool
) -> tuple[Array, ...]:
    """Return the layer norm of the tokens of one device, and the same in 8 bits if asked to."""
    tile_tokens, tile_columns = _tile_shape(x.shape[1])
    dtypes = (x.dtype, WEIGHTS) if is_narrowed else (x.dtype,)
    results: tuple[Array, ...] = pl.pallas_call(
        partial(_forward_kernel, epsilon=epsilon),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, dtype) for dtype in dtypes),
        grid=(pl.cdiv(x.shape[0], tile_tokens),),
        compiler_params=triton.CompilerParams(num_warps=max(2, tile_columns // 1024)),
        interpret=interpret(),
        name="layer_norm_forward",
    )(x, scale, bias)
    return results


def _backward(
    x: Array, scale: Array, gx: Array, gy: Array, epsilon: float
) -> tuple[Array, Array]:
    """Return the gradient of `x`, and those of scale, bias and pending bias as an array (3, D).

    Args:
        x: the stream, (N, D).
        scale: (D,).
        gx: the gradient of the returned stream, (N, D).
        gy: the gradient of the normalized stream, (N, D).
        epsilon: added to the variance.
    """
    num_tokens, width = x.shape
    programs = pl.cdiv(num_tokens, _tokens_per_program(num_tokens))
    dx, partial_sums = pl.pallas_call(
        partial(_backward_kernel, epsilon=epsilon),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, 3, width), jnp.float32),
        ),
        grid=(programs,),
        compiler_params=triton.CompilerParams(
            num_warps=max(1, _tile_shape(width)[1] // 1024)
        ),
        interpret=interpret(),
        name="layer_norm_backward",
    )(x, scale, gx, gy)
    return dx, partial_sums.sum(0)
