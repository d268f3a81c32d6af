"""A jaxpr as a graph that can be searched and edited.

JAX traces a function to a list of equations. A `Graph` also knows where each variable is defined
and used, and puts the equations back into order after an edit.
"""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from shardwise.tracing.jaxpr import shape_of
from shardwise.tree import DType

Array = jax.Array
Atom: TypeAlias = core.Var | core.Literal
# The equations of a call of a kernel by function, options, and types of the operands.
Calls: TypeAlias = dict[Hashable, core.JaxprEqn]

# Stands for the caller of a function among the equations that use a variable.
CALLER = -1


class Graph:
    """The equations of a jaxpr, while it is rewritten."""

    def __init__(self, jaxpr: core.Jaxpr, calls: Calls):
        """Read a jaxpr.

        Args:
            jaxpr: the jaxpr. It is not changed.
            calls: traced calls, which several graphs share.
        """
        self.jaxpr = jaxpr
        self._calls = calls
        # The next number of an equation. Numbers stay the same when others are removed.
        self._numbers = itertools.count()
        self._equations: dict[int, core.JaxprEqn] = {}
        self._defined_by: dict[core.Var, int] = {}
        self._used_by: dict[core.Var, dict[int, None]] = {}
        for var in jaxpr.outvars:
            if isinstance(var, core.Var):
                self._used_by.setdefault(var, {})[CALLER] = None
        for equation in jaxpr.eqns:
            self._add(equation)
        # Equations whose results nobody uses would count as users of others.
        for number in reversed(tuple(self._equations)):
            if number in self._equations and self._is_unused(number):
                self._remove(number)
        self._is_changed = False

    @property
    def equations(self) -> tuple[core.JaxprEqn, ...]:
        """The equations: those that are left, and those that were added."""
        return tuple(self._equations.values())

    def _add(self, equation: core.JaxprEqn) -> None:
        number = next(self._numbers)
        self._equations[number] = equation
        self._defined_by |= dict.fromkeys(equation.outvars, number)
        for var in _variables(equation.invars):
            self._used_by.setdefault(var, {})[number] = None

    def _remove(self, number: int) -> None:
        """Remove an equation, and those whose results nobody uses then."""
        pending = [number]
        while pending:
            number = pending.pop()
            equation = self._equations.pop(number)
            for var in equation.outvars:
                # Another equation may define it already.
                if self._defined_by.get(var) == number:
                    del self._defined_by[var]
            for var in set(_variables(equation.invars)):
                del self._used_by[var][number]
                source = self._defined_by.get(var)
                if source is not None and self._is_unused(source):
                    pending.append(source)

    def _is_unused(self, number: int) -> bool:
        equation = self._equations[number]
        is_used = any(self._used_by.get(var) for var in equation.outvars)
        return not is_used and not equation.effects

    def definition(self, atom: Atom, *names: str) -> core.JaxprEqn | None:
        """Return the equation that computes a variable.

        Args:
            atom: the variable.
            *names: primitives. With another one, the result is None; it also is for inputs.
        """
        if not isinstance(atom, core.Var) or atom not in self._defined_by:
            return None
        equation = self._equations[self._defined_by[atom]]
        return None if names and equation.primitive.name not in names else equation

    def users(self, atom: Atom) -> list[core.JaxprEqn | None]:
        """Return the equations that use a variable, and None if the function returns it."""
        if not isinstance(atom, core.Var):
            return []
        # The caller has no equation.
        return list(map(self._equations.get, self._used_by.get(atom, ())))

    def only_user(self, atom: Atom, *names: str) -> core.JaxprEqn | None:
        """Return the only equation that uses a variable, or None if there are others."""
        users = self.users(atom)
        if len(users) != 1 or users[0] is None:
            return None
        return None if names and users[0].primitive.name not in names else users[0]

    def find(self, *names: str) -> Iterator[core.JaxprEqn]:
        """Yield the equations with one of these primitives; edits are allowed meanwhile."""
        for equation in self.equations:
            if equation.primitive.name in names and self._is_current(equation):
                yield equation

    def _is_current(self, equation: core.JaxprEqn) -> bool:
        return bool(equation.outvars) and (
            self.definition(equation.outvars[0]) is equation
        )

    def depends_on(self, atoms: Sequence[Atom], others: Sequence[core.Var]) -> bool:
        """Return whether the computation of `atoms` uses one of `others`."""
        searched = set(others)
        seen: set[core.Var] = set()
        pending = [atom for atom in atoms if isinstance(atom, core.Var)]
        while pending:
            var = pending.pop()
            if var in searched:
                return True
            equation = self.definition(var)
            if var in seen or equation is None:
                continue
            seen.add(var)
            pending += _variables(equation.invars)
        return False

    def compute(
        self,
        outputs: Sequence[core.Var | None],
        function: Callable[..., Array | Sequence[Array]],
        operands: Sequence[Atom],
        *options: Hashable,
    ) -> list[core.Var]:
        """Let a jitted function compute variables, in place of the equations that did.

        Args:
            outputs: the variables. None creates a new one.
            function: a function of the operands and the options.
            operands: its operands.
            *options: its other arguments.

        Returns:
            The variables.
        """
        types = tuple(_type_of(atom) for atom in operands)
        key = (function, options, types)
        if key not in self._calls:

            def call(*arrays: Array) -> Array | Sequence[Array]:
                return function(*arrays, *options)

            call.__name__ = function.__name__
            structs = [
                jax.ShapeDtypeStruct(*shape_and_dtype) for shape_and_dtype in types
            ]
            self._calls[key] = jax.make_jaxpr(jax.jit(call))(*structs).jaxpr.eqns[-1]
        equation = self._calls[key]
        outvars = [
            core.Var(var.aval) if output is None else output
            for output, var in zip(outputs, equation.outvars, strict=True)
        ]
        replaced = [x for x in map(self.definition, outvars) if x is not None]
        source_info = (replaced or [equation])[-1].source_info
        self._insert(
            [
                equation.replace(
                    invars=list(operands), outvars=outvars, source_info=source_info
                )
            ]
        )
        return outvars

    def splice(
        self,
        outputs: Sequence[core.Var | None],
        function: Callable[..., Array | Sequence[Array]],
        operands: Sequence[Atom],
    ) -> list[core.Var]:
        """Let the equations of a function compute variables, like `compute` without a call."""
        structs = [jax.ShapeDtypeStruct(*_type_of(atom)) for atom in operands]
        jaxpr = jax.make_jaxpr(function)(*structs).jaxpr
        assert not jaxpr.constvars
        names: dict[core.Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        results = cast(Sequence[core.Var], jaxpr.outvars)
        for output, var in zip(outputs, results, strict=True):
            if output is not None:
                names[var] = output
        added = []
        for equation in jaxpr.eqns:
            for var in equation.outvars:
                names.setdefault(var, core.Var(var.aval))
            added.append(
                equation.replace(
                    invars=[
                        x if isinstance(x, core.Literal) else names[x]
                        for x in equation.invars
                    ],
                    outvars=[names[var] for var in equation.outvars],
                )
            )
        self._insert(added)
        return [cast(core.Var, names[var]) for var in results]

    def _insert(self, added: Sequence[core.JaxprEqn]) -> None:
        """Add equations, and remove those that defined their results before."""
        self._is_changed = True
        replaced = {
            self._defined_by[var]: None
            for equation in added
            for var in equation.outvars
            if var in self._defined_by
        }
        for equation in added:
            self._add(equation)
        for number in replaced:
            # Other results of the equation may still be used.
            if number in self._equations and not any(
                self._defined_by.get(var) == number and self._used_by.get(var)
                for var in self._equations[number].outvars
            ):
                self._remove(number)

    def substitute(
        self, old: core.Var, new: core.Var, equations: Collection[int]
    ) -> None:
        """Let some equations, given by their ids, use another variable."""
        for number in tuple(self._used_by.get(old, ())):
            equation = self._equations.get(number)
            if equation is None or id(equation) not in equations:
                continue
            invars = [new if var is old else var for var in equation.invars]
            self._equations[number] = equation.replace(invars=invars)
            del self._used_by[old][number]
            self._used_by.setdefault(new, {})[number] = None
        source = self._defined_by.get(old)
        if source is not None and self._is_unused(source):
            self._remove(source)

    def ordered(self) -> list[core.JaxprEqn]:
        """Return the equations, each after those that it depends on."""
        if not self._is_changed:
            return list(self.jaxpr.eqns)
        order: dict[int, None] = {}
        for number in self._equations:
            stack = [number]
            while stack:
                before = (
                    self._defined_by.get(var)
                    for var in _variables(self._equations[stack[-1]].invars)
                )
                missing = [x for x in before if x is not None and x not in order]
                if missing:
                    stack += missing
                else:
                    order.setdefault(stack.pop())
        return [self._without_replaced(number) for number in order]

    def _without_replaced(self, number: int) -> core.JaxprEqn:
        """Return an equation without the results that another one defines now."""
        equation = self._equations[number]
        outvars = [
            var if self._defined_by[var] == number else core.DropVar(var.aval)
            for var in equation.outvars
        ]
        if all(map(operator.is_, outvars, equation.outvars)):
            return equation
        kept: core.JaxprEqn = equation.replace(outvars=outvars)
        return kept


def _variables(atoms: Sequence[Atom]) -> list[core.Var]:
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def dtype_of(atom: Atom) -> DType:
    """Return the dtype of a variable."""
    dtype: DType = cast(jax.core.ShapedArray, atom.aval).dtype
    return dtype


def _type_of(atom: Atom) -> tuple[tuple[int, ...], DType]:
    return shape_of(atom), dtype_of(atom)


def is_float(atom: Atom) -> bool:
    """Return whether a variable is an array of floats."""
    return bool(jnp.issubdtype(dtype_of(atom), jnp.floating))


def constant_value(graph: Graph, atom: Atom, limit: int) -> np.ndarray | None:
    """Return the value of a variable that depends on no input of the function, or None.

    Args:
        graph: the graph.
        atom: the variable.
        limit: the largest number of entries of an array that is computed for this.
    """
    if isinstance(atom, core.Literal):
        return np.asarray(atom.val)
    ordered: dict[int, core.JaxprEqn] = {}
    pending = [graph.definition(atom)]
    while pending:
        equation = pending[-1]
        if equation is None or equation.effects:
            return None
        if any(math.prod(shape_of(var)) > limit for var in equation.outvars):
            return None
        before = map(graph.definition, _variables(equation.invars))
        missing = [x for x in before if id(x) not in ordered]
        if missing:
            pending += missing
        else:
            ordered[id(equation)] = equation
            pending.pop()
    debug_info = graph.jaxpr.debug_info
    jaxpr = core.Jaxpr((), (), (atom,), list(ordered.values()), debug_info=debug_info)
    with jax.ensure_compile_time_eval():
        (value,) = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))()
    return np.asarray(value)
