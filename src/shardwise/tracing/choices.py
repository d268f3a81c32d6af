"""Read the choices that a function makes with `jax.lax.top_k`, such as the experts of a token."""

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.extend.core import JaxprEqn

from shardwise.tracing.jaxpr import (
    CALLS,
    bind,
    evaluate,
    inner_function,
    inner_jaxprs,
    scan_parts,
)
from shardwise.tree import PyTree

# The scores and the chosen indices of each `top_k`.
Choices: TypeAlias = list[tuple[jax.Array, jax.Array]]


def read_choices(function: Callable[..., PyTree]) -> Callable[..., Choices]:
    """Return a function of the same arguments that returns the choices of `function`.

    Loops over layers are read as well; branches and `jax.shard_map` are not.

    Args:
        function: a function of arrays.

    Returns:
        A function whose results are, for each `top_k` in the order in which they run, the scores
        and the chosen indices. In a loop both have one more dim.

    Example:
        >>> read_choices(lambda x: jax.lax.top_k(x, 2)[0].sum())(jnp.arange(3.0))
        [(Array([0., 1., 2.], dtype=float32), Array([2, 1], dtype=int32))]
    """

    def choices(*args: PyTree) -> Choices:
        closed = jax.make_jaxpr(function)(*args)
        found: Choices = []
        evaluate(closed, jax.tree.leaves(args), _collecting(found))
        return found

    return choices


def _collecting(
    found: Choices,
) -> Callable[[JaxprEqn, list[jax.Array]], list[jax.Array]]:
    """Return a function that evaluates an equation, and adds its choices to `found`."""

    def evaluate_equation(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        inner = inner_function(eqn) if _has_choices(eqn) else None
        if inner is None:
            outputs = bind(eqn, inputs)
            if eqn.primitive.name == "top_k":
                found.append((inputs[0], outputs[1]))
            return outputs
        if eqn.primitive.name != "scan":
            return evaluate(inner, inputs, evaluate_equation)
        outputs, in_loop = _evaluate_scan(eqn, inputs)
        found.extend(in_loop)
        return outputs

    return evaluate_equation


def _has_choices(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    is_read = name == "scan" or name in CALLS
    return name == "top_k" or (
        is_read
        and any(
            _has_choices(inner_eqn)
            for inner in inner_jaxprs(eqn.params)
            for inner_eqn in inner.eqns
        )
    )


def _evaluate_scan(
    eqn: JaxprEqn, inputs: list[jax.Array]
) -> tuple[list[jax.Array], Choices]:
    """Return the outputs of a loop, and the choices of all iterations in one array each."""
    inner = inner_function(eqn)
    assert inner is not None
    num_consts, num_carried = scan_parts(eqn)

    def body(
        carried: list[jax.Array], slices: list[jax.Array]
    ) -> tuple[list[jax.Array], tuple[list[jax.Array], Choices]]:
        found: Choices = []
        args = [*inputs[:num_consts], *carried, *slices]
        outputs = evaluate(inner, args, _collecting(found))
        return outputs[:num_carried], (outputs[num_carried:], found)

    carried, (stacked, found) = jax.lax.scan(
        body,
        inputs[num_consts : num_consts + num_carried],
        inputs[num_consts + num_carried :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return [*carried, *stacked], found
