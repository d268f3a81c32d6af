"""A check in a model reports the same on every layout of eight devices, and stops the update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify

from shardwise import (
    Mean,
    Rules,
    abstract_state,
    init_state,
    make_mesh,
    make_train_step,
)
from shardwise.errors import CheckError
from shardwise.tree import named_leaves

X = np.random.default_rng(0).normal(size=(32, 16)).astype("f4")


class Net(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, ("embed", "mlp"))
        down = nnx.with_partitioning(init, ("mlp", "embed"))
        self.up = nnx.Linear(16, 64, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(64, 16, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        h = nnx.gelu(self.up(x))
        top = h.max()
        checkify.check(top < 100, "activation of {top:.1f}", top=top)
        return x + self.down(h)


def loss(model, batch):
    largest = jnp.abs(batch["x"]).max(axis=1)
    worst = largest.argmax()
    checkify.check(largest.max() < 1e4, "example {n} is too large", n=worst)
    return Mean((model(batch["x"]) - batch["x"][:, ::-1]) ** 2)


def failing_runs(layout):
    """Return parameters after two good steps, and the messages of two bad ones after each."""
    count = 1 if layout == "data=1" else 8
    mesh = make_mesh(layout, jax.devices()[:count])
    spec = abstract_state(Net, optax.adam(1e-2), mesh, Rules(fsdp_min_size=16))
    step = make_train_step(spec, loss, {"x": X}, accumulate=2).compile()
    state = init_state(spec, 0)
    large, huge = X * 300, X.copy()
    huge[11] = 1e6
    messages = []
    for bad in (large, huge):
        state, _ = step(state, step.place({"x": X}))
        with pytest.raises(CheckError) as raised:
            step(state, step.place({"x": bad}))
        messages.append(str(raised.value))
        state = raised.value.state
    return {name: np.asarray(x) for name, x in named_leaves(state).items()}, messages


@pytest.fixture(scope="module")
def one_device():
    return failing_runs("data=1")


@pytest.mark.parametrize(
    "layout", ["data=8", "fsdp=8", "data=4,model=2", "data=2,fsdp=2,model=2"]
)
def test_a_check_reports_the_same_on_every_mesh(layout, one_device):
    state, messages = failing_runs(layout)
    expected, expected_messages = one_device
    assert messages == expected_messages
    assert messages[0].startswith("step 2: check failed: activation of ")
    # Example 11 is number 5 of the second micro-batch.
    assert messages[1].startswith("step 4: check failed: example 5 is too large (")
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=2e-5, atol=2e-6)
