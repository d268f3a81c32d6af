"""The dtype in which a model computes, and sums of 16-bit floats.

`compute_in` makes the layers of Flax compute in another dtype than that of their parameters.
Casting the parameters is not enough: a layer without a dtype promotes bfloat16 weights and float32
inputs to float32. The layers cast their inputs instead, with the mechanism of Flax. The batch is
not cast, because it also holds targets: bfloat16 would round the target 1234.5 to 1232.

`sums_in_float32` is about sums. JAX sums in the dtype of its input. bfloat16 has 8 significant
bits, so a running sum stops growing when it is 256 times as large as the next term. The gradient
of a bias is a sum over all tokens, and the gradient of an embedding is a sum over all occurrences
of a token. With 20,000 equal terms on a CPU, JAX alone loses 18 % of the first sum and 97 % of the
second. Matmuls are not affected: they accumulate in float32 on every platform.

The sums are created by automatic differentiation, so no model code can change their dtype. The
function therefore rewrites the jaxpr of the gradients, loops included. It works for any model.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun

from shardwise.findings import Finding
from shardwise.flops import MatmulDtypes
from shardwise.text import show_share
from shardwise.tracing.jaxpr import replace_equation, rewrite, with_inner_jaxprs
from shardwise.tree import DType, PyTree

SUMS = ("reduce_sum", "scatter-add", "cumsum")
# Kernels choose the dtype of their sums themselves.
OPAQUE = ("pallas_call", "mpmd_map")
HALF = (jnp.bfloat16, jnp.float16)
# A finding is about at least this share of the matmul FLOPs.
MIN_SHARE = 0.01

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
# `hook(variable, value)` returns the value that the model gets when it reads the variable.
AccessHook: TypeAlias = Callable[[nnx.Variable[jax.Array], jax.Array], jax.Array]
# Another way to compute an equation that is a sum: a function of its operands, or None.
OwnSum: TypeAlias = Callable[
    [JaxprEqn], Callable[[Sequence[jax.Array]], jax.Array] | None
]


def compute_in(module: nnx.Module, dtype: DType) -> None:
    """Make the layers of `module` compute in `dtype`. The module is changed.

    It sets the `dtype` of every layer that follows the convention of Flax: attributes `dtype`, None
    if the user chose none, and `param_dtype`. Such a layer casts its inputs and parameters to it.

    - A layer with another dtype keeps it, and reads its own parameters as they are stored.
    - A layer with a variable whose metadata say `keep_dtype` stays as it is.
    - `nnx.Embed` without a dtype stores the one of its table, as a `numpy.dtype`. An explicit
      `dtype=jnp.float32` has another type and is kept. `dtype=np.dtype("float32")` looks like the
      default.
    - `nnx.BatchNorm` keeps its running statistics in their own dtype; Flax alone would round them
      in evaluation mode.
    - `nnx.SimpleCell` has the default `dtype=jnp.float32`, which therefore counts as None. Its
      carry keeps the dtype of its parameters, like that of the other recurrent cells.
    """
    parts = [part for _, part in nnx.iter_modules(module)]
    for part in parts:
        if isinstance(part, nnx.SimpleCell) and part.dtype == jnp.float32:
            part.dtype = part.dense_i.dtype = part.dense_h.dtype = None
    for part in parts:
        # Not `getattr`: a weight with adapters has the attributes of its array.
        attributes = vars(part)
        if "dtype" not in attributes or "param_dtype" not in attributes:
            continue
        variables = [x for x in attributes.values() if isinstance(x, nnx.Variable)]
        if _chosen_dtype(part) not in (None, dtype):
            for variable in variables:
                variable.set_metadata(keep_dtype=True)
        elif not any(x.get_metadata("keep_dtype", False) for x in variables):
            _set_dtype(part, dtype)


def _chosen_dtype(layer: nnx.Module) -> DType | None:
    """Return the dtype that the user gave to a layer, or None."""
    dtype = vars(layer)["dtype"]
    is_default = isinstance(layer, nnx.Embed) and isinstance(dtype, np.dtype)
    if dtype is None or (is_default and dtype == vars(layer)["param_dtype"]):
        return None
    chosen: DType = jnp.dtype(dtype)
    return chosen


def _set_dtype(layer: nnx.Module, dtype: DType) -> None:
    setattr(layer, "dtype", dtype)  # noqa: B010
    if isinstance(layer, nnx.BatchNorm) and layer.promote_dtype is promote_dtype:
        layer.promote_dtype = _promote_without_statistics
    if isinstance(layer, nnx.SimpleCell):
        layer.activation_fn = _cast_output(
            layer.activation_fn, jnp.dtype(layer.param_dtype)
        )


def _promote_without_statistics(
    args: Arguments, /, *, dtype: DType | None = None, inexact: bool = True
) -> Arguments:
    """Promote what a `nnx.BatchNorm` computes with, except its running mean and variance."""
    x, mean, variance, scale, bias = args
    x, scale, bias = promote_dtype((x, scale, bias), dtype=dtype, inexact=inexact)
    return cast(Arguments, (x, mean, variance, scale, bias))


# One function for two equal arguments, so that programs of two equal models are compiled once.
@lru_cache
def _cast_output(
    function: Callable[[jax.Array], jax.Array], dtype: DType
) -> Callable[[jax.Array], jax.Array]:
    def cast_function(x: jax.Array) -> jax.Array:
        return function(x).astype(dtype)

    return cast_function


def dtype_at_use(
    variable: nnx.Variable[jax.Array], stored: DType, dtype: DType | None
) -> DType:
    """Return the dtype in which a model that computes in `dtype` reads a variable.

    Args:
        variable: the variable. Metadata `keep_dtype` exclude it.
        stored: the dtype of its value.
        dtype: the compute dtype, or None.
    """
    if dtype is None or variable.get_metadata("keep_dtype", False):
        return stored
    return dtype if jnp.issubdtype(stored, jnp.floating) else stored


@lru_cache
def cast_hook(dtype: DType) -> AccessHook:
    """Return the hook that casts a parameter where a model that computes in `dtype` reads it.

    There is one hook for each dtype, so that JAX compiles programs of two equal models once.
    """

    def hook(variable: nnx.Variable[jax.Array], value: jax.Array) -> jax.Array:
        return value.astype(dtype_at_use(variable, value.dtype, dtype))

    return hook


def find_other_dtypes(matmuls: MatmulDtypes, dtype: DType | None) -> list[Finding]:
    """Return a finding if a model that should compute in `dtype` has other matmuls.

    Matmuls in layers with a dtype of their own are meant to be so, unless they are most of them.

    Args:
        matmuls: the matmuls of the model.
        dtype: its compute dtype, or None.
    """
    total = sum(matmuls.flops.values())
    if dtype is None or not total:
        return []
    other = {name: x for name, x in matmuls.unasked.items() if name != str(dtype)}
    fact = (
        f"compute_dtype is {dtype}, but {{share}} of the matmul FLOPs are in {{name}}"
    )
    if sum(other.values()) > MIN_SHARE * total:
        name = next(iter(other))
        place = matmuls.unasked_lines.get(name)
        return [
            Finding(
                "matmul-dtype",
                fact.format(share=show_share(other[name], total), name=name)
                + (f" ({place})" if place else ""),
                "Cast the inputs of the matmul: x.astype(kernel.dtype). Layers of Flax do it "
                "themselves.",
            )
        ]
    if matmuls.flops.get(str(dtype), 0.0) < total / 2:
        name = next(iter(matmuls.flops))
        return [
            Finding(
                "matmul-dtype",
                fact.format(share=show_share(matmuls.flops[name], total), name=name),
                f"Layers with dtype={name} keep it. Do not pass a dtype to those that should "
                f"compute in {dtype}.",
            )
        ]
    return []


def sums_in_float32(
    function: Callable[..., PyTree], own_sum: OwnSum | None = None
) -> Callable[..., PyTree]:
    """Return `function` with every sum of 16-bit floats computed in float32 and rounded once.

    Args:
        function: a function of pytrees of arrays, usually the result of `jax.grad`.
        own_sum: returns another way to compute a sum of any dtype, or None for the usual one.

    Returns:
        A function with the same signature. Dtypes of inputs and outputs do not change.
    """

    def widen_equation(equation: JaxprEqn, widen: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
        name = equation.primitive.name
        own = own_sum(equation) if own_sum and name in SUMS else None
        if own is not None:
            return replace_equation(equation, own)
        if name in SUMS and _output_dtype(equation) in HALF:
            return _sum_in_float32(equation)
        return equation if name in OPAQUE else with_inner_jaxprs(equation, widen)

    def summed(*args: PyTree) -> PyTree:
        closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
        widened = rewrite(closed, widen_equation)
        leaves = jaxpr_as_fun(widened)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(output), leaves)

    return summed


def _output_dtype(equation: JaxprEqn) -> DType:
    dtype: DType = cast(jax.core.ShapedArray, equation.outvars[0].aval).dtype
    return dtype


def _sum_in_float32(equation: JaxprEqn) -> JaxprEqn:
    """Replace a sum by a call of a function that widens, sums and rounds."""

    def widened(args: Sequence[jax.Array]) -> jax.Array:
        wide = [x.astype(jnp.float32) if x.dtype in HALF else x for x in args]
        total: jax.Array
        if equation.primitive.name == "scatter-add":
            total = _scatter_add(equation, *wide)
        else:
            total = equation.primitive.bind(*wide, **equation.params)
        return total.astype(_output_dtype(equation))

    return replace_equation(equation, widened)


def _scatter_add(
    equation: JaxprEqn, operand: jax.Array, indices: jax.Array, updates: jax.Array
) -> jax.Array:
    # The equation cannot be bound again with wider inputs: its parameters hold an addition in the
    # 16-bit dtype.
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: equation.params[name] for name in names}
    return jax.lax.scatter_add(operand, indices, updates, **options)
