"""The training loop, and exact means over validation data of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import Batches
from shardwise.loop import evaluate, steps
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.state import abstract_state, init_state
from shardwise.step import make_eval_step, make_train_step


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(self.norm(x)))[:, 0]


def weighted(model, batch):
    return Mean(model(batch["x"]) ** 2 * batch["w"], batch["w"])


def scalar(model, batch):
    return (model(batch["x"]) ** 2).mean()


def make_data(rows):
    rng = np.random.default_rng(rows)
    return {
        "x": rng.normal(size=(rows, 4)).astype("f4"),
        "w": rng.uniform(0.5, 2, rows).astype("f4"),
    }


SPEC = abstract_state(Net, optax.sgd(0.1), make_mesh("data=8"))
STATE = init_state(SPEC, 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 70), st.integers(1, 24), st.booleans())
def test_evaluation_is_exact_for_any_number_of_examples(rows, batch_size, with_weights):
    data, batch_size = make_data(rows), min(batch_size, rows)
    loss = weighted if with_weights else scalar
    batches = Batches(data, batch_size)
    got = evaluate(make_eval_step(SPEC, loss, next(batches.once())), STATE, batches)[
        "loss"
    ]
    # In evaluation mode: running statistics, and no dropout.
    normalized = data["x"] / np.sqrt(1 + 1e-5)
    outputs = normalized @ np.asarray(STATE.params["linear"]["kernel"])[:, 0]
    want = np.average(outputs**2, weights=data["w"] if with_weights else None)
    assert got == pytest.approx(want, rel=1e-5)


def test_evaluation_compiles_once_for_batches_of_two_sizes():
    batches = Batches(make_data(37), 16)
    step = make_eval_step(SPEC, weighted, next(batches.once()))
    evaluate(step, STATE, batches)
    assert step.function._cache_size() == 1


def test_steps_continue_from_the_step_of_the_state():
    batches = Batches(make_data(64), 16)
    step = make_train_step(SPEC, weighted, batches(0))
    state = init_state(SPEC, 0)
    seen = []
    for n, new, metrics in steps(step, state, batches, until=3):
        seen.append((n, int(new.step)))
        state = new
        assert isinstance(metrics["loss"], jax.Array)
    assert seen == [(1, 1), (2, 2), (3, 3)]
    assert [n for n, *_ in steps(step, state, batches, until=5)] == [4, 5]
    assert list(steps(step, init_state(SPEC, 0), batches, until=0)) == []


def test_resumed_run_equals_uninterrupted_run():
    batches = Batches(make_data(64), 16)
    step = make_train_step(SPEC, weighted, batches(0))

    def run(state, until):
        return [state for _, state, _ in steps(step, state, batches, until=until)][-1]

    straight = run(init_state(SPEC, 0), 6)
    broken = run(run(init_state(SPEC, 0), 2), 6)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), straight, broken)
    )
