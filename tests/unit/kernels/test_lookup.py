"""Tests of the embedding lookup and its gradient against NumPy."""

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
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.lookup import look_up


@pytest.fixture(params=["cpu", "gpu", "tpu"])
def where(request, monkeypatch):
    """Run a test with the code for CPUs, GPUs and TPUs."""
    monkeypatch.setattr(tables, "platform", lambda: request.param)


def table_gradient(indices, g, vocab_size):
    return jax.jit(
        lambda table: jax.vjp(lambda t: look_up(t, indices), table)[1](g)[0]
    )(jnp.zeros((vocab_size, g.shape[1]), g.dtype))


@settings(max_examples=10)
@given(
    vocab_size=st.integers(1, 40),
    tokens=st.integers(1, 200),
    seed=st.integers(0, 2**31),
)
def test_gradient_sums_over_the_occurrences_of_each_token(vocab_size, tokens, seed):
    rng = np.random.default_rng(seed)
    indices, g = (
        rng.integers(0, vocab_size, tokens),
        rng.normal(size=(tokens, 3)).astype("f4"),
    )
    expected = np.zeros((vocab_size, 3))
    np.add.at(expected, indices, g)
    for at in ("cpu", "gpu", "tpu"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "platform", lambda at=at: at)
            np.testing.assert_allclose(
                table_gradient(jnp.asarray(indices), jnp.asarray(g), vocab_size),
                expected,
                atol=1e-4,
            )
    table = rng.normal(size=(vocab_size, 3)).astype("f4")
    np.testing.assert_array_equal(look_up(table, indices), table[indices])


def test_negative_tokens_count_from_the_end_and_others_do_not_exist(where):
    g = jnp.ones((3, 2))
    gradient = table_gradient(jnp.array([-1, -3, 1]), g, 4)
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 0, 1])
    found = look_up(jnp.arange(4.0)[:, None], jnp.array([-1, 4, -5]))[:, 0]
    np.testing.assert_array_equal(found, [3, np.nan, np.nan])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "uint32"])
def test_tokens_of_any_integer_type(dtype):
    table = jnp.arange(70_000.0)[:, None]
    tokens = jnp.array([0, 3, 120], dtype)
    np.testing.assert_array_equal(look_up(table, tokens)[:, 0], [0, 3, 120])
    nats = cross_entropy(-table[:, 0] * jnp.ones((3, 1)), tokens)
    np.testing.assert_allclose(nats, nats[0] + np.array([0, 3, 120]), rtol=1e-5)


def test_frequent_token_in_bfloat16_is_summed_accurately(where):
    rng = np.random.default_rng(0)
    g = jnp.asarray(rng.uniform(0.5, 1.5, (20000, 8)), jnp.bfloat16)
    exact = np.asarray(g, np.float64).sum(0)
    ours = table_gradient(jnp.zeros(20000, int), g, 2)[0]
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=2**-8)
    naive = jnp.zeros((2, 8), jnp.bfloat16).at[jnp.zeros(20000, int)].add(g)[0]
    # A sum in bfloat16, as JAX would compute it, loses most of the total.
    assert (np.asarray(naive, np.float64) < 0.1 * exact).all()


def test_each_device_sums_its_own_tokens(where):
    mesh = make_mesh("data=8")
    rng = np.random.default_rng(2)
    indices, g = rng.integers(0, 30, 640), rng.normal(size=(640, 4)).astype("f4")
    sharded = jax.device_put((indices, g), NamedSharding(mesh, P("data")))
    run = jax.jit(
        lambda indices, g: jax.vjp(lambda t: look_up(t, indices), jnp.zeros((30, 4)))[
            1
        ](g)[0]
    )
    assert set(re.findall(r"all-\w+", run.lower(*sharded).compile().as_text())) == {
        "all-reduce"
    }
    expected = np.zeros((30, 4))
    np.add.at(expected, indices, g)
    np.testing.assert_allclose(run(*sharded), expected, atol=1e-4)
