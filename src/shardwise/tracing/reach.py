"""Which variables of a traced function depend on some of its inputs."""

from collections.abc import Sequence
from typing import cast

from jax.extend import core

from shardwise.tracing.jaxpr import CALLS, inner_function, scan_parts


def reached(closed: core.ClosedJaxpr, is_source: Sequence[bool]) -> set[core.Var]:
    """Return the variables that depend on some inputs, those of inner functions included.

    Args:
        closed: the traced function.
        is_source: for each input, whether it is one of them.

    Returns:
        The variables. Those of a function that is called several times are among them if they
        depend on the inputs in one of the calls.
    """
    reach = _Reach()
    reach.run(closed.jaxpr, is_source)
    return reach.variables


class _Reach:
    """One pass over a traced function."""

    def __init__(self) -> None:
        self.variables: set[core.Var] = set()

    def run(self, jaxpr: core.Jaxpr, inputs: Sequence[bool]) -> list[bool]:
        """Return which outputs of a jaxpr depend on the inputs that do."""
        self._add(jaxpr.invars, inputs)
        for equation in jaxpr.eqns:
            operands = [self._is_reached(atom) for atom in equation.invars]
            self._add(equation.outvars, self._outputs(equation, operands))
        return [self._is_reached(atom) for atom in jaxpr.outvars]

    def _add(self, variables: Sequence[core.Var], are_reached: Sequence[bool]) -> None:
        pairs = zip(variables, are_reached, strict=True)
        self.variables.update(var for var, is_reached in pairs if is_reached)

    def _is_reached(self, atom: core.Var | core.Literal) -> bool:
        return isinstance(atom, core.Var) and atom in self.variables

    def _outputs(self, equation: core.JaxprEqn, operands: list[bool]) -> list[bool]:
        name, params = equation.primitive.name, equation.params
        inner = inner_function(equation)
        if inner is not None and name in CALLS:
            return self.run(inner.jaxpr, operands)
        if inner is not None and name == "scan":
            num_constants, num_carried = scan_parts(equation)
            return self._loop(inner.jaxpr, operands, num_constants, num_carried)
        if name == "while":
            first = cast(int, params["cond_nconsts"])
            body = cast(core.ClosedJaxpr, params["body_jaxpr"]).jaxpr
            num_constants = cast(int, params["body_nconsts"])
            inputs = operands[first:]
            return self._loop(body, inputs, num_constants, len(inputs) - num_constants)
        if name == "cond":
            branches = cast(Sequence[core.ClosedJaxpr], params["branches"])
            results = [self.run(branch.jaxpr, operands[1:]) for branch in branches]
            return [operands[0] or any(each) for each in zip(*results, strict=True)]
        return [any(operands)] * len(equation.outvars)

    def _loop(
        self,
        body: core.Jaxpr,
        inputs: list[bool],
        num_constants: int,
        num_carried: int,
    ) -> list[bool]:
        """Return the outputs of a loop whose carried values depend on those before."""
        end = num_constants + num_carried
        while True:
            outputs = self.run(body, inputs)
            carried = [
                before or after
                for before, after in zip(
                    inputs[num_constants:end], outputs[:num_carried], strict=True
                )
            ]
            if carried == inputs[num_constants:end]:
                return [*carried, *outputs[num_carried:]]
            inputs = [*inputs[:num_constants], *carried, *inputs[end:]]
