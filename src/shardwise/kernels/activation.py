"""GELU with the bias of the preceding linear layer, alone and as part of an MLP.

These are the widest activations of a transformer. XLA writes them twice in the forward pass (after
the bias, and after the GELU). Its backward pass, which also sums the gradient of the bias, reaches
half of the memory bandwidth. The GPU kernels here read and write every value once.

On Hopper GPUs the GELU is applied to the result of the matmul before it leaves the chip (see
`shardwise.kernels.hopper`).

Shapes: N tokens, D width, F hidden width of the MLP.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardwise.kernels import hopper
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


def gelu_mlp(x: Array, up: Array, bias: Array, down: Array) -> Array:
    """Return `gelu(x @ up + bias) @ down`: an MLP without the bias of its second layer.

    Args:
        x: (N, D).
        up: (D, F).
        bias: (F,).
        down: (F, D).

    Returns:
        An array (N, D).
    """
    if (
        has_gpu_kernels()
        and hopper.is_available()
        and hopper.supports_matmul(x, up.shape[1])
    ):
        return fused_gelu_mlp(x, up, bias, down)
    return plain_gelu_mlp(x, up, bias, down)


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
