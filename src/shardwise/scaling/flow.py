"""Follow parameters through a traced loss to the operations that use them.

A parameter passes through operations that only cast, reshape, slice or rescale it. Its use is the
operation in which it meets activations: a matmul or a convolution that contracts some of its dims,
a lookup of some of its entries, or an elementwise operation.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast

from jax.extend import core

from shardwise.tracing.jaxpr import (
    CALLS,
    Shape,
    frames_of,
    inner_function,
    scan_parts,
    shape_of,
)

# For each dim of a value, the dims of a parameter that it consists of.
Dims: TypeAlias = tuple[frozenset[int], ...]
Kind: TypeAlias = Literal[
    "matmul", "selected", "lookup", "rows", "elementwise", "unknown"
]
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
# Files of these packages are not the place where a user's model does something.
HIDDEN = ("/jax/", "/flax/", "/optax/", "/shardwise/kernels/", "/shardwise/scaling/")


@dataclass(frozen=True)
class Use:
    """An operation in which a parameter meets activations.

    Attributes:
        path: the parameter.
        kind: what the operation does with it. "selected" is a matmul of a part of the parameter
            that the data select, such as the kernel of an expert. "rows" is a matmul in which the
            parameter takes the place of activations, such as learned queries.
        operation: the name of the primitive.
        contracted: the dims of the parameter that a matmul or a convolution sums over.
        place: file and line of the operation.
        scales: the parameters that scale the activations: the result is multiplied by a factor if
            all of them are. Empty if there are none.
        has_rows: whether activations take part, or what takes their place. Otherwise it is the
            matmul with a single vector, such as those that find the largest singular value.
    """

    path: str
    kind: Kind
    operation: str
    contracted: frozenset[int] = frozenset()
    place: str = ""
    scales: Paths = NONE
    has_rows: bool = True


@dataclass(frozen=True)
class Contraction:
    """A matmul of two activations, such as queries and keys.

    Attributes:
        size: the number of entries that it sums over.
        place: file and line of the operation.
    """

    size: int
    place: str


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


@dataclass
class Flow:
    """What a trace does with the parameters.

    Attributes:
        growing: the dims of each parameter that grow with the width, where this is known.
        uses: the uses of all parameters, in the order of the trace.
        layers: for each parameter, the dims that a scan iterates over.
        contractions: the matmuls of two activations.
        branches: the parameters that scale a residual branch, for each sum of a stream `x` and a
            branch that is computed from `x`, and for each bias that is added to a stream.
        unscaled: file and line of sums with a branch that has parameters, none of which scales it.
    """

    growing: Mapping[str, Collection[int]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    layers: dict[str, set[int]] = field(default_factory=dict)
    contractions: list[Contraction] = field(default_factory=list)
    branches: list[Paths] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)

    def of(self, path: str) -> list[Use]:
        """Return the uses of one parameter."""
        return [use for use in self.uses if use.path == path]

    def grows(self, value: Value, numbers: Iterable[int]) -> bool:
        """Return whether one of some dims of a value grows with the width."""
        numbers = tuple(numbers)
        return any(
            dims[number] & set(self.growing.get(path, ()))
            for path, dims in value.dims.items()
            for number in numbers
        )


def follow(
    closed: core.ClosedJaxpr,
    params: Mapping[int, str],
    batch: Iterable[int],
    growing: Mapping[str, Collection[int]],
) -> Flow:
    """Follow the parameters of a traced loss.

    Args:
        closed: the traced loss.
        params: the paths of the parameters, by the number of the input.
        batch: the numbers of the inputs that are the batch or random keys.
        growing: the dims of each parameter that grow with the width.

    Returns:
        What the loss does with each parameter.
    """
    flow = Flow(growing)
    inputs = input_values(closed.jaxpr, params, batch)
    Walk(flow).run(closed.jaxpr, inputs)
    return flow


def input_values(
    jaxpr: core.Jaxpr, params: Mapping[int, str], batch: Iterable[int]
) -> list[Value]:
    """Return what is known about the inputs of a traced loss, see `follow`."""
    data = set(batch)
    inputs = []
    for number, variable in enumerate(jaxpr.invars):
        path = params.get(number)
        value = Value(is_data=number in data)
        if path is not None:
            rank = len(shape_of(variable))
            dims = tuple(frozenset([dim]) for dim in range(rank))
            own = frozenset([path])
            value = Value({path: dims}, scales=own, depends=own)
        inputs.append(value)
    return inputs


class Walk:
    """Computes the `Value` of each variable, and adds what it finds to a `Flow`."""

    def __init__(self, flow: Flow):
        """Start a walk.

        Args:
            flow: what is found is added to it.
        """
        self.flow = flow

    def run(self, jaxpr: core.Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Return the values of the outputs of a jaxpr."""
        values: dict[core.Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        ancestors = _Ancestors(jaxpr)

        def read(atom: core.Var | core.Literal) -> Value:
            if isinstance(atom, core.Literal):
                return Value(is_zero=not shape_of(atom) and not atom.val)
            return values.get(atom, Value())

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            results = self.equation(equation, operands)
            if self._is_stream(equation, operands, ancestors, read):
                results = [replace(results[0], is_stream=True)]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(
        self, equation: core.JaxprEqn, operands: list[Value]
    ) -> Sequence[Value]:
        """Return the values of the results of an equation."""
        name = equation.primitive.name
        special = self._special.get(name)
        if special is not None:
            return special(self, equation, operands)
        inner = inner_function(equation)
        if inner is not None and name in CALLS:
            return self.run(inner.jaxpr, operands)
        if name in LAYOUT:
            return self._layout(equation, operands)
        return self._other(equation, operands)

    def _layout(
        self, equation: core.JaxprEqn, operands: list[Value]
    ) -> Sequence[Value]:
        name = equation.primitive.name
        if name == "optimization_barrier":
            return operands
        is_data = any(value.is_data for value in operands)
        if name in JOINS and is_data:
            for value in operands:
                if not value.is_data:
                    self._add_uses(equation, value, "elementwise")
            return [replace(self._result(operands), scales=_joint_scales(operands))]
        moved = [_moved(equation, operands, var) for var in equation.outvars]
        if is_data and not operands[0].is_data:
            # A part of a parameter, whose place depends on the data.
            self._add_uses(equation, operands[0], "lookup")
            return [replace(value, is_data=True) for value in moved]
        return moved

    # Loops and branches

    def _scan(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        _, num_carried = scan_parts(equation)
        body = cast(core.ClosedJaxpr, inner_function(equation)).jaxpr
        outputs = self.run(body, self.scan_inputs(equation, operands))
        stacked_outputs = [
            replace(value, dims=_prefixed(value.dims))
            for value in outputs[num_carried:]
        ]
        return [*outputs[:num_carried], *stacked_outputs]

    def scan_inputs(
        self, equation: core.JaxprEqn, operands: Sequence[Value]
    ) -> list[Value]:
        """Return what is known about the inputs of the body of a scan, in every iteration."""
        num_constants, num_carried = scan_parts(equation)
        first = num_constants + num_carried
        constants, carried = operands[:num_constants], operands[num_constants:first]
        stacked = [self._without_layers(value) for value in operands[first:]]
        body = cast(core.ClosedJaxpr, inner_function(equation)).jaxpr
        # What is carried into the first iteration may not depend on the data yet.
        trial = Walk(Flow(self.flow.growing)).run(
            body, [*constants, *carried, *stacked]
        )
        # It depends on the parameters of other layers, which are other parameters.
        layers = frozenset(path for value in stacked for path in value.dims)
        carried = [
            _merged(before, replace(after, depends=after.depends - layers))
            for before, after in zip(carried, trial[:num_carried], strict=True)
        ]
        return [*constants, *carried, *stacked]

    def _without_layers(self, value: Value) -> Value:
        """Return the value of one iteration of a scan over a stacked value."""
        for path, dims in value.dims.items():
            self.flow.layers.setdefault(path, set()).update(dims[0])
        inner = {path: dims[1:] for path, dims in value.dims.items()}
        return replace(value, dims=inner)

    def _while(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        num_condition = cast(int, equation.params["cond_nconsts"])
        num_constants = cast(int, equation.params["body_nconsts"])
        body = cast(core.ClosedJaxpr, equation.params["body_jaxpr"]).jaxpr
        first = num_condition + num_constants
        constants, carried = operands[num_condition:first], operands[first:]
        trial = Walk(Flow(self.flow.growing)).run(body, [*constants, *carried])
        carried = [
            _merged(before, after) for before, after in zip(carried, trial, strict=True)
        ]
        return self.run(body, [*constants, *carried])

    def _cond(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        branches = cast(Sequence[core.ClosedJaxpr], equation.params["branches"])
        results = [self.run(branch.jaxpr, operands[1:]) for branch in branches]
        merged = results[0]
        for other in results[1:]:
            merged = [_merged(*pair) for pair in zip(merged, other, strict=True)]
        return merged

    # Operations in which parameters meet activations

    def _matmul(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        dims = _contracted_dims(equation)
        left, right = operands[:2]
        if left.dims and right.dims and not (left.is_data or right.is_data):
            return [self._matmul_of_parameters(equation, operands)]
        result, scales = self._result(operands), NONE
        for side in (0, 1):
            own, other = operands[side], operands[1 - side]
            is_activation = other.is_data and not other.dims
            if not own.is_data:
                has_rows = other.is_data or _num_free(equation, 1 - side) > 1
                self._add_uses(
                    equation, own, "matmul", dims[side], other.scales, has_rows=has_rows
                )
                scales |= own.scales
            elif own.dims and is_activation:
                self._add_uses(equation, own, "selected", dims[side], other.scales)
                scales |= own.scales
            if own.dims and not (other.dims or result.is_data):
                # Constants whose size does not depend on the width are features.
                has_rows = _num_free(equation, 1 - side) > 1
                is_data = has_rows and not self.flow.grows(own, dims[side])
                result = replace(result, is_data=is_data)
        if left.is_data and right.is_data and not (left.dims or right.dims):
            size = _size(shape_of(equation.invars[0]), dims[0])
            contraction = Contraction(size, place_of(equation))
            self.flow.contractions.append(contraction)
            scales = _scales("mul", [left, right])
        return [_composed(equation, operands, replace(result, scales=scales))]

    def _matmul_of_parameters(
        self, equation: core.JaxprEqn, operands: list[Value]
    ) -> Value:
        """Return the matmul of two values that depend on parameters, and not on the data.

        One of them may take the place of an activation: a bias that passes through a kernel,
        features that do not depend on the data, such as those of positions, or learned queries. If
        neither does, the result is a kernel that consists of two parameters.
        """
        dims = _contracted_dims(equation)
        result = self._result(operands)
        for side in (0, 1):
            own, other = operands[side], operands[1 - side]
            is_bias = _num_free(equation, side) == 1
            is_feature = own.is_computed and not other.is_computed
            are_queries = (
                self.flow.grows(own, dims[side])
                and not self.flow.grows(own, own.other_dims(dims[side]))
                and self.flow.grows(other, other.other_dims(dims[1 - side]))
            )
            if not (is_bias or is_feature or are_queries):
                continue
            if are_queries:
                self._add_uses(equation, own, "rows")
            self._add_uses(
                equation,
                other,
                "matmul",
                dims[1 - side],
                own.scales,
                has_rows=not is_bias,
            )
            result = replace(result, scales=other.scales, is_data=not is_bias)
            return _composed(equation, operands, result)
        for value in operands:
            self._add_uses(equation, value, "unknown")
        return _composed(equation, operands, result)

    def _gather(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        table, indices = operands[:2]
        items = table.dims.items()
        dims = {path: _gathered(equation, found) for path, found in items}
        result = replace(self._result(operands), dims=dims, scales=table.scales)
        if table.is_data or not indices.is_data:
            return [result]
        self._add_uses(equation, table, "lookup")
        return [result]

    def _update(
        self, equation: core.JaxprEqn, operands: list[Value]
    ) -> Sequence[Value]:
        """Return the value of an array with some entries replaced, or with others added to them."""
        old = operands[0]
        new = operands[1 if equation.primitive.name == "dynamic_update_slice" else 2]
        if not new.is_data:
            return self._other(equation, operands)
        if not old.is_data:
            self._add_uses(equation, old, "elementwise")
        return [replace(self._result(operands), scales=_common_scales(old, new))]

    def _other(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        name = equation.primitive.name
        shapes = [shape_of(atom) for atom in equation.invars]
        out = shape_of(equation.outvars[0]) if equation.outvars else ()
        is_elementwise = all(_is_broadcast(shape, out) for shape in shapes)
        result = self._result(operands)
        if not result.is_data:
            dims: dict[str, Dims] = {}
            if is_elementwise:
                for value, shape in zip(operands, shapes, strict=True):
                    if len(shape) == len(out):
                        dims |= value.dims
            scales = _scales(name, operands)
            result = replace(result, dims=dims, scales=scales)
            return [result] * len(equation.outvars)
        kind: Kind = "elementwise" if is_elementwise else "unknown"
        for value in operands:
            if not value.is_data:
                self._add_uses(equation, value, kind)
        return [replace(result, scales=_scales(name, operands))] * len(equation.outvars)

    def _result(self, operands: Iterable[Value]) -> Value:
        """Return what is known about any function of some values."""
        values = list(operands)
        depends = frozenset(path for value in values for path in value.depends)
        is_data = any(value.is_data for value in values)
        return Value(is_data=is_data, depends=depends)

    def _add_uses(
        self,
        equation: core.JaxprEqn,
        value: Value,
        kind: Kind,
        contracted: Iterable[int] = (),
        scales: Paths = NONE,
        *,
        has_rows: bool = True,
    ) -> None:
        contracted = tuple(contracted)
        for path, dims in value.dims.items():
            summed = frozenset(dim for number in contracted for dim in dims[number])
            # Part of a kernel that was composed of two parameters.
            is_unknown = kind == "matmul" and not any(dims)
            use = Use(
                path=path,
                kind="unknown" if is_unknown else kind,
                operation=equation.primitive.name,
                contracted=summed,
                place=place_of(equation),
                scales=scales,
                has_rows=has_rows,
            )
            self.flow.uses.append(use)

    def _is_stream(
        self,
        equation: core.JaxprEqn,
        operands: list[Value],
        ancestors: "_Ancestors",
        read: Callable[[core.Var | core.Literal], Value],
    ) -> bool:
        """Return whether an equation is `x + f(x)`, and note the parameters of `f(x)`.

        The bias of `f` may be added to a stream separately, and so may a second branch: in
        `x + f(x) + g(x)`.

        Args:
            equation: the equation.
            operands: the values of its operands.
            ancestors: which variables are computed from which others.
            read: returns the value of a variable.
        """
        if equation.primitive.name not in ("add", "add_any"):
            return False
        found = False
        for side in (0, 1):
            branch, stream = operands[side], operands[1 - side]
            if not stream.is_data:
                continue
            atom, stream_atom = equation.invars[side], equation.invars[1 - side]
            if not branch.is_data:
                is_branch = stream.is_stream and bool(branch.scales)
                before = ancestors.before(stream_atom)
            else:
                before = ancestors.source(atom, stream_atom)
                is_branch = before is not None and bool(branch.scales)
            if is_branch:
                ancestors.add_stream(equation, before)
                self.flow.branches.append(branch.scales)
                found = True
            elif before is not None and branch.is_data:
                others = ancestors.other_inputs(atom, before)
                if any(read(var).dims for var in others):
                    self.flow.unscaled.append(place_of(equation))
        return found

    _special: Mapping[
        str, Callable[["Walk", core.JaxprEqn, list[Value]], Sequence[Value]]
    ] = {
        "scan": _scan,
        "while": _while,
        "cond": _cond,
        "dot_general": _matmul,
        "conv_general_dilated": _matmul,
        "ragged_dot_general": _matmul,
        "gather": _gather,
        "dynamic_update_slice": _update,
        "scatter": _update,
        "scatter-add": _update,
    }


class _Ancestors:
    """Which variables of a jaxpr are computed from which others."""

    def __init__(self, jaxpr: core.Jaxpr):
        self._defined = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._places = {
            var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars
        }
        # For each stream `x + f(x)`, the variable `x`.
        self._before: dict[core.Var, core.Var] = {}

    def add_stream(self, equation: core.JaxprEqn, before: core.Var | None) -> None:
        """Note that a sum is `x + f(x)`, and what `x` is."""
        if before is not None:
            self._before[equation.outvars[0]] = before

    def before(self, stream: core.Var | core.Literal) -> core.Var | None:
        """Return what a stream was before its last branches were added; None if it had none."""
        return self._before.get(self._original(stream))

    def source(
        self, branch: core.Var | core.Literal, stream: core.Var | core.Literal
    ) -> core.Var | None:
        """Return the `x` from which a branch is computed that is added to a stream.

        That is the stream, or what it was before it got the branch next to this one, as in
        `x + f(x) + g(x)`. None if the branch uses neither.
        """
        atom = cast(core.Var, branch)
        for x in (self._original(stream), self.before(stream)):
            if x is not None and self._uses(atom, x)[atom]:
                return x
        return None

    def other_inputs(
        self, branch: core.Var | core.Literal, x: core.Var
    ) -> list[core.Var]:
        """Return what a branch is computed from, apart from `x` and what is computed from it."""
        uses = self._uses(cast(core.Var, branch), x)
        between = [self._defined[var] for var in uses if uses[var] and var is not x]
        return [var for eqn in between for var in _variables(eqn) if not uses[var]]

    def _original(self, atom: core.Var | core.Literal) -> core.Var:
        """Return the variable that was only moved or cast, for example to another dtype."""
        while atom in self._defined:
            equation = self._defined[atom]
            if equation.primitive.name not in LAYOUT or len(equation.invars) != 1:
                break
            atom = equation.invars[0]
        return cast(core.Var, atom)

    def _uses(self, atom: core.Var, x: core.Var) -> dict[core.Var, bool]:
        """Return whether a variable, and all that it is computed from, use `x`."""
        first = self._places.get(x, -1)
        uses = {x: True}
        pending = [atom]
        while pending:
            var = pending[-1]
            # What was computed before `x` does not use it.
            is_later = self._places.get(var, -1) > first
            variables = _variables(self._defined[var]) if is_later else []
            unknown = [each for each in variables if each not in uses]
            if var not in uses and unknown:
                pending += unknown
                continue
            pending.pop()
            uses.setdefault(var, any(uses[each] for each in variables))
        return uses


def _variables(equation: core.JaxprEqn) -> list[core.Var]:
    """Return the inputs of an equation that are not constants."""
    return [var for var in equation.invars if not isinstance(var, core.Literal)]


def _scales(name: str, operands: Sequence[Value]) -> Paths:
    """Return the parameters whose common factor is a factor of a result.

    Args:
        name: the primitive.
        operands: its operands.
    """
    if name == "reduce_sum":
        return operands[0].scales
    if name == "select_n" and len(operands) == 3:
        return _common_scales(*operands[1:])
    if len(operands) != 2:
        return NONE
    left, right = operands
    if name in SUMS:
        return _joint_scales(operands)
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


def _joint_scales(values: Iterable[Value]) -> Paths:
    """Return the parameters that scale a sum, or an array of several parts, if all of them do."""
    found = [value.scales for value in values if not value.is_zero]
    return frozenset[str]().union(*found) if all(found) else NONE


def _common_scales(first: Value, second: Value) -> Paths:
    """Return the parameters whose common factor is a factor of two values; that of 0 is any."""
    if first.is_zero or second.is_zero:
        return first.scales | second.scales
    return first.scales if first.scales == second.scales else NONE


def _contracted_dims(equation: core.JaxprEqn) -> tuple[Sequence[int], Sequence[int]]:
    """Return the dims of both operands that a matmul or a convolution sums over."""
    params = equation.params
    if equation.primitive.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        # Batch or output features come first, then input features, then space.
        space = numbers.rhs_spec[2:]
        return (numbers.lhs_spec[1],), (numbers.rhs_spec[1], *space)
    numbers = params.get("dimension_numbers")
    if equation.primitive.name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (left, right), _ = numbers
    return left, right


def _num_free(equation: core.JaxprEqn, side: int) -> int:
    """Return the number of rows of an operand of a matmul: the size of what is not summed over."""
    shape = shape_of(equation.invars[side])
    return math.prod(shape) // _size(shape, _contracted_dims(equation)[side])


def _composed(
    equation: core.JaxprEqn, operands: Sequence[Value], result: Value
) -> Value:
    """Return the result of a matmul, with the parameters that it consists of unless it is data."""
    if result.is_data:
        return result
    rank = len(shape_of(equation.outvars[0]))
    # Where their dims are is not known: some were summed over.
    unknown = (frozenset[int](),) * rank
    paths = [path for value in operands[:2] for path in value.dims]
    return replace(result, dims=dict.fromkeys(paths, unknown))


def _is_broadcast(shape: Shape, out: Shape) -> bool:
    """Return whether an array of this shape can be an operand of an elementwise operation."""
    if not shape:
        return True
    sizes = zip(shape, out, strict=False)
    return len(shape) == len(out) and all(a in (1, b) for a, b in sizes)


def _size(shape: Shape, dims: Iterable[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def _merged(first: Value, second: Value) -> Value:
    """Return what is known about a variable that has one of two values."""
    is_data = first.is_data or second.is_data
    return Value(
        dims={} if is_data else {**second.dims, **first.dims},
        is_data=is_data,
        scales=_common_scales(first, second),
        depends=first.depends | second.depends,
        is_stream=first.is_stream or second.is_stream,
        is_zero=first.is_zero and second.is_zero,
    )


def _prefixed(dims: Mapping[str, Dims]) -> dict[str, Dims]:
    return {path: (frozenset[int](), *found) for path, found in dims.items()}


def _moved(
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


def _gathered(equation: core.JaxprEqn, dims: Dims) -> Dims:
    """Return where dims are after a gather with constant indices, such as `kernel[:, 1]`."""
    numbers = equation.params["dimension_numbers"]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [found for dim, found in enumerate(dims) if dim not in removed]
    rank = len(shape_of(equation.outvars[0]))
    places = dict(zip(numbers.offset_dims, kept, strict=True))
    return tuple(places.get(i, frozenset()) for i in range(rank))


def place_of(equation: core.JaxprEqn) -> str:
    """Return file and line of the model that an equation was traced from."""
    for frame in frames_of(equation):
        if not any(part in frame.file_name for part in HIDDEN):
            name = frame.file_name.rpartition("/")[2]
            return f"{name}:{frame.line_num}"
    return ""
