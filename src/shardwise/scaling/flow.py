"""Follow parameters through a traced loss to the operations that use them.

A parameter passes through operations that only cast, reshape, slice or rescale it. Its use is the
operation in which it meets activations: a matmul or a convolution that contracts some of its dims,
a lookup of some of its entries, or an elementwise operation.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from jax.extend import core

from shardwise.scaling.branches import Streams
from shardwise.scaling.products import SummedProduct, summed_products
from shardwise.scaling.uses import (
    Contraction,
    Flow,
    Kind,
    Use,
    is_of_user,
    place_of,
)
from shardwise.scaling.values import (
    JOINS,
    LAYOUT,
    NONE,
    Dims,
    Paths,
    Value,
    add_first_dim,
    common_scales,
    gather_dims,
    joint_scales,
    merge_values,
    move_value,
    scales_of,
)
from shardwise.tracing.jaxpr import (
    CALLS,
    Shape,
    inner_function,
    scan_parts,
    shape_of,
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
        streams = Streams(jaxpr, self.flow)
        products = summed_products(jaxpr)

        def read(atom: core.Var | core.Literal) -> Value:
            if isinstance(atom, core.Literal):
                return Value(is_zero=not shape_of(atom) and not atom.val)
            return values.get(atom, Value())

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            results = self.equation(equation, operands)
            self._note_multiplier(equation, operands, streams)
            product = products.get(equation.outvars[0]) if equation.outvars else None
            if product is not None:
                factors = [read(factor) for factor in product.factors]
                self._note_product(equation, product, factors)
            if streams.is_stream(equation, operands, read):
                results = [replace(results[0], is_stream=True)]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _note_multiplier(
        self, equation: core.JaxprEqn, operands: Sequence[Value], streams: Streams
    ) -> None:
        """Note a number that the model multiplies activations or parameters with."""
        if equation.primitive.name not in ("mul", "div") or not is_of_user(equation):
            return
        for atom, other, value in zip(
            equation.invars, equation.invars[::-1], operands[::-1], strict=True
        ):
            if not isinstance(atom, core.Literal) or shape_of(atom):
                continue
            if (value.is_data or value.dims) and not streams.is_sum(other):
                found = self.flow.multipliers.setdefault(place_of(equation), set())
                found.add(float(atom.val))

    def _note_product(
        self, equation: core.JaxprEqn, product: SummedProduct, factors: list[Value]
    ) -> None:
        """Note the use of parameters in a sum over a product, as in a matmul."""
        axes = product.axes
        left, right = factors
        if self._are_activations(factors, (axes, axes)):
            contraction = Contraction(product.size, place_of(equation))
            self.flow.contractions.append(contraction)
        for own, other in ((left, right), (right, left)):
            is_activation = other.is_data and not other.dims
            if is_activation and self.flow.grows(own, axes):
                kind: Kind = "selected" if own.is_data else "matmul"
                self._add_uses(equation, own, kind, axes, other.scales)

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
            return [replace(self._result(operands), scales=joint_scales(operands))]
        moved = [move_value(equation, operands, var) for var in equation.outvars]
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
            replace(value, dims=add_first_dim(value.dims))
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
            merge_values(before, replace(after, depends=after.depends - layers))
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
            merge_values(before, after)
            for before, after in zip(carried, trial, strict=True)
        ]
        return self.run(body, [*constants, *carried])

    def _cond(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        branches = cast(Sequence[core.ClosedJaxpr], equation.params["branches"])
        results = [self.run(branch.jaxpr, operands[1:]) for branch in branches]
        merged = results[0]
        for other in results[1:]:
            merged = [merge_values(*pair) for pair in zip(merged, other, strict=True)]
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
        if self._are_activations(operands, dims):
            size = _size(shape_of(equation.invars[0]), dims[0])
            contraction = Contraction(size, place_of(equation))
            self.flow.contractions.append(contraction)
            scales = scales_of("mul", [left, right])
        return [_composed(equation, operands, replace(result, scales=scales))]

    def _are_activations(
        self, operands: Sequence[Value], dims: tuple[Sequence[int], Sequence[int]]
    ) -> bool:
        """Return whether a matmul or a sum of products has two activations, and no kernel.

        Entries of tables that the data select, such as embeddings of users and of items, are
        activations here. The kernel of an expert is also selected, and its outputs may grow.
        """
        left, right = operands[:2]
        if not (left.is_data and right.is_data):
            return False
        if not (left.dims and right.dims):
            return not (left.dims or right.dims)
        return not any(
            self.flow.grows(own, own.other_dims(summed))
            for own, summed in zip((left, right), dims, strict=True)
        )

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
        dims = {path: gather_dims(equation, found) for path, found in items}
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
        return [replace(self._result(operands), scales=common_scales(old, new))]

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
            scales = scales_of(name, operands)
            result = replace(result, dims=dims, scales=scales)
            return [result] * len(equation.outvars)
        kind: Kind = "elementwise" if is_elementwise else "unknown"
        for value in operands:
            if not value.is_data:
                self._add_uses(equation, value, kind)
        return [replace(result, scales=scales_of(name, operands))] * len(
            equation.outvars
        )

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
