"""Layer normalization that passes its input through, with one kernel forward and one backward on GPUs.

XLA spreads the backward pass of a layer norm over several kernels, each of which reads the activations again: 5.7 ms of a
63 ms step of GPT-2 124M on an H200, where reading and writing every tensor once needs 1.8. Here the residual stream goes
through the function, so that the two gradients that meet at `x` are added where the second is made. The bias of the layer
before may be added here too: its gradient, the sum of those of all tokens, is then summed on the way.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.kernels.partitioning import by_rows, interpret, pl, triton
from shardwise.kernels.platform import platform

Array = jax.Array


class ResidualNorm(nnx.LayerNorm):
    """A stream of tokens (N, D), and what (D,) is still to be added to all of them -> the stream with it, and its normalized form."""

    def __call__(self, x: Array, late: Array | None = None) -> tuple[Array, Array]:  # type: ignore[override]
        assert self.scale is not None
        assert self.bias is not None
        weights = self.scale[...], self.bias[...], self.epsilon
        if platform() == "gpu" and x.shape[1] <= MAX_WIDTH:
            return fused_layer_norm(x, late, *weights)
        return (cpu_layer_norm if platform() == "cpu" else plain_layer_norm)(
            add_late(x, late), *weights
        )


def add_late(x: Array, late: Array | None) -> Array:
    return x if late is None else x + late


def plain_layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> tuple[Array, Array]:
    """In float32 inside, whatever the dtype of `x`."""
    centred = x.astype(jnp.float32) - x.astype(jnp.float32).mean(-1, keepdims=True)
    deviation = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return x, (centred * deviation * scale + bias).astype(x.dtype)


def cpu_layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> tuple[Array, Array]:
    """As `plain_layer_norm`, with a backward pass of fewer passes over memory on CPUs: a twentieth of a step of the default recipe.

    The barrier writes the stream to memory (see `step.COMPILER_OPTIONS`): XLA would add it up from the first layer on wherever it is read.
    """
    x = jax.lax.optimization_barrier(x)
    return x, _cpu_normal(x, scale, bias, epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cpu_normal(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    return plain_layer_norm(x, scale, bias, epsilon)[1]


def _cpu_forward(x: Array, scale: Array, bias: Array, epsilon: float) -> tuple[Array, Any]:
    mean = x.astype(jnp.float32).mean(-1, keepdims=True)
    deviation = jax.lax.rsqrt(
        jnp.square(x.astype(jnp.float32) - mean).mean(-1, keepdims=True) + epsilon
    )
    normal = (x.astype(jnp.float32) - mean) * deviation * scale + bias
    return normal.astype(x.dtype), (x, scale, mean, deviation)


def _cpu_backward(epsilon: float, saved: Any, grad: Array) -> tuple[Array, Array, Array]:
    """Sums over a row are products with the scale, those over all rows read the same array once more."""
    x, scale, mean, deviation = saved
    g, centred, shares = (
        grad.astype(jnp.float32),
        x.astype(jnp.float32) - mean,
        scale.astype(jnp.float32) / x.shape[1],
    )
    to_scale = g * (centred * deviation)
    dx = deviation * (
        g * scale - (g @ shares)[:, None] - centred * (deviation * (to_scale @ shares)[:, None])
    )
    return dx.astype(x.dtype), to_scale.sum(0).astype(scale.dtype), g.sum(0).astype(scale.dtype)


_cpu_normal.defvjp(_cpu_forward, _cpu_backward)


MAX_WIDTH = 8192  # of what a program of the kernels holds in registers
TILE = 2048  # numbers that a program of the forward kernel works on
PROGRAMS = 1024  # of the backward kernel, at least: each goes through many rows, to add up the gradients of vectors


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def fused_layer_norm(
    x: Array, late: Array | None, scale: Array, bias: Array, epsilon: float
) -> tuple[Array, Array]:
    x = add_late(x, late)  # not in the kernel: a product that makes x adds it on its way
    return x, *by_rows(partial(_forward, epsilon=epsilon), "n d, d, d -> n d", whole="d")(
        x, scale, bias
    )


def _forward_rule(
    x: Array, late: Array | None, scale: Array, bias: Array, epsilon: float
) -> tuple[Any, Any]:
    x, normal = fused_layer_norm(x, late, scale, bias, epsilon)
    return (x, normal), (x, late, scale)


def _backward_rule(
    epsilon: float, saved: Any, grads: tuple[Array, Array]
) -> tuple[Array, Array | None, Array, Array]:
    x, late, scale = saved
    dx, sums = by_rows(
        partial(_backward, epsilon=epsilon), "n d, d, n d, n d -> n d, k d", whole="d"
    )(x, scale, *grads)
    dscale, dbias, dlate = sums
    return (
        dx,
        None if late is None else dlate.astype(late.dtype),
        dscale.astype(scale.dtype),
        dbias.astype(scale.dtype),
    )


fused_layer_norm.defvjp(_forward_rule, _backward_rule)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a tile, both powers of two as Triton needs them."""
    columns = pl.next_power_of_2(width)
    return max(1, TILE // columns), columns


def _rows_each(height: int) -> int:
    """Rows that a program of the backward kernel goes through."""
    return max(1, min(64, height // PROGRAMS))


def _forward_kernel(
    x_ref: Any, scale_ref: Any, bias_ref: Any, y_ref: Any, *, epsilon: float
) -> None:
    height, width = x_ref.shape
    rows, columns = _tile(width)
    row, column = pl.program_id(0) * rows + jnp.arange(rows)[:, None], jnp.arange(columns)[None]
    inside = (row < height) & (column < width)
    x = triton.load(x_ref.at[row, column], mask=inside, other=0).astype(jnp.float32)
    scale = triton.load(scale_ref.at[column], mask=column < width, other=0).astype(jnp.float32)
    bias = triton.load(bias_ref.at[column], mask=column < width, other=0).astype(jnp.float32)
    centred = jnp.where(inside, x - jnp.sum(x, axis=1, keepdims=True) / width, 0)
    deviation = jax.lax.rsqrt(jnp.sum(centred * centred, axis=1, keepdims=True) / width + epsilon)
    triton.store(
        y_ref.at[row, column], (centred * deviation * scale + bias).astype(y_ref.dtype), mask=inside
    )


def _backward_kernel(
    x_ref: Any,
    scale_ref: Any,
    gx_ref: Any,
    gy_ref: Any,
    dx_ref: Any,
    sums_ref: Any,
    *,
    epsilon: float,
) -> None:
    """A row at a time; the next one is loaded meanwhile."""
    height, width = x_ref.shape
    program, column, each = pl.program_id(0), jnp.arange(_tile(width)[1]), _rows_each(height)
    scale = triton.load(scale_ref.at[column], mask=column < width, other=0).astype(jnp.float32)

    def place(i: Array) -> tuple[Array, Array]:
        row = program * each + i
        return row, (row < height) & (i < each) & (column < width)

    def load(i: Array) -> list[Array]:
        row, inside = place(i)
        return [
            triton.load(ref.at[row, column], mask=inside, other=0)
            for ref in (x_ref, gx_ref, gy_ref)
        ]

    def one(i: Array, carry: Any) -> Any:
        (to_scale, to_bias, to_late), loaded = carry
        following = load(i + 1)
        row, inside = place(i)
        x, gx, gy = (a.astype(jnp.float32) for a in loaded)
        centred = jnp.where(inside, x - jnp.sum(x) / width, 0)
        deviation = jax.lax.rsqrt(jnp.sum(centred * centred) / width + epsilon)
        normal, g = centred * deviation, gy * scale
        dx = gx + (g - jnp.sum(g) / width - normal * (jnp.sum(g * normal) / width)) * deviation
        triton.store(dx_ref.at[row, column], dx.astype(dx_ref.dtype), mask=inside)
        return (to_scale + gy * normal, to_bias + gy, to_late + dx), following

    zeros = jnp.zeros(column.shape, jnp.float32)
    sums, _ = jax.lax.fori_loop(0, each, one, ((zeros, zeros, zeros), load(jnp.int32(0))))
    for i, total in enumerate(sums):
        triton.store(sums_ref.at[program, i, column], total, mask=column < width)


def _forward(x: Array, scale: Array, bias: Array, epsilon: float) -> tuple[Array]:
    normal = pl.pallas_call(
        partial(_forward_kernel, epsilon=epsilon),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], _tile(x.shape[1])[0]),),
        compiler_params=triton.CompilerParams(num_warps=max(2, _tile(x.shape[1])[1] // 1024)),
        interpret=interpret(),
        name="layer_norm_forward",
    )(x, scale, bias)
    return (normal,)


def _backward(x: Array, scale: Array, gx: Array, gy: Array, epsilon: float) -> tuple[Array, Array]:
    """The gradient of x, and those (3, D) of scale, bias and what was added to all rows."""
    programs = pl.cdiv(x.shape[0], _rows_each(x.shape[0]))
    dx, sums = pl.pallas_call(
        partial(_backward_kernel, epsilon=epsilon),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, 3, x.shape[1]), jnp.float32),
        ),
        grid=(programs,),
        compiler_params=triton.CompilerParams(num_warps=max(1, _tile(x.shape[1])[1] // 1024)),
        interpret=interpret(),
        name="layer_norm_backward",
    )(x, scale, gx, gy)
    return dx, sums.sum(0)
