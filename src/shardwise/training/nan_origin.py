"""Where in a computation something happens first: the use of each input, and the first NaN."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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


def order_of_use(traced: ClosedJaxpr, names: Sequence[str]) -> list[str]:
    """The names of the first inputs of a traced function, in the order in which its operations first take them in."""
    used: dict[str, None] = {}

    def visit(jaxpr: Jaxpr, known: dict[Any, str]) -> None:
        for eqn in jaxpr.eqns:
            inner = _inner(eqn)
            mine = [None if isinstance(var, Literal) else known.get(var) for var in eqn.invars]
            if inner is not None and len(inner.jaxpr.invars) == len(mine):
                visit(
                    inner.jaxpr,
                    {
                        var: name
                        for var, name in zip(inner.jaxpr.invars, mine, strict=True)
                        if name is not None
                    },
                )
            used.update(dict.fromkeys(name for name in mine if name is not None))

    visit(traced.jaxpr, dict(zip(traced.jaxpr.invars, names, strict=False)))
    return [*used, *(name for name in names if name not in used)]


def first_nan(function: Callable[..., Any], *args: Any) -> str | None:
    """The first operation of `function(*args)` that makes a NaN of numbers, with its place in the source; None if there is none.

    They are carried out one after the other, loops over layers included, so this takes long and is for when something is wrong.
    """
    closed, _ = jax.make_jaxpr(function, return_shape=True)(*args)
    found = next(_nans(closed.jaxpr, closed.consts, jax.tree.leaves(args), ""), None)
    return found if isinstance(found, str) else None


def _nans(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], where: str) -> Iterator[Any]:
    """Yields the operations that make NaNs, then, as a list, what is computed."""
    values: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    )

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        inputs = [read(var) for var in eqn.invars]
        outputs: list[Any] = []
        inner = _inner(eqn)
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
            for found in _scan(eqn, inputs, where):
                if isinstance(found, str):
                    yield found
                else:
                    outputs = found
        elif (
            inner is not None
            and eqn.primitive.name in CALLS
            and len(inner.jaxpr.invars) == len(inputs)
        ):
            for found in _nans(inner.jaxpr, inner.consts, inputs, where):
                if isinstance(found, str):
                    yield found
                else:
                    outputs = found
        else:
            with eqn.ctx.manager:
                result = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = list(result) if eqn.primitive.multiple_results else [result]
            if any(map(_has_nan, outputs)) and not any(map(_has_nan, inputs)):
                yield f"'{eqn.primitive.name}' at {_place(eqn)}{where}"
        values.update(zip(eqn.outvars, outputs, strict=True))
    yield [read(var) for var in jaxpr.outvars]


def _scan(eqn: Any, inputs: list[Any], where: str) -> Iterator[Any]:
    """A loop, one round after the other: rounds are layers as a rule. It takes constants, what is carried, and what has a part for each."""
    inner = _inner(eqn)
    assert inner is not None
    num_cut = sum(
        outer.aval.ndim > var.aval.ndim
        for outer, var in zip(eqn.invars, inner.jaxpr.invars, strict=True)
    )
    num_carry = sum(
        outer.aval.ndim == var.aval.ndim
        for outer, var in zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
    )
    num_consts = len(inputs) - num_carry - num_cut
    consts, carry, cut = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )
    collected: list[list[Any]] = []
    for i in range(eqn.params["length"]):
        for found in _nans(
            inner.jaxpr,
            inner.consts,
            [*consts, *carry, *(x[i] for x in cut)],
            f"{where}, round {i} of a loop",
        ):
            if isinstance(found, str):
                yield found
            else:
                carry, rest = found[:num_carry], found[num_carry:]
                collected.append(rest)
    yield [*carry, *(jnp.stack(y) for y in zip(*collected, strict=True))]


def _inner(eqn: Any) -> ClosedJaxpr | None:
    """The computation within an operation, if there is one."""
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):
            return value
        if isinstance(value, Jaxpr):
            return ClosedJaxpr(value, [])
    return None


def _place(eqn: Any) -> str:
    """File, line and function."""
    try:
        from jax._src import source_info_util  # JAX has no public name for it
    except ImportError:
        return str(eqn.source_info.name_stack)
    return source_info_util.summarize(eqn.source_info)


def _has_nan(value: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.floating) and jnp.isnan(value).any())
