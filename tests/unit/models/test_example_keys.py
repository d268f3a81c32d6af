"""A key for some examples draws the numbers that they have in the complete batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.errors import ConfigError
from shardwise.models.example_keys import Draws, _positions, example_key, find_draws

BATCH_SIZE, REST = 12, (5, 3)
KEY = jax.random.key(7)
EXAMPLES = jnp.array([3, 7, 11], jnp.uint32)


def key_of(examples, bits=((BATCH_SIZE, *REST),), splits=()):
    draws = Draws(frozenset(bits), frozenset(splits))
    return example_key(jax.random.key_data(KEY), examples, BATCH_SIZE, draws)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_draws_are_those_of_the_batch(dtype):
    def derive(key):
        return jax.random.split(jax.random.fold_in(key, 5))[1]

    drawn = jax.random.normal(derive(key_of(EXAMPLES)), (3, *REST), dtype)
    complete = jax.random.normal(derive(KEY), (BATCH_SIZE, *REST), dtype)
    np.testing.assert_array_equal(drawn, complete[EXAMPLES])


def test_draws_without_examples_are_the_same_for_all():
    np.testing.assert_array_equal(
        jax.random.normal(key_of(EXAMPLES), (3, 9)), jax.random.normal(KEY, (3, 9))
    )


def test_keys_can_be_vectorized():
    examples = jnp.arange(BATCH_SIZE, dtype=jnp.uint32).reshape(3, 4).T

    @jax.jit
    @jax.vmap
    def draw(examples):
        return jax.random.uniform(key_of(examples), (3, *REST))

    complete = jax.random.uniform(KEY, (BATCH_SIZE, *REST))
    np.testing.assert_array_equal(draw(examples), complete[examples])


def test_positions_have_64_bits():
    examples, rest = np.array([2**31 - 1, 70000, 5], np.uint32), (2**10, 3 * 2**10)
    high, low = _positions(jnp.asarray(examples), rest)
    entries = np.arange(np.prod(rest), dtype=np.uint64).reshape(rest)
    expected = examples.astype(np.uint64)[:, None, None] * np.uint64(np.prod(rest))
    found = (np.asarray(high).astype(np.uint64) << np.uint64(32)) + np.asarray(low)
    np.testing.assert_array_equal(found, expected + entries)


def test_draws_that_cannot_be_told_apart_are_refused():
    shapes = (BATCH_SIZE, *REST), (3, *REST)
    with pytest.raises(ConfigError, match="cannot tell them apart"):
        key_of(EXAMPLES, bits=shapes)
    with pytest.raises(ConfigError, match="cannot tell them apart"):
        key_of(EXAMPLES, splits=shapes)


@pytest.mark.parametrize("rest", [(), (2,)])
def test_keys_of_examples_are_those_of_the_batch(rest):
    """As in stochastic depth: one key for each example, from `split(key, len(x))`."""

    def draw(key, count):
        keys = jax.random.split(jax.random.fold_in(key, 5), (count, *rest))
        return jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys.reshape(-1))

    drawn = draw(key_of(EXAMPLES, splits=((BATCH_SIZE, *rest),)), 3)
    complete = draw(KEY, BATCH_SIZE).reshape(BATCH_SIZE, -1)
    np.testing.assert_array_equal(drawn.reshape(3, -1), complete[EXAMPLES])


def test_draws_in_inner_functions_are_found():
    def draw(key):
        key = jax.random.split(key, 3)[0]
        return jax.jit(lambda key: jax.random.normal(key, (4, 2)))(key)

    found = find_draws(jax.make_jaxpr(draw)(KEY).jaxpr)
    assert found == Draws(bits=frozenset({(4, 2)}), splits=frozenset({(3,)}))
