"""Time one update of the float32 parameters of GPT-2 124M, relative to its memory traffic.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --stacked --only adamw "muon, stacked"

The bandwidth is measured in the same run, by copying an array of the same size. AdamW with clipping
accesses 8 values per parameter. It reads the gradient twice, because the norm must be known before
it is used. It reads and writes the weight and two moments.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from shardwise import abstract_state, make_mesh, optim
from shardwise.models.gpt import GPT, PRESETS
from shardwise.optim.matrices import parameters_stored_as
from shardwise.optim.parts import norm

TABLES = ("tokens", "positions")
# Updates in one program.
UPDATES = 20


def by_hand(lr):
    """Return AdamW with clipping, written with Optax only."""
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(lr, b2=0.95, weight_decay=0.1)
    )


# The optimizer, and how many values per parameter it accesses.
OPTIMIZERS = {
    "adamw": (lambda lr: optim.adamw(lr, b2=0.95, weight_decay=0.1, clip=1.0), 8),
    "adamw, optax by hand": (by_hand, 8),
    "adamw, bfloat16 moment": (
        lambda lr: optim.adamw(
            lr, b2=0.95, weight_decay=0.1, clip=1.0, moment_dtype="bfloat16"
        ),
        7,
    ),
    "adamw, average kept": (
        lambda lr: optim.adamw(lr, b2=0.95, weight_decay=0.1, clip=1.0, ema=0.999),
        10,
    ),
    "sgd": (lambda lr: optim.sgd(lr, clip=1.0), 6),
    "lion": (lambda lr: optim.lion(lr, weight_decay=0.1, clip=1.0), 6),
    "adafactor": (lambda lr: optim.adafactor(lr, clip=1.0), 5),
    "muon": (lambda lr: optim.muon(lr, adam=TABLES, weight_decay=0.1, clip=1.0), 6),
    "muon, bfloat16": (
        lambda lr: optim.muon(
            lr, adam=TABLES, weight_decay=0.1, clip=1.0, iterate_in="bfloat16"
        ),
        6,
    ),
    "muon, stacked": (
        lambda lr: optim.muon(
            lr, adam=TABLES, stacked=("blocks/*",), weight_decay=0.1, clip=1.0
        ),
        6,
    ),
    "muon, stacked, bfloat16": (
        lambda lr: optim.muon(
            lr,
            adam=TABLES,
            stacked=("blocks/*",),
            weight_decay=0.1,
            clip=1.0,
            iterate_in="bfloat16",
        ),
        6,
    ),
}


def seconds(function, state, rounds: int = 5, calls: int = 5) -> float:
    """Return the median seconds per call, after one second of warm-up.

    `function` maps a state to the next one.
    """
    begun = time.perf_counter()
    while time.perf_counter() - begun < 1:
        state = jax.block_until_ready(function(state))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            state = function(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def random_like(abstract, scale: float, seed: int):
    """Return a tree of normally distributed arrays with the shapes of `abstract`."""
    leaves, structure = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten(
        [
            scale * jax.random.normal(key, leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
    )


def time_of_update(
    tx: optax.GradientTransformation, abstract, with_norms: bool
) -> float:
    """Return the seconds of one update."""
    params, grads = random_like(abstract, 0.02, 0), random_like(abstract, 0.01, 1)

    @partial(jax.jit, donate_argnums=0)
    def several_updates(carry, grads):
        """Run several updates in one program.

        In training, an update is part of a program too. Separate programs would dispatch hundreds
        of buffers for each update.
        """

        def update(i, carry):
            params, state, _ = carry
            # The gradients change, otherwise the compiler would compute the norm only once.
            changed = jax.tree.map(lambda g: g * (1 + 1e-6 * i), grads)
            # As in a training step: matrices of one shape are stacked on a GPU.
            with parameters_stored_as(jax.tree.map(lambda p: p.sharding, abstract)):
                updates, state = tx.update(changed, state, params)
            params = optax.apply_updates(params, updates)
            return (
                params,
                state,
                (norm(updates), norm(params)) if with_norms else carry[2],
            )

        return jax.lax.fori_loop(0, UPDATES, update, carry)

    carry = (params, jax.jit(tx.init)(params), (jnp.zeros([]), jnp.zeros([])))
    return seconds(lambda carry: several_updates(carry, grads), carry) / UPDATES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2", choices=sorted(PRESETS))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(OPTIMIZERS),
        default=["adamw", "adamw, optax by hand", "muon"],
    )
    parser.add_argument(
        "--norms",
        action="store_true",
        help="also compute the norms of update and parameters, as the training step does",
    )
    parser.add_argument(
        "--stacked",
        action="store_true",
        help="stack the layers (scan_layers): 16 large leaves instead of 148",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = replace(PRESETS[options.preset], scan_layers=options.stacked)
    schedule = optim.cosine(3e-4, 10_000, warmup=0.05)
    mesh = make_mesh("data=1", jax.devices()[:1])
    abstract = abstract_state(
        lambda rngs: GPT(config, rngs), optax.identity(), mesh
    ).abstract.params
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract))

    several_copies = jax.jit(
        lambda x: jax.lax.fori_loop(0, UPDATES, lambda _, x: x + 1, x), donate_argnums=0
    )
    bandwidth = (
        2 * 4 * count * UPDATES / seconds(several_copies, jnp.zeros(count, jnp.float32))
    )
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {count:,} parameters, "
        f"copies at {bandwidth / 1e9:,.0f} GB/s"
    )
    answers = {}
    for name in options.only:
        make, numbers = OPTIMIZERS[name]
        took = time_of_update(make(schedule), abstract, options.norms)
        needed = numbers * 4 * count / bandwidth
        answers[name] = {
            "ms": took * 1e3,
            "needed_ms": needed * 1e3,
            "ratio": took / needed,
        }
        bound = f"the traffic of {numbers} values per parameter ({needed * 1e3:.3f} ms)"
        print(
            f"{name:24} {took * 1e3:7.3f} ms, {took / needed:5.2f} times {bound}",
            flush=True,
        )
    if options.json:
        options.json.write_text(
            json.dumps(
                {"bandwidth": bandwidth, "parameters": count, "optimizers": answers},
                indent=2,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
