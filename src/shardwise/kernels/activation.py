"""GELU of a linear layer's output, with the bias added on the way: one kernel forward and one backward on GPUs.

The widest activations of a transformer pass here. XLA writes them twice in the forward pass (with the bias, and after the
GELU), and its backward pass, which sums the gradient of the bias too, runs at half of the memory's speed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardwise.kernels import hopper
from shardwise.kernels.partitioning import by_rows, interpret, pl, triton
from shardwise.kernels.platform import platform

Array = jax.Array
ROWS, COLUMNS = 32, 256  # of a tile
TILES = 16  # that a program of the backward kernel goes through, to add up the gradient of the bias


def bias_gelu(x: Array, bias: Array) -> Array:
    """gelu(x + bias) for x (N, F), tanh-approximated, in float32 inside. The backward pass computes it again from x."""
    fused = platform() == "gpu" and x.dtype in (jnp.bfloat16, jnp.float16)
    return (fused_bias_gelu if fused else plain_bias_gelu)(x, bias)


@jax.checkpoint
def plain_bias_gelu(x: Array, bias: Array) -> Array:
    return jax.nn.gelu((x + bias).astype(jnp.float32), approximate=True).astype(x.dtype)


def bias_gelu_between(x: Array, up: Array, bias: Array, down: Array) -> Array:
    """gelu(x @ up + bias) @ down for x (N, D), up (D, F), down (F, D)."""
    fused = platform() == "gpu" and hopper.is_here() and hopper.can_multiply(x, up.shape[1])
    return (fused_between if fused else plain_between)(x, up, bias, down)


def plain_between(x: Array, up: Array, bias: Array, down: Array) -> Array:
    return bias_gelu(x @ up, bias) @ down


@jax.custom_vjp
def fused_between(x: Array, up: Array, bias: Array, down: Array) -> Array:
    """A product becomes its GELU, and its gradient is multiplied by the slope, before it goes to memory. (The value; differentiated,
    it is the rules.)"""
    return plain_between(x, up, bias, down)


def _between_forward(x: Array, up: Array, bias: Array, down: Array) -> tuple[Array, Any]:
    y, slope = by_rows(_product_gelu, "n d, d f, f -> n f, n f", whole="d")(x, up, bias)
    return y @ down, (x, up, bias, down, y, slope)


def _between_backward(saved: Any, g: Array) -> tuple[Array, Array, Array, Array]:
    x, up, bias, down, y, slope = saved
    dproduct, dbias = by_rows(_product_slope, "n d, f d, n f -> n f, f", whole="d")(g, down, slope)
    return dproduct @ up.T, x.T @ dproduct, dbias.astype(bias.dtype), y.T @ g


fused_between.defvjp(_between_forward, _between_backward)


def _product_gelu(x: Array, up: Array, bias: Array) -> tuple[Array, Array]:
    if hopper.can_multiply(x, up.shape[1]):
        return hopper.product_gelu(x, up, bias)
    y, slope = hopper.gelu_and_slope(
        (x @ up).astype(jnp.float32) + bias
    )  # what one device holds may not be cut into tiles
    return y.astype(x.dtype), slope.astype(x.dtype)


def _product_slope(g: Array, down: Array, slope: Array) -> tuple[Array, Array]:
    if hopper.can_multiply(g, down.shape[0]):
        return hopper.product_slope(g, down, slope)
    gradient = (g @ down.T).astype(jnp.float32) * slope
    return gradient.astype(g.dtype), gradient.sum(0)


@jax.custom_vjp
def fused_bias_gelu(x: Array, bias: Array) -> Array:
    return by_rows(_forward, "n f, f -> n f")(x, bias)[0]


def _forward_rule(x: Array, bias: Array) -> tuple[Array, Any]:
    return fused_bias_gelu(x, bias), (x, bias)


def _backward_rule(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, bias = saved
    dx, dbias = by_rows(_backward, "n f, f, n f -> n f, f")(x, bias, g)
    return dx, dbias.astype(bias.dtype)


fused_bias_gelu.defvjp(_forward_rule, _backward_rule)


def _tanh(x: Array) -> Array:
    """That of the hardware, one instruction: right to 11 bits, where bfloat16 has 8. Other dtypes are not rounded so."""
    return jnp.tanh(x) if interpret() else triton.approx_tanh(x)


def _tile(shape: tuple[int, int], row: Any, column: Any) -> tuple[Any, Array]:
    """Where the numbers of a tile are, and which of them there are."""
    rows, columns = (
        row * ROWS + jnp.arange(ROWS)[:, None],
        column * COLUMNS + jnp.arange(COLUMNS)[None],
    )
    return (rows, columns), (rows < shape[0]) & (columns < shape[1])


def _forward_kernel(x_ref: Any, bias_ref: Any, y_ref: Any) -> None:
    where, inside = _tile(x_ref.shape, pl.program_id(0), pl.program_id(1))
    x = triton.load(x_ref.at[where], mask=inside, other=0).astype(jnp.float32)
    x += triton.load(bias_ref.at[where[1]], mask=where[1] < bias_ref.shape[0], other=0).astype(
        jnp.float32
    )
    triton.store(
        y_ref.at[where], hopper.gelu_and_slope(x, _tanh)[0].astype(y_ref.dtype), mask=inside
    )


def _backward_kernel(x_ref: Any, bias_ref: Any, g_ref: Any, dx_ref: Any, dbias_ref: Any) -> None:
    program, column = pl.program_id(0), pl.program_id(1)
    at = column * COLUMNS + jnp.arange(COLUMNS)
    bias = triton.load(bias_ref.at[at], mask=at < bias_ref.shape[0], other=0).astype(jnp.float32)

    def tile(i: Array, total: Array) -> Array:
        where, inside = _tile(x_ref.shape, program * TILES + i, column)
        x, g = (
            triton.load(ref.at[where], mask=inside, other=0).astype(jnp.float32)
            for ref in (x_ref, g_ref)
        )
        dx = g * hopper.gelu_and_slope(x + bias[None], _tanh)[1]
        triton.store(dx_ref.at[where], dx.astype(dx_ref.dtype), mask=inside)
        return total + dx

    total = jax.lax.fori_loop(0, TILES, tile, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    triton.store(dbias_ref.at[program, at], jnp.sum(total, axis=0), mask=at < bias_ref.shape[0])


def _call(kernel: Any, rows: int, x: Array, name: str, **kwargs: Any) -> Any:
    grid = pl.cdiv(x.shape[0], rows), pl.cdiv(x.shape[1], COLUMNS)
    return pl.pallas_call(
        kernel,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret(),
        name=name,
        **kwargs,
    )


def _forward(x: Array, bias: Array) -> tuple[Array]:
    return (
        _call(
            _forward_kernel,
            ROWS,
            x,
            "gelu_forward",
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x, bias),
    )


def _backward(x: Array, bias: Array, g: Array) -> tuple[Array, Array]:
    sums = jax.ShapeDtypeStruct((pl.cdiv(x.shape[0], ROWS * TILES), x.shape[1]), jnp.float32)
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), sums
    dx, dbias = _call(_backward_kernel, ROWS * TILES, x, "gelu_backward", out_shape=shapes)(
        x, bias, g
    )
    return dx, dbias.sum(0)
