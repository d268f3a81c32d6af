"""How each JAX primitive changes the dependence of values on examples, see `loss.dependence`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
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
# Applied to each entry alone; operands may have dims of size 1 that are broadcast.
ELEMENTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp conj convert_element_type copy copy_p cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
    or polygamma population_count pow random_clone random_fold_in random_unwrap
    random_wrap real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta clz name reshard
    mesh_cast pvary
    """
)
# Operations that add their operands.
_ADDS = _names("add sub add_any concatenate select_n pad")
# Operations that move entries or add them up, so that a factor can be applied after them.
_KEEPS_FACTORS = LINEAR - _ADDS - {"select_n"}


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


def _moved(equation: core.JaxprEqn, value: Value, dim: int) -> list[Value]:
    """Return `value` with its examples along `dim` for all outputs."""
    return same(equation, replace(value, dim=dim, index_columns=frozenset()))


def with_digests(
    equation: core.JaxprEqn, operands: list[Value], results: list[Value]
) -> list[Value]:
    """Return the results of a rule with their factors and digests, see `Value`."""
    if results[0].kind >= Kind.STATISTIC:
        return results
    name = equation.primitive.name
    factors: tuple[float, ...] = (1.0,)
    dependent = [value for value in operands if value.kind != Kind.FREE]
    digests = [value.full_digest for value in operands]
    if name in ("mul", "div", "dot_general") and len(dependent) == 1:
        scale = _scale(name, operands)
        digests = [v.digest for v in operands if v.kind != Kind.FREE]
        if scale is None:
            factors = dependent[0].factors
            digests += [v.full_digest for v in operands if v.kind == Kind.FREE]
        else:
            factors = tuple(factor * scale for factor in dependent[0].factors)
            # A constant leaves no other trace, so that 2 * x and x * 2 are the same.
            name = "scaled"
    elif name in _ADDS and dependent:
        # The predicate of `select_n` is not added.
        cases = operands[1:] if name == "select_n" else operands
        added = [value for value in cases if value.kind != Kind.FREE]
        factors = tuple(dict.fromkeys(f for v in added for f in v.factors)) or (1.0,)
        digests[-len(cases) :] = [value.digest for value in cases]
    elif name in _KEEPS_FACTORS and len(dependent) == 1:
        factors = dependent[0].factors
        digests = [value.digest for value in operands]
    extra = equation.params.get("y") if name == "integer_pow" else None
    digest = hash((name, extra, *digests))
    return [
        replace(result, factors=factors, digest=digest)
        if result.kind != Kind.FREE
        else replace(result, digest=_free_digest(result, digest))
        for result in results
    ]


def _free_digest(value: Value, digest: int) -> int:
    # An index depends on the size of the batch only by its length.
    if value.index_role:
        return hash(("index", value.index_role))
    return digest if value.constant is None else hash(("constant", value.constant))


def _scale(name: str, operands: list[Value]) -> float | None:
    """Return the constant by which the only dependent operand is multiplied, if it is known."""
    free = [value for value in operands if value.kind == Kind.FREE]
    if len(free) != 1 or not free[0].constant:
        return None
    if name == "div":
        return 1 / free[0].constant if operands[1] is free[0] else None
    if name == "dot_general":
        return None
    return free[0].constant


# FREE values


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
    if array.size and is_number and (array == array.flat[0]).all():
        number = float(array.flat[0])
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
        moved = [_reshaped_dim(before, equation, dim) for dim in found]
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
    if name in ("convert_element_type", "copy", "sharding_constraint"):
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
        moved = _reshaped_dim(shape_of(equation.invars[0]), equation, dim)
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


# SUM values


def sum_rule(equation: core.JaxprEqn, operands: list[Value]) -> Value:
    """Return the value of an operation on SUMs and FREE values."""
    name = equation.primitive.name
    sums = [value for value in operands if value.kind == Kind.SUM]
    free = [value for value in operands if value.kind == Kind.FREE]
    is_rounded = (
        name == "convert_element_type"
        and np.dtype(equation.params["new_dtype"]).kind in "biu"
    )
    if name in LINEAR and not is_rounded:
        has_offset = any(value.has_offset for value in sums)
        # The predicate of `select_n` is not added.
        added = free[1:] if name == "select_n" else free
        if name in _ADDS:
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
    # Entries of one example may differ by their position in it.
    is_positional = found.entries == 1 and any(
        value.kind == Kind.FREE and found.dim in value.positions for value in operands
    )
    if is_positional:
        return positional(equation)
    return _moved(equation, found, found.dim)


def kernel(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Return the values of a kernel, which is taken to treat all examples alike."""
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
        return same(equation, Value(Kind.SUM))
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


def _update_slice(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    value, update = operands[:2]
    if any(other.kind == Kind.ROWS for other in operands[2:]):
        return unknown(equation)
    if value.kind != Kind.ROWS:
        return unknown(equation)
    shape, own = shape_of(equation.invars[0]), shape_of(equation.invars[1])
    is_same = update.kind == Kind.FREE or (update.dim, update.entries) == (
        value.dim,
        value.entries,
    )
    if shape[value.dim] != own[value.dim] or not is_same:
        return coupled(equation)
    if update.kind == Kind.FREE and value.dim in update.positions:
        return positional(equation)
    return _moved(equation, value, value.dim)


def _stack(equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
    dims = {(v.dim, v.entries) for v in operands if v.kind == Kind.ROWS}
    if len(dims) > 1:
        return coupled(equation)
    dim, entries = dims.pop()
    if any(dim in v.positions for v in operands if v.kind == Kind.FREE):
        return positional(equation)
    dim += equation.params["axis"] <= dim
    return same(equation, Value(Kind.ROWS, dim=dim, entries=entries))


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
    positional_free = [
        v for v in operands if v.kind == Kind.FREE and dim in v.positions
    ]
    if positional_free and not all(v.index_role == "index" for v in positional_free):
        return positional(equation)
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
