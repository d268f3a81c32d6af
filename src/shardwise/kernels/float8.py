"""Matmuls of numbers with 8 bits.

A tensor core of a Hopper GPU multiplies numbers of 8 bits twice as fast as numbers of 16 bits. Two
formats are used, as is common: e4m3 (3 bits of fraction, up to 448) for activations and weights,
and e5m2 (2 bits, up to 57,344) for gradients. Sums are float32.

- The forward pass and the gradient of the activations use 8 bits.
- The gradient of the weights uses 16 bits: its operands would have to be transposed copies, which
  cost more than they save, and it decides what the optimizer sees.

Scales are powers of two, so that scaling alone never rounds, and a scale that differs between two
meshes hardly changes a result. Values beyond the range of a format saturate.

A step calls `with_float8_matmuls`. Functions in this package that have a version of 8 bits ask
`uses_float8()` while they are traced; all other large matmuls are replaced in the trace. Without
the option nothing here is called. CPUs emulate the same rounding, so that tests cover it.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.typing import DTypeLike

from shardwise.errors import ConfigError
from shardwise.flops import MatmulChoice, kernel_name
from shardwise.kernels.platform import platform
from shardwise.tracing.jaxpr import (
    inner_jaxprs,
    replace_equation,
    rewrite,
    shape_of,
    with_inner_jaxprs,
)
from shardwise.tracing.reach import reached
from shardwise.tree import DType, PyTree

Array = jax.Array
# Contracted dims of the left and of the right operand of a matmul without batch dims.
Contracted: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

# Rows, depth and columns of a matmul, and why it does not use 8 bits.
MatmulSize: TypeAlias = tuple[int, int, int, str]

# Dtypes of operands that are converted.
WIDE = (jnp.bfloat16, jnp.float16, jnp.float32)
WEIGHTS = jnp.float8_e4m3fn
GRADIENTS = jnp.float8_e5m2

# The dtype of the operands of matmuls: "float8", or None for that of the arrays.
matmul_dtype = jax.make_user_context(default_value=None)

# A kernel takes the scale of a gradient from one of this many tokens. Its format has room for
# values that are 2**11 times as large as the largest one that is found, and 2**20 times as small.
SAMPLED = 8
SAMPLED_EXPONENT = 4
# The exponent of the largest value of a complete array: that of the largest number of its format.
EXACT_EXPONENT = {WEIGHTS: 8, GRADIENTS: 15}

# cuBLAS multiplies matrices of 8 bits if all their sizes are multiples of this.
MULTIPLE = 16
# Rates of an H200 in matmuls of 16 bits, FLOP/s, and when it converts an array, bytes/s. A matmul
# of 8 bits is twice as fast.
MATMUL_RATE = 7e14
CONVERSION_RATE = 2.2e12


@partial(
    jax.tree_util.register_dataclass, data_fields=("wide", "narrow"), meta_fields=()
)
@dataclass(frozen=True)
class Narrowed:
    """Activations, and their copy in 8 bits for the next matmul.

    Gradients belong to `wide`.

    Attributes:
        wide: (N, D), 16 or 32 bits.
        narrow: (N, D), 8 bits, not scaled.
    """

    wide: Array
    narrow: Array

    @property
    def dtype(self) -> DType:
        """The dtype that results have too."""
        return self.wide.dtype


def uses_float8() -> bool:
    """Return whether matmuls of the current trace have operands of 8 bits."""
    return bool(matmul_dtype.value == "float8")


def narrow(x: Array, scale: Array | float = 1.0, dtype: DType = WEIGHTS) -> Array:
    """Return `x * scale` in 8 bits. Values out of range saturate."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)


def narrow_exactly(x: Array, dtype: DType = WEIGHTS) -> tuple[Array, Array]:
    """Return an array in 8 bits and its scale, for which the largest value is just in range."""
    scale = _power_of_two(jnp.max(jnp.abs(x)), EXACT_EXPONENT[dtype])
    return narrow(x, scale, dtype), scale


