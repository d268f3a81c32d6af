"""A jaxpr as a graph that can be searched and edited.

JAX traces a function to a list of equations. A `Graph` also knows where each variable is defined
and used, and puts the equations back into order after an edit.
"""

import math
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


class Graph:
    """The equations of a jaxpr, while it is rewritten."""

    def __init__(self, jaxpr: core.Jaxpr, calls: Calls):
        """Read a jaxpr.

        Args:
            jaxpr: the jaxpr. It is not changed.
            calls: traced calls, which several graphs share.
        """
        self.jaxpr = jaxpr
        self.equations: list[core.JaxprEqn] = list(jaxpr.eqns)
        self._calls = calls
        self._index()

    def _index(self) -> None:
        self._places: dict[core.Var, int] = {}
        self._users: dict[core.Var, list[int]] = {}
        for place, equation in enumerate(self.equations):
            self._places |= dict.fromkeys(equation.outvars, place)
            for var in equation.invars:
                if isinstance(var, core.Var):
                    self._users.setdefault(var, []).append(place)
        for var in self.jaxpr.outvars:
            if isinstance(var, core.Var):
                # The caller uses it.
                self._users.setdefault(var, []).append(-1)

    def definition(self, atom: Atom, *names: str) -> core.JaxprEqn | None:
        """Return the equation that computes a variable.

        Args:
            atom: the variable.
            *names: primitives. With another one, the result is None; it also is for inputs.
        """
        if not isinstance(atom, core.Var) or atom not in self._places:
            return None
        equation = self.equations[self._places[atom]]
        return None if names and equation.primitive.name not in names else equation

    def users(self, atom: Atom) -> list[core.JaxprEqn | None]:
        """Return the equations that use a variable, and None if the function returns it."""
        if not isinstance(atom, core.Var):
            return []
        return [
            None if place < 0 else self.equations[place]
            for place in dict.fromkeys(self._users.get(atom, []))
        ]

    def only_user(self, atom: Atom, *names: str) -> core.JaxprEqn | None:
        """Return the only equation that uses a variable, or None if there are others."""
        users = self.users(atom)
        if len(users) != 1 or users[0] is None:
            return None
        return None if names and users[0].primitive.name not in names else users[0]

    def find(self, *names: str) -> Iterator[core.JaxprEqn]:
        """Yield the equations with one of these primitives; edits are allowed meanwhile."""
        for equation in tuple(self.equations):
            if equation.primitive.name in names and self._is_current(equation):
                yield equation

    def _is_current(self, equation: core.JaxprEqn) -> bool:
        place = self._places.get(equation.outvars[0]) if equation.outvars else None
        return place is not None and self.equations[place] is equation

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
            pending += [x for x in equation.invars if isinstance(x, core.Var)]
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
        place = max(
            (self._places.get(x, 0) for x in outvars if x in self._places), default=None
        )
        like = None if place is None else self.equations[place].source_info
        self._insert(
            [
                equation.replace(
                    invars=list(operands),
                    outvars=outvars,
                    source_info=like or equation.source_info,
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
        defined = {var for equation in added for var in equation.outvars}
        kept = []
        is_replaced = False
        for equation in self.equations:
            if not defined.intersection(equation.outvars):
                kept.append(equation)
                continue
            is_replaced = True
            rest = [
                core.DropVar(var.aval) if var in defined else var
                for var in equation.outvars
            ]
            if any(not isinstance(var, core.DropVar) for var in rest):
                kept.append(equation.replace(outvars=rest))
        self.equations = [*kept, *added]
        if is_replaced:
            self._settle()
        else:
            # The next edit uses the new variables.
            self._index()

    def substitute(
        self, old: core.Var, new: core.Var, equations: Collection[int]
    ) -> None:
        """Let some equations, given by their ids, use another variable."""
        self.equations = [
            equation.replace(
                invars=[new if var is old else var for var in equation.invars]
            )
            if id(equation) in equations
            else equation
            for equation in self.equations
        ]
        self._settle()

    def finished(self, equations: Sequence[core.JaxprEqn]) -> core.Jaxpr:
        """Return the edited jaxpr, with these equations in place of those of the graph."""
        finished: core.Jaxpr = self.jaxpr.replace(eqns=list(equations))
        return finished

    def _settle(self) -> None:
        """Remove equations that nobody uses, and put the others behind what they depend on."""
        self._index()
        pending = [
            self._places[var]
            for var in self.jaxpr.outvars
            if isinstance(var, core.Var) and var in self._places
        ]
        pending += [n for n, x in enumerate(self.equations) if x.effects]
        needed: set[int] = set()
        while pending:
            place = pending.pop()
            if place not in needed:
                needed.add(place)
                pending += self._dependencies(place)
        ordered: dict[int, None] = {}
        for place in sorted(needed):
            stack = [place]
            while stack:
                missing = [x for x in self._dependencies(stack[-1]) if x not in ordered]
                if missing:
                    stack += missing
                else:
                    ordered.setdefault(stack.pop())
        self.equations = [self.equations[place] for place in ordered]
        self._index()

    def _dependencies(self, place: int) -> list[int]:
        invars = self.equations[place].invars
        places = (self._places.get(x) for x in invars if isinstance(x, core.Var))
        return [x for x in places if x is not None]


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
    equations: list[core.JaxprEqn] = []
    pending, seen = [atom], set()
    while pending:
        equation = graph.definition(pending.pop())
        if equation is None or equation.effects:
            return None
        if any(math.prod(shape_of(var)) > limit for var in equation.outvars):
            return None
        if id(equation) not in seen:
            seen.add(id(equation))
            equations.append(equation)
            pending += [x for x in equation.invars if isinstance(x, core.Var)]
    order = {id(equation): n for n, equation in enumerate(graph.equations)}
    equations.sort(key=lambda equation: order[id(equation)])
    debug_info = graph.jaxpr.debug_info
    jaxpr = core.Jaxpr((), (), (atom,), equations, debug_info=debug_info)
    with jax.ensure_compile_time_eval():
        (value,) = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))()
    return np.asarray(value)
