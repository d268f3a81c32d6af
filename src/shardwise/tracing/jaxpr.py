"""Read and rewrite a traced function: its inner functions, and the lines that it came from."""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import jax
from jax.extend import core

from shardwise.errors import is_library

Shape: TypeAlias = tuple[int, ...]
Atom: TypeAlias = core.Var | core.Literal
# The equation that computes each variable of a jaxpr.
Definitions: TypeAlias = Mapping[core.Var, core.JaxprEqn]

JAX = str(Path(jax.__file__).parent)
# Operations that call a function once, so that its equations can take their place.
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
)


class Frame(Protocol):
    """A line of Python that an equation was traced from."""

    file_name: str
    line_num: int
    function_name: str


def frames_of(equation: core.JaxprEqn) -> list[Frame]:
    """Return the stack of Python frames that an equation was traced from, innermost first."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else cast(list[Frame], traceback.frames)


def user_frame(equation: core.JaxprEqn) -> Frame | None:
    """Return the innermost frame outside of JAX, Flax, shardwise and other libraries."""
    own = (frame for frame in frames_of(equation) if not is_library(frame.file_name))
    return next(own, None)


def inner_jaxprs(params: Mapping[str, object]) -> Iterator[core.Jaxpr]:
    """Yield the jaxprs among the parameters of an equation, such as the body of a scan."""
    for value in params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def with_inner_jaxprs(
    equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """Return an equation with `change` applied to each jaxpr among its parameters.

    The same equation is returned if `change` returns the jaxprs that it gets, so that JAX lowers a
    function that several equations call once.
    """

    def changed(value: object) -> object:
        if isinstance(value, core.ClosedJaxpr):
            jaxpr = change(value.jaxpr)
            return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
        return change(value) if isinstance(value, core.Jaxpr) else value

    params = {}
    for key, value in equation.params.items():
        before, structure = jax.tree.flatten(value, is_leaf=_is_jaxpr)
        after = list(map(changed, before))
        if not all(map(operator.is_, before, after)):
            params[key] = jax.tree.unflatten(structure, after)
    return (
        equation.replace(params={**equation.params, **params}) if params else equation
    )


def rewrite(
    closed: core.ClosedJaxpr,
    change: Callable[
        [core.JaxprEqn, Callable[[core.Jaxpr], core.Jaxpr]], core.JaxprEqn
    ],
) -> core.ClosedJaxpr:
    """Return a traced function with other equations.

    Each jaxpr is rewritten once, and kept if none of its equations changes, so that JAX lowers a
    function that several equations call once.

    Args:
        closed: the traced function.
        change: returns an equation in place of another one. Its second argument rewrites a jaxpr,
            for `with_inner_jaxprs`.
    """
    rewritten: dict[core.Jaxpr, core.Jaxpr] = {}

    def visit(jaxpr: core.Jaxpr) -> core.Jaxpr:
        if jaxpr not in rewritten:
            equations = [change(equation, visit) for equation in jaxpr.eqns]
            is_same = all(map(operator.is_, equations, jaxpr.eqns))
            rewritten[jaxpr] = jaxpr if is_same else jaxpr.replace(eqns=equations)
        return rewritten[jaxpr]

    jaxpr = visit(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def replace_equation(
    equation: core.JaxprEqn, function: Callable[[Sequence[jax.Array]], jax.Array]
) -> core.JaxprEqn:
    """Replace an equation with one result by a call of a function of its operands."""
    call_function = jax.jit(lambda *args: function(args))
    avals = (variable.aval for variable in equation.invars)
    call = jax.make_jaxpr(call_function)(*avals).jaxpr.eqns[0]
    replaced: core.JaxprEqn = equation.replace(
        primitive=call.primitive, params=call.params, effects=call.effects
    )
    return replaced


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def without_side_effects(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a traced function without checks, prints and callbacks.

    Equations without results are removed, in loops too, and with them all equations that only they
    use. The rest is what the function computes: it does not change when a check or a
    `jax.debug.print` is added.
    """
    rewritten: dict[core.Jaxpr, core.Jaxpr] = {}

    def pure(jaxpr: core.Jaxpr) -> core.Jaxpr:
        if jaxpr not in rewritten:
            rewritten[jaxpr] = _without_side_effects(jaxpr, pure)
        return rewritten[jaxpr]

    jaxpr = pure(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def _without_side_effects(
    jaxpr: core.Jaxpr, pure: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.Jaxpr:
    kept: list[core.JaxprEqn] = []
    # Variables that equations use which are kept, and those that removed equations use.
    used = {var for var in jaxpr.outvars if isinstance(var, core.Var)}
    only_in_removed: set[core.Var] = set()
    for equation in reversed(jaxpr.eqns):
        operands = {var for var in equation.invars if isinstance(var, core.Var)}
        results = set(equation.outvars)
        # Equations whose results nobody uses are kept, as in a function without side effects.
        if not results or (results & only_in_removed and not results & used):
            only_in_removed |= operands
        else:
            used |= operands
            kept.append(with_inner_jaxprs(equation, pure))
    kept.reverse()
    is_same = len(kept) == len(jaxpr.eqns) and all(map(operator.is_, kept, jaxpr.eqns))
    return jaxpr if is_same else jaxpr.replace(eqns=kept)


def definitions(jaxpr: core.Jaxpr) -> Definitions:
    """Return the equation that computes each variable of a jaxpr, except its inputs."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def original(atom: Atom, defined: Definitions, keeping: Collection[str]) -> Atom:
    """Return what was only moved or cast, for example to another dtype.

    Args:
        atom: a variable or a constant.
        defined: the equations of its jaxpr.
        keeping: the operations that keep all entries.
    """
    while not isinstance(atom, core.Literal) and atom in defined:
        equation = defined[atom]
        if equation.primitive.name not in keeping or len(equation.invars) != 1:
            break
        atom = equation.invars[0]
    return atom


def calls_function(jaxpr: core.Jaxpr, name: str) -> bool:
    """Return whether `jaxpr`, or a jaxpr nested in it, calls a jitted function of this name."""
    return any(
        equation.params.get("name") == name
        or any(calls_function(inner, name) for inner in inner_jaxprs(equation.params))
        for equation in jaxpr.eqns
    )


def scan_parts(equation: core.JaxprEqn) -> tuple[int, int]:
    """Return the number of constants and of carried values among the inputs of a scan.

    The rest are stacked values, with one slice per iteration. The parameters that say so differ
    between releases of JAX, so it is read from the shapes: a stacked value has one more dim outside
    than inside.
    """
    inner = next(inner_jaxprs(equation.params))
    num_stacked = sum(
        len(shape_of(outer)) > len(shape_of(var))
        for outer, var in zip(equation.invars, inner.invars, strict=True)
    )
    num_carried = sum(
        len(shape_of(outer)) == len(shape_of(var))
        for outer, var in zip(equation.outvars, inner.outvars, strict=True)
    )
    return len(equation.invars) - num_carried - num_stacked, num_carried


def inner_function(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Return the function that a call or a loop calls, or None for other operations."""
    for value in equation.params.values():
        if isinstance(value, core.ClosedJaxpr):
            return value
        if isinstance(value, core.Jaxpr):
            return core.ClosedJaxpr(value, [])
    return None


def evaluate(
    closed: core.ClosedJaxpr,
    args: Sequence[jax.Array],
    evaluate_equation: Callable[[core.JaxprEqn, list[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    """Return the outputs of a traced function, with another meaning of its equations.

    Args:
        closed: the traced function.
        args: its inputs.
        evaluate_equation: returns the outputs of an equation for its inputs, as `bind` does.
    """
    jaxpr = closed.jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values: dict[core.Var, jax.Array] = dict(
        zip(variables, [*closed.consts, *args], strict=True)
    )

    def read(var: core.Var | core.Literal) -> jax.Array:
        return var.val if isinstance(var, core.Literal) else values[var]

    for equation in jaxpr.eqns:
        outputs = evaluate_equation(equation, [read(var) for var in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def bind(equation: core.JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the outputs of an equation for other inputs."""
    primitive = equation.primitive
    with equation.ctx.manager:
        result = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return list(result) if primitive.multiple_results else [result]


def is_defined_in_jax(jaxpr: core.Jaxpr) -> bool:
    """Return whether the function that a jaxpr was traced from is part of JAX."""
    source = jaxpr.debug_info.func_src_info or ""
    return JAX in source


def shape_of(variable: core.Var | core.Literal) -> Shape:
    """Return the shape of a variable of a jaxpr."""
    return cast(Shape, getattr(variable.aval, "shape", ()))
