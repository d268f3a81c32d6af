"""How each JAX primitive changes the dependence of values on examples, see `loss.dependence`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from jax.extend import core

from shardwise.loss.constants import index_columns
from shardwise.loss.primitives import (
    ADDS,
    BILINEAR,
    ELEMENTWISE,
    LINEAR,
    is_rounding,
    names_in,
)
from shardwise.loss.value import Kind, Value, cause_of
from shardwise.tracing.jaxpr import shape_of

# From the values of the operands to those of the outputs.
Rule: TypeAlias = Callable[[core.JaxprEqn, list[Value]], list[Value]]


def same(equation: core.JaxprEqn, value: Value) -> list[Value]:
    """Return the same value for all outputs of an equation."""
    return [value] * len(equation.outvars)


def coupled(equation: core.JaxprEqn) -> list[Value]:
    """Return values that combine examples, because of this equation."""
    return same(equation, Value(Kind.COUPLED, cause=cause_of(equation)))


def unknown(equation: core.JaxprEqn) -> list[Value]:
    """Return values of an equation that the analysis does not understand."""
    return same(equation, Value(Kind.UNKNOWN, cause=cause_of(equation)))


def positional(equation: core.JaxprEqn) -> list[Value]:
    """Return values that depend on the positions of examples in the batch."""
    cause = replace(cause_of(equation), is_positional=True)
    return same(equation, Value(Kind.COUPLED, cause=cause))


def _common_rows(operands: list[Value]) -> Value | None:
    """Return where all ROWS operands have their examples, or None if they disagree."""
    places = {(v.dim, v.entries) for v in operands if v.kind == Kind.ROWS}
    if len(places) != 1:
        return None
    dim, entries = places.pop()
    return Value(Kind.ROWS, dim=dim, entries=entries)


def _has_positions(operands: list[Value], dim: int) -> bool:
    """Return whether a FREE operand differs by position along a dim."""
    return any(v.kind == Kind.FREE and dim in v.positions for v in operands)


def _moved(equation: core.JaxprEqn, value: Value, dim: int) -> list[Value]:
    """Return `value` with its examples along `dim` for all outputs."""
    return same(equation, replace(value, dim=dim, index_columns=frozenset()))


# SUM values


def sum_rule(equation: core.JaxprEqn, operands: list[Value]) -> Value:
    """Return the value of an operation on SUMs and FREE values."""
    name = equation.primitive.name
    sums = [value for value in operands if value.kind == Kind.SUM]
    free = [value for value in operands if value.kind == Kind.FREE]
    if name in LINEAR and not is_rounding(equation):
        has_offset = any(value.has_offset for value in sums)
        # The predicate of `select_n` is not added.
        added = free[1:] if name == "select_n" else free
        if name in ADDS:
            has_offset |= any(value.constant != 0 for value in added)
        return Value(Kind.SUM, has_offset=has_offset)
    is_scaled = name in BILINEAR or (name == "div" and operands[1].kind == Kind.FREE)
    if len(sums) == 1 and is_scaled:
        return Value(Kind.SUM, has_offset=sums[0].has_offset)
    return Value(Kind.STATISTIC, cause=cause_of(equation))


# ROWS values


def elementwise(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Operands of one shape, or with dims of size 1 that are broadcast."""
    if equation.primitive.name not in ELEMENTWISE:
        return unknown(equation)
    shape = shape_of(equation.outvars[0])
    for variable in equation.invars:
        own = shape_of(variable)
        is_fitting = len(own) == len(shape) and all(
            size in (1, full) for size, full in zip(own, shape, strict=True)
        )
        if own and not is_fitting:
            return unknown(equation)
    rows = _common_rows(operands)
    if rows is None:
        return coupled(equation)
    # Entries of one example may differ by their position in it.
    if rows.entries == 1 and _has_positions(operands, rows.dim):
        return positional(equation)
    return _moved(equation, rows, rows.dim)


