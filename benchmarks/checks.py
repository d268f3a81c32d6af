"""Measure what checks in a loss cost: `python -m benchmarks.checks`.

The same GPT trains with three losses: without checks, with one check of the loss, and with checks
in every layer. The three run in turn, round after round, so that noise affects all of them alike.
Times of a step are the median over the rounds of a ratio within one round. The loop does nothing
else, so the time that the device waits for the host shows in full.
"""

import argparse
import statistics
import time
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import checkify

from shardwise import (
    Batches,
    Mean,
    Tokens,
    abstract_state,
    init_state,
    make_mesh,
    make_train_step,
    steps,
    use_cpu_devices,
)
from shardwise.models.gpt import GPT, GPTBlock, GPTConfig
from shardwise.models.loss import cross_entropy


class CheckedBlock(GPTBlock):
    """A layer that checks its output."""

    def __call__(self, x, *args, **options):
        """Return the output of the layer, and its bias."""
        y, bias = super().__call__(x, *args, **options)
        top = jnp.abs(y).max()
        checkify.check(top < 1e4, "largest value {top}", top=top)
        return y, bias


def checked_layers(config, rngs):
    """Return a GPT whose layers check their outputs."""
    model = GPT(config, rngs)
    for block in model.blocks:
        block.__class__ = CheckedBlock
    return model


def loss(model, batch):
    """Return the loss of every token."""
    return Mean(cross_entropy(model(batch["inputs"]), batch["labels"]))


def checked_loss(model, batch):
    """Return the loss of every token, once it is checked."""
    nats = cross_entropy(model(batch["inputs"]), batch["labels"])
    checkify.check(nats.max() < 100, "largest {top}", top=nats.max())
    return Mean(nats)


CASES = {
    "no checks": (GPT, loss),
    "one check": (GPT, checked_loss),
    "a check per layer": (checked_layers, loss),
}


def main() -> None:
    """Print compile time and step time of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="data=1")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    use_cpu_devices(options.devices)
    config = GPTConfig(
        vocab_size=256,
        max_length=64,
        num_layers=options.layers,
        num_heads=4,
        width=options.width,
    )
    tokens = np.random.default_rng(0).integers(0, 256, 100_000)
    batches = Batches(Tokens(tokens, 64), 16)
    runs = {}
    for name, (factory, function) in CASES.items():
        mesh = make_mesh(options.mesh)
        spec = abstract_state(partial(factory, config), optax.adamw(1e-3), mesh)
        began = time.perf_counter()
        step = make_train_step(spec, function, batches(0)).compile()
        compiled = time.perf_counter() - began
        runs[name] = [step, init_state(spec, 0), compiled, []]
    for _ in range(options.rounds):
        for run in runs.values():
            step, state = run[:2]
            began = time.perf_counter()
            until = int(state.step) + options.steps
            for _, state, metrics in steps(step, state, batches, until=until):  # noqa: B007
                pass
            float(metrics["loss"])
            run[1] = state
            run[3].append((time.perf_counter() - began) / options.steps)
    base = runs["no checks"][3]
    for name, (_, _, compiled, times) in runs.items():
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
        print(
            f"{name}: compiled in {compiled:.1f} s, {statistics.median(times) * 1e3:.1f} ms per "
            f"step, {ratio:.2f} times"
        )


if __name__ == "__main__":
    main()
