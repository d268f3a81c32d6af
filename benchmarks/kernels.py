"""Time each GPU kernel in the shapes of GPT-2 124M with 64 x 1024 tokens, compared with a lower
bound.

The bound is cuBLAS's plain matmul, or moving every byte once at the memory bandwidth.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --set STAGES=4 SLOPES=4

`--set` changes constants of kernels/hopper.py or kernels/norm.py. Large matmuls warm up the chip
before each measurement, as in a training step. A cold chip has a higher clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.hardware import find_chip
from shardwise.kernels import hopper, norm

Array = jax.Array


def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """Return normally distributed bfloat16 values."""
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(
        jnp.bfloat16
    )


def milliseconds(
    function: Callable[..., Any], *args: Any, calls: int = 60, warm_s: float = 0.4
) -> float:
    """Return the median milliseconds per call on a warm chip."""
    large, multiply = normal(9, (8192, 8192)), jax.jit(jnp.matmul)
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end:
        multiply(large, large).block_until_ready()
    times = []
    for _ in range(5):
        jax.block_until_ready(function(*args))
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def apart(found: Any, expected: Any) -> float:
    """Return the largest difference in the first 1024 rows, relative to the largest value."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    arrays = [
        [np.asarray(x[:1024].astype(jnp.float32)) for x in pair] for pair in pairs
    ]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in arrays)


@jax.jit
def reference_gelu(x: Array, up: Array, bias: Array) -> tuple[Array, Array]:
    """Return GELU of a matmul with bias, and its derivative."""
    y, pull = jax.vjp(
        partial(jax.nn.gelu, approximate=True), (x @ up).astype(jnp.float32) + bias
    )
    return y, pull(jnp.ones_like(y))[0]


@jax.jit
def reference_slope(g: Array, down: Array, slope: Array) -> tuple[Array, Array]:
    """Return a matmul times the derivative of GELU, and its sum over tokens."""
    product = (g @ down.T).astype(jnp.float32) * slope
    return product, product.sum(0)


@jax.jit
def reference_exp(x: Array, table: Array) -> tuple[Array, Array]:
    """Return exponentials of the logits, and their sums."""
    shares = jnp.exp((x @ table.T).astype(jnp.float32))
    return shares, shares.sum(1)


@jax.jit
def reference_loss(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the gradient of the loss by the logits, and the loss."""
    wide = logits.astype(jnp.float32)
    return jax.nn.softmax(wide) - jax.nn.one_hot(
        labels, logits.shape[1]
    ), -jax.nn.log_softmax(wide)[jnp.arange(len(labels)), labels]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="an integer, or several separated by commas",
    )
    options = parser.parse_args()
    for change in options.set:
        name, _, value = change.partition("=")
        numbers = tuple(int(part) for part in value.split(","))
        module = next(module for module in (hopper, norm) if hasattr(module, name))
        setattr(module, name, numbers if len(numbers) > 1 else numbers[0])
    rows, width, wide, vocab = options.rows, 768, 3072, 50304
    chip = find_chip(jax.devices()[0].device_kind)
    assert chip is not None, (
        "This GPU is unknown. Add its memory bandwidth to shardwise/hardware.py."
    )
    speed = chip.bandwidth
    x, up, bias = (
        normal(0, (rows, width)),
        normal(1, (width, wide), 0.03),
        normal(2, (wide,), 0.1),
    )
    g, down = normal(3, (rows, width), 0.01), normal(4, (wide, width), 0.03)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {rows} tokens "
        f"{' '.join(options.set)}"
    )

    def show(name: str, took: float, least: float, what: str, wrong: float) -> None:
        print(
            f"{name:22s} {took:7.3f} ms, {took / least:5.2f} times {what} ({least:.3f} ms); "
            f"relative error {wrong:.1e}",
            flush=True,
        )

    y, slope = hopper.product_gelu(x, up, bias)
    bare = milliseconds(jax.jit(jnp.matmul), x, up)
    show(
        "product_gelu",
        milliseconds(hopper.product_gelu, x, up, bias),
        bare,
        "cuBLAS",
        apart((y, slope), reference_gelu(x, up, bias)),
    )
    wrong = apart(hopper.product_slope(g, down, slope), reference_slope(g, down, slope))
    bare = milliseconds(jax.jit(lambda g, down: g @ down.T), g, down)
    show(
        "product_slope",
        milliseconds(hopper.product_slope, g, down, slope),
        bare,
        "cuBLAS",
        wrong,
    )

    table = normal(10, (vocab, width), 0.03)
    less = jnp.zeros(rows, jnp.float32)
    wrong = apart(hopper.product_exp(x, table, less), reference_exp(x[:1024], table))
    bare = milliseconds(jax.jit(lambda x, table: x @ table.T), x, table, calls=20)
    show(
        "product_exp",
        milliseconds(hopper.product_exp, x, table, less, calls=20),
        bare,
        "cuBLAS",
        wrong,
    )

    scale, shift = normal(5, (width,)), normal(6, (width,))
    forward = jax.jit(lambda *args: norm.fused_layer_norm(*args, 1e-5)[1])
    wrong = apart(
        forward(x, None, scale, shift), norm.plain_layer_norm(x, scale, shift, 1e-5)[1]
    )
    show(
        "layer norm",
        milliseconds(forward, x, None, scale, shift),
        2 * x.nbytes / speed * 1e3,
        "memory traffic",
        wrong,
    )
    backward = jax.jit(lambda x, scale, gx, gy: norm._backward(x, scale, gx, gy, 1e-5))
    expected = jax.vjp(
        lambda x, late, *weights: norm.plain_layer_norm(x + late, *weights, 1e-5),
        x,
        jnp.zeros_like(shift),
        scale,
        shift,
    )[1]
    dx, dlate, dscale, dshift = expected((g, x))
    wrong = apart(backward(x, scale, g, x), (dx, jnp.stack([dscale, dshift, dlate])))
    show(
        "layer norm, backward",
        milliseconds(backward, x, scale, g, x),
        4 * x.nbytes / speed * 1e3,
        "memory traffic",
        wrong,
    )

    logits, labels = (
        normal(7, (rows, vocab), 3),
        jax.random.randint(jax.random.key(8), (rows,), 0, vocab),
    )
    loss = jax.jit(hopper.cross_entropy, donate_argnums=0)
    wrong = apart(
        jax.tree.map(lambda part: part[:1024], loss(logits + 0, labels)),
        reference_loss(logits[:1024], labels[:1024]),
    )
    held = [logits]

    def again() -> Array:
        held[0], nats = loss(held[0], labels)
        return nats

    show(
        "loss",
        milliseconds(again, calls=20),
        2 * logits.nbytes / speed * 1e3,
        "memory traffic",
        wrong,
    )


if __name__ == "__main__":
    main()
