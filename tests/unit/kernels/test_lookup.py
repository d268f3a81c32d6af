"""Rows of a table, and the gradient that they get back, against NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import make_mesh
from shardwise.kernels import lookup as tables
from shardwise.kernels.lookup import look_up


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def where(request, monkeypatch):
    """As it is computed here, and as on a GPU and a TPU."""
    monkeypatch.setattr(tables, "platform", lambda: request.param)


def table_gradient(indices, g, rows):
    return jax.jit(lambda table: jax.vjp(lambda t: look_up(t, indices), table)[1](g)[0])(
        jnp.zeros((rows, g.shape[1]), g.dtype)
    )


@settings(max_examples=10)
@given(rows=st.integers(1, 40), tokens=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_rows_that_are_looked_up_get_what_flows_back(rows, tokens, seed):
    rng = np.random.default_rng(seed)
    indices, g = rng.integers(0, rows, tokens), rng.normal(size=(tokens, 3)).astype("f4")
    expected = np.zeros((rows, 3))
    np.add.at(expected, indices, g)
    for at in ("cpu", "gpu", "tpu"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "platform", lambda at=at: at)
            np.testing.assert_allclose(
                table_gradient(jnp.asarray(indices), jnp.asarray(g), rows), expected, atol=1e-4
            )
    table = rng.normal(size=(rows, 3)).astype("f4")
    np.testing.assert_array_equal(look_up(table, indices), table[indices])


def test_a_frequent_word_in_bfloat16_is_summed_right(where):
    rng = np.random.default_rng(0)
    g = jnp.asarray(rng.uniform(0.5, 1.5, (20000, 8)), jnp.bfloat16)
    exact = np.asarray(g, np.float64).sum(0)
    ours = table_gradient(jnp.zeros(20000, int), g, 2)[0]
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=2**-8)
    naive = jnp.zeros((2, 8), jnp.bfloat16).at[jnp.zeros(20000, int)].add(g)[0]
    assert (np.asarray(naive, np.float64) < 0.1 * exact).all()  # what JAX alone makes of it


def test_each_device_sums_its_own_tokens(where):
    mesh = make_mesh("data=8")
    rng = np.random.default_rng(2)
    indices, g = rng.integers(0, 30, 640), rng.normal(size=(640, 4)).astype("f4")
    cut = jax.device_put((indices, g), NamedSharding(mesh, P("data")))
    run = jax.jit(
        lambda indices, g: jax.vjp(lambda t: look_up(t, indices), jnp.zeros((30, 4)))[1](g)[0]
    )
    assert set(re.findall(r"all-\w+", run.lower(*cut).compile().as_text())) == {"all-reduce"}
    expected = np.zeros((30, 4))
    np.add.at(expected, indices, g)
    np.testing.assert_allclose(run(*cut), expected, atol=1e-4)
