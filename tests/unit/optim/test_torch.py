"""20 updates agree with the optimizers of PyTorch. The fixture says how it was made."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwise import optim

FIXTURE = np.load(Path(__file__).parents[2] / "fixtures" / "torch_optimizers.npz")
STEPS = 20
RECIPES = {
    "adamw": optim.adamw(
        optim.cosine(0.03, STEPS),
        b2=0.95,
        weight_decay=0.1,
        decay=lambda path, leaf: True,
        clip=1.0,
    ),
    "sgd": optim.sgd(
        optim.cosine(0.05, STEPS),
        nesterov=True,
        weight_decay=0.01,
        decay=lambda path, leaf: True,
    ),
    "muon": optim.muon(optim.cosine(0.02, STEPS), rms=None, weight_decay=0.1),
    "muon_rms": optim.muon(optim.cosine(0.03, STEPS), rms=0.2, weight_decay=0.1),
    "muon_bfloat16": optim.muon(optim.cosine(0.02, STEPS), rms=None, weight_decay=0.1),
}


@pytest.mark.parametrize("name", RECIPES)
def test_equal_to_pytorch(name):
    tx = RECIPES[name]
    keys = [key.partition("/")[2] for key in FIXTURE if key.startswith(f"{name}/")]
    params = {key: jnp.asarray(FIXTURE[f"start/{key}"], jnp.float32) for key in keys}
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for n in range(STEPS):
        grads = {
            key: jnp.asarray(FIXTURE[f"grads/{key}"][n], jnp.float32) for key in keys
        }
        params, state = step(params, state, grads)
    for key in keys:
        expected = FIXTURE[f"{name}/{key}"]
        start = FIXTURE[f"start/{key}"]
        # Otherwise any optimizer would pass.
        assert np.linalg.norm(expected - start) > 0.03 * np.linalg.norm(start)
        error = np.linalg.norm(params[key] - expected) / np.linalg.norm(expected)
        assert error < (2e-3 if name == "muon_bfloat16" else 1e-6), key
