"""Find what a library function computes in a traced function.

A template is the jaxpr of a reference function, such as `jax.nn.gelu`, traced with the shapes of
the place where it is searched. Because the installed release traces both, the comparison needs no
knowledge of how the function is written.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import jax
import numpy as np
from jax.extend import core

from shardwise.acceleration.graph import Atom, Graph, dtype_of
from shardwise.tracing.jaxpr import shape_of
from shardwise.tree import DType

Shape: TypeAlias = tuple[int, ...]
# The type of an argument of a reference function.
ArgType: TypeAlias = tuple[Shape, DType]

# A number that no model contains. Where a reference function gets it as an option, any number
# fits, and the match reports it.
ANY_NUMBER = 0.123456789

# Parameters of a function with a custom gradient that are Python functions. Its jaxpr is compared.
CUSTOM = ("custom_jvp_call", "custom_vjp_call")


@dataclass
class Match:
    """A place in a graph that computes what a reference function computes.

    Attributes:
        inputs: the variables that are the arguments of the function.
        numbers: the numbers in the place of `ANY_NUMBER`.
        equations: the ids of the equations.
    """

    inputs: list[Atom]
    numbers: list[float] = field(default_factory=list)
    equations: set[int] = field(default_factory=set)

    def covers(self, users: Sequence[core.JaxprEqn | None]) -> bool:
        """Return whether all of these equations are part of the match."""
        return all(user is not None and id(user) in self.equations for user in users)


def template(
    reference: Callable[..., jax.Array], types: tuple[ArgType, ...], *options: Hashable
) -> core.Jaxpr | None:
    """Return the jaxpr of `reference(*arguments, *options)`, or None if it raises.

    Args:
        reference: the function.
        types: shapes and dtypes of its arguments.
        *options: its other arguments.
    """
    # A jaxpr names the mesh that it was traced for.
    return _template(reference, types, options, jax.sharding.get_abstract_mesh())


@lru_cache(maxsize=256)
def _template(
    reference: Callable[..., jax.Array],
    types: tuple[ArgType, ...],
    options: tuple[Hashable, ...],
    _: jax.sharding.AbstractMesh,
) -> core.Jaxpr | None:
    structs = [jax.ShapeDtypeStruct(*arg_type) for arg_type in types]
    try:
        closed = jax.make_jaxpr(lambda *args: reference(*args, *options))(*structs)
    except Exception:  # The function does not take these shapes or options.
        return None
    return None if closed.consts else closed.jaxpr


def match(graph: Graph, output: Atom, pattern: core.Jaxpr | None) -> Match | None:
    """Return how a variable of the graph is computed as a template says, or None."""
    if pattern is None:
        return None
    definitions = {var: x for x in pattern.eqns for var in x.outvars}
    arguments = set(pattern.invars)
    bound: dict[core.Var, Atom] = {}
    found = Match([])

    def fits(expected: Atom, actual: Atom) -> bool:
        if isinstance(expected, core.Literal):
            return isinstance(actual, core.Literal) and _same_number(
                expected.val, actual.val, found.numbers
            )
        if expected in bound:
            return bound[expected] is actual
        if expected in arguments:
            bound[expected] = actual
            return _type(expected) == _type(actual)
        wanted = definitions.get(expected)
        equation = graph.definition(actual)
        if wanted is None or equation is None or not _same_operation(wanted, equation):
            return False
        if not _same_result(wanted.outvars, expected, equation.outvars, actual):
            return False
        bound[expected] = actual
        found.equations.add(id(equation))
        return all(map(fits, wanted.invars, equation.invars))

    if not fits(pattern.outvars[0], output):
        return None
    if any(var not in bound for var in pattern.invars):
        return None
    found.inputs = [bound[var] for var in pattern.invars]
    return found


def _same_result(
    expected_all: Sequence[core.Var],
    expected: Atom,
    actual_all: Sequence[core.Var],
    actual: Atom,
) -> bool:
    """Return whether two variables have the same place among the results of equations."""
    pairs = zip(expected_all, actual_all, strict=False)
    return any(x is expected and y is actual for x, y in pairs)


def _type(atom: Atom) -> ArgType:
    return shape_of(atom), dtype_of(atom)


def _same_number(expected: object, actual: object, numbers: list[float]) -> bool:
    expected, actual = np.asarray(expected), np.asarray(actual)
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return False
    if expected.shape == () and expected == np.asarray(ANY_NUMBER, expected.dtype):
        numbers.append(float(actual))
        return True
    return bool(np.array_equal(expected, actual, equal_nan=expected.dtype.kind == "f"))


def _same_operation(a: core.JaxprEqn, b: core.JaxprEqn) -> bool:
    """Return whether two equations compute the same, apart from their operands."""
    if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
        return False
    if a.params.keys() != b.params.keys():
        return False
    has_functions = a.primitive.name in CUSTOM
    return all(
        _same_parameter(value, b.params[key])
        for key, value in a.params.items()
        if not has_functions or isinstance(value, core.ClosedJaxpr | core.Jaxpr)
    )


def _same_parameter(a: object, b: object) -> bool:
    if isinstance(a, core.ClosedJaxpr) and isinstance(b, core.ClosedJaxpr):
        return not a.consts and not b.consts and same_jaxpr(a.jaxpr, b.jaxpr)
    if isinstance(a, core.Jaxpr) and isinstance(b, core.Jaxpr):
        return same_jaxpr(a, b)
    if a is b:
        return True
    # A fill value of a gather may be NaN.
    if isinstance(a, float | np.floating) and isinstance(b, float | np.floating):
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(a == b)


def same_jaxpr(a: core.Jaxpr, b: core.Jaxpr) -> bool:
    """Return whether two jaxprs are equal but for the names of their variables."""
    if a is b:
        return True
    names: dict[core.Var, core.Var] = {}

    def same(x: Atom, y: Atom) -> bool:
        if isinstance(x, core.Literal) or isinstance(y, core.Literal):
            return (
                isinstance(x, core.Literal)
                and isinstance(y, core.Literal)
                and _same_number(x.val, y.val, [])
            )
        return names.get(x) is y

    def define(xs: Sequence[core.Var], ys: Sequence[core.Var]) -> bool:
        names.update(zip(xs, ys, strict=False))
        return len(xs) == len(ys) and all(
            _type(x) == _type(y) for x, y in zip(xs, ys, strict=True)
        )

    return (
        len(a.eqns) == len(b.eqns)
        and define([*a.constvars, *a.invars], [*b.constvars, *b.invars])
        and all(
            _same_operation(x, y)
            and all(map(same, x.invars, y.invars))
            and define(x.outvars, y.outvars)
            for x, y in zip(a.eqns, b.eqns, strict=True)
        )
        and len(a.outvars) == len(b.outvars)
        and all(map(same, a.outvars, b.outvars))
    )
