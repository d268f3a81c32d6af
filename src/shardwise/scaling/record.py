"""Record the activations of any model: the results of all matmuls, convolutions and lookups.

The traced loss is evaluated equation by equation, also inside of calls and scans. Results of
operations that use a parameter are returned under the path of the parameter.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from shardwise.scaling.flow import Walk, input_values
from shardwise.scaling.uses import Flow
from shardwise.scaling.values import Value
from shardwise.tracing.jaxpr import CALLS, bind, inner_function, scan_parts

Array = jax.Array
Recorded: TypeAlias = dict[str, Array]
RECORDED = ("matmul", "selected", "lookup")


def recorded(
    closed: core.ClosedJaxpr,
    params: Mapping[int, str],
    batch: set[int],
    growing: Mapping[str, Collection[int]],
) -> Callable[..., Recorded]:
    """Return a function that computes the activations of a traced loss.

    Args:
        closed: the traced loss.
        params: the paths of the parameters, by the number of the input.
        batch: the numbers of the inputs that are the batch or random keys.
        growing: the dims of each parameter that grow with the width.

    Returns:
        A function of the inputs of the loss. It returns activations by the path of the parameter
        that they were computed with, and the outputs of the loss as "loss".
    """

    def record(*arrays: Array) -> Recorded:
        recorder = _Recorder(growing)
        values = input_values(closed.jaxpr, params, batch)
        outputs, _ = recorder.run(closed, arrays, values)
        kept = recorder.kept
        floats = [out for out in outputs if jnp.issubdtype(out.dtype, jnp.floating)]
        if floats:
            kept["loss"] = floats[0]
        return kept

    return record


class _Recorder:
    """Evaluates jaxprs, and keeps the activations."""

    def __init__(self, growing: Mapping[str, Collection[int]]) -> None:
        self.kept: Recorded = {}
        self._flow = Flow(growing)
        self._walk = Walk(self._flow)

    def run(
        self,
        closed: core.ClosedJaxpr,
        arrays: Sequence[Array],
        values: Sequence[Value],
    ) -> tuple[list[Array], list[Value]]:
        """Return the outputs of a jaxpr, and what is known about them."""
        jaxpr = closed.jaxpr
        known: dict[core.Var, tuple[Array, Value]] = {}
        constants = [(constant, Value()) for constant in closed.consts]
        known.update(zip(jaxpr.constvars, constants, strict=True))
        inputs = zip(arrays, values, strict=True)
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: core.Var | core.Literal) -> tuple[Array, Value]:
            if isinstance(atom, core.Literal):
                return cast(Array, atom.val), Value()
            return known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            own_arrays = [array for array, _ in operands]
            own_values = [value for _, value in operands]
            results = self._equation(equation, own_arrays, own_values)
            known.update(zip(equation.outvars, zip(*results, strict=True), strict=True))
        outputs = [read(atom) for atom in jaxpr.outvars]
        return [array for array, _ in outputs], [value for _, value in outputs]

    def _equation(
        self, equation: core.JaxprEqn, arrays: list[Array], values: list[Value]
    ) -> tuple[list[Array], Sequence[Value]]:
        name = equation.primitive.name
        inner = inner_function(equation)
        if name == "scan":
            return self._scan(equation, arrays, values)
        if inner is not None and name in CALLS:
            return self.run(inner, arrays, values)
        outputs = bind(equation, arrays)
        num_before = len(self._flow.uses)
        results = self._walk.equation(equation, values)
        for use in self._flow.uses[num_before:]:
            is_activation = results[0].is_data and name not in ("while", "cond")
            if use.kind in RECORDED and is_activation:
                self._keep(use.path, outputs[0])
        return outputs, results

    def _scan(
        self, equation: core.JaxprEqn, arrays: list[Array], values: list[Value]
    ) -> tuple[list[Array], Sequence[Value]]:
        num_constants, num_carried = scan_parts(equation)
        first = num_constants + num_carried
        body = cast(core.ClosedJaxpr, inner_function(equation))
        inner_values = self._walk.scan_inputs(equation, values)

        def step(
            carried: list[Array], stacked: list[Array]
        ) -> tuple[list[Array], tuple[list[Array], Recorded]]:
            recorder = _Recorder(self._flow.growing)
            inputs = [*arrays[:num_constants], *carried, *stacked]
            outputs, _ = recorder.run(body, inputs, inner_values)
            return outputs[:num_carried], (outputs[num_carried:], recorder.kept)

        carried, (stacked, kept) = jax.lax.scan(
            step,
            arrays[num_constants:first],
            arrays[first:],
            length=cast(int, equation.params["length"]),
            reverse=cast(bool, equation.params.get("reverse", False)),
        )
        for path, array in kept.items():
            self._keep(path, array)
        return [*carried, *stacked], self._walk.equation(equation, values)

    def _keep(self, path: str, array: Array) -> None:
        name, number = path, 1
        while name in self.kept:
            number += 1
            name = f"{path} #{number}"
        self.kept[name] = array
