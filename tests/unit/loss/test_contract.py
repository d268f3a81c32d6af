"""How a loss is called, and what it may return."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.loss.contract import as_means, call_loss, optional_arguments
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.state import abstract_state, init_state
from shardwise.step import make_eval_step, make_train_step

BATCH = {
    "x": np.linspace(-1, 1, 32, dtype="f4").reshape(8, 4),
    "y": np.arange(8, dtype="f4"),
}


def linear(rngs):
    return nnx.Linear(4, 1, rngs=rngs)


def spec_on(mesh, factory=linear):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    return abstract_state(factory, optax.sgd(0.1), make_mesh(mesh, devices))


def losses_of(loss, mesh="data=1", steps=3, **options):
    spec = spec_on(mesh)
    step = make_train_step(spec, loss, BATCH, **options)
    state, losses = init_state(spec, 0), []
    for _ in range(steps):
        state, metrics = step(state, step.place(BATCH))
        losses.append(float(metrics["loss"]))
    return losses


def noisy(model, batch, rngs):
    noise = jax.random.normal(rngs.noise(), batch["y"].shape)
    return Mean((model(batch["x"])[:, 0] + noise) ** 2)


def test_random_streams_depend_on_the_step_and_the_seed_alone():
    one = losses_of(noisy)
    assert len(set(one)) == 3
    assert one == losses_of(noisy)
    assert one != losses_of(noisy, seed=1)
    np.testing.assert_allclose(losses_of(noisy, "data=8"), one, rtol=1e-6)


def test_the_step_is_counted_from_zero():
    def scheduled(model, batch, step):
        return Mean(0 * model(batch["x"])[:, 0] + step)

    assert losses_of(scheduled) == [0, 1, 2]


def test_evaluation_batches_have_streams_of_their_own():
    spec = spec_on("data=1")
    step = make_eval_step(spec, noisy, BATCH)
    state = init_state(spec, 0)
    layout = step.layout(8, 8)
    values = [
        float(step.on(state, BATCH, layout, number)["loss"].value)
        for number in (0, 1, 0)
    ]
    assert values[0] == values[2] != values[1]


def test_only_arguments_that_are_free_are_passed():
    def loss(model, batch, step, rngs=None):
        return step

    assert optional_arguments(loss) == ("rngs", "step")
    assert optional_arguments(functools.partial(loss, step=7)) == ("rngs",)
    assert optional_arguments(lambda model, batch, **rest: 0.0) == ()
    bound = functools.partial(loss, step=7)
    key = jax.random.key(0)
    assert call_loss(bound, None, None, key, jnp.int32(1)) == 7


@pytest.mark.parametrize(
    "loss",
    [lambda model, batch, key: 0.0, lambda model: 0.0, lambda rngs, model, batch: 0.0],
)
def test_a_signature_that_does_not_fit_is_refused(loss):
    with pytest.raises(ConfigError, match=r"called as loss\(model, batch\)"):
        optional_arguments(loss)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((jnp.ones(()), jnp.ones(())), r"return Mean\(total, weight\)"),
        ((jnp.ones(()), jnp.ones((8, 3))), r"float32\[\], float32\[8, 3\]"),
        ((jnp.ones(()), {}, {}), "additional metrics"),
        ([jnp.ones(())], r"returned \[float32\[\]\]"),
        ({"loss": jnp.ones(())}, "returned a dict"),
        (None, "returned a NoneType"),
        (jnp.ones(8), r"array of shape \(8,\)"),
        ((jnp.ones(()), {"lr": 1.0}), "reserved"),
    ],
)
def test_other_forms_are_refused_with_what_to_write(output, message):
    with pytest.raises(ConfigError, match=message):
        as_means(output, 8)


def test_an_entry_of_weight_zero_must_have_a_total_of_zero():
    nats, mask = jnp.arange(1.0, 5.0), jnp.array([1.0, 1.0, 0.0, 1.0])
    assert np.isnan(Mean(nats, mask).summed().total)
    np.testing.assert_allclose(Mean(nats * mask, mask).summed().value, 7 / 3)
    # One total per example, and weights per token.
    tokens = jnp.stack([mask, mask * 0, mask, mask])
    assert np.isnan(Mean(nats, tokens).summed().total)
    assert Mean(nats * jnp.array([1.0, 0, 1, 1]), tokens).summed().total == 8
    # The padding of a batch has a weight, but is excluded.
    padded = Mean(nats * mask, mask).summed(jnp.array([True, True, True, False]))
    np.testing.assert_allclose(padded.value, 3 / 2)


def test_a_mask_that_was_not_multiplied_in_changes_nothing():
    def forgotten(model, batch):
        return Mean(model(batch["x"])[:, 0] ** 2 + 1, (batch["y"] > 3) * 1.0)

    spec = spec_on("data=1")
    step = make_train_step(spec, forgotten, BATCH)
    state = init_state(spec, 0)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, step.place(BATCH))
    assert not metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, before, state.params)
