"""Sums of 16-bit floats in float32, for any model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import Mean, init_state, make_mesh
from shardwise.precision import sums_in_float32
from shardwise.state import abstract_state
from shardwise.step import make_train_step

TOKENS = 20_000
WEIGHTS = np.random.default_rng(0).uniform(0.5, 1.5, (TOKENS, 8)).astype("f4")


class Model(nnx.Module):
    """An embedding of one token, and a bias: both gradients are sums over all tokens."""

    def __init__(self, scan, rngs):
        self.embed = nnx.Embed(4, 8, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.scan = scan

    def __call__(self, tokens):
        def layer(linear, x):
            return linear(x)

        x = self.embed(tokens)
        if not self.scan:
            return layer(self.linear, x)
        axes = {"in_axes": (None, nnx.Carry), "out_axes": nnx.Carry}
        return nnx.scan(nnx.remat(layer), **axes, length=1)(self.linear, x)


def gradients(compute_dtype, scan, accumulate=1):
    """Return the gradients of the weighted sum of all outputs."""

    def loss(model, batch):
        return Mean(
            (model(batch["tokens"]) * batch["weights"]).sum(-1).astype(jnp.float32),
            1 / TOKENS,
        )

    spec = abstract_state(
        lambda rngs: Model(scan, rngs), optax.sgd(1.0), make_mesh("data=8")
    )
    batch = {
        "tokens": np.zeros(TOKENS, "i4"),
        "weights": WEIGHTS.astype(compute_dtype or "f4"),
    }
    step = make_train_step(
        spec, loss, batch, compute_dtype=compute_dtype, accumulate=accumulate
    )
    return step.gradients(init_state(spec, 0), step.place(batch))[0]


@pytest.mark.parametrize(("scan", "accumulate"), [(False, 1), (True, 1), (False, 4)])
def test_gradients_of_embeddings_and_biases_are_accurate_in_bfloat16(scan, accumulate):
    exact = gradients(None, scan)
    half = gradients("bfloat16", scan, accumulate)
    for layer, name in (("embed", "embedding"), ("linear", "bias")):
        want = exact[layer][name]
        tolerance = 0.01 * float(jnp.abs(want).max())
        np.testing.assert_allclose(
            half[layer][name], want, rtol=0.02, atol=tolerance, err_msg=name
        )


def test_jax_alone_loses_most_of_such_a_sum():
    """This is why the module exists: most of the gradient of a frequent token is lost."""
    g = jnp.asarray(WEIGHTS, jnp.bfloat16)

    def pull(table):
        return jax.vjp(lambda t: t[jnp.zeros(TOKENS, int)], table)[1](g)[0]

    table, exact = jnp.zeros((4, 8), jnp.bfloat16), WEIGHTS.astype(np.float64).sum(0)
    assert (np.asarray(jax.jit(pull)(table), np.float64)[0] < 0.1 * exact).all()
    np.testing.assert_allclose(
        np.asarray(jax.jit(sums_in_float32(pull))(table), np.float64)[0],
        exact,
        rtol=0.01,
    )


def test_other_sums_and_structures_do_not_change():
    def function(x, more):
        return {"sum": x.sum(), "more": [more, None], "count": jnp.cumsum(more)}

    x, more = jnp.arange(6.0), jnp.arange(3)
    plain, wide = function(x, more), sums_in_float32(function)(x, more)
    assert jax.tree.structure(plain) == jax.tree.structure(wide)
    jax.tree.map(np.testing.assert_array_equal, plain, wide)