def gradient_scale(g: Array) -> Array:
    """Return a scale for gradients of tokens (N, D) in e5m2, from some of the tokens.

    Many tokens may have no gradient: those of a prompt or of padding, at the same places of all
    sequences. So the place of the token that is read differs between groups of tokens.
    """
    sample = g
    if g.shape[0] % SAMPLED == 0:
        # Not a slice with a stride: on a mesh this one moves nothing.
        groups = g.reshape(-1, SAMPLED, *g.shape[1:])
        # Multiples of the golden ratio: any regular choice of groups has all places.
        number = jnp.arange(len(groups), dtype=jnp.uint32)
        place = (number * jnp.uint32(2654435769)) >> (32 - int(math.log2(SAMPLED)))
        place = place.astype(jnp.int32).reshape(-1, *(1,) * g.ndim)
        sample = jnp.take_along_axis(groups, place, axis=1, mode="promise_in_bounds")
    return _power_of_two(jnp.max(jnp.abs(sample)), SAMPLED_EXPONENT)


def _power_of_two(largest: Array, exponent: int) -> Array:
    """Return the power of two that brings a value to at most `2 ** exponent`, float32."""
    # The exponent e of the largest value: 2 ** (e - 1) <= largest < 2 ** e.
    _, e = jnp.frexp(largest.astype(jnp.float32))
    is_usual = jnp.isfinite(largest) & (largest > 0)
    power = jnp.where(is_usual, jnp.clip(exponent - e, -100, 100), 0)
    # The bits of the number: `jnp.exp2` rounds.
    return lax.bitcast_convert_type((power.astype(jnp.int32) + 127) << 23, jnp.float32)


def matmul8(
    a: Array,
    b: Array,
    contracted: Contracted,
    factor: Array,
    dtype: DType,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """Return a matmul of arrays with 8 bits, times a factor.

    Args:
        a: left operand, 8 bits.
        b: right operand, 8 bits.
        contracted: the contracted dims of both.
        factor: float32, a power of two.
        dtype: the dtype of the result.
        precision: `HIGHEST` to round sums of a Hopper GPU to float32, not to fewer bits.
    """
    dims = (contracted, ((), ()))
    if platform() == "gpu":
        # cuBLAS scales and adds what follows in its epilogue.
        product = lax.dot_general(
            a, b, dims, precision=precision, preferred_element_type=dtype
        )
        return product * factor.astype(dtype)
    product = lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), dims)
    return (product * factor).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def float8_matmul(
    x: Array, weights: Array, contracted: Contracted, dtype: DType
) -> Array:
    """Return a matmul whose forward pass and whose gradient of `x` use 8 bits.

    Args:
        x: activations.
        weights: weights; their gradient uses the dtypes of the arrays.
        contracted: the contracted dims of both.
        dtype: the dtype of the result.
    """
    return _float8_forward(x, weights, contracted, dtype)[0]


def _float8_forward(
    x: Array, weights: Array, contracted: Contracted, dtype: DType
) -> tuple[Array, tuple[Array, Array]]:
    (x8, x_scale), (w8, w_scale) = narrow_exactly(x), narrow_exactly(weights)
    y = matmul8(x8, w8, contracted, 1 / (x_scale * w_scale), dtype)
    return y, (x, weights)


