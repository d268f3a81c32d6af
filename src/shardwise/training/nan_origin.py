"""Find where a computation first uses each input, and where it first produces a NaN."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from shardwise.tracing.jaxpr import (
    CALLS,
    JAX,
    bind,
    evaluate,
    frames_of,
    inner_function,
    scan_parts,
)
from shardwise.tree import PyTree


def order_of_use(traced: ClosedJaxpr, names: Sequence[str]) -> list[str]:
    """Return the names of inputs in the order in which operations first use them.

    Args:
        traced: a traced function.
        names: names of its first inputs. Inputs without a name are ignored.

    Returns:
        All names; those of unused inputs come last.
    """
    used: dict[str, None] = {}

    def visit(jaxpr: Jaxpr, known: dict[Var, str]) -> None:
        for eqn in jaxpr.eqns:
            inputs = [
                None if isinstance(var, Literal) else known.get(var)
                for var in eqn.invars
            ]
            inner = inner_function(eqn)
            if inner is not None and len(inner.jaxpr.invars) == len(inputs):
                inside = zip(inner.jaxpr.invars, inputs, strict=True)
                visit(
                    inner.jaxpr, {var: name for var, name in inside if name is not None}
                )
            used.update(dict.fromkeys(name for name in inputs if name is not None))

    visit(traced.jaxpr, dict(zip(traced.jaxpr.invars, names, strict=False)))
    return [*used, *(name for name in names if name not in used)]


class _FirstNaN(Exception):
    """Carries the description of the operation that produced a NaN."""


def first_nan(function: Callable[..., PyTree], *args: PyTree) -> str | None:
    """Return the first operation of `function(*args)` that produces a NaN from other numbers.

    The operations are evaluated one after the other, including those in loops over layers. This
    is slow, and meant for a step that is known to be bad.

    Returns:
        The name of the operation and its place in the source code, or None if no operation
        produces a NaN.
    """
    closed = jax.make_jaxpr(function)(*args)
    try:
        _evaluate(closed, jax.tree.leaves(args), "")
    except _FirstNaN as found:
        return str(found)
    return None


def _evaluate(
    closed: ClosedJaxpr, args: Sequence[jax.Array], where: str
) -> list[jax.Array]:
    """Return the outputs of a computation; raise `_FirstNaN` at the first NaN.

    Args:
        closed: the computation.
        args: its inputs.
        where: the loop that it is in, for the description.
    """
    return evaluate(closed, args, lambda eqn, inputs: _evaluate_eqn(eqn, inputs, where))


def _evaluate_eqn(
    eqn: JaxprEqn, inputs: list[jax.Array], where: str
) -> list[jax.Array]:
    name = eqn.primitive.name
    if not eqn.outvars:
        # A check or a print: it has run in the step.
        return []
    inner = inner_function(eqn)
    if name == "scan" and inner is not None and not eqn.params["reverse"]:
        return _evaluate_scan(eqn, inner, inputs, where)
    if name in CALLS and inner is not None and len(inner.jaxpr.invars) == len(inputs):
        return _evaluate(inner, inputs, where)
    outputs = bind(eqn, inputs)
    if any(map(_has_nan, outputs)) and not any(map(_has_nan, inputs)):
        raise _FirstNaN(f"'{name}' at {_place(eqn)}{where}")
    return outputs


def _evaluate_scan(
    eqn: JaxprEqn, inner: ClosedJaxpr, inputs: list[jax.Array], where: str
) -> list[jax.Array]:
    """Evaluate a loop iteration by iteration; the iterations are usually layers.

    Its inputs are constants, carried values, and stacked values with one slice per iteration.
    """
    num_consts, num_carried = scan_parts(eqn)
    consts = inputs[:num_consts]
    carried = inputs[num_consts : num_consts + num_carried]
    stacked = inputs[num_consts + num_carried :]
    collected: list[list[jax.Array]] = []
    for i in range(eqn.params["length"]):
        args = [*consts, *carried, *(x[i] for x in stacked)]
        outputs = _evaluate(inner, args, f"{where}, iteration {i} of a loop")
        carried = outputs[:num_carried]
        collected.append(outputs[num_carried:])
    return [*carried, *(jnp.stack(slices) for slices in zip(*collected, strict=True))]


def _place(eqn: JaxprEqn) -> str:
    """Return file, line and function of an operation, in a layer rather than in JAX."""
    frames = frames_of(eqn)
    outside = [frame for frame in frames if not frame.file_name.startswith(JAX)]
    if not frames:
        return str(eqn.source_info.name_stack)
    frame = (outside or frames)[0]
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"


def _has_nan(value: jax.Array) -> bool:
    return bool(
        jnp.issubdtype(jnp.result_type(value), jnp.floating) and jnp.isnan(value).any()
    )
