"""Find linear layers in a graph, and multiply with one row per token."""

import itertools
import math
from dataclasses import dataclass
from functools import partial

import jax
from jax.extend import core

from shardwise.acceleration import layers
from shardwise.acceleration.graph import Atom, Graph, dtype_of
from shardwise.acceleration.options import Options
from shardwise.tracing.jaxpr import shape_of

Array = jax.Array


@dataclass(frozen=True)
class Linear:
    """A linear layer in a graph.

    Attributes:
        x: its input, (..., *ins).
        kernel: its weights, (*ins, *outs).
        bias: (*outs), or None.
        product: `x` times the kernel.
        output: the result with the bias.
        num_in: the number of dims in `ins`.
    """

    x: Atom
    kernel: Atom
    bias: Atom | None
    product: core.Var
    output: core.Var
    num_in: int


def find_linear(graph: Graph, atom: Atom) -> Linear | None:
    """Return the linear layer that computes a variable, or None."""
    found = biased_value(graph, atom)
    if found is None:
        return _find_product(graph, atom)
    value, bias = found
    linear = _find_product(graph, value)
    if linear is None or graph.only_user(value) is None:
        return None
    outs = shape_of(linear.kernel)[linear.num_in :]
    if shape_of(bias) != outs:
        return None
    assert isinstance(atom, core.Var)
    return Linear(linear.x, linear.kernel, bias, linear.product, atom, linear.num_in)


def _find_product(graph: Graph, atom: Atom) -> Linear | None:
    """Return the linear layer without a bias that computes a variable, or None."""
    equation = graph.definition(atom, "dot_general")
    if equation is None:
        return None
    x, kernel = equation.invars
    contracted, batch = equation.params["dimension_numbers"]
    num_in = len(contracted[0])
    ndim = len(shape_of(x))
    is_linear = (
        not batch[0]
        and tuple(contracted[0]) == tuple(range(ndim - num_in, ndim))
        and tuple(contracted[1]) == tuple(range(num_in))
        and len(shape_of(kernel)) > num_in
        and not equation.params.get("out_sharding")
        and equation.params["precision"] is None
        and dtype_of(x) == dtype_of(kernel) == dtype_of(equation.outvars[0])
    )
    if not is_linear:
        return None
    product = equation.outvars[0]
    return Linear(x, kernel, None, product, product, num_in)


def biased_value(graph: Graph, atom: Atom) -> tuple[Atom, Atom] | None:
    """Return `value` and `bias` of a variable that is `value + bias`, or None.

    The bias has the last dims of the value, and is repeated along the others.
    """
    equation = graph.definition(atom, "add")
    if equation is None:
        return None
    for value, repeated in (equation.invars, equation.invars[::-1]):
        bias = _repeated(graph, repeated, shape_of(atom))
        if bias is not None and shape_of(value) == shape_of(atom):
            return value, bias
    return None


def _repeated(graph: Graph, atom: Atom, shape: tuple[int, ...]) -> Atom | None:
    """Return the variable of fewer dims that is repeated along the first dims of `shape`."""
    equation = graph.definition(atom, "reshape", "broadcast_in_dim")
    if equation is None:
        return None
    source = equation.invars[0]
    missing = len(shape) - len(shape_of(source))
    last = shape[missing:]
    if not shape_of(source) or missing < 1 or shape_of(source) != last:
        return None
    if equation.primitive.name == "reshape":
        return source if shape_of(atom) == (1,) * missing + last else None
    is_trailing = tuple(equation.params["broadcast_dimensions"]) == tuple(
        range(missing, len(shape))
    )
    return source if is_trailing and shape_of(atom)[missing:] == last else None


