"""Checks in traced functions become a result, wherever JAX allows a check."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from shardwise import make_mesh
from shardwise.loss.fingerprint import jaxpr_fingerprint
from shardwise.tracing.assertions import (
    describe_failure,
    drop_checks,
    first_failure,
    functionalize,
    has_checks,
)
from shardwise.tracing.jaxpr import without_side_effects

GOOD = jnp.array([0.1, 0.2, 0.3, 0.4])
BAD = jnp.array([0.1, 0.2, 0.9, 0.4])


def check(x):
    checkify.check(jnp.all(x < 0.5), "largest value {top:.1f}", top=x.max())


def no_check(x):
    pass


# Each is x**2, and checks x.


def plain(x, check):
    check(x)
    return x**2


def jitted(x, check):
    return jax.jit(partial(plain, check=check))(x)


def in_loop(x, check):
    def body(carry, value):
        check(value)
        return carry + value, value**2

    return jax.lax.scan(body, 0.0, x)[1]


def in_while(x, check):
    def body(carry):
        check(carry)
        return carry + 1e-3

    return x**2 + 0 * jax.lax.while_loop(lambda carry: carry[0] < 0.102, body, x)


def in_branch(x, check):
    return jax.lax.cond(x.sum() > 0, partial(plain, check=check), lambda x: x, x)


def in_remat(x, check):
    return jax.checkpoint(partial(plain, check=check))(x)


def in_vmap(x, check):
    return jax.vmap(partial(plain, check=check))(x)


def next_to_shard_map(x, check):
    check(x)
    part = PartitionSpec("data")
    mesh = make_mesh("data=4", jax.devices()[:4])
    y = jax.shard_map(lambda x: x**2, mesh=mesh, in_specs=part, out_specs=part)(x)
    check(x)
    return y


def next_to_batched_while(x, check):
    check(x)
    count = partial(jax.lax.while_loop, lambda x: x < 3, lambda x: x + 1)
    return x**2 + 0 * jax.vmap(count)(x)


FUNCTIONS = [
    plain,
    jitted,
    in_loop,
    in_while,
    in_branch,
    in_remat,
    in_vmap,
    next_to_shard_map,
    next_to_batched_while,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_check_is_a_result_of_the_function_and_of_its_gradient(function):
    def total(x):
        return function(x, check).sum()

    def value_and_failure(x):
        failure, value = functionalize(total)(x)
        return value, failure

    # Loops without a fixed length have no gradient.
    has_gradient = function not in (in_while, next_to_batched_while)
    gradient = jax.grad(value_and_failure, has_aux=True)
    for checked in (value_and_failure, gradient)[: 1 + has_gradient]:
        value, (failed, error) = jax.jit(checked)(GOOD)
        assert not failed
        assert error.get() is None
        expected = 2 * GOOD if checked is gradient else (GOOD**2).sum()
        np.testing.assert_allclose(value, expected, rtol=1e-6)

        _, (failed, error) = jax.jit(checked)(BAD)
        assert failed
        line = check.__code__.co_firstlineno + 1
        assert describe_failure(error) == f"largest value 0.9 ({__file__}, line {line})"


def test_an_optional_check_runs():
    def function(x):
        checkify.debug_check(jnp.all(x < 0.5), "too large")
        return x

    (failed, _), _ = jax.jit(functionalize(function))(BAD)
    assert failed


def test_the_first_of_several_failures_is_kept():
    def one(x):
        return functionalize(partial(plain, check=check))(x)

    rows = jnp.array([[0.1], [0.7], [0.6]])
    _, (failures, _) = jax.lax.scan(lambda carry, x: (carry, one(x)), 0, rows)
    failed, error = first_failure(failures)
    assert failed
    assert describe_failure(error).startswith("largest value 0.7 ")
    assert not first_failure(jax.tree.map(lambda x: x[:1], failures))[0]


def test_the_first_iteration_that_fails_is_reported():
    (failed, error), _ = jax.jit(functionalize(partial(in_loop, check=check)))(
        jnp.array([0.1, 0.7, 0.6])
    )
    assert failed
    assert describe_failure(error).startswith("largest value 0.7 ")


def test_a_message_with_stray_braces_is_shown_as_it_is():
    def function(x):
        checkify.check(jnp.all(x < 0.5), "labels of {split} are wrong")
        return x

    (_, error), _ = functionalize(function)(BAD)
    assert describe_failure(error).startswith("labels of {split} are wrong (")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_checks_can_be_dropped(function):
    unchecked = jax.jit(drop_checks(partial(function, check=check)))
    np.testing.assert_allclose(unchecked(BAD), BAD**2, rtol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_checks_and_prints_are_not_part_of_what_is_computed(function):
    """The fingerprint of a loss must not change when a check or a print is added."""
    checked, plain = (
        jax.make_jaxpr(partial(function, check=check))(BAD)
        for check in (check_and_print, no_check)
    )
    assert has_checks(checked)
    assert not has_checks(plain)
    assert jaxpr_fingerprint(checked) != jaxpr_fingerprint(plain)
    pure = without_side_effects(checked)
    assert jaxpr_fingerprint(pure) == jaxpr_fingerprint(plain)
    assert without_side_effects(plain) is plain


def check_and_print(x):
    check(x)
    jax.debug.print("{} {}", x.min(), jnp.isnan(x).sum())


def test_unused_results_stay_part_of_what_is_computed():
    def function(x, check):
        jnp.sin(x)  # nobody uses it
        if check:
            jax.debug.print("{}", jnp.cos(x).sum())
            is_bad = jnp.isnan(x).any()
            jax.lax.cond(is_bad, lambda: jax.debug.print("NaN"), lambda: None)
        return x + 1

    one, two = (
        jax.make_jaxpr(lambda x, check=check: function(x, check))(GOOD)
        for check in (True, False)
    )
    names = [
        equation.primitive.name for equation in without_side_effects(one).jaxpr.eqns
    ]
    assert names == ["sin", "add"]
    assert jaxpr_fingerprint(without_side_effects(one)) == jaxpr_fingerprint(two)
