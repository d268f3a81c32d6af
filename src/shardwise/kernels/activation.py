"""GELU with the bias of the preceding linear layer, alone and as part of an MLP.

These are the widest activations of a transformer. XLA writes them twice in the forward pass (after
the bias, and after the GELU). Its backward pass, which also sums the gradient of the bias, reaches
half of the memory bandwidth. The GPU kernels here read and write every value once.

On Hopper GPUs the GELU is applied to the result of the matmul before it leaves the chip (see
`shardwise.kernels.hopper`).

Shapes: N tokens, D width, F hidden width of the MLP.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from shardwise.kernels import hopper
from shardwise.kernels.float8 import (
    GRADIENTS,
    Narrowed,
    gradient_scale,
    matmul8,
    narrow,
    narrow_exactly,
)
from shardwise.kernels.partitioning import (
    Ref,
    Residuals,
    interpret,
    partitioned,
    pl,
    triton,
)
from shardwise.kernels.platform import has_gpu_kernels

Array = jax.Array

# Tokens and columns of a tile of the Triton kernels.
TILE_TOKENS = 32
TILE_COLUMNS = 256

# Tiles that a program of the backward kernel loops over, adding up the gradient of the bias.
TILES_PER_PROGRAM = 16


def bias_gelu(x: Array, bias: Array) -> Array:
    """Return `gelu(x + bias)`, with the tanh approximation, computed in float32.

    The backward pass computes it again from `x`.

    Args:
        x: (N, F).
        bias: (F,).

    Returns:
        An array (N, F) of the dtype of `x`.
    """
    if has_gpu_kernels() and x.dtype in (jnp.bfloat16, jnp.float16):
        return fused_bias_gelu(x, bias)
    y: Array = plain_bias_gelu(x, bias)
    return y


@jax.checkpoint
def plain_bias_gelu(x: Array, bias: Array) -> Array:
    """Return `bias_gelu` without kernels."""
    return jax.nn.gelu((x + bias).astype(jnp.float32), approximate=True).astype(x.dtype)


def gelu_mlp(x: Array | Narrowed, up: Array, bias: Array, down: Array) -> Array:
    """Return `gelu(x @ up + bias) @ down`: an MLP without the bias of its second layer.

    Args:
        x: (N, D). If it is `Narrowed`, the matmuls use 8 bits.
        up: (D, F).
        bias: (F,).
        down: (F, D).

    Returns:
        An array (N, D).
    """
    if isinstance(x, Narrowed):
        return float8_gelu_mlp(x.wide, x.narrow, up, bias, down)
    if _is_on_hopper() and hopper.supports_matmul(x, up.shape[1]):
        return fused_gelu_mlp(x, up, bias, down)
    return plain_gelu_mlp(x, up, bias, down)


def _is_on_hopper() -> bool:
    return has_gpu_kernels() and hopper.is_available()


def plain_gelu_mlp(x: Array, up: Array, bias: Array, down: Array) -> Array:
    """Return `gelu_mlp` with separate matmuls and GELU."""
    return bias_gelu(x @ up, bias) @ down


@jax.custom_vjp
def fused_gelu_mlp(x: Array, up: Array, bias: Array, down: Array) -> Array:
    """Return `gelu_mlp`, with the kernels for Hopper GPUs when it is differentiated.

    The forward pass applies the GELU to the first matmul before the result leaves the chip, and
    saves the slope of the GELU. The backward pass multiplies the gradient by the slope before it
    leaves the chip.
    """
    return plain_gelu_mlp(x, up, bias, down)


def _mlp_forward(
    x: Array, up: Array, bias: Array, down: Array
) -> tuple[Array, Residuals]:
    rule = "n d, d f, f -> n f, n f"
    y, slope = partitioned(_matmul_gelu, rule, replicated="d")(x, up, bias)
    return y @ down, (x, up, bias, down, y, slope)


def _mlp_backward(residuals: Residuals, g: Array) -> tuple[Array, Array, Array, Array]:
    x, up, bias, down, y, slope = residuals
    rule = "n d, f d, n f -> n f, f"
    dhidden, dbias = partitioned(_matmul_slope, rule, replicated="d")(g, down, slope)
    return dhidden @ up.T, x.T @ dhidden, dbias.astype(bias.dtype), y.T @ g


fused_gelu_mlp.defvjp(_mlp_forward, _mlp_backward)


def _matmul_gelu(x: Array, up: Array, bias: Array) -> tuple[Array, Array]:
    """Return the GELU of `x @ up + bias` and its slope, on one device."""
    if hopper.supports_matmul(x, up.shape[1]):
        y, slope = hopper.product_gelu(x, up, bias)
        return y, slope
    # The tiles of the kernel divide the complete array, but not the shard of this device.
    y, slope = hopper.gelu_and_slope((x @ up).astype(jnp.float32) + bias)
    return y.astype(x.dtype), slope.astype(x.dtype)


def _matmul_slope(g: Array, down: Array, slope: Array) -> tuple[Array, Array]:
    """Return `(g @ down.T) * slope` and its sum over tokens, on one device."""
    if hopper.supports_matmul(g, down.shape[0]):
        gradient, bias_gradient = hopper.product_slope(g, down, slope)
        return gradient, bias_gradient
    gradient = (g @ down.T).astype(jnp.float32) * slope
    return gradient.astype(g.dtype), gradient.sum(0)


@jax.custom_vjp
def float8_gelu_mlp(x: Array, x8: Array, up: Array, bias: Array, down: Array) -> Array:
    """Return `gelu_mlp` with matmuls of 8 bits; gradients of weights use the dtype of `x`.

    The hidden activations and their gradient are written twice, in 16 and in 8 bits: for the
    gradients of the weights, and for the next matmul.

    Args:
        x: (N, D).
        x8: the same in 8 bits.
        up: (D, F).
        bias: (F,).
        down: (F, D).
    """
    return _float8_mlp_forward(x, x8, up, bias, down)[0]


def _float8_mlp_forward(
    x: Array, x8: Array, up: Array, bias: Array, down: Array
) -> tuple[Array, Residuals]:
    (up8, up_scale), (down8, down_scale) = narrow_exactly(up.T), narrow_exactly(down.T)
    factors = jnp.stack([1 / up_scale, jnp.ones_like(up_scale)])
    local = partial(_matmul_gelu8, is_on_hopper=_is_on_hopper())
    rule = "n d, f d, f, k -> n f, n f, n f"
    call = partitioned(local, rule, replicated="d k")
    y, slope, y8 = call(x8, up8, bias.astype(x.dtype), factors)
    out = matmul8(y8, down8, ((1,), (1,)), 1 / down_scale, x.dtype)
    return out, (x, up, bias, down, y, slope, up_scale, down_scale)


def _float8_mlp_backward(
    residuals: Residuals, g: Array
) -> tuple[Array, None, Array, Array, Array]:
    x, up, bias, down, y, slope, up_scale, down_scale = residuals
    up8, down8 = narrow(up, up_scale), narrow(down, down_scale)
    scale = gradient_scale(g)
    local = partial(_matmul_slope8, is_on_hopper=_is_on_hopper())
    rule = "n d, f d, n f, k -> n f, f, n f"
    call = partitioned(local, rule, replicated="d k")
    factors = jnp.stack([1 / (scale * down_scale), scale])
    g8 = narrow(g, scale, GRADIENTS)
    dhidden, dbias, dhidden8 = call(g8, down8, slope, factors)
    dx = matmul8(dhidden8, up8, ((1,), (1,)), 1 / (up_scale * scale), x.dtype)
    return dx, None, x.T @ dhidden, dbias.astype(bias.dtype), y.T @ g


float8_gelu_mlp.defvjp(_float8_mlp_forward, _float8_mlp_backward)


def _matmul_gelu8(
    x: Array, up: Array, bias: Array, factors: Array, *, is_on_hopper: bool
) -> tuple[Array, Array, Array]:
    """Return `hopper.product_gelu8` on one device, with its kernel or without."""
    if is_on_hopper and hopper.supports_matmul(x, up.shape[0]):
        y, slope, y8 = hopper.product_gelu8(x, up, bias, factors)
        return y, slope, y8
    product = matmul8(x, up, ((1,), (1,)), factors[0], bias.dtype)
    y, slope = hopper.gelu_and_slope(product.astype(jnp.float32) + bias)
    return y.astype(bias.dtype), slope.astype(bias.dtype), narrow(y, factors[1])


def _matmul_slope8(
    g: Array, down: Array, slope: Array, factors: Array, *, is_on_hopper: bool
) -> tuple[Array, Array, Array]:
    """Return `hopper.product_slope8` on one device, with its kernel or without."""
    if is_on_hopper and hopper.supports_matmul(g, down.shape[0]):
        dx, sums, dx8 = hopper.product_slope8(g, down, slope, factors)
        return dx, sums, dx8
    product = matmul8(g, down, ((1,), (1,)), factors[0], jnp.dtype(jnp.float32))
    dx = product * slope
    return dx.astype(slope.dtype), dx.sum(0), narrow(dx, factors[1], GRADIENTS)


@jax.custom_vjp
def fused_bias_gelu(x: Array, bias: Array) -> Array:
    """Return `bias_gelu` with the Triton kernels for GPUs."""
    return partitioned(_forward, "n f, f -> n f")(x, bias)[0]


def _forward_rule(x: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
    return fused_bias_gelu(x, bias), (x, bias)


def _backward_rule(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, bias = residuals
    dx, dbias = partitioned(_backward, "n f, f, n f -> n f, f")(x, bias, g)
    return dx, dbias.astype(bias.dtype)


fused_bias_gelu.defvjp(_forward_rule, _backward_rule)


def _tanh(x: Array) -> Array:
    """Return tanh from a single instruction of the GPU.

    It is accurate to 11 bits. That is enough for bfloat16, which has 8, and float16, which has 11.
    """
    return jnp.tanh(x) if interpret() else triton.approx_tanh(x)


def _locate_tile(
    shape: tuple[int, int], row: Array, column: Array
) -> tuple[tuple[Array, Array], Array]:
    """Return the indices of the values of a tile, and the mask of those inside the array."""
    tokens = row * TILE_TOKENS + jnp.arange(TILE_TOKENS)[:, None]
    columns = column * TILE_COLUMNS + jnp.arange(TILE_COLUMNS)[None]
    return (tokens, columns), (tokens < shape[0]) & (columns < shape[1])


def _forward_kernel(x_ref: Ref, bias_ref: Ref, y_ref: Ref) -> None:
    where, inside = _locate_tile(x_ref.shape, pl.program_id(0), pl.program_id(1))
    columns = where[1]
    x = triton.load(x_ref.at[where], mask=inside, other=0).astype(jnp.float32)
    bias = triton.load(bias_ref.at[columns], mask=columns < bias_ref.shape[0], other=0)
    x += bias.astype(jnp.float32)
    triton.store(
        y_ref.at[where],
        hopper.gelu_and_slope(x, _tanh)[0].astype(y_ref.dtype),
        mask=inside,
    )


def _backward_kernel(
    x_ref: Ref, bias_ref: Ref, g_ref: Ref, dx_ref: Ref, dbias_ref: Ref
) -> None:
    program = pl.program_id(0)
    column = pl.program_id(1)
    columns = column * TILE_COLUMNS + jnp.arange(TILE_COLUMNS)
    bias = triton.load(bias_ref.at[columns], mask=columns < bias_ref.shape[0], other=0)
    bias = bias.astype(jnp.float32)

    def process_tile(i: Array, total: Array) -> Array:
        where, inside = _locate_tile(
            x_ref.shape, program * TILES_PER_PROGRAM + i, column
        )
        x, g = (
            triton.load(ref.at[where], mask=inside, other=0).astype(jnp.float32)
            for ref in (x_ref, g_ref)
        )
        dx: Array = g * hopper.gelu_and_slope(x + bias[None], _tanh)[1]
        triton.store(dx_ref.at[where], dx.astype(dx_ref.dtype), mask=inside)
        return total + dx

    zeros = jnp.zeros((TILE_TOKENS, TILE_COLUMNS), jnp.float32)
    total = jax.lax.fori_loop(0, TILES_PER_PROGRAM, process_tile, zeros)
    triton.store(
        dbias_ref.at[program, columns],
        jnp.sum(total, axis=0),
        mask=columns < bias_ref.shape[0],
    )


def _pallas_call(
    kernel: Callable[..., None],
    name: str,
    x: Array,
    tokens_per_program: int,
    out_shape: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
) -> Callable[..., tuple[Array, ...]]:
    """Return a call of `kernel` with programs that cover `x` (N, F)."""
    call: Callable[..., tuple[Array, ...]] = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(
            pl.cdiv(x.shape[0], tokens_per_program),
            pl.cdiv(x.shape[1], TILE_COLUMNS),
        ),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret(),
        name=name,
    )
    return call


def _forward(x: Array, bias: Array) -> tuple[Array, ...]:
    """Return the GELU of the values of one device."""
    out_shape = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
    return _pallas_call(_forward_kernel, "gelu_forward", x, TILE_TOKENS, out_shape)(
        x, bias
    )


def _backward(x: Array, bias: Array, g: Array) -> tuple[Array, Array]:
    """Return the gradients of `x` and of the bias, on one device."""
    tokens_per_program = TILE_TOKENS * TILES_PER_PROGRAM
    num_programs = pl.cdiv(x.shape[0], tokens_per_program)
    out_shape = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((num_programs, x.shape[1]), jnp.float32),
    )
    call = _pallas_call(
        _backward_kernel, "gelu_backward", x, tokens_per_program, out_shape
    )
    dx, partial_sums = call(x, bias, g)
    return dx, partial_sums.sum(0)