def split_kernels(graph: Graph, options: Options) -> None:
    """Turn a linear layer whose output is split into several linear layers.

    Queries, keys and values are often computed by one layer. Its output would be copied to split
    it, and so would the three gradients to join them. The kernel is smaller.
    """
    for equation in graph.find("split", "unstack", "slice"):
        whole = equation.invars[0]
        reshaped = graph.definition(whole, "reshape")
        output = whole if reshaped is None else reshaped.invars[0]
        linear = find_linear(graph, output)
        if (
            linear is None
            or not options.has_rows(linear.x)
            or len(shape_of(linear.x)) != 3
            or len(shape_of(linear.kernel)) != 2
            or shape_of(whole)[:2] != shape_of(output)[:2]
            or (reshaped is not None and graph.only_user(output) is None)
        ):
            continue
        users = [user and _parts(user) for user in graph.users(whole)]
        parts = [part for user in users if user for part in user]
        if None in users or len(parts) < 2:
            continue
        # Columns of the kernel for one index of the dim that is split.
        columns = math.prod(shape_of(whole)[3:])
        operands = [x for x in (linear.x, linear.kernel, linear.bias) if x is not None]
        for var, start, size in parts:
            part = partial(
                _linear_part,
                start=start * columns,
                size=size * columns,
                shape=shape_of(var),
            )
            graph.splice([var], part, operands)


def _parts(equation: core.JaxprEqn) -> list[tuple[core.Var, int, int]] | None:
    """Return variables that are parts of an array (B, T, C, ...): where in C, and how long.

    It is None for an equation that does something else than splitting along C.
    """
    outputs, params = equation.outvars, equation.params
    shape = shape_of(equation.invars[0])
    if equation.primitive.name == "slice":
        starts, ends = params["start_indices"], params["limit_indices"]
        is_whole = [
            (start, end) == (0, size)
            for start, end, size in zip(starts, ends, shape, strict=True)
        ]
        if params["strides"] is not None or not all(is_whole[:2] + is_whole[3:]):
            return None
        return [(outputs[0], starts[2], ends[2] - starts[2])]
    if equation.primitive.name not in ("split", "unstack") or params["axis"] != 2:
        return None
    sizes = [int(size) for size in params.get("sizes", [1] * len(outputs))]
    ends = list(itertools.accumulate(sizes))
    return [
        (var, end - size, size)
        for var, end, size in zip(outputs, ends, sizes, strict=True)
    ]


def _linear_part(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    start: int,
    size: int,
    shape: tuple[int, ...],
) -> list[Array]:
    """Return some columns of the output of a linear layer."""
    cut = partial(
        jax.lax.slice_in_dim, start_index=start, limit_index=start + size, axis=-1
    )
    y = jax.lax.dot_general(x, cut(kernel), (((2,), (0,)), ((), ())))
    if bias is not None:
        y = y + cut(bias).reshape(1, 1, -1)
    return [y.reshape(shape)]


def join_layers(graph: Graph, options: Options) -> None:
    """Let linear layers of the same tokens share their backward pass."""
    groups: dict[Atom, list[Linear]] = {}
    for equation in graph.find("dot_general"):
        linear = _find_product(graph, equation.outvars[0])
        if linear is None or linear.num_in != 1 or len(shape_of(linear.x)) != 3:
            continue
        if isinstance(linear.x, core.Var) and options.has_rows(linear.x):
            groups.setdefault(linear.x, []).append(linear)
    for x, group in groups.items():
        if len(group) == 1:
            continue
        group = [_with_bias(graph, linear) for linear in group]
        biases = [linear.bias for linear in group if linear.bias is not None]
        operands = [x, *(linear.kernel for linear in group), *biases]
        if not graph.depends_on(operands[1:], [linear.product for linear in group]):
            has_bias = tuple(linear.bias is not None for linear in group)
            outputs = [linear.output for linear in group]
            graph.compute(outputs, layers.linear_layers, operands, has_bias)


def _with_bias(graph: Graph, linear: Linear) -> Linear:
    """Return a linear layer with the bias that is added to it alone, if there is one."""
    user = graph.only_user(linear.product, "add")
    biased = None if user is None else find_linear(graph, user.outvars[0])
    return linear if biased is None else biased


def merge_rows(graph: Graph, options: Options) -> None:
    """Multiply the tokens of all sequences as one matrix.

    With three dims, XLA could choose between layouts, and would transpose activations on GPUs.
    """
    for equation in graph.find("dot_general"):
        linear = _find_product(graph, equation.outvars[0])
        if linear is None or not options.has_rows(linear.x):
            continue
        if len(shape_of(linear.x)) - linear.num_in != 2:
            continue
        linear = _with_bias(graph, linear)
        operands = [linear.x, linear.kernel, linear.bias]
        graph.compute(
            [linear.output],
            layers.linear_layer,
            [x for x in operands if x is not None],
        )
