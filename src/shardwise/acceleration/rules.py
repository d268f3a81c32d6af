"""Find layers of JAX, Flax and Optax in a graph, and let kernels compute them.

Each rule is a function that edits a graph. `RULES` lists them in the order in which they run.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend import core

from shardwise.acceleration import layers
from shardwise.acceleration.graph import (
    Atom,
    Graph,
    constant_value,
    dtype_of,
    is_float,
)
from shardwise.acceleration.linear import (
    Linear,
    biased_value,
    find_linear,
    join_layers,
    merge_rows,
    split_kernels,
)
from shardwise.acceleration.options import Options
from shardwise.acceleration.templates import (
    ANY_NUMBER,
    Match,
    Shape,
    match,
    template,
)
from shardwise.tracing.jaxpr import shape_of

Array = jax.Array

# The largest mask of attention that is computed in order to see whether it is causal.
MAX_MASK = 2**26


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def fuse_mlps(graph: Graph, options: Options) -> None:
    """Find `gelu(x @ up + bias) @ down`."""
    for equation in graph.find("dot_general"):
        down = find_linear(graph, equation.outvars[0])
        if down is None or down.num_in != 1 or len(shape_of(down.kernel)) != 2:
            continue
        types = ((shape_of(down.x), dtype_of(down.x)),)
        found = match(graph, down.x, template(_gelu, types))
        if found is None or graph.only_user(down.x) is None:
            continue
        hidden = found.inputs[0]
        up = find_linear(graph, hidden)
        if (
            up is None
            or up.num_in != 1
            or not options.has_rows(up.x)
            or len(shape_of(up.x)) > 3
            or len(shape_of(up.kernel)) != 2
            or not found.covers(graph.users(hidden))
        ):
            continue
        bias = up.bias
        if bias is None:
            (bias,) = graph.splice([None], _zeros_like_columns, [up.kernel])
        mlp = layers.plain_gelu_mlp if options.saves_matmuls else layers.gelu_mlp
        graph.compute([down.product], mlp, [up.x, up.kernel, bias, down.kernel])


def _zeros_like_columns(kernel: Array) -> list[Array]:
    return [jnp.zeros(kernel.shape[1], kernel.dtype)]


def fuse_gelus(graph: Graph, options: Options) -> None:
    """Find `gelu(x + bias)` after a linear layer that `fuse_mlps` did not find."""
    last = template(_gelu, (((1,), jnp.dtype(jnp.float32)),))
    if last is None:
        return
    for equation in graph.find(last.eqns[-1].primitive.name):
        output = equation.outvars[0]
        if len(shape_of(output)) not in (2, 3) or not is_float(output):
            continue
        types = ((shape_of(output), dtype_of(output)),)
        found = match(graph, output, template(_gelu, types))
        hidden = None if found is None else found.inputs[0]
        if found is None or hidden is None or not options.has_rows(hidden):
            continue
        linear = find_linear(graph, hidden)
        if linear is None or linear.bias is None or len(shape_of(linear.bias)) != 1:
            continue
        if found.covers(graph.users(hidden)):
            graph.compute([output], layers.bias_gelu, [linear.product, linear.bias])


def _reference_norm(x: Array, scale: Array, *rest: Any) -> Array:
    """Return the layer norm of Flax. The rest is a bias if there is one, a dtype, and a choice."""
    *bias, dtype, use_fast_variance = rest
    norm = nnx.LayerNorm(
        x.shape[-1],
        epsilon=ANY_NUMBER,
        dtype=dtype,
        use_bias=bool(bias),
        use_fast_variance=bool(use_fast_variance),
        rngs=nnx.Rngs(0),
    )
    norm.scale = nnx.Param(scale)
    if bias:
        norm.bias = nnx.Param(bias[0])
    normalized: Array = norm(x)
    return normalized


def fuse_norms(graph: Graph, options: Options) -> None:
    """Find layer norms, and the residual stream that they read.

    Other users of the stream get it from the norm, whose backward kernel then adds the gradients.
    A bias that was added last to the stream is left to the norm, too.
    """
    # Without a bias, the norm is a part of what the norm with a bias computes.
    for num_weights in (2, 1):
        for equation in graph.find("add", "mul", "convert_element_type"):
            _fuse_norm(graph, options, equation.outvars[0], num_weights)


def _fuse_norm(
    graph: Graph, options: Options, output: core.Var, num_weights: int
) -> None:
    """Let a kernel compute `output`, if that is a layer norm with this number of weights."""
    found = _match_norm(graph, output, num_weights)
    if found is None:
        return
    x, *weights = found.inputs
    if not isinstance(x, core.Var) or not options.has_rows(x):
        return
    others = [
        user
        for user in graph.users(x)
        if user is None or id(user) not in found.equations
    ]
    if graph.depends_on(weights, [x]):
        # The parameters of the norm depend on its input.
        others = [None]
    has_outside_user = None in others
    pending = None if has_outside_user else _pending_bias(graph, x)
    stream, _ = graph.compute(
        [None, output],
        layers.layer_norm if pending is None else layers.add_layer_norm,
        [*(pending or (x,)), *weights],
        dtype_of(output),
        found.numbers[0],
    )
    if not has_outside_user:
        graph.substitute(x, stream, {id(user) for user in others})


def _match_norm(graph: Graph, output: core.Var, num_weights: int) -> Match | None:
    shape, dtype = shape_of(output), dtype_of(output)
    if len(shape) not in (2, 3) or not is_float(output):
        return None
    vector = (shape[-1:], dtype)
    for x_dtype in dict.fromkeys((dtype, jnp.dtype(jnp.float32))):
        for is_fast in (True, False):
            types = ((shape, x_dtype), *[vector] * num_weights)
            pattern = template(_reference_norm, types, dtype, is_fast)
            found = match(graph, output, pattern)
            if found is not None:
                return found
    return None


def _pending_bias(graph: Graph, x: core.Var) -> tuple[Atom, Atom, Atom] | None:
    """Return a, b and c of a variable `a + (b + c)`, where c is a bias, or None."""
    equation = graph.definition(x, "add")
    if equation is None:
        return None
    for stream, branch in (equation.invars, equation.invars[::-1]):
        found = biased_value(graph, branch)
        if (
            found is not None
            and len(shape_of(found[1])) == 1
            and shape_of(stream) == shape_of(x) == shape_of(branch)
            and graph.only_user(branch) is not None
        ):
            return stream, *found
    return None


def _reference_attention(
    q: Array, k: Array, v: Array, causal: bool, implementation: str | None
) -> Array:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        implementation=implementation,  # type: ignore[arg-type]
    )


def _reference_masked_attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def fuse_attention(graph: Graph, options: Options) -> None:
    """Find `jax.nn.dot_product_attention`, causal or without a mask."""
    for equation in graph.equations:
        output = equation.outvars[0] if equation.outvars else None
        if output is None or graph.definition(output) is not equation:
            continue
        shape = shape_of(output)
        if len(shape) != 4 or not is_float(output) or not options.has_rows(output):
            continue
        if not _may_be_attention(graph, output):
            continue
        found = _match_attention(graph, output)
        if found is None:
            continue
        place, causal = found
        q, k, v = place.inputs[:3]
        v = _with_bias_after(graph, v, place, output)
        k = _without_bias(graph, k, place)
        graph.compute([output], layers.attention_layer, [q, k, v], causal)


def _may_be_attention(graph: Graph, output: Atom) -> bool:
    """Return whether a variable may be attention. Templates would take time for every array."""
    while (moved := graph.definition(output, "reshape", "transpose")) is not None:
        output = moved.invars[0]
    last = graph.definition(output, "dot_general", "custom_vjp_call", "jit", "pjit")
    if last is None or last.primitive.name != "dot_general":
        return last is not None
    _, (batch_dims, _) = last.params["dimension_numbers"]
    return bool(batch_dims)


def _match_attention(graph: Graph, output: core.Var) -> tuple[Match, bool] | None:
    """Return a place with queries, keys and values, and whether it is causal; or None."""
    batch_size, length, num_heads, width = shape = shape_of(output)
    dtype = dtype_of(output)
    query = (shape, dtype)
    for num_groups in (n for n in range(num_heads, 0, -1) if num_heads % n == 0):
        key = ((batch_size, length, num_groups, width), dtype)
        types = (query, key, key)
        for implementation in (None, "cudnn"):
            for causal in (True, False):
                pattern = template(_reference_attention, types, causal, implementation)
                found = match(graph, output, pattern)
                if found is not None:
                    return found, causal
        for first in {batch_size, 1}:
            mask_type = ((first, 1, length, length), jnp.dtype(bool))
            pattern = template(_reference_masked_attention, (*types, mask_type))
            found = match(graph, output, pattern)
            if found is not None and _is_causal(graph, found.inputs[3]):
                return found, True
    return None


def _is_causal(graph: Graph, mask: Atom) -> bool:
    """Return whether a mask (..., T, T) is known to be that of causal attention."""
    value = constant_value(graph, mask, MAX_MASK)
    return value is not None and bool(np.all(value == np.tril(np.ones_like(value))))


def _without_bias(graph: Graph, key: Atom, place: Match) -> Atom:
    """Return keys without the bias of their linear layer.

    It adds the same number to all scores of a query, so it has neither an effect nor a gradient.
    """
    found = _heads(graph, key, place)
    if found is None or found.bias is None:
        return key
    return _as_heads(graph, found.product, shape_of(key))


def _with_bias_after(
    graph: Graph, value: Atom, place: Match, attention: core.Var
) -> Atom:
    """Return values without the bias of their linear layer, if the output layer can add it.

    The attention weights of a query sum to 1, so the bias can be added to the output of the heads
    instead. Passed through the output layer it becomes a part of its bias, whose gradient need not
    be summed over all tokens again.
    """
    found = _heads(graph, value, place)
    if found is None or found.bias is None or shape_of(attention) != shape_of(value):
        return value
    heads: Atom = attention
    reshaped = graph.only_user(heads, "reshape")
    if reshaped is not None:
        heads = reshaped.outvars[0]
    user = graph.only_user(heads, "dot_general")
    adds = None if user is None else graph.only_user(user.outvars[0], "add")
    out = None if adds is None else find_linear(graph, adds.outvars[0])
    if out is None or out.bias is None or out.x is not heads:
        return value
    if shape_of(heads)[:2] != shape_of(attention)[:2]:
        return value
    # A layer for each head, or for some of them, has another use for the bias.
    if _num_inputs(out) != math.prod(shape_of(found.bias)):
        return value
    if graph.depends_on([found.bias], [attention]):
        return value
    operands = [found.bias, out.kernel, out.bias]
    (bias,) = graph.splice([None], _output_bias, operands)
    graph.splice([out.output], _add_bias, [out.product, bias])
    return _as_heads(graph, found.product, shape_of(value))


def _num_inputs(layer: Linear) -> int:
    return math.prod(shape_of(layer.kernel)[: layer.num_in])


def _output_bias(value_bias: Array, kernel: Array, bias: Array) -> list[Array]:
    num_out = bias.ndim
    matrix = kernel.reshape(-1, *kernel.shape[kernel.ndim - num_out :])
    return [jnp.tensordot(value_bias.reshape(-1), matrix, 1) + bias]


def _add_bias(x: Array, bias: Array) -> list[Array]:
    return [x + bias]


def _heads(graph: Graph, atom: Atom, place: Match) -> Linear | None:
    """Return the linear layer whose output (B, T, H, K) is used by attention alone, or None."""
    if not place.covers(graph.users(atom)):
        return None
    while (reshaped := graph.definition(atom, "reshape", "squeeze")) is not None:
        if shape_of(atom)[:2] != shape_of(reshaped.invars[0])[:2]:
            return None
        if graph.only_user(reshaped.invars[0]) is None:
            return None
        atom = reshaped.invars[0]
    return find_linear(graph, atom)


def _as_heads(graph: Graph, product: core.Var, shape: Shape) -> Atom:
    if shape_of(product) == shape:
        return product
    (heads,) = graph.splice([None], lambda x: [x.reshape(shape)], [product])
    return heads


def _reference_take(table: Array, indices: Array) -> Array:
    return jnp.take(table, indices, axis=0)


def fuse_lookups(graph: Graph, options: Options) -> None:
    """Find `jnp.take(table, indices, axis=0)`, as in `nnx.Embed`."""
    for equation in graph.find("jit", "pjit"):
        if len(equation.invars) != 2:
            continue
        table, indices = equation.invars
        is_lookup = (
            len(shape_of(table)) == 2
            and is_float(table)
            and shape_of(indices) != ()
            and jnp.issubdtype(dtype_of(indices), jnp.integer)
        )
        if not is_lookup:
            continue
        types = tuple((shape_of(x), dtype_of(x)) for x in (table, indices))
        output = equation.outvars[0]
        if match(graph, output, template(_reference_take, types)) is not None:
            graph.compute([output], layers.look_up, [table, indices])


def fuse_losses(graph: Graph, options: Options) -> None:
    """Find `optax.softmax_cross_entropy_with_integer_labels`, and the output layer before it."""
    # The maximum of the logits is a part of their logsumexp.
    for equation in graph.find("reduce_max"):
        logits = equation.invars[0]
        shape = shape_of(logits)
        is_last = tuple(equation.params["axes"]) == (len(shape) - 1,)
        if not is_last or len(shape) < 2 or not options.has_rows(logits):
            continue
        found = _match_loss(graph, logits)
        if found is None:
            continue
        output, labels, place = found
        features = _output_layer(graph, logits, place)
        if features is None:
            operands = [logits, labels]
            graph.compute([output], layers.token_losses, operands, dtype_of(output))
        else:
            x, weights, is_table = features
            graph.compute(
                [output],
                layers.linear_token_losses,
                [x, weights, labels],
                dtype_of(output),
                is_table,
            )


_reference_loss = optax.softmax_cross_entropy_with_integer_labels


def _match_loss(graph: Graph, logits: Atom) -> tuple[core.Var, Atom, Match] | None:
    """Return the losses of logits (..., V), their labels, and the place; or None."""
    shape = shape_of(logits)
    dtypes = {
        dtype_of(atom)
        for equation in graph.equations
        for atom in equation.invars
        if shape_of(atom) == shape[:-1] and jnp.issubdtype(dtype_of(atom), jnp.integer)
    }
    for dtype in sorted(dtypes, key=str):
        types = ((shape, dtype_of(logits)), (shape[:-1], dtype))
        pattern = template(_reference_loss, types)
        if pattern is None:
            continue
        last = next(
            x for x in reversed(pattern.eqns) if pattern.outvars[0] in x.outvars
        )
        for equation in graph.find(last.primitive.name):
            output = equation.outvars[0]
            if shape_of(output) != shape[:-1]:
                continue
            found = match(graph, output, pattern)
            if found is not None and found.inputs[0] is logits:
                return output, found.inputs[1], found
    return None


def _output_layer(
    graph: Graph, logits: Atom, place: Match
) -> tuple[Atom, Atom, bool] | None:
    """Return input and weights of the layer that computes logits only for a loss, or None.

    The last result says whether the weights are a table (V, D), or else (D, V).
    """
    if not place.covers(graph.users(logits)):
        return None
    cast = graph.definition(logits, "convert_element_type")
    if cast is not None and graph.only_user(cast.invars[0]) is not None:
        logits = cast.invars[0]
    equation = graph.definition(logits, "dot_general")
    if equation is None:
        return None
    x, weights = equation.invars
    contracted, batch = equation.params["dimension_numbers"]
    ndim = len(shape_of(x))
    is_linear = (
        not batch[0]
        and tuple(contracted[0]) == (ndim - 1,)
        and len(shape_of(weights)) == 2
        and dtype_of(x) == dtype_of(weights) == dtype_of(equation.outvars[0])
        and equation.params["precision"] is None
    )
    if not is_linear:
        return None
    if tuple(contracted[1]) == (1,):
        return x, weights, True
    transposed = graph.definition(weights, "transpose")
    if transposed is not None:
        return x, transposed.invars[0], True
    return x, weights, False


Rule = Callable[[Graph, Options], None]

RULES: tuple[Rule, ...] = (
    split_kernels,
    fuse_attention,
    fuse_losses,
    fuse_lookups,
    fuse_mlps,
    fuse_gelus,
    fuse_norms,
    join_layers,
    merge_rows,
)
