"""Which variables depend on an input, in loops, branches and calls."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from shardwise.tracing.reach import reached


def outputs_reached(function, is_source, *args):
    """Return which outputs of a function depend on the arguments that are marked."""
    closed = jax.make_jaxpr(function)(*args)
    found = reached(closed, is_source)
    outputs = closed.jaxpr.outvars
    return [isinstance(atom, core.Var) and atom in found for atom in outputs]


def carried(a, b):
    # `y` depends on `b` from the second iteration on.
    (x, y), stacked = jax.lax.scan(lambda c, s: ((c[0], c[0] + s), s), (a, a), b)
    return x, y, stacked


def rotated(a, b):
    # The third value depends on `b` after two iterations.
    return jax.lax.fori_loop(0, 3, lambda _, c: (b, c[0], c[1]), (a, a, a))


def chosen(a, b):
    return jax.lax.cond(a > 0, lambda a, b: (a, b), lambda a, b: (-a, a), a, b)


def called(a, b):
    twice = jax.checkpoint(jax.jit(lambda x, y: (2 * x, 2 * y)))
    return (*twice(a, b), jax.nn.relu(a), jax.nn.relu(b))


@pytest.mark.parametrize(
    ("function", "args", "of_second"),
    [
        (lambda a, b: (a, b, a + b, 1), (1.0, 1.0), [0, 1, 1, 0]),
        (carried, (1.0, jnp.ones(3)), [0, 1, 1]),
        (rotated, (1.0, 1.0), [1, 1, 1]),
        (chosen, (1.0, 1.0), [0, 1]),
        (called, (1.0, 1.0), [0, 1, 0, 1]),
    ],
)
def test_what_depends_on_an_input(function, args, of_second):
    assert outputs_reached(function, [False, True], *args) == of_second
    assert not any(outputs_reached(function, [False, False], *args))


def test_a_condition_reaches_the_results_of_all_branches():
    assert all(outputs_reached(chosen, [True, False], 1.0, 1.0))
