"""How each JAX primitive changes the dependence of values on examples, see `loss.dependence`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from jax.extend import core

from shardwise.loss.value import Kind, Shape, Value, cause_of, shape_of

# From the values of the operands to those of the outputs.
Rule: TypeAlias = Callable[[core.JaxprEqn, list[Value]], list[Value]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Linear in all operands together.
LINEAR = _names(
    """
    add sub neg add_any convert_element_type reduce_sum reshape broadcast_in_dim transpose
    squeeze slice copy copy_p real imag reduce_precision sharding_constraint name
    optimization_barrier stop_gradient concatenate select_n psum split expand_dims cumsum
    pad rev dynamic_slice gather
    """
)
# Linear in one operand, if the others are FREE.
BILINEAR = _names("mul dot_general conv_general_dilated")


def same(equation: core.JaxprEqn, value: Value) -> list[Value]:
    return [value] * len(equation.outvars)


def coupled(equation: core.JaxprEqn) -> list[Value]:
    return same(equation, Value(Kind.COUPLED, cause=cause_of(equation)))


def unknown(equation: core.JaxprEqn) -> list[Value]:
    return same(equation, Value(Kind.UNKNOWN, cause=cause_of(equation)))


def _moved(equation: core.JaxprEqn, value: Value, dim: int) -> list[Value]:
    """Return `value` with its examples along `dim` for all outputs."""
    return same(equation, replace(value, dim=dim, index_columns=frozenset()))


# FREE values


def constant_value(constant: object) -> Value:
    """Return the value of a literal or of an array that the function closes over."""
    value = Value(Kind.FREE, is_fixed=True)
    try:
        array = np.asarray(constant)
    except (TypeError, ValueError):
        return value
    if array.size == 1 and array.dtype.kind in "biuf":
        return replace(value, constant=float(array.reshape(())))
    if array.ndim == 1 and array.dtype.kind in "iu":
        is_index = bool((array == np.arange(array.size)).all())
        return replace(value, index_dim=0 if is_index else None)
    return value


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
_KEEPS_CONSTANT = _names(
    """
    convert_element_type broadcast_in_dim reshape squeeze copy stop_gradient transpose
    slice reduce_max reduce_min expand_dims sharding_constraint
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


def index_dim(equation: core.JaxprEqn, operands: list[Value]) -> int | None:
    """Return the dim along which the output is its own index, see `Value.index_dim`."""
    name, params = equation.primitive.name, equation.params
    if name == "iota":
        dim: int = params["dimension"]
        return dim
    dims = [value.index_dim for value in operands if value.index_dim is not None]
    if not dims:
        return None
    # `select_n(i < 0, i, i + n)` turns negative indices into positive ones: `add` is its part.
    if name in ("convert_element_type", "select_n", "copy", "sharding_constraint"):
        return dims[0]
    if name == "add" and any(value.constant is not None for value in operands):
        return dims[0]
    if name == "broadcast_in_dim":
        moved: int = params["broadcast_dimensions"][dims[0]]
        return moved
    if name in ("reshape", "squeeze"):
        return _reshaped_dim(shape_of(equation.invars[0]), equation, dims[0])
    return None


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
        if value.index_dim is not None and width == 1:
            columns.add(start)
        start += width
    return frozenset(columns)


# SUM values


def sum_rule(equation: core.JaxprEqn, operands: list[Value]) -> Value:
    """Return the value of an operation on SUMs and FREE values."""
    name = equation.primitive.name
    sums = [value for value in operands if value.kind == Kind.SUM]
    free = [value for value in operands if value.kind == Kind.FREE]
    statistic = Value(Kind.STATISTIC, cause=cause_of(equation))
    if name in LINEAR:
        factors = tuple(dict.fromkeys(f for value in sums for f in value.factors))
        # The index or predicate of these is not added.
        adds = name in ("add", "sub", "add_any", "concatenate")
        has_offset = any(value.has_offset for value in sums)
        has_offset |= adds and any(value.constant != 0 for value in free)
        return Value(Kind.SUM, factors=factors, has_offset=has_offset)
    is_scaled = name in BILINEAR or (name == "div" and operands[1].kind == Kind.FREE)
    if len(sums) == 1 and is_scaled:
        scale = next((v.constant for v in free if v.constant is not None), 1.0)
        scale = 1 / scale if name == "div" and scale else scale
        factors = tuple(factor * scale for factor in sums[0].factors)
        return replace(sums[0], factors=factors)
    return statistic


# ROWS values


