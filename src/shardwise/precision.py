"""Sums of 16-bit floats, computed in float32.

JAX sums in the dtype of its input. bfloat16 has 8 significant bits, so a running sum stops growing
when it is 256 times as large as the next term. The gradient of a bias is a sum over all tokens, and
the gradient of an embedding is a sum over all occurrences of a token. With 20,000 equal terms on a
CPU, JAX alone loses 18 % of the first sum and 97 % of the second. Matmuls are not affected: they
accumulate in float32 on every platform.

The sums are created by automatic differentiation, so no model code can change their dtype. This
module therefore rewrites the jaxpr of the gradients, loops included. It works for any model.
"""

import operator
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from shardwise.tree import DType, PyTree

SUMS = ("reduce_sum", "scatter-add", "cumsum")
# Kernels choose the dtype of their sums themselves.
OPAQUE = ("pallas_call", "mpmd_map")
HALF = (jnp.bfloat16, jnp.float16)

# Maps each jaxpr that was visited to its rewritten form.
Rewritten = dict[Jaxpr, Jaxpr]
Param = TypeVar("Param")


def sums_in_float32(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return `function` with every sum of 16-bit floats computed in float32 and rounded once.

    Args:
        function: a function of pytrees of arrays, usually the result of `jax.grad`.

    Returns:
        A function with the same signature. Dtypes of inputs and outputs do not change.
    """

    def widened(*args: PyTree) -> PyTree:
        closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jaxpr_as_fun(_widen_closed(closed, {}))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(output), leaves)

    return widened


def _widen_closed(closed: ClosedJaxpr, rewritten: Rewritten) -> ClosedJaxpr:
    jaxpr = _widen_jaxpr(closed.jaxpr, rewritten)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def _widen_jaxpr(jaxpr: Jaxpr, rewritten: Rewritten) -> Jaxpr:
    """Rewrite each jaxpr once, and keep those without such sums, so that JAX lowers them once."""
    if jaxpr not in rewritten:
        equations = [_widen_equation(equation, rewritten) for equation in jaxpr.eqns]
        is_same = all(map(operator.is_, equations, jaxpr.eqns))
        rewritten[jaxpr] = jaxpr if is_same else jaxpr.replace(eqns=equations)
    return rewritten[jaxpr]


def _widen_equation(equation: JaxprEqn, rewritten: Rewritten) -> JaxprEqn:
    name = equation.primitive.name
    if name in SUMS and _output_dtype(equation) in HALF:
        return _sum_in_float32(equation)
    if name in OPAQUE:
        return equation
    changed = {}
    for key, value in equation.params.items():
        before, structure = jax.tree.flatten(value, is_leaf=_is_jaxpr)
        after = [_widen_param(item, rewritten) for item in before]
        if not all(map(operator.is_, before, after)):
            changed[key] = jax.tree.unflatten(structure, after)
    return (
        equation.replace(params={**equation.params, **changed}) if changed else equation
    )


def _output_dtype(equation: JaxprEqn) -> DType:
    dtype: DType = cast(jax.core.ShapedArray, equation.outvars[0].aval).dtype
    return dtype


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _widen_param(value: Param, rewritten: Rewritten) -> Param | ClosedJaxpr | Jaxpr:
    if isinstance(value, ClosedJaxpr):
        return _widen_closed(value, rewritten)
    if isinstance(value, Jaxpr):
        return _widen_jaxpr(value, rewritten)
    return value


def _sum_in_float32(equation: JaxprEqn) -> JaxprEqn:
    """Replace a sum by a call of a function that widens, sums and rounds."""

    @jax.jit
    def widened(*args: jax.Array) -> jax.Array:
        wide = [x.astype(jnp.float32) if x.dtype in HALF else x for x in args]
        total: jax.Array
        if equation.primitive.name == "scatter-add":
            total = _scatter_add(equation, *wide)
        else:
            total = equation.primitive.bind(*wide, **equation.params)
        return total.astype(_output_dtype(equation))

    avals = (variable.aval for variable in equation.invars)
    call = jax.make_jaxpr(widened)(*avals).jaxpr.eqns[0]
    replaced: JaxprEqn = equation.replace(
        primitive=call.primitive, params=call.params, effects=call.effects
    )
    return replaced


def _scatter_add(
    equation: JaxprEqn, operand: jax.Array, indices: jax.Array, updates: jax.Array
) -> jax.Array:
    # The equation cannot be bound again with wider inputs: its parameters hold an addition in the
    # 16-bit dtype.
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: equation.params[name] for name in names}
    return jax.lax.scatter_add(operand, indices, updates, **options)