def _float8_backward(
    contracted: Contracted, dtype: DType, residuals: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, weights = residuals

    def dot(weights: Array) -> Array:
        dims = (contracted, ((), ()))
        return lax.dot_general(x, weights, dims, preferred_element_type=dtype)

    (w8, w_scale), (g8, g_scale) = narrow_exactly(weights), narrow_exactly(g, GRADIENTS)
    # The gradient of x contracts all dims of the weights that the matmul left.
    left = tuple(i for i in range(weights.ndim) if i not in contracted[1])
    num_kept = x.ndim - len(contracted[0])
    from_g = tuple(range(num_kept, g.ndim))
    product = matmul8(g8, w8, (from_g, left), 1 / (g_scale * w_scale), x.dtype)
    # Its dims: those of x that were kept, then the contracted ones, as the weights order them.
    order = sorted(range(len(contracted[1])), key=contracted[1].__getitem__)
    kept = [i for i in range(x.ndim) if i not in contracted[0]]
    dims = [*kept, *(contracted[0][i] for i in order)]
    dx = product.transpose([dims.index(i) for i in range(x.ndim)])
    (dweights,) = jax.linear_transpose(dot, weights)(g)
    return dx, dweights


float8_matmul.defvjp(_float8_forward, _float8_backward)


def with_float8_matmuls(
    function: Callable[..., PyTree], weights: Sequence[int]
) -> Callable[..., PyTree]:
    """Return a function whose large matmuls use 8 bits.

    Functions with custom gradients are left as they are: they ask `uses_float8()`, before they
    are differentiated. Rules of custom gradients are traced later, without the context.

    Args:
        function: a function of pytrees of arrays. While it is called, it raises `ConfigError` if
            no matmul is changed.
        weights: the numbers of the arguments that are parameters. An operand of a matmul that
            depends on them alone counts as weights, and the other one as activations.
    """

    def changed(*args: PyTree) -> PyTree:
        with matmul_dtype("float8"):
            closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
        is_activation = [
            number not in weights
            for number, arg in enumerate(args)
            for _ in jax.tree.leaves(arg)
        ]
        activations = reached(closed, is_activation)

        def change(equation: JaxprEqn, visit: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
            name = equation.primitive.name
            if name == "dot_general" and not why_not_float8(equation):
                return replace_equation(equation, _as_float8(equation, activations))
            if name.startswith("custom_") or name == "pallas_call":
                return equation
            return with_inner_jaxprs(equation, visit)

        converted = rewrite(closed, change)
        if converted is closed and not has_float8(closed.jaxpr):
            raise ConfigError(
                "matmul_dtype='float8' has no effect: every matmul of this model takes longer to "
                "convert than it saves, or has dimensions that are not multiples of "
                f"{MULTIPLE}. Use matmul_dtype=None, or a wider model."
            )
        leaves = jaxpr_as_fun(converted)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(output), leaves)

    return changed


def matmul_choices(jaxpr: Jaxpr) -> tuple[MatmulChoice, ...]:
    """Return the matmuls of a forward pass by size, most FLOPs first.

    Those with batch dims, as in attention, never use 8 bits and do not count.

    Args:
        jaxpr: the forward pass, traced while `uses_float8()`.
    """
    counts: Counter[MatmulSize] = Counter()
    for size, count in _matmul_sizes(jaxpr):
        counts[size] += count
    choices = [MatmulChoice(*size, count) for size, count in counts.items()]
    choices.sort(key=lambda x: -x.rows * x.depth * x.columns * x.count)
    return tuple(choices)


def _matmul_sizes(
    jaxpr: Jaxpr, repeats: int = 1, custom: str | None = None
) -> Iterator[tuple[MatmulSize, int]]:
    """Yield the size of each matmul, and how often it is computed.

    Args:
        jaxpr: the traced function.
        repeats: how often it is called.
        custom: inside a function with custom gradients, why it does not use 8 bits.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), (batch, _) = params["dimension_numbers"]
            if batch:
                continue
            why = why_not_float8(equation) if custom is None else custom
            a, b = _operands(equation)
            depth = math.prod(a.shape[dim] for dim in contracted)
            yield (a.size // depth, depth, b.size // depth, why), repeats
        elif name == "mpmd_map" and kernel_name(params).startswith("product_"):
            rows, depth = shape_of(equation.invars[0])
            columns = shape_of(equation.outvars[0])[1]
            yield (rows, depth, columns, custom or ""), repeats
        else:
            inside = custom
            if custom is None and name.startswith("custom_"):
                inside = _why_not_inside(params)
            count = repeats * params["length"] if name == "scan" else repeats
            for inner in inner_jaxprs(params):
                yield from _matmul_sizes(inner, count, inside)


def _why_not_inside(params: dict[str, object]) -> str:
    """Return why the matmuls of a function with custom gradients do not use 8 bits; "" if they do.

    Args:
        params: the parameters of its equation.
    """
    inner = list(inner_jaxprs(params))
    if any(map(has_float8, inner)):
        return ""
    if any(has_float8(jaxpr, GRADIENTS) for jaxpr in inner):
        return "only the gradient of its input uses 8 bits"
    return "its function has custom gradients"


def has_float8(jaxpr: Jaxpr, dtype: DTypeLike = WEIGHTS) -> bool:
    """Return whether a value of a dtype of 8 bits is computed, in loops too."""
    for equation in jaxpr.eqns:
        if any(getattr(var.aval, "dtype", None) == dtype for var in equation.outvars):
            return True
        if any(has_float8(inner, dtype) for inner in inner_jaxprs(equation.params)):
            return True
    return False


def why_not_float8(equation: JaxprEqn) -> str:
    """Return why a `dot_general` is not computed with 8 bits; "" if it is."""
    (contracted, batch) = equation.params["dimension_numbers"]
    a, b = _operands(equation)
    if batch != ((), ()):
        return "it has batch dimensions"
    other = next((x.dtype for x in (a, b) if x.dtype not in WIDE), None)
    if other is not None:
        return f"an operand is {other}"
    depth = math.prod(a.shape[dim] for dim in contracted[0])
    sizes = (a.size // depth, depth, b.size // depth) if depth else (0,)
    if not depth or any(size % MULTIPLE for size in sizes):
        return f"a size is not a multiple of {MULTIPLE}"
    saved, cost = saved_seconds(*sizes), conversion_seconds(*sizes)
    if cost >= saved:
        return f"converting takes {cost / saved:.1f} times as long as it saves"
    return ""


def _operands(equation: JaxprEqn) -> list[ShapedArray]:
    return [cast(ShapedArray, var.aval) for var in equation.invars[:2]]


def saved_seconds(rows: int, depth: int, columns: int) -> float:
    """Return the time that 8 bits save in a matmul on an H200, forward and backward.

    Args:
        rows: the size of the left operand.
        depth: the size of the dimension that is contracted.
        columns: the size of the right operand.
    """
    # Half of the time of the forward pass, and of the gradient of the activations.
    return 2 * rows * depth * columns / MATMUL_RATE


def conversion_seconds(rows: int, depth: int, columns: int) -> float:
    """Return the time that it takes to convert the operands; arguments as in `saved_seconds`."""
    # The smaller operand is the weights, and costs little to convert.
    tokens, columns = max(rows, columns), min(rows, columns)
    # Activations and gradients of 16 bits are read twice and written once.
    return tokens * 5 * (depth + columns) / CONVERSION_RATE


def _as_float8(
    equation: JaxprEqn, activations: Collection[Var]
) -> Callable[..., Array]:
    """Return a function of the operands of a `dot_general` that multiplies with 8 bits.

    Args:
        equation: the `dot_general`.
        activations: the variables that depend on more than parameters.
    """
    (left, right), _ = equation.params["dimension_numbers"]
    _, b = _operands(equation)
    dtype = cast(ShapedArray, equation.outvars[0].aval).dtype

    def multiply(args: tuple[Array, Array]) -> Array:
        if _has_weights_on_the_right(equation, activations):
            return float8_matmul(*args, (left, right), dtype)
        product = float8_matmul(args[1], args[0], (right, left), dtype)
        # The dims of `b` come first: exchange them with those of `a`.
        num_b = b.ndim - len(right)
        order = (*range(num_b, product.ndim), *range(num_b))
        return product.transpose(order)

    return multiply


def _has_weights_on_the_right(equation: JaxprEqn, activations: Collection[Var]) -> bool:
    """Return whether the right operand of a matmul is the weights, whose gradient uses 16 bits.

    If both depend on the data, as in a layer whose weights another layer computes, or none, the
    smaller operand counts as the weights.
    """
    is_activation = [
        isinstance(atom, Var) and atom in activations for atom in equation.invars
    ]
    if is_activation[0] != is_activation[1]:
        return is_activation[0]
    a, b = _operands(equation)
    return bool(b.size <= a.size)
