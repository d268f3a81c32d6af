"""Values that depend on no example: constants, parameters, random numbers, indices."""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from shardwise.loss.primitives import ELEMENTWISE, PLACEMENT, names_in
from shardwise.loss.value import Kind, Value
from shardwise.tracing.jaxpr import Shape, shape_of


def constant_value(constant: object) -> Value:
    """Return the value of a literal or of an array that the function closes over."""
    value = Value(Kind.FREE, is_fixed=True, digest=id(constant))
    # An array on a device is not fetched. It is the same object for every batch size.
    if isinstance(constant, jax.Array):
        return replace(value, positions=long_dims(constant.shape))
    try:
        array = np.asarray(constant)
    except (TypeError, ValueError):
        return value
    # `bfloat16` is a number to JAX, but not to NumPy.
    is_number = jnp.issubdtype(array.dtype, np.number) or array.dtype == bool
    is_real = not np.iscomplexobj(array) or not array.imag.any()
    if array.size and is_number and is_real and (array == array.flat[0]).all():
        number = float(array.real.flat[0])
        return replace(value, constant=number, digest=hash(("constant", number)))
    positions = frozenset(
        dim
        for dim in long_dims(array.shape)
        if (array != array.take([0], axis=dim)).any()
    )
    value = replace(value, positions=positions, digest=hash(array.tobytes()))
    is_list = len(long_dims(array.shape)) == 1 and array.dtype.kind in "iu"
    if is_list and (array.reshape(-1) == np.arange(array.size)).all():
        (dim,) = positions
        digest = hash(("index", "index"))
        return replace(value, index_dim=dim, index_role="index", digest=digest)
    return value


def long_dims(shape: Shape) -> frozenset[int]:
    """Return the dims with more than one entry."""
    return frozenset(dim for dim, size in enumerate(shape) if size > 1)


def positions(equation: core.JaxprEqn, operands: list[Value]) -> frozenset[int]:
    """Return the dims along which a FREE output differs by position, see `Value.positions`."""
    name, params = equation.primitive.name, equation.params
    shape = shape_of(equation.outvars[0])
    if name == "iota":
        return frozenset([params["dimension"]])
    found = {dim for value in operands for dim in value.positions}
    if not found or name.startswith("random_"):
        return frozenset()
    if name == "broadcast_in_dim":
        return frozenset(params["broadcast_dimensions"][dim] for dim in found)
    if name in ("reshape", "squeeze"):
        before = shape_of(equation.invars[0])
        moved = [reshaped_dim(before, equation, dim) for dim in found]
        if None not in moved:
            return frozenset(dim for dim in moved if dim is not None)
    if name in ELEMENTWISE:
        return frozenset(found)
    if name == "dot_general":
        return _dot_positions(equation, operands)
    return long_dims(shape)


def _dot_positions(equation: core.JaxprEqn, operands: list[Value]) -> frozenset[int]:
    """Return where the free and batch dims that differ by position are in a product."""
    contracting, batch = equation.params["dimension_numbers"]
    found: set[int] = set()
    first_free = len(batch[0])
    for side, (variable, value) in enumerate(
        zip(equation.invars, operands, strict=True)
    ):
        used = (*contracting[side], *batch[side])
        free = [dim for dim in range(len(shape_of(variable))) if dim not in used]
        for dim in value.positions:
            if dim in free:
                found.add(first_free + free.index(dim))
            elif dim in batch[side]:
                found.add(batch[side].index(dim))
        first_free += len(free)
    return frozenset(found)


_FOLDS: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": max,
    "min": min,
    "neg": lambda x: -x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "integer_pow": lambda x, y: x**y,
}
_KEEPS_CONSTANT = names_in(
    """
    convert_element_type broadcast_in_dim reshape squeeze copy stop_gradient transpose
    slice reduce_max reduce_min expand_dims sharding_constraint
    reshard mesh_cast
    """
)


def fold(equation: core.JaxprEqn, operands: list[Value]) -> float | None:
    """Return the value of all entries of an output, if those of the operands are known."""
    name, constants = equation.primitive.name, [value.constant for value in operands]
    if not constants or None in constants:
        return None
    known = [constant for constant in constants if constant is not None]
    if name in _KEEPS_CONSTANT:
        return known[0]
    if name == "reduce_sum":
        count = math.prod(shape_of(equation.invars[0])) / max(
            1, math.prod(shape_of(equation.outvars[0]))
        )
        return known[0] * count
    if name == "integer_pow":
        known.append(equation.params["y"])
    try:
        return _FOLDS[name](*known) if name in _FOLDS else None
    except (ZeroDivisionError, OverflowError, ValueError):
        return None


def index(equation: core.JaxprEqn, operands: list[Value]) -> tuple[int | None, str]:
    """Return along which dim the output is its own index, and its role, see `Value`.

    JAX writes `x[i]` as `x[select_n(i < 0, i, i + n)]`.
    """
    name, params = equation.primitive.name, equation.params
    if name == "iota":
        return params["dimension"], "index"
    found = [value for value in operands if value.index_dim is not None]
    if not found:
        return None, ""
    dim, role = found[0].index_dim, found[0].index_role
    assert dim is not None
    others = [value for value in operands if value.index_dim is None]
    is_with_constant = len(others) == 1 and others[0].constant is not None
    if name in ("convert_element_type", "copy", *PLACEMENT):
        return dim, role
    if name == "lt" and role == "index" and is_with_constant and not others[0].constant:
        return dim, "negative"
    if name == "add" and role == "index" and is_with_constant:
        return dim, "shifted"
    if name == "select_n" and operands[0].constant == 0:
        return operands[1].index_dim, operands[1].index_role
    if name == "select_n":
        roles = [value.index_role for value in operands]
        return (
            (dim, "index") if roles == ["negative", "index", "shifted"] else (None, "")
        )
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][dim], role
    if name in ("reshape", "squeeze"):
        moved = reshaped_dim(shape_of(equation.invars[0]), equation, dim)
        return (None, "") if moved is None else (moved, role)
    return None, ""


def index_columns(equation: core.JaxprEqn, operands: list[Value]) -> frozenset[int]:
    """Return the columns of the last dim that are an index along dim 0."""
    shape = shape_of(equation.outvars[0])
    if equation.primitive.name != "concatenate":
        return frozenset()
    if equation.params["dimension"] != len(shape) - 1:
        return frozenset()
    columns, start = set(), 0
    for variable, value in zip(equation.invars, operands, strict=True):
        width = shape_of(variable)[-1]
        if value.index_role == "index" and width == 1:
            columns.add(start)
        start += width
    return frozenset(columns)


def reshaped_dim(shape: Shape, equation: core.JaxprEqn, dim: int) -> int | None:
    """Return where a dim is after a reshape that keeps it as a whole."""
    before = math.prod(shape[:dim])
    product = 1
    for new_dim, size in enumerate(shape_of(equation.outvars[0])):
        if product == before and size == shape[dim]:
            return new_dim
        product *= size
    return None
