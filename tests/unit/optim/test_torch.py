"""Twenty updates equal to PyTorch's own optimizers; the fixture says how it was made."""

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
        optim.cosine(0.05, STEPS), nesterov=True, weight_decay=0.01, decay=lambda path, leaf: True
    ),
    "muon": optim.muon(optim.cosine(0.02, STEPS), rms=None, weight_decay=0.1),
    "muon_rms": optim.muon(optim.cosine(0.03, STEPS), rms=0.2, weight_decay=0.1),
    "muon_bfloat16": optim.muon(optim.cosine(0.02, STEPS), rms=None, weight_decay=0.1),
}


@pytest.mark.parametrize("name", RECIPES)
def test_equal_to_pytorch(name):
    tx, keys = (
        RECIPES[name],
        [key.partition("/")[2] for key in FIXTURE if key.startswith(f"{name}/")],
    )
    params = {key: jnp.asarray(FIXTURE[f"start/{key}"], jnp.float32) for key in keys}
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for n in range(STEPS):
        params, state = step(
            params,
            state,
            {key: jnp.asarray(FIXTURE[f"grads/{key}"][n], jnp.float32) for key in keys},
        )
    for key in keys:
        wanted, start = FIXTURE[f"{name}/{key}"], FIXTURE[f"start/{key}"]
        assert np.linalg.norm(wanted - start) > 0.03 * np.linalg.norm(start), (
            "the fixture hardly moves"
        )
        error = np.linalg.norm(params[key] - wanted) / np.linalg.norm(wanted)
        print(f"{name}/{key}: {error:.1e}")
        assert error < (2e-3 if name == "muon_bfloat16" else 1e-6), key
