"""Read a traced function: its inner functions, and the lines of code that it came from."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import jax
from jax.extend import core

from shardwise.errors import is_library

Shape: TypeAlias = tuple[int, ...]

JAX = str(Path(jax.__file__).parent)


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


def is_defined_in_jax(jaxpr: core.Jaxpr) -> bool:
    """Return whether the function that a jaxpr was traced from is part of JAX."""
    source = jaxpr.debug_info.func_src_info or ""
    return JAX in source


def shape_of(variable: core.Var | core.Literal) -> Shape:
    """Return the shape of a variable of a jaxpr."""
    return cast(Shape, getattr(variable.aval, "shape", ()))
