"""Benchmarks compare the same computation."""

import jax

from benchmarks.nnx_jit import WAYS


def test_nnx_jit_measures_steps_with_the_same_losses():
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 8))
    steps = {name: make(1, 8) for name, make in WAYS.items()}
    losses = {
        name: [float(step(x, y)) for _ in range(3)] for name, step in steps.items()
    }
    assert losses["nnx_jit"] == losses["cached_partial"] == losses["jax_jit"]
    assert losses["jax_jit"][2] < losses["jax_jit"][0]
