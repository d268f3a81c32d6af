"""Tests of the GELU and loss kernels against JAX and Optax, in the interpreter of Pallas.

On a GPU the same code is compiled.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import make_mesh
from shardwise.kernels import cross_entropy as losses
from shardwise.kernels.activation import fused_bias_gelu, plain_bias_gelu
from shardwise.kernels.cross_entropy import chunked_cross_entropy, cross_entropy
from shardwise.kernels.float8 import matmul_dtype


def assert_close(ours, theirs, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * float(jnp.abs(b).max())
        )


def gelu_and_grads(gelu, x, bias):
    return jax.jit(
        jax.value_and_grad(lambda x, bias: jnp.sin(gelu(x, bias)).sum(), argnums=(0, 1))
    )(x, bias)


def jax_gelu(x, bias):
    return jax.nn.gelu(x + bias, approximate=True)


@pytest.mark.parametrize("gelu", [fused_bias_gelu, plain_bias_gelu])
@settings(max_examples=3)
@given(
    tokens=st.integers(1, 70),
    width=st.sampled_from([1, 96, 300]),
    seed=st.integers(0, 2**31),
)
def test_gelu_matches_jax_for_any_shape(gelu, tokens, width, seed):
    rng = np.random.default_rng(seed)
    x, bias = (
        rng.normal(0, 4, (tokens, width)).astype("f4"),
        rng.normal(0, 1, width).astype("f4"),
    )
    assert_close(gelu_and_grads(gelu, x, bias), gelu_and_grads(jax_gelu, x, bias))


def test_gelu_of_large_inputs_is_finite():
    x = jnp.asarray([[-1e4, -30.0, 30.0, 1e4]])
    (value, grads) = gelu_and_grads(fused_bias_gelu, x, jnp.zeros(4))
    assert np.isfinite(value)
    assert np.isfinite(grads[0]).all()


def test_each_device_computes_its_own_shard_of_the_gelu():
    mesh = make_mesh("data=4,model=2")
    rng = np.random.default_rng(0)
    x, bias = rng.normal(size=(64, 96)).astype("f4"), rng.normal(size=96).astype("f4")
    sharded = (
        jax.device_put(x, NamedSharding(mesh, P("data", "model"))),
        jax.device_put(bias, NamedSharding(mesh, P("model"))),
    )
    run = jax.jit(lambda *arguments: gelu_and_grads(fused_bias_gelu, *arguments))
    value, grads = run(*sharded)
    assert [
        g.sharding.is_equivalent_to(a.sharding, a.ndim)
        for g, a in zip(grads, sharded, strict=True)
    ] == [True, True]
    assert set(re.findall(r"all-\w+", run.lower(*sharded).compile().as_text())) == {
        "all-reduce"
    }
    assert_close((value, grads), gelu_and_grads(jax_gelu, x, bias))


def loss_and_grad(loss, logits, labels, weights):
    return jax.jit(jax.value_and_grad(lambda x: (loss(x, labels) * weights).sum()))(
        logits
    )


@pytest.fixture(params=["plain", "fused"])
def where(request, monkeypatch):
    """Run a test with the plain loss, and with the loss for GPUs."""
    monkeypatch.setattr(
        losses, "platform", lambda: "gpu" if request.param == "fused" else "cpu"
    )
    return request.param


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 130), (2, 5000)])
def test_cross_entropy_matches_optax(where, shape):
    rng = np.random.default_rng(1)
    logits, labels = (
        rng.normal(0, 5, shape).astype("f4"),
        rng.integers(0, shape[-1], shape[:-1]),
    )
    for weights in (
        np.ones(shape[:-1], "f4"),
        rng.uniform(size=shape[:-1]).astype("f4"),
    ):
        theirs = loss_and_grad(
            optax.softmax_cross_entropy_with_integer_labels, logits, labels, weights
        )
        assert_close(loss_and_grad(cross_entropy, logits, labels, weights), theirs)
    assert_close(
        cross_entropy(logits, labels),
        optax.softmax_cross_entropy_with_integer_labels(logits, labels),
    )


def of_logits(features, table, labels, weights):
    return (cross_entropy(features @ table.T, labels) * weights).sum()


def of_features(features, table, labels, weights):
    nats = losses.linear_cross_entropy(features, table, labels)
    return (nats * weights).sum()


def of_features8(features, table, labels, weights):
    with matmul_dtype("float8"):
        return of_features(features, table, labels, weights)


def in_chunks(features, table, labels, weights):
    return chunked_cross_entropy(features, table, labels, 2, weights)


@pytest.mark.parametrize(
    ("loss", "tolerance"),
    [
        (of_logits, 2e-5),
        (of_features, 2e-5),
        (of_features8, 0.1),
        (in_chunks, 2e-5),
    ],
)
def test_labels_mean_what_they_mean_for_optax(where, loss, tolerance):
    """Negative ones count from the end, and others do not exist. Padding is often -1 or -100."""
    rng = np.random.default_rng(5)
    features, table = (0.5 * rng.normal(size=(n, 32)).astype("f4") for n in (64, 128))
    labels = jnp.asarray(rng.integers(-128, 128, 64))
    weights = (rng.uniform(size=64) < 0.5).astype("f4")

    def theirs(features, table):
        logits = features @ table.T
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (nats * weights).sum()

    run = partial(jax.value_and_grad, argnums=(0, 1))
    assert_close(
        run(loss)(features, table, labels, weights),
        run(theirs)(features, table),
        tolerance,
    )
    for label in (128, -129):
        wrong = labels.at[0].set(label)
        assert np.isnan(loss(features, table, wrong, jnp.ones(64)))


def test_weights_of_zero_leave_labels_out_that_do_not_exist():
    features, table = jnp.ones((4, 8)), jnp.ones((16, 8))
    labels = jnp.array([0, -100, 3, -100])
    total = in_chunks(features, table, labels, labels >= 0)
    np.testing.assert_allclose(total, 2 * np.log(16), rtol=1e-6)


@pytest.mark.parametrize("loss", [of_features, of_features8, in_chunks])
def test_a_frozen_table_may_be_a_numpy_array(loss):
    rng = np.random.default_rng(6)
    features, table = (rng.normal(size=(n, 32)).astype("f4") for n in (64, 128))
    labels, weights = rng.integers(0, 128, 64), np.ones(64, "f4")
    by_features = jax.jit(
        jax.grad(lambda x, labels: loss(x, table, labels, weights)),
    )
    expected = jax.grad(loss)(features, jnp.asarray(table), labels, weights)
    assert_close(by_features(features, labels), expected)


def test_cross_entropy_of_bfloat16_logits_is_rounded_once(where):
    rng = np.random.default_rng(2)
    logits, labels = (
        jnp.asarray(rng.normal(0, 5, (20, 300)), jnp.bfloat16),
        rng.integers(0, 300, 20),
    )
    value, grad = loss_and_grad(cross_entropy, logits, labels, 1.0)
    exact, exact_grad = loss_and_grad(
        cross_entropy, logits.astype(jnp.float32), labels, 1.0
    )
    assert grad.dtype == jnp.bfloat16
    assert_close(value, exact)
    assert (grad == exact_grad.astype(jnp.bfloat16)).mean() > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_device_computes_the_loss_of_its_own_tokens(dtype, monkeypatch):
    # The kernel for Hopper computes in half precision, and only on one device.
    monkeypatch.setattr(losses.hopper, "is_available", lambda: True)
    mesh = make_mesh("data=8")
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(64, 128)), dtype)
    labels = rng.integers(0, 128, 64)
    sharded = jax.device_put((logits, labels), NamedSharding(mesh, P("data")))
    run = jax.jit(losses.fused_cross_entropy)
    nats, gradient = run(*sharded)
    assert gradient.sharding.is_equivalent_to(sharded[0].sharding, 2)
    assert not re.findall(r"all-\w+", run.lower(*sharded).compile().as_text())
    exact = logits.astype(jnp.float32)
    assert_close(nats, optax.softmax_cross_entropy_with_integer_labels(exact, labels))


@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2"])
def test_linear_cross_entropy_matches_cross_entropy_of_the_logits(monkeypatch, mesh):
    """Each device has too few tokens for the Hopper kernel, or the vocabulary is sharded."""
    monkeypatch.setattr(
        losses, "_is_fused", lambda *_: losses._vocabulary_is_unsharded()
    )
    rng = np.random.default_rng(4)
    features, table = (
        rng.normal(size=(64, 16)).astype("f4"),
        rng.normal(size=(40, 16)).astype("f4"),
    )
    labels, weights = (
        rng.integers(0, 40, (4, 16)),
        rng.uniform(size=(4, 16)).astype("f4"),
    )

    def value_and_grads(loss, *arguments):
        return jax.jit(
            jax.value_and_grad(
                lambda *args: (loss(*args, labels) * weights).sum(), argnums=(0, 1)
            )
        )(*arguments)

    theirs = value_and_grads(
        lambda f, t, y: optax.softmax_cross_entropy_with_integer_labels(
            (f @ t.T).reshape(4, 16, 40), y
        ),
        features,
        table,
    )
    mesh = make_mesh(mesh)
    with jax.set_mesh(mesh):
        spread = jax.device_put(features, NamedSharding(mesh, P("data")))
        assert_close(
            value_and_grads(losses.linear_cross_entropy, spread, table), theirs
        )


def test_very_unlikely_label_has_a_finite_loss_and_a_useful_gradient(monkeypatch):
    """exp(1000) overflows, so the kernel clips exponents at 60.

    The loss must be finite there, and the gradient must point in the right direction.
    """
    monkeypatch.setattr(losses, "_is_fused", lambda *_: True)
    features, table = (
        jnp.ones((4, 16), jnp.bfloat16),
        jnp.zeros((40, 16), jnp.bfloat16).at[:20].set(-1000 / 16),
    )

    def loss(features, table):
        # Scaled as if there were a million tokens.
        return losses.linear_cross_entropy(features, table, jnp.arange(4)).sum() / 2**20

    nats, (to_features, to_table) = jax.value_and_grad(loss, argnums=(0, 1))(
        features, table
    )
    assert 60 < nats * 2**20 / 4 < 60 + np.log(40)
    wide = np.asarray(to_table.astype(jnp.float32)) * 2**20
    # The gradient of the labels is as large as possible.
    assert (wide[:4] < -0.9).all()
    # The gradient of all more likely tokens is as large, with the opposite sign.
    np.testing.assert_allclose(wide[20:].sum(0), 4, rtol=0.02)
    assert np.isfinite(np.asarray(to_features.astype(jnp.float32))).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_chunked_cross_entropy_matches_the_complete_loss(where, weighted):
    rng = np.random.default_rng(0)
    features, table = (
        rng.normal(size=(24, 16)).astype("f4"),
        rng.normal(size=(40, 16)).astype("f4"),
    )
    labels, weights = (
        rng.integers(0, 40, 24),
        rng.uniform(size=24).astype("f4") if weighted else np.ones(24, "f4"),
    )

    def complete(features, table, weights):
        return (
            3
            * (
                optax.softmax_cross_entropy_with_integer_labels(
                    features @ table.T, labels
                )
                * weights
            ).sum()
        )

    theirs = jax.value_and_grad(complete, argnums=(0, 1, 2))(features, table, weights)
    for chunks in (1, 4, 24):

        def parts(features, table, weights, chunks=chunks):
            return 3 * chunked_cross_entropy(features, table, labels, chunks, weights)

        assert_close(
            jax.value_and_grad(parts, argnums=(0, 1, 2))(features, table, weights),
            theirs,
        )
        if not weighted:
            assert_close(
                3 * chunked_cross_entropy(features, table, labels, chunks), theirs[0]
            )
    with pytest.raises(ValueError, match="24 tokens are not divisible by chunks=5"):
        chunked_cross_entropy(features, table, labels, 5)


def test_chunked_cross_entropy_computes_no_matmul_twice():
    shapes = jnp.zeros((24, 16)), jnp.zeros((40, 16))
    text = (
        jax.jit(
            jax.grad(
                lambda f, t: chunked_cross_entropy(f, t, np.zeros(24, int), 4),
                argnums=(0, 1),
            )
        )
        .lower(*shapes)
        .as_text()
    )
    assert text.count("stablehlo.dot_general") == 3
