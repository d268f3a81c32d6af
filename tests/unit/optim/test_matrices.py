"""Optimizers of matrices, compared with references in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise import optim


def follow(tx, gradients, params):
    """Return the updates for these gradients. The parameters do not move."""
    state, updates = tx.init(params), []
    update = jax.jit(tx.update)
    for gradient in gradients:
        result, state = update(gradient, state, params)
        updates.append(result)
    return updates


def newton_schulz(x):
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (10, 2, 6)])
def test_normuon_is_its_reference(shape):
    """NorMuon of PyTorch weights (outputs, inputs), in float64."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(6, *shape))
    inputs, outputs = optim.matrices.matrix_shape(shape)
    momentum = np.zeros((outputs, inputs))
    mean_square = np.zeros((outputs, 1))
    expected = []
    for gradient in gradients:
        weight = gradient.reshape(inputs, outputs).T
        momentum = 0.9 * momentum + weight
        update = newton_schulz(weight + 0.9 * momentum)
        mean_square = 0.95 * mean_square + 0.05 * (update**2).mean(1, keepdims=True)
        update = update / np.sqrt(mean_square)
        update *= 0.2 * np.sqrt(update.size) / np.linalg.norm(update)
        expected.append(-0.1 * update.T.reshape(shape))

    params = {"w": jnp.zeros(shape)}
    tx = optim.normuon(0.1, momentum=0.9)
    updates = follow(tx, [{"w": jnp.asarray(g, "f4")} for g in gradients], params)
    for actual, reference in zip(updates, expected, strict=True):
        np.testing.assert_allclose(actual["w"], reference, rtol=1e-3, atol=1e-5)


def test_a_neuron_without_gradient_stays_where_it_is():
    gradient = {"w": jnp.ones((4, 6)).at[:, 2].set(0) + jnp.eye(4, 6)}
    gradient["w"] = gradient["w"].at[:, 2].set(0)
    (update,) = follow(optim.normuon(0.1), [gradient], gradient)
    assert not update["w"][:, 2].any()
    assert np.sqrt(np.mean(np.square(update["w"]))) == pytest.approx(0.02, rel=1e-4)


def test_the_layers_of_a_stack_are_separate():
    x = jax.random.normal(jax.random.key(0), (3, 8, 12))
    together = follow(optim.normuon(0.1, stacked=("w",)), [{"w": x}], {"w": x})[0]
    for i in range(3):
        alone = follow(optim.normuon(0.1), [{"w": x[i]}], {"w": x[i]})[0]
        np.testing.assert_allclose(together["w"][i], alone["w"], rtol=1e-4, atol=1e-6)
