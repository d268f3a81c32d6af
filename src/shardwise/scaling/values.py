"""What is known about the variables of a trace, and what operations that move entries change."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jax.extend import core

from shardwise.tracing.jaxpr import Shape, shape_of

# For each dim of a value, the dims of a parameter that it consists of.
Dims: TypeAlias = tuple[frozenset[int], ...]
Paths: TypeAlias = frozenset[str]
NONE: Paths = frozenset()

# Operations that keep the order of the dims.
POSITIONAL = (
    "convert_element_type",
    "copy",
    "concatenate",
    "dynamic_slice",
    "name",
    "neg",
    "optimization_barrier",
    "pad",
    "reduce_precision",
    "rev",
    "sharding_constraint",
    "slice",
    "split",
    "stop_gradient",
)
# Operations that move entries of an array to other places, and compute nothing.
LAYOUT = (*POSITIONAL, "broadcast_in_dim", "reshape", "squeeze", "stack", "transpose")
JOINS = ("concatenate", "stack")
SUMS = ("add", "add_any", "sub")


@dataclass(frozen=True)
class Value:
    """What is known about a variable of the trace.

    Attributes:
        dims: for each parameter that it consists of, where the dims of the parameter are.
        is_data: whether it depends on the batch or is random, so that it is an activation.
        scales: parameters whose common factor is a factor of this value.
        depends: the parameters that it depends on.
        is_stream: whether it is a residual stream, a sum `x + f(x)`.
        is_zero: whether it is a constant array of zeros.
    """

    dims: Mapping[str, Dims] = field(default_factory=dict)
    is_data: bool = False
    scales: Paths = NONE
    depends: Paths = NONE
    is_stream: bool = False
    is_zero: bool = False

    @property
    def is_computed(self) -> bool:
        """Whether it was computed from parameters by matmuls, such as features of positions."""
        places = [dim for dims in self.dims.values() for dim in dims]
        return bool(self.dims) and not any(places)

    def other_dims(self, dims: Collection[int]) -> list[int]:
        """Return the numbers of all dims except some."""
        rank = len(next(iter(self.dims.values())))
        return [number for number in range(rank) if number not in dims]


def merge_values(first: Value, second: Value) -> Value:
    """Return what is known about a variable that has one of two values."""
    is_data = first.is_data or second.is_data
    return Value(
        dims={} if is_data else {**second.dims, **first.dims},
        is_data=is_data,
        scales=common_scales(first, second),
        depends=first.depends | second.depends,
        is_stream=first.is_stream or second.is_stream,
        is_zero=first.is_zero and second.is_zero,
    )


def add_first_dim(dims: Mapping[str, Dims]) -> dict[str, Dims]:
    """Return where dims are in an array of several such values, the results of a scan."""
    return {path: (frozenset[int](), *found) for path, found in dims.items()}


def move_value(
    equation: core.JaxprEqn, operands: Sequence[Value], result: core.Var
) -> Value:
    """Return the value of a result of an operation in `LAYOUT`."""
    depends = frozenset(path for value in operands for path in value.depends)
    is_data = operands[0].is_data
    # The operands after the first are indices or padding, unless arrays are joined.
    is_joined = equation.primitive.name in JOINS
    scales = NONE if is_joined else operands[0].scales
    dims: dict[str, Dims] = {}
    for atom, value in zip(equation.invars, operands, strict=True):
        for path, found in value.dims.items():
            dims[path] = _moved_dims(equation, shape_of(atom), found, shape_of(result))
    return Value(
        dims=dims,
        is_data=is_data,
        scales=scales,
        depends=depends,
        is_stream=operands[0].is_stream,
        is_zero=not is_joined and operands[0].is_zero,
    )


def _moved_dims(
    equation: core.JaxprEqn, before: Shape, dims: Dims, after: Shape
) -> Dims:
    params = equation.params
    match equation.primitive.name:
        case "transpose":
            return tuple(dims[i] for i in params["permutation"])
        case "stack":
            axis = params["axis"]
            return (*dims[:axis], frozenset(), *dims[axis:])
        case "squeeze":
            removed = {dim % len(dims) for dim in params["dimensions"]}
            return tuple(found for i, found in enumerate(dims) if i not in removed)
        case "broadcast_in_dim":
            places = params["broadcast_dimensions"]
            sources = dict(zip(places, dims, strict=True))
            return tuple(sources.get(i, frozenset()) for i in range(len(after)))
        case "reshape":
            return _reshaped(before, dims, after)
    return dims


def _reshaped(before: Shape, dims: Dims, after: Shape) -> Dims:
    """Return where dims are after a reshape: dims of equal size in total belong together."""
    result: list[frozenset[int]] = []
    sources = list(zip(before, dims, strict=True))
    targets = list(after)
    while targets:
        size_before, size_after, count = 1, 1, 0
        found: frozenset[int] = frozenset()
        while not count or size_before != size_after:
            if targets[count:] and (size_after <= size_before or not sources):
                size_after *= targets[count]
                count += 1
            else:
                size, source = sources.pop(0)
                size_before *= size
                if size > 1:
                    found |= source
        result += [found if size > 1 else frozenset[int]() for size in targets[:count]]
        targets = targets[count:]
    return tuple(result)


def gather_dims(equation: core.JaxprEqn, dims: Dims) -> Dims:
    """Return where dims are after a gather with constant indices, such as `kernel[:, 1]`."""
    numbers = equation.params["dimension_numbers"]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [found for dim, found in enumerate(dims) if dim not in removed]
    rank = len(shape_of(equation.outvars[0]))
    places = dict(zip(numbers.offset_dims, kept, strict=True))
    return tuple(places.get(i, frozenset()) for i in range(rank))


def scales_of(name: str, operands: Sequence[Value]) -> Paths:
    """Return the parameters whose common factor is a factor of a result.

    Args:
        name: the primitive.
        operands: its operands.
    """
    if name == "reduce_sum":
        return operands[0].scales
    if name == "select_n" and len(operands) == 3:
        return common_scales(*operands[1:])
    if len(operands) != 2:
        return NONE
    left, right = operands
    if name in SUMS:
        return joint_scales(operands)
    if name == "mul":
        # The gain of a norm is the parameter itself, not what scales its input.
        for own in (left, right):
            if not own.is_data and own.scales:
                return own.scales
        for own, other in ((left, right), (right, left)):
            if own.scales and not own.scales & other.depends:
                return own.scales
    if name == "div" and left.scales and not left.scales & right.depends:
        return left.scales
    return NONE


def joint_scales(values: Iterable[Value]) -> Paths:
    """Return the parameters that scale a sum, or an array of several parts, if all of them do."""
    found = [value.scales for value in values if not value.is_zero]
    return frozenset[str]().union(*found) if all(found) else NONE


def common_scales(first: Value, second: Value) -> Paths:
    """Return the parameters whose common factor is a factor of two values; that of 0 is any."""
    if first.is_zero or second.is_zero:
        return first.scales | second.scales
    return first.scales if first.scales == second.scales else NONE