def kernel(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Return the values of a kernel, which is taken to treat all examples alike."""
    rows = _common_rows(operands)
    if rows is None:
        return unknown(equation)
    shapes = [
        shape_of(variable)
        for variable, value in zip(equation.invars, operands, strict=True)
        if value.kind == Kind.ROWS
    ]
    shapes += [shape_of(variable) for variable in equation.outvars]
    sizes = {shape[rows.dim] if rows.dim < len(shape) else 0 for shape in shapes}
    return same(equation, rows) if len(sizes) == 1 else unknown(equation)


def _same_dim(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Each output is like the input at its position."""
    return [replace(value, index_columns=frozenset()) for value in operands]


def _broadcast_in_dim(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, shape = operands[0], shape_of(equation.invars[0])
    dim = equation.params["broadcast_dimensions"][value.dim]
    if shape[value.dim] != equation.params["shape"][dim]:
        return unknown(equation)
    return _moved(equation, value, dim)


def _reshape(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, shape = operands[0], shape_of(equation.invars[0])
    before = math.prod(shape[: value.dim])
    num_rows = shape[value.dim] // value.entries
    product = 1
    for dim, size in enumerate(shape_of(equation.outvars[0])):
        # The first dim that starts where the examples start, and holds all of them.
        if product == before and size % num_rows == 0 and (size > 1 or num_rows == 1):
            return same(equation, Value(Kind.ROWS, dim=dim, entries=size // num_rows))
        product *= size
    return unknown(equation)


def _transpose(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    dim = equation.params["permutation"].index(operands[0].dim)
    return _moved(equation, operands[0], dim)


def _squeeze(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, dims = operands[0], equation.params["dimensions"]
    if value.dim in dims:
        return unknown(equation)
    return _moved(equation, value, value.dim - sum(dim < value.dim for dim in dims))


def _reduce(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    name, params = equation.primitive.name, equation.params
    value = next(value for value in operands if value.kind == Kind.ROWS)
    axes = params["axes"] if "axes" in params else params["dimensions"]
    if value.dim not in axes:
        dim = value.dim - sum(axis < value.dim for axis in axes)
        return _moved(equation, value, dim)
    if name == "reduce_sum":
        return same(equation, Value(Kind.SUM))
    return coupled(equation)


def _along_axis(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Operations that mix the entries of one dim, such as `cumsum`, `sort` and `top_k`."""
    keys = [key for key in _AXIS if key in equation.params]
    # `top_k` of jax 0.10 has no such parameter: it is along the last dim.
    axis = equation.params[keys[0]] if keys else -1
    rows = _common_rows(operands)
    if rows is None or rows.dim == axis % len(shape_of(equation.invars[0])):
        return coupled(equation)
    return _moved(equation, rows, rows.dim)


# Names of the parameter that holds the dim of an operation along one dim.
_AXIS = ("axis", "dimension", "reduction_dimension")


def _last_dims(count: int) -> Rule:
    """Operations on the last `count` dims, such as `top_k` and `cholesky`."""

    def rule(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        for variable, value in zip(equation.invars, operands, strict=True):
            if value.kind == Kind.ROWS and value.dim >= len(shape_of(variable)) - count:
                return coupled(equation)
        rows = _common_rows(operands)
        return coupled(equation) if rows is None else same(equation, rows)

    return rule


def _fft(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    return _last_dims(len(equation.params["fft_lengths"]))(equation, operands)


def _rev(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    if operands[0].dim in equation.params["dimensions"]:
        return coupled(equation)
    return _moved(equation, operands[0], operands[0].dim)


def _slice(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Slices and updates of slices: the examples must stay complete."""
    value = operands[0]
    if any(other.kind == Kind.ROWS for other in operands[1:]):
        return unknown(equation)
    if (
        shape_of(equation.outvars[0])[value.dim]
        != shape_of(equation.invars[0])[value.dim]
    ):
        return coupled(equation)
    return _moved(equation, value, value.dim)


def _update_slice(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, update = operands[:2]
    if any(other.kind == Kind.ROWS for other in operands[2:]):
        return unknown(equation)
    if value.kind != Kind.ROWS:
        return unknown(equation)
    shape = shape_of(equation.invars[0])
    own = shape_of(equation.invars[1])
    if shape[value.dim] != own[value.dim] or _common_rows([value, update]) is None:
        return coupled(equation)
    if _has_positions([update], value.dim):
        return positional(equation)
    return _moved(equation, value, value.dim)


def _stack(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    rows = _common_rows(operands)
    if rows is None:
        return coupled(equation)
    if _has_positions(operands, rows.dim):
        return positional(equation)
    return _moved(equation, rows, rows.dim + (equation.params["axis"] <= rows.dim))


def _pad(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value = operands[0]
    if value.kind != Kind.ROWS or operands[1].kind == Kind.ROWS:
        return unknown(equation)
    if tuple(equation.params["padding_config"][value.dim]) != (0, 0, 0):
        return unknown(equation)
    return _moved(equation, value, value.dim)


def _split(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    if equation.params["axis"] == operands[0].dim:
        return coupled(equation)
    return _moved(equation, operands[0], operands[0].dim)


def _unstack(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, axis = operands[0], equation.params["axis"]
    if axis == value.dim:
        return coupled(equation)
    return _moved(equation, value, value.dim - (axis < value.dim))


def _concatenate(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    rows = _common_rows(operands)
    if rows is None:
        return coupled(equation)
    if equation.params["dimension"] == rows.dim:
        return unknown(equation)
    # `x[jnp.arange(B), labels]` puts both indices into one array.
    others = [value for value in operands if value.index_role != "index"]
    if _has_positions(others, rows.dim):
        return positional(equation)
    columns = index_columns(equation, operands)
    return same(equation, replace(rows, index_columns=columns))


def _dot_general(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    contracting, batch = equation.params["dimension_numbers"]
    roles = []
    num_free = 0
    for index, (value, variable) in enumerate(
        zip(operands, equation.invars, strict=True)
    ):
        dims = range(len(shape_of(variable)))
        free = [dim for dim in dims if dim not in contracting[index] + batch[index]]
        if value.kind == Kind.ROWS:
            if value.dim in batch[index]:
                position = batch[index].index(value.dim)
                roles.append(("batch", position, value))
            elif value.dim in contracting[index]:
                position = contracting[index].index(value.dim)
                roles.append(("contracting", position, value))
            else:
                position = len(batch[0]) + num_free + free.index(value.dim)
                roles.append(("free", position, value))
        num_free += len(free)
    role, position, value = roles[0]
    if len(roles) == 2:
        other_role, other_position, other = roles[1]
        is_same = (role, position, value.entries) == (
            other_role,
            other_position,
            other.entries,
        )
        if not is_same or role == "free":
            return coupled(equation)
    if role == "contracting":
        contracted = [dims[position] for dims in contracting]
        for operand, dim in zip(operands, contracted, strict=True):
            if operand.kind == Kind.FREE and dim in operand.positions:
                return positional(equation)
        return same(equation, Value(Kind.SUM))
    return _moved(equation, value, position)


def _convolution(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    image, kernel = operands
    numbers = equation.params["dimension_numbers"]
    if kernel.kind == Kind.ROWS or equation.params["batch_group_count"] != 1:
        return unknown(equation)
    if image.dim != numbers.lhs_spec[0]:
        return coupled(equation)
    return _moved(equation, image, numbers.out_spec[0])


def _reduce_window(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, params = operands[0], equation.params
    if any(v.kind == Kind.ROWS for v in operands[1:]):
        return unknown(equation)
    if params["window_dimensions"][value.dim] != 1:
        return coupled(equation)
    return _moved(equation, value, value.dim)


def _gather(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Indexing: `table[tokens]`, `x[:, 0]`, `take_along_axis`, `x[jnp.arange(B), labels]`."""
    source, indices = operands
    numbers = equation.params["dimension_numbers"]
    rank = len(shape_of(equation.outvars[0]))
    # Dims of the output that come from the dims of the indices, in order.
    looked_up = [dim for dim in range(rank) if dim not in numbers.offset_dims]

    def at_index(value: Value) -> list[Value]:
        """The examples are along a dim of the indices."""
        if value.dim >= len(looked_up):
            return coupled(equation)
        return _moved(equation, value, looked_up[value.dim])

    if source.kind != Kind.ROWS:
        return at_index(indices)
    if source.dim in numbers.operand_batching_dims:
        position = numbers.operand_batching_dims.index(source.dim)
        dim = numbers.start_indices_batching_dims[position]
        if indices.kind == Kind.ROWS and indices.dim != dim:
            return coupled(equation)
        return at_index(replace(source, dim=dim))
    if source.dim in numbers.start_index_map:
        column = numbers.start_index_map.index(source.dim)
        is_own_index = column in indices.index_columns or (
            indices.index_role == "index" and len(numbers.start_index_map) == 1
        )
        dim = indices.dim if indices.kind == Kind.ROWS else indices.index_dim or 0
        # `x[jnp.arange(4)]` of 8 examples drops some of them.
        count = shape_of(equation.invars[1])[dim]
        if not is_own_index or count != shape_of(equation.invars[0])[source.dim]:
            return coupled(equation)
        return at_index(replace(source, dim=dim))
    if indices.kind == Kind.ROWS:
        return coupled(equation)
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [
        dim for dim in range(len(shape_of(equation.invars[0]))) if dim not in dropped
    ]
    return _moved(equation, source, numbers.offset_dims[kept.index(source.dim)])


def _scatter(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Counting with `zeros.at[labels].add(1)` is a sum over examples; the rest is unknown."""
    name = equation.primitive.name
    source, indices, updates = operands
    numbers = equation.params["dimension_numbers"]
    if source.kind != Kind.ROWS:
        if indices.kind == Kind.FREE and indices.positions:
            return positional(equation)
        if name in ("scatter-add", "scatter_add"):
            return same(equation, Value(Kind.SUM, has_offset=source.constant != 0))
        return unknown(equation)
    # Examples that are neither indexed nor inserted stay where they are.
    is_window = source.dim not in (
        *numbers.inserted_window_dims,
        *numbers.scatter_dims_to_operand_dims,
        *numbers.operand_batching_dims,
    )
    if not is_window or operands[1].kind == Kind.ROWS:
        return unknown(equation)
    if updates.kind == Kind.ROWS:
        kept = [
            dim
            for dim in range(len(shape_of(equation.invars[0])))
            if dim
            not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        ]
        window = numbers.update_window_dims[kept.index(source.dim)]
        if updates.dim != window:
            return coupled(equation)
    return _moved(equation, source, source.dim)


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "concatenate": _concatenate,
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update_slice,
    "stack": _stack,
    "pad": _pad,
    "split": _split,
    "unstack": _unstack,
    "rev": _rev,
    "fft": _fft,
    "optimization_barrier": _same_dim,
}
_SHARED: dict[str, Rule] = {
    "scatter scatter-add scatter_add": _scatter,
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax "
    "argmin reduce": _reduce,
    "cumsum cumprod cummax cummin cumlogsumexp sort approx_top_k top_k": _along_axis,
    "cholesky triangular_solve eigh eig qr svd lu geqrf householder_product": _last_dims(
        2
    ),
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min": _reduce_window,
}
RULES |= {name: rule for names, rule in _SHARED.items() for name in names_in(names)}
