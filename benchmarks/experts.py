"""Time experts on an accelerator, next to dense matmuls of the same FLOPs.

    python -m benchmarks.experts

First the matmuls alone: `ragged_dot` is XLA's own, and tokamax is used if it is installed. Then
complete layers, from the router to the sum of the outputs, next to an MLP as wide as the experts
that a token passes through. Ratios are those of one process.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from benchmarks.kernels import milliseconds, normal
from shardwise import moe
from shardwise.kernels.grouped import grouped_matmul, tiling

Array = jax.Array
# Gate, up and down.
Kernels: TypeAlias = tuple[Array, Array, Array]
# From rows, kernels and the sizes of groups to rows.
Multiply: TypeAlias = Callable[[Array, Array, Array], Array]
# Tokens, choices per token, experts, width and hidden width.
SHAPES = {
    "124M": (65536, 2, 8, 768, 2048),
    "Mixtral 8x7B": (8192, 2, 8, 4096, 14336),
    "64 experts": (16384, 8, 64, 2048, 1024),
}


def ours(x: Array, kernels: Array, sizes: Array) -> Array:
    """Return the grouped matmul of shardwise, which pads the rows."""
    num_rows = len(x)
    tiles = tiling(len(x), len(kernels))
    x = jnp.pad(x, ((0, tiles.num_rows - len(x)), (0, 0)))
    return grouped_matmul(x, kernels, sizes, tiles)[:num_rows]


def implementations() -> dict[str, Multiply]:
    """Return the grouped matmuls to compare."""
    found: dict[str, Multiply] = {
        "dense": lambda x, kernels, sizes: x @ kernels[0],
        "ragged_dot": jax.lax.ragged_dot,
        "shardwise": ours,
    }
    try:
        import tokamax
    except ImportError:
        return found
    found["tokamax"] = tokamax.ragged_dot
    return found


def gradients(
    function: Multiply, x: Array, kernels: Array, sizes: Array, grad: Array
) -> tuple[Array, ...]:
    """Return the gradients of rows and kernels."""
    _, pull = jax.vjp(lambda x, kernels: function(x, kernels, sizes), x, kernels)
    return tuple(pull(grad))


def mlp(x: Array, kernels: Kernels) -> Array:
    """Return the output of a dense MLP with a gate."""
    gate, up, down = kernels
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def both_passes(
    function: Callable[[Array, Kernels], Array], x: Array, kernels: Kernels
) -> list[Array]:
    """Return the gradients of tokens and kernels."""
    out, pull = jax.vjp(function, x, kernels)
    gradients: list[Array] = jax.tree.leaves(pull(out))
    return gradients


def time_layers() -> None:
    """Print one line of JSON for each shape: forward and backward pass of complete layers."""
    for title, (tokens, choices, experts, width, hidden) in SHAPES.items():
        x = normal(0, (tokens // 1024, 1024, width))
        router = normal(1, (width, experts), 0.02).astype(jnp.float32)
        inner, outer = (experts, width, hidden), (experts, hidden, width)
        kernels = tuple(normal(2, shape, 0.02) for shape in (inner, inner, outer))
        wide = choices * hidden
        dense = tuple(
            normal(3, shape, 0.02)
            for shape in ((width, wide), (width, wide), (wide, width))
        )

        def routed(
            x: Array, kernels: Kernels, router: Array = router, k: int = choices
        ) -> Array:
            return moe(x, x.astype(jnp.float32) @ router, kernels, top_k=k)[0]

        record: dict[str, object] = {"layer": title}
        for name, function, weights in (
            ("experts", routed, kernels),
            ("dense", mlp, dense),
        ):
            passes = jax.jit(partial(both_passes, function))
            record[f"{name}_ms"] = round(milliseconds(passes, x, weights, calls=5), 3)
        print(json.dumps(record), flush=True)


def main() -> None:
    """Print one line of JSON for each shape and implementation."""
    time_layers()
    for title, (tokens, choices, experts, width, hidden) in SHAPES.items():
        num_rows = tokens * choices
        x = normal(0, (num_rows, width))
        kernels = normal(1, (experts, width, hidden), 0.02)
        # Uneven groups, all multiples of the blocks.
        share = num_rows // experts
        shift = 2048 if share > 2048 else 0
        sizes = [share + (shift if i % 2 else -shift) for i in range(experts)]
        groups = jnp.array(sizes, jnp.int32)
        grad = normal(2, (num_rows, hidden))
        flops = 2.0 * num_rows * width * hidden
        for name, function in implementations().items():
            record = {"shape": title, "function": name}
            try:
                backward = jax.jit(partial(gradients, function))
                calls = (
                    ("forward", jax.jit(function), 1, (x, kernels, groups)),
                    ("backward", backward, 2, (x, kernels, groups, grad)),
                )
                for kind, jitted, factor, arrays in calls:
                    ms = milliseconds(jitted, *arrays, calls=10)
                    record[f"{kind}_ms"] = round(ms, 3)
                    record[f"{kind}_tflops"] = round(factor * flops / ms / 1e9, 1)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
