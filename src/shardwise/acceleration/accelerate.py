"""`accelerate`: a loss whose layers are computed by the kernels of shardwise."""

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import jax
import numpy as np
from flax import nnx
from jax.extend import core

from shardwise.acceleration.graph import Calls, Graph, dtype_of
from shardwise.acceleration.options import Options
from shardwise.acceleration.rules import RULES
from shardwise.kernels.platform import is_analyzed
from shardwise.sharding import has_explicit_axes
from shardwise.tracing.jaxpr import shape_of, with_inner_jaxprs
from shardwise.tree import KeyPath, PyTree

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_State: TypeAlias = nnx.State[Any, Any]

# Operations whose inner functions are rewritten. Not those with a custom gradient, which a
# derivative does not use, and not `shard_map`, where a device has only a part of each array.
NESTED = (
    "jit",
    "pjit",
    "closed_call",
    "remat",
    "remat2",
    "checkpoint",
    "scan",
    "while",
    "cond",
)


def accelerate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let the kernels of shardwise compute the layers of a function.

    A model that is written with the layers of Flax and the functions of JAX and Optax gets the
    kernels of `shardwise.models.gpt.GPT`. The model does not change: its parameters keep their
    names and shapes, so that checkpoints fit with and without `accelerate`.

    The function is traced, and these parts of it are replaced, also inside of `nnx.scan` and
    `nnx.remat`:

    - `nnx.LayerNorm`, together with the residual connection and the bias before it
    - `nnx.gelu`, or `jax.nn.gelu`, with the tanh approximation between two linear layers
    - `jax.nn.dot_product_attention` and `nnx.MultiHeadAttention`, causal or without a mask, without
      dropout of attention weights
    - `nnx.Embed`, or `jnp.take(table, tokens, axis=0)`
    - `optax.softmax_cross_entropy_with_integer_labels`, together with the output layer
    - `nnx.Linear` for sequences (B, T, D), also if its output is split into several arrays

    Everything else stays as it is, and so do layers in float64. Results and gradients agree with
    those of the function within rounding. The bias of keys gets a gradient of exactly zero instead
    of rounding errors. The kernels depend on the platform, see `kernels/README.md`. They have first
    derivatives in reverse mode only, and on GPUs no `jax.vmap`.

    Args:
        function: a loss for `Run`, `make_train_step` or `make_eval_step`, or another function of
            NNX modules and pytrees of arrays. It may change variables of the modules, but not
            their other attributes.

    Returns:
        A function of the same arguments.

    Example:
        >>> run = Run(model=model, loss=accelerate(loss), ...)  # doctest: +SKIP
    """

    @functools.wraps(function)
    def accelerated(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        # The analysis of a loss reads what the user has written.
        if is_analyzed.value or has_explicit_axes():
            return function(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
        objects = [leaf for leaf in leaves if _is_object(leaf)]
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        definition, state = nnx.split(objects)
        results = _Results()

        def on_arrays(state: PyTree, arrays: list[jax.Array]) -> PyTree:
            before = _arrays_of(state)
            new_objects = nnx.merge(definition, state)
            values = iter(new_objects), iter(arrays)
            new_args, new_kwargs = jax.tree.unflatten(
                structure,
                [
                    next(values[0])
                    if _is_object(leaf)
                    else next(values[1])
                    if _is_array(leaf)
                    else leaf
                    for leaf in leaves
                ],
            )
            output = function(*new_args, **new_kwargs)
            return results.split(output), _changed(before, nnx.state(new_objects))

        closed, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(state, arrays)
        sizes = frozenset(np.shape(array)[0] for array in arrays if np.ndim(array))
        rewritten = rewrite_calls(closed, sizes)
        outputs = core.jaxpr_as_fun(rewritten)(*jax.tree.leaves((state, arrays)))
        values, new_state = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        if new_state:
            nnx.update(objects, new_state)
        return cast(Result, results.join(values))

    return accelerated


def _arrays_of(state: _State) -> dict[KeyPath, list[jax.Array]]:
    """Return the arrays of each variable."""
    return {path: jax.tree.leaves(x) for path, x in nnx.to_flat_state(state)}


def _changed(before: dict[KeyPath, list[jax.Array]], after: _State) -> _State:
    """Return the variables that a function has changed or added.

    The others may belong to a trace around this one, where NNX refuses to change them.
    """
    arrays = _arrays_of(after)
    return nnx.from_flat_state(
        [
            (path, x)
            for path, x in nnx.to_flat_state(after)
            if list(map(id, arrays[path])) != list(map(id, before.get(path, ())))
        ]
    )


class _Results:
    """The output of a function: arrays, which a trace returns, and anything else."""

    def split(self, output: PyTree) -> list[jax.Array]:
        """Keep everything but the arrays, and return these."""
        self._leaves, self._structure = jax.tree.flatten(output)
        return [leaf for leaf in self._leaves if _is_array(leaf)]

    def join(self, arrays: list[jax.Array]) -> PyTree:
        """Return the output with other arrays."""
        values = iter(arrays)
        leaves = [next(values) if _is_array(x) else x for x in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


def _is_object(leaf: object) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def rewrite_calls(
    closed: core.ClosedJaxpr, batch_sizes: frozenset[int]
) -> core.ClosedJaxpr:
    """Return a traced function with the layers that `accelerate` replaces.

    Args:
        closed: the traced function.
        batch_sizes: the first dims of its arguments.
    """
    calls: Calls = {}
    rewritten: dict[tuple[core.Jaxpr, Options], core.Jaxpr] = {}

    def visit(jaxpr: core.Jaxpr, options: Options) -> core.Jaxpr:
        key = jaxpr, options
        if key not in rewritten:
            graph = Graph(jaxpr, calls)
            if not _has_float64(jaxpr):
                for rule in RULES:
                    rule(graph, options)
            added = {id(call.params["jaxpr"]) for call in calls.values()}
            equations = [
                visit_inner(equation, options)
                if equation.primitive.name in NESTED
                and id(equation.params.get("jaxpr")) not in added
                else equation
                for equation in graph.ordered()
            ]
            is_same = all(map(operator.is_, equations, jaxpr.eqns))
            is_same &= len(equations) == len(jaxpr.eqns)
            rewritten[key] = jaxpr if is_same else jaxpr.replace(eqns=equations)
        return rewritten[key]

    def visit_inner(equation: core.JaxprEqn, options: Options) -> core.JaxprEqn:
        if equation.params.get("policy") is not None:
            options = replace(options, saves_matmuls=True)
        return with_inner_jaxprs(equation, lambda jaxpr: visit(jaxpr, options))

    jaxpr = visit(closed.jaxpr, Options(batch_sizes))
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def _has_float64(jaxpr: core.Jaxpr) -> bool:
    """Return whether layers compute in 64 bits, which the kernels do not: they sum in 32."""
    results = (var for equation in jaxpr.eqns for var in equation.outvars)
    return any(
        len(shape_of(var)) > 1 and dtype_of(var) == np.float64 for var in results
    )
