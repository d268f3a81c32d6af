"""Value assertions inside of traced functions: `checkify.check`, and those of chex.

A check cannot raise while a compiled program runs. JAX's `checkify` turns it into a value: the
function returns an error next to its result. `functionalize` does that for a part of a training
step. Only functions whose trace has a check are functionalized, so nobody else pays for it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend import core

from shardwise.errors import is_library
from shardwise.tracing.jaxpr import inner_jaxprs, rewrite, with_inner_jaxprs
from shardwise.tree import PyTree

Output = TypeVar("Output")
# Whether a check failed, as a boolean scalar, and which one.
Failure: TypeAlias = tuple[jax.Array, checkify.Error]

# What JAX raises for a check that nobody functionalized.
NOT_FUNCTIONALIZED = "was not functionalized"
# What JAX appends to the message of a check.
SUFFIX = " (`check` failed)"


@contextmanager
def chex_assertions() -> Iterator[None]:
    """Let value assertions of chex call `checkify.check` in functions that are traced here.

    chex refuses a value assertion on traced arrays unless `chex.chexify` runs the function.
    `chexify` must be the outermost transformation and reads the error itself, so a step cannot be
    built from it. It has no public switch: its level is the one that `chexify` sets.
    """
    internal = sys.modules.get("chex._src.asserts_internal")
    storage = getattr(internal, "CHEXIFY_STORAGE", None)
    if storage is None:
        yield
        return
    storage.level += 1
    try:
        yield
    finally:
        storage.level -= 1


def has_checks(traced: core.ClosedJaxpr | core.Jaxpr | core.JaxprEqn) -> bool:
    """Return whether a traced function, or one of its inner functions, has a check."""
    return any(type(effect).__name__ == "ErrorEffect" for effect in traced.effects)


def calls_with_checks(jaxpr: core.Jaxpr, primitive: str) -> bool:
    """Return whether a check is inside of an equation of this primitive, such as "shard_map"."""
    return any(
        has_checks(equation)
        and (
            equation.primitive.name == primitive
            or any(
                calls_with_checks(inner, primitive)
                for inner in inner_jaxprs(equation.params)
            )
        )
        for equation in jaxpr.eqns
    )


def functionalize(
    function: Callable[..., Output],
) -> Callable[..., tuple[Failure, Output]]:
    """Return `function` with its checks as a result.

    Args:
        function: a function of pytrees of arrays.

    Returns:
        A function with the same arguments. It returns a `Failure`, and the result of `function`.
    """

    def checked(*args: PyTree) -> tuple[Failure, Output]:
        leaves = jax.tree.leaves(args)
        closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
        visible = core.jaxpr_as_fun(rewrite(closed, _hide))
        pure, results = jax.make_jaxpr(checkify.checkify(visible), return_shape=True)(
            *leaves
        )
        values = core.jaxpr_as_fun(rewrite(pure, _show))(*leaves)
        error, flat = jax.tree.unflatten(jax.tree.structure(results), values)
        result: Output = jax.tree.unflatten(jax.tree.structure(output), flat)
        return (_has_failed(error), error), result

    return checked


def failure_as_aux(
    function: Callable[..., tuple[jax.Array, Output]], has_checks: bool
) -> Callable[..., tuple[jax.Array, tuple[Output, Failure | None]]]:
    """Return a function for `jax.grad` whose auxiliary output includes the failed check.

    Checks become outputs before the function is differentiated: `jax.grad` drops the checks inside
    of a scan (jax 0.10.2 and 0.12.0).

    Args:
        function: returns a value and auxiliary output.
        has_checks: whether it has checks. Otherwise the failure is None.
    """

    def checked(
        *args: PyTree,
    ) -> tuple[jax.Array, tuple[Output, Failure | None]]:
        if not has_checks:
            value, aux = function(*args)
            return value, (aux, None)
        failure, (value, aux) = functionalize(function)(*args)
        return value, (aux, failure)

    return checked


def drop_checks(function: Callable[..., Output]) -> Callable[..., Output]:
    """Return `function` without its checks, for programs that cannot stop."""

    @wraps(function)
    def unchecked(*args: PyTree) -> Output:
        with chex_assertions():
            closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
            if has_checks(closed):
                return functionalize(function)(*args)[1]
        leaves = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        result: Output = jax.tree.unflatten(jax.tree.structure(output), leaves)
        return result

    return unchecked


# `checkify` rewrites every loop, call and kernel, and fails for some that have no check: a
# `shard_map`, or a while loop under `vmap`. Equations without a check are therefore replaced by
# this primitive while it runs.
_hidden = core.Primitive("hidden")
_hidden.multiple_results = True


def _hidden_results(
    *_: PyTree, equation: core.JaxprEqn
) -> tuple[list[PyTree], set[PyTree]]:
    return [var.aval for var in equation.outvars], set(equation.effects)


_hidden.def_effectful_abstract_eval(_hidden_results)


def _hide(
    equation: core.JaxprEqn, hide: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """Hide an equation that has inner functions and no check."""
    if has_checks(equation):
        return with_inner_jaxprs(equation, hide)
    if not any(inner_jaxprs(equation.params)):
        return equation
    hidden: core.JaxprEqn = equation.replace(
        primitive=_hidden, params={"equation": equation}
    )
    return hidden


def _show(
    equation: core.JaxprEqn, show: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """Undo `_hide`."""
    if equation.primitive is not _hidden:
        return with_inner_jaxprs(equation, show)
    original = equation.params["equation"]
    shown: core.JaxprEqn = equation.replace(
        primitive=original.primitive, params=original.params
    )
    return shown


def _has_failed(error: checkify.Error) -> jax.Array:
    failed = jnp.zeros((), bool)
    for predicate in error._pred.values():
        failed |= jnp.any(predicate)
    return failed


def first_failure(failures: Failure) -> Failure:
    """Return the first failure of several, which are stacked along the first dim."""
    first = jnp.argmax(failures[0])
    failure: Failure = jax.tree.map(lambda x: x[first], failures)
    return failure


def describe_failure(error: checkify.Error) -> str:
    """Return the message of the first failed check and the user's line that it is on."""
    exception = jax.device_get(error).get_exception()
    try:
        message = str(exception).removesuffix(SUFFIX)
    except (IndexError, KeyError, ValueError):
        # Braces in the message that name no value.
        message = exception.fmt_string
    # chex adds the line too.
    message = message.partition(" [failed at: ")[0].rstrip(".")
    frames = exception.traceback_info.frames
    own = [frame for frame in frames if not is_library(frame.file_name)]
    frame = (own or frames)[0]
    return f"{message} ({frame.file_name}, line {frame.line_num})"
