"""Residual streams: sums `x + f(x)`, and the parameters that scale the branch `f`."""

from collections.abc import Callable, Sequence
from typing import cast

from jax.extend import core

from shardwise.scaling.uses import Flow, place_of
from shardwise.scaling.values import Value
from shardwise.tracing.jaxpr import Atom, definitions, original

# Operations that keep all entries of an array. A slice is not the same stream.
KEEPING = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "name",
    "optimization_barrier",
    "reduce_precision",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "stop_gradient",
    "transpose",
)


class Streams:
    """The residual streams of a jaxpr. Adds the branches that it finds to a `Flow`."""

    def __init__(self, jaxpr: core.Jaxpr, flow: Flow):
        """Start without streams.

        Args:
            jaxpr: the jaxpr.
            flow: what is found is added to it.
        """
        self._flow = flow
        self._defined = definitions(jaxpr)
        self._places = {
            var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars
        }
        # For each stream `x + f(x)`, the variable `x`.
        self._before: dict[core.Var, core.Var] = {}

    def is_sum(self, atom: Atom) -> bool:
        """Return whether a variable is a sum over dims of an array."""
        equation = self._defined.get(self._original(atom))
        return equation is not None and equation.primitive.name == "reduce_sum"

    def is_stream(
        self,
        equation: core.JaxprEqn,
        operands: Sequence[Value],
        read: Callable[[Atom], Value],
    ) -> bool:
        """Return whether an equation is `x + f(x)`, and note the parameters of `f(x)`.

        The bias of `f` may be added to a stream separately, and so may a second branch: in
        `x + f(x) + g(x)`.

        Args:
            equation: the equation.
            operands: the values of its operands.
            read: returns the value of a variable.
        """
        if equation.primitive.name not in ("add", "add_any"):
            return False
        found = False
        for side in (0, 1):
            branch, stream = operands[side], operands[1 - side]
            if not stream.is_data:
                continue
            atom, stream_atom = equation.invars[side], equation.invars[1 - side]
            if not branch.is_data:
                is_branch = stream.is_stream and bool(branch.scales)
                x = self._before_branches(stream_atom)
            else:
                x = self._source(atom, stream_atom)
                is_branch = x is not None and bool(branch.scales)
            if is_branch:
                self._flow.branches.append(branch.scales)
                if x is not None:
                    self._before[equation.outvars[0]] = x
                    inside = branch.depends - read(x).depends - branch.scales
                    self._flow.inside |= inside
                found = True
            elif x is not None and branch.is_data:
                others = self._other_inputs(atom, x)
                if any(read(var).dims for var in others):
                    self._flow.unscaled.append(place_of(equation))
        return found

    def _before_branches(self, stream: Atom) -> core.Var | None:
        """Return what a stream was before its last branches were added; None if it had none."""
        return self._before.get(self._original(stream))

    def _source(self, branch: Atom, stream: Atom) -> core.Var | None:
        """Return the `x` from which a branch is computed that is added to a stream.

        That is the stream, or what it was before it got the branch next to this one, as in
        `x + f(x) + g(x)`. None if the branch uses neither.
        """
        atom = cast(core.Var, branch)
        for x in (self._original(stream), self._before_branches(stream)):
            if x is not None and self._uses(atom, x)[atom]:
                return x
        return None

    def _other_inputs(self, branch: Atom, x: core.Var) -> list[core.Var]:
        """Return what a branch is computed from, apart from `x` and what is computed from it."""
        uses = self._uses(cast(core.Var, branch), x)
        between = [self._defined[var] for var in uses if uses[var] and var is not x]
        return [var for eqn in between for var in _variables(eqn) if not uses[var]]

    def _original(self, atom: Atom) -> core.Var:
        """Return the variable that was only moved or cast, for example to another dtype."""
        return cast(core.Var, original(atom, self._defined, KEEPING))

    def _uses(self, atom: core.Var, x: core.Var) -> dict[core.Var, bool]:
        """Return whether a variable, and all that it is computed from, use `x`."""
        first = self._places.get(x, -1)
        uses = {x: True}
        pending = [atom]
        while pending:
            var = pending[-1]
            # What was computed before `x` does not use it.
            is_later = self._places.get(var, -1) > first
            variables = _variables(self._defined[var]) if is_later else []
            unknown = [each for each in variables if each not in uses]
            if var not in uses and unknown:
                pending += unknown
                continue
            pending.pop()
            uses.setdefault(var, any(uses[each] for each in variables))
        return uses


def _variables(equation: core.JaxprEqn) -> list[core.Var]:
    """Return the inputs of an equation that are not constants."""
    return [var for var in equation.invars if not isinstance(var, core.Literal)]
