"""Compare `nnx.jit` of a training step with `jax.jit` of the same step on arrays.

    python -m benchmarks.nnx_jit

`nnx.jit` takes model and optimizer apart before every call and puts them together after it, on the
host. `jax.jit` of the functional API does it once, while the step is traced. shardwise works the
second way. The model is an MLP of NNX layers, the optimizer is Adam, and both steps donate their
inputs:

- `nnx.jit(step)(model, optimizer, x, y)`
- `nnx.cached_partial(nnx.jit(step), model, optimizer)`, which keeps what it took apart
- `jax.jit(step)(state, x, y)`, with `nnx.merge` and `nnx.state` inside

All run in turn, round after round. Each figure is the median over the rounds of a ratio within one
round. The programs are the same, so the difference is host time: the CPU time of the thread that
calls the step. On an accelerator it is hidden as long as a step of the device takes longer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

# Layers, width and batch size of each case.
CASES = {"small": (2, 64, 32), "medium": (24, 256, 64)}

# A step that keeps its model, and returns the loss.
Step = Callable[[jax.Array, jax.Array], jax.Array]


class MLP(nnx.Module):
    """Linear layers with norms."""

    def __init__(self, layers: int, width: int, rngs: nnx.Rngs):
        """Create the parameters."""
        self.layers = nnx.List(
            [nnx.Linear(width, width, rngs=rngs) for _ in range(layers)]
        )
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs (B, D) of inputs (B, D)."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nnx.relu(layer(norm(x)))
        return x


def train_step(
    model: MLP, optimizer: nnx.Optimizer[MLP], x: jax.Array, y: jax.Array
) -> jax.Array:
    """Update the model and return its loss."""
    loss: jax.Array
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def make_objects(layers: int, width: int) -> tuple[MLP, nnx.Optimizer[MLP]]:
    """Return a new model and its optimizer."""
    model = MLP(layers, width, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def with_nnx_jit(layers: int, width: int) -> Step:
    """Return the step with `nnx.jit`."""
    model, optimizer = make_objects(layers, width)
    return partial(nnx.jit(train_step, donate_argnums=(0, 1)), model, optimizer)


def with_cached_partial(layers: int, width: int) -> Step:
    """Return the step with `nnx.jit` and `nnx.cached_partial`."""
    step: Step = nnx.cached_partial(
        nnx.jit(train_step, donate_argnums=(0, 1)), *make_objects(layers, width)
    )
    return step


def with_jax_jit(layers: int, width: int) -> Step:
    """Return the step with `jax.jit` and the functional API."""
    definition, state = nnx.split(make_objects(layers, width))

    @partial(jax.jit, donate_argnums=0)
    def on_arrays(state, x, y):
        model, optimizer = nnx.merge(definition, state)
        loss = train_step(model, optimizer, x, y)
        return nnx.state((model, optimizer)), loss

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        nonlocal state
        state, loss = on_arrays(state, x, y)
        return loss

    return step


WAYS = {
    "nnx_jit": with_nnx_jit,
    "cached_partial": with_cached_partial,
    "jax_jit": with_jax_jit,
}


def timed(step: Step, x: jax.Array, y: jax.Array, count: int) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of this thread, per step."""
    start, own = time.perf_counter(), time.thread_time()
    for _ in range(count):
        loss = step(x, y)
    loss.block_until_ready()
    return (time.perf_counter() - start) / count, (time.thread_time() - own) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of work per way and round"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    answer = {}
    print(f"jax {jax.__version__}; median of {options.rounds} rounds")
    for name, (layers, width, batch_size) in CASES.items():
        x, y = jax.random.normal(jax.random.key(0), (2, batch_size, width))
        ways = {way: make(layers, width) for way, make in WAYS.items()}
        losses = {
            way: [float(step(x, y)) for _ in range(3)] for way, step in ways.items()
        }
        assert losses["nnx_jit"] == losses["cached_partial"] == losses["jax_jit"]
        count = max(5, int(options.seconds / timed(ways["nnx_jit"], x, y, 5)[0]))
        rounds = [
            {way: timed(step, x, y, count) for way, step in ways.items()}
            for _ in range(options.rounds)
        ]
        num_arrays = len(jax.tree.leaves(nnx.state(make_objects(layers, width))))
        row: dict[str, float] = {"arrays": num_arrays}
        for way in ways:
            row[f"{way}_s"], row[f"{way}_host_s"] = (
                statistics.median(r[way][i] for r in rounds) for i in (0, 1)
            )
            row[f"{way}_ratio"] = statistics.median(
                r[way][0] / r["jax_jit"][0] for r in rounds
            )
        answer[name] = row
        print(f"{name}, {num_arrays} arrays")
        for way in ways:
            print(
                f"  {way:15} {row[f'{way}_s'] * 1e3:8.3f} ms, {row[f'{way}_ratio']:.2f} x, "
                f"host {row[f'{way}_host_s'] * 1e3:.3f} ms",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
