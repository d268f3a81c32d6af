"""Assertions of chex in the model and the loss."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import (
    Mean,
    abstract_state,
    evaluate,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
)
from shardwise.errors import CheckError, ConfigError
from shardwise.tracing.assertions import chex_assertions

X = np.random.default_rng(0).normal(size=(16, 8)).astype("f4")
BATCH = {"x": X, "y": X.sum(1)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.hidden(x))
        chex.assert_tree_all_finite(h)
        return self.out(h)[:, 0]


def loss(model, batch):
    prediction = model(batch["x"])
    chex.assert_equal_shape([prediction, batch["y"]])
    return Mean((prediction - batch["y"]) ** 2)


def make(function, model=Net):
    spec = abstract_state(model, optax.sgd(0.1), make_mesh("data=8"))
    return spec, make_train_step(spec, function, BATCH, accumulate=2)


def with_nan():
    x = X.copy()
    x[5, 0] = np.nan
    return {**BATCH, "x": x}


def test_a_value_assertion_needs_no_wrapper():
    spec, step = make(loss)
    state, metrics = step(init_state(spec, 0), step.place(BATCH))
    assert np.isfinite(metrics["loss"])
    with pytest.raises(CheckError) as raised:
        step(state, step.place(with_nan()))
    line = Net.__call__.__code__.co_firstlineno + 2
    assert str(raised.value) == (
        "step 2: check failed: [Chex] chexify assertion 'assert_tree_all_finite' failed: Tree "
        f"contains non-finite value: nan ({__file__}, line {line}). The update was not applied."
    )


def test_a_value_assertion_runs_in_an_evaluation():
    spec, _ = make(loss)
    step = make_eval_step(spec, loss, BATCH)
    state = init_state(spec, 0)
    assert evaluate(step, state, [BATCH])["loss"] > 0
    with pytest.raises(CheckError, match=r"batch 2: .*Tree contains non-finite value"):
        evaluate(step, state, [BATCH, with_nan()])


def test_a_static_assertion_names_the_users_line():
    def column(model, batch):
        prediction = model(batch["x"])[:, None]
        chex.assert_shape(prediction, (16,))
        return Mean((prediction - batch["y"]) ** 2)

    line = column.__code__.co_firstlineno + 2
    with pytest.raises(ConfigError) as raised:
        make(column)
    assert str(raised.value) == (
        "the loss failed for a batch of x float32[16, 8], y float32[16]: AssertionError: [Chex] "
        "Assertion assert_shape failed: Error in shape compatibility check: input 0 has shape "
        f"(16, 1) but expected (16). ({__file__}, line {line})"
    )


def test_chexify_is_refused_with_what_to_do():
    wrapped = chex.chexify(loss, async_check=False)
    with pytest.raises(ConfigError, match=r"Do not use chex\.chexify in a model"):
        make(wrapped)


def test_the_switch_of_chex_is_the_one_that_chexify_uses():
    """shardwise sets it, and restores it also after an exception."""
    wrapped = chex.chexify(lambda: jnp.zeros(()), async_check=False)
    wrapped()
    with chex_assertions(), pytest.raises(RuntimeError, match="Nested @chexify"):
        wrapped()
    with pytest.raises(RuntimeError, match="Nested @chexify"), chex_assertions():
        wrapped()
    wrapped()
