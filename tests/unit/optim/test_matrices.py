"""Optimizers of matrices, compared with references in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise import optim
from shardwise.optim import eigenbasis
from shardwise.optim.matrices import matrix_shape


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
    inputs, outputs = matrix_shape(shape)
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


def reference_soap(gradients, every, b1=0.95, b2=0.95):
    """SOAP in float64, one matrix at a time, with explicit sums."""
    rows, columns = gradients[0].shape
    first, second = np.zeros((rows, columns)), np.zeros((rows, columns))
    covariances = [np.zeros((rows, rows)), np.zeros((columns, columns))]
    bases = [np.eye(rows), np.eye(columns)]
    for n, gradient in enumerate(gradients):
        outers = np.einsum("ik,jk->ij", gradient, gradient), gradient.T @ gradient
        for i, outer in enumerate(outers):
            covariances[i] = b2 * covariances[i] + (1 - b2) * outer
            if n % every == 0:
                shift = 1e-3 * np.linalg.norm(covariances[i])
                shifted = covariances[i] + shift * np.eye(len(outer))
                bases[i] = np.linalg.qr(shifted @ bases[i])[0]
        left, right = bases
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * (left.T @ gradient @ right) ** 2
        mean = left.T @ first @ right / (1 - b1 ** (n + 1))
        square = second / (1 - b2 ** (n + 1))
        fade = square / (square + 1e-6 * square.max())
        yield left @ (fade * mean / np.sqrt(square)) @ right.T


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5)])
def test_soap_is_its_reference(shape):
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(shape[0], shape[0]))
    gradients = [mix @ rng.normal(size=shape) for _ in range(8)]
    tx = optim.scale_by_soap(every=3)
    params = {"w": jnp.zeros(shape)}
    updates = follow(tx, [{"w": jnp.asarray(g, "f4")} for g in gradients], params)
    for actual, expected in zip(updates, reference_soap(gradients, 3), strict=True):
        np.testing.assert_allclose(actual["w"], expected, rtol=2e-3, atol=1e-3)


def test_the_bases_of_soap_become_eigenvectors():
    rng = np.random.default_rng(0)
    scales = np.diag(2.0 ** -np.arange(6))
    turn = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    gradient = {
        "w": jnp.asarray(turn @ scales @ np.linalg.qr(rng.normal(size=(6, 6)))[0])
    }
    tx = optim.scale_by_soap(every=1)
    state = tx.init(gradient)
    update = jax.jit(tx.update)
    for _ in range(30):
        _, state = update(gradient, state)
    basis, covariance = state.left_basis["w"], state.left["w"]
    inside = basis.T @ covariance @ basis
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-5)
    off_diagonal = inside - jnp.diag(jnp.diag(inside))
    assert float(jnp.abs(off_diagonal).max()) < 1e-3 * float(inside.max())


def test_a_long_side_keeps_its_basis():
    params = {"w": jnp.ones((4, 40)), "v": jnp.ones((50, 40))}
    state = optim.scale_by_soap(largest=20).init(params)
    shapes = [leaf.shape for leaf in jax.tree.leaves((state.left, state.right))]
    assert shapes == [(4, 4)]
    updates, _ = optim.scale_by_soap(largest=20).update(params, state)
    # The basis of columns is that of Adam, and so is all of "v".
    np.testing.assert_allclose(updates["v"], 1.0, rtol=1e-5)


def difference_by_rounding(rank):
    """Return how much two runs of SOAP differ whose gradients differ by rounding."""
    rng = np.random.default_rng(0)
    sides = rng.normal(size=(10, 24, rank)), rng.normal(size=(10, rank, 16))
    gradients = np.einsum("nik,nkj->nij", *sides)
    noise = 6e-8 * np.abs(gradients) * rng.normal(size=gradients.shape)
    params = {"w": jnp.zeros((24, 16))}
    first, second = (
        follow(
            optim.scale_by_soap(every=2),
            [{"w": jnp.asarray(g, "f4")} for g in run],
            params,
        )
        for run in (gradients, gradients + noise)
    )
    pairs = [(a["w"], b["w"]) for a, b in zip(first, second, strict=True)]
    return np.array([jnp.linalg.norm(a - b) / jnp.linalg.norm(a) for a, b in pairs])


@pytest.fixture
def without_shift_and_fade(monkeypatch):
    """JAX keeps traces of the branches of a condition, and with them the constants."""
    jax.clear_caches()
    monkeypatch.setattr(eigenbasis, "SHIFT", 0.0)
    monkeypatch.setattr(eigenbasis, "FADE", 0.0)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("rank", [1, 3])
def test_rounding_in_directions_without_gradient_does_not_move_soap(rank):
    difference = difference_by_rounding(rank)
    assert difference.max() < 3e-3
    assert np.median(difference) < 3e-4


def test_rounding_moves_soap_without_shift_and_fade(without_shift_and_fade):
    assert np.median(difference_by_rounding(3)) > 0.03