def elementwise(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Operands of one shape, or with dims of size 1 that are broadcast."""
    out_shapes = {shape_of(variable) for variable in equation.outvars}
    if len(out_shapes) != 1:
        return unknown(equation)
    shape = out_shapes.pop()
    found: Value | None = None
    for variable, value in zip(equation.invars, operands, strict=True):
        own = shape_of(variable)
        if own and (
            len(own) != len(shape)
            or any(size not in (1, full) for size, full in zip(own, shape, strict=True))
        ):
            return unknown(equation)
        if value.kind != Kind.ROWS:
            continue
        if found is not None and (value.dim, value.entries) != (
            found.dim,
            found.entries,
        ):
            return coupled(equation)
        found = value
    assert found is not None
    return _moved(equation, found, found.dim)


def kernel(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    rows = {
        (value.dim, value.entries, shape_of(variable)[value.dim])
        for variable, value in zip(equation.invars, operands, strict=True)
        if value.kind == Kind.ROWS
    }
    if len(rows) != 1:
        return unknown(equation)
    dim, entries, size = rows.pop()
    results = []
    for variable in equation.outvars:
        shape = shape_of(variable)
        if len(shape) <= dim or shape[dim] != size:
            return unknown(equation)
        results.append(Value(Kind.ROWS, dim=dim, entries=entries))
    return results


def _same_dim(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Each output is like the input at its position."""
    return [replace(value, index_columns=frozenset()) for value in operands]


def _broadcast_in_dim(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, shape = operands[0], shape_of(equation.invars[0])
    dim = equation.params["broadcast_dimensions"][value.dim]
    if shape[value.dim] != equation.params["shape"][dim]:
        return unknown(equation)
    return _moved(equation, value, dim)


def _reshaped_dim(shape: Shape, equation: core.JaxprEqn, dim: int) -> int | None:
    """Return where a dim is after a reshape that keeps it as a whole."""
    before = math.prod(shape[:dim])
    product = 1
    for new_dim, size in enumerate(shape_of(equation.outvars[0])):
        if product == before and size == shape[dim]:
            return new_dim
        product *= size
    return None


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
        return same(equation, Value(Kind.SUM, factors=(1.0,)))
    return coupled(equation)


def _along_axis(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Operations that mix the entries of one dim, such as `cumsum` and `sort`."""
    params = equation.params
    axis = next(
        params[key]
        for key in ("axis", "dimension", "reduction_dimension")
        if key in params
    )
    value = next(value for value in operands if value.kind == Kind.ROWS)
    others = [v for v in operands if v.kind == Kind.ROWS and v.dim != value.dim]
    axis %= len(shape_of(equation.invars[0]))
    if others or value.dim == axis:
        return coupled(equation)
    return _moved(equation, value, value.dim)


def _last_dims(count: int) -> Rule:
    """Operations on the last `count` dims, such as `top_k` and `cholesky`."""

    def rule(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        for variable, value in zip(equation.invars, operands, strict=True):
            if value.kind == Kind.ROWS and value.dim >= len(shape_of(variable)) - count:
                return coupled(equation)
        dims = {(v.dim, v.entries) for v in operands if v.kind == Kind.ROWS}
        if len(dims) > 1:
            return coupled(equation)
        dim, entries = dims.pop()
        return same(equation, Value(Kind.ROWS, dim=dim, entries=entries))

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


def _concatenate(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    dims = {(v.dim, v.entries) for v in operands if v.kind == Kind.ROWS}
    if len(dims) > 1:
        return coupled(equation)
    dim, entries = dims.pop()
    if equation.params["dimension"] == dim:
        return unknown(equation)
    columns = index_columns(equation, operands)
    return same(
        equation, Value(Kind.ROWS, dim=dim, entries=entries, index_columns=columns)
    )


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
        return same(equation, Value(Kind.SUM, factors=(1.0,)))
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
            indices.index_dim is not None and len(numbers.start_index_map) == 1
        )
        if not is_own_index:
            return coupled(equation)
        dim = indices.dim if indices.kind == Kind.ROWS else indices.index_dim or 0
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
    source, _, updates = operands
    numbers = equation.params["dimension_numbers"]
    if source.kind != Kind.ROWS:
        if name in ("scatter-add", "scatter_add"):
            has_offset = source.constant != 0
            return same(
                equation, Value(Kind.SUM, factors=(1.0,), has_offset=has_offset)
            )
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
    "pad": _pad,
    "split": _split,
    "rev": _rev,
    "fft": _fft,
    "top_k": _last_dims(1),
    "optimization_barrier": _same_dim,
}
_SHARED: dict[str, Rule] = {
    "scatter scatter-add scatter_add": _scatter,
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax "
    "argmin reduce": _reduce,
    "cumsum cumprod cummax cummin cumlogsumexp sort approx_top_k": _along_axis,
    "cholesky triangular_solve eigh eig qr svd lu geqrf householder_product": _last_dims(
        2
    ),
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min": _reduce_window,
}
RULES |= {name: rule for names, rule in _SHARED.items() for name in _names(names)}
