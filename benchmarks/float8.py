"""Time matmuls of 8 bits on a Hopper GPU, next to 16 bits, in the shapes of GPT-2 124M.

    python -m benchmarks.float8

The first table is about single operations with 64 x 1024 tokens: matmuls of cuBLAS, the kernels of
`shardwise.kernels.hopper`, and conversions. Large matmuls warm up the chip before each measurement,
as in a training step. `python -m benchmarks.gpt2 --rows 64 --float8` times the complete step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import milliseconds, normal
from shardwise.kernels import hopper
from shardwise.kernels.float8 import (
    GRADIENTS,
    gradient_scale,
    matmul8,
    narrow,
    narrow_exactly,
)
from shardwise.step.train import COMPILER_OPTIONS

Array = jax.Array
TOKENS, WIDTH, HIDDEN, VOCABULARY = 65_536, 768, 3072, 50_304
ROWS = ((1,), (1,))


def timed(name: str, function: Callable[..., Any], *args: Any) -> float:
    """Print and return the milliseconds of a call."""
    jitted = jax.jit(function, compiler_options=COMPILER_OPTIONS["gpu"])
    taken = milliseconds(jitted, *args, calls=20, warm_s=0.2)
    print(f"{name:34s} {taken:7.3f} ms", flush=True)
    return taken


def compare_matmuls() -> None:
    """Time matmuls of cuBLAS with the result of a residual added, in 16 and in 8 bits."""
    shapes = {
        "query, key or value": (WIDTH, WIDTH),
        "second layer of the MLP": (HIDDEN, WIDTH),
        "output layer": (WIDTH, VOCABULARY),
    }
    for name, (depth, columns) in shapes.items():
        x, w = normal(0, (TOKENS, depth)), normal(1, (depth, columns), 0.03)
        residual = normal(2, (TOKENS, columns))
        (x8, _), (w8, scale) = narrow_exactly(x), narrow_exactly(w.T)
        multiply8 = partial(matmul8, contracted=ROWS, dtype=x.dtype)
        wide = timed(f"{name}, 16 bits", lambda x, w, r: x @ w + r, x, w, residual)
        narrowed = timed(
            f"{name}, 8 bits",
            lambda x, w, s, r, multiply8=multiply8: multiply8(x, w, factor=1 / s) + r,
            x8,
            w8,
            scale,
            residual,
        )
        print(f"{'':34s} {wide / narrowed:7.2f} times as fast")


def compare_kernels() -> None:
    """Time the matmuls with an epilogue, and the conversions, in 16 and in 8 bits."""
    x, g = normal(0, (TOKENS, WIDTH)), normal(1, (TOKENS, WIDTH), 0.01)
    up, down = normal(2, (WIDTH, HIDDEN), 0.03), normal(3, (HIDDEN, WIDTH), 0.03)
    bias, table = normal(4, (HIDDEN,), 0.1), normal(5, (VOCABULARY, WIDTH), 0.02)
    offset = jnp.zeros((TOKENS,), jnp.float32)
    x8, g_scale = narrow(x), gradient_scale(g)
    g8 = narrow(g, g_scale, GRADIENTS)
    (up8, up_scale), (down8, down_scale) = narrow_exactly(up.T), narrow_exactly(down)
    one = jnp.ones(())
    _, slope = hopper.product_gelu(x, up, bias)
    timed("first layer with GELU, 16 bits", hopper.product_gelu, x, up, bias)
    factors = jnp.stack([1 / up_scale, one])
    timed("first layer with GELU, 8 bits", hopper.product_gelu8, x8, up8, bias, factors)
    timed("gradient of GELU, 16 bits", hopper.product_slope, g, down, slope)
    factors = jnp.stack([1 / (down_scale * g_scale), g_scale])
    timed("gradient of GELU, 8 bits", hopper.product_slope8, g8, down8, slope, factors)
    timed("output layer with exp, 16 bits", hopper.product_exp, x, table, offset)
    exp8 = partial(hopper.product_exp8, dtype=GRADIENTS)
    factors = jnp.stack([one, one])
    timed("output layer with exp and a copy in 8 bits", exp8, x, table, offset, factors)
    compare_output_gradient(x, table)
    timed("convert activations", narrow, x)
    timed("convert activations, exact scale", narrow_exactly, x)
    timed(
        "convert gradients",
        lambda g: narrow(g, gradient_scale(g), GRADIENTS),
        g,
    )


def compare_output_gradient(x: Array, table: Array) -> None:
    """Time the gradient of the input of the output layer."""
    gradient = jnp.exp(x @ table.T)
    gradient8 = narrow(gradient, 1.0, GRADIENTS)
    table8, scale = narrow_exactly(table.T)
    timed("gradient of features, 16 bits", jnp.matmul, gradient, table)
    for precision in (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST):
        multiply = partial(matmul8, contracted=ROWS, dtype=x.dtype, precision=precision)
        name = f"gradient of features, 8 bits, {precision.name}"
        timed(
            name,
            lambda g, t, s, multiply=multiply: multiply(g, t, factor=1 / s),
            gradient8,
            table8,
            scale,
        )


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    compare_matmuls()
    compare_kernels()


if __name__ == "__main__":
    main()
