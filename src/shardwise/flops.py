"""Facts about a function that are read from its trace: FLOPs, kernels, primitives.

A jaxpr is the program as JAX traced it, before any compiler changes it. Counting there gives the
same number on every platform, and before anything is compiled. Compilers report less: XLA's cost
analysis counts the body of a loop once, does not look inside custom kernels, and includes
rematerialized work, which MFU must exclude.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import jax
from jax.extend import core

from shardwise.tree import PyTree


def count_flops(function: Callable[..., PyTree], *args: PyTree) -> float:
    """Return the floating-point operations of all matmuls and convolutions of `function`.

    A multiply-add counts as two operations. The body of a scan counts once per iteration.
    Element-wise operations are not counted, as is usual for MFU. Pass the forward function:
    rematerialization then adds nothing, because it is part of the backward pass.

    Args:
        function: a function of pytrees of arrays.
        *args: its arguments, as arrays or `jax.ShapeDtypeStruct`.

    Example:
        >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
        >>> w = jax.ShapeDtypeStruct((16, 4), "float32")
        >>> count_flops(lambda x, w: x @ w, x, w)
        1024.0
    """
    return count_jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr)


def count_jaxpr_flops(jaxpr: core.Jaxpr) -> float:
    """Return what `count_flops` returns, for a function that is traced already."""
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def count_kernels(jaxpr: core.Jaxpr) -> dict[str, float]:
    """Return the FLOPs of one call of each Pallas kernel in `jaxpr`, by kernel name.

    The text of a compiled program says only that a kernel is called, not what the kernel computes.
    """
    flops: dict[str, float] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            flops[_kernel_name(equation.params)] = _equation_flops(equation)
        else:
            for inner in inner_jaxprs(equation.params):
                flops.update(count_kernels(inner))
    return flops


def calls_function(jaxpr: core.Jaxpr, name: str) -> bool:
    """Return whether `jaxpr`, or a jaxpr nested in it, calls a jitted function of this name."""
    return any(
        equation.params.get("name") == name
        or any(calls_function(inner, name) for inner in inner_jaxprs(equation.params))
        for equation in jaxpr.eqns
    )


def inner_jaxprs(params: Mapping[str, object]) -> Iterator[core.Jaxpr]:
    """Yield the jaxprs among the parameters of an equation, such as the body of a scan."""
    for value in params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def _equation_flops(equation: core.JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    # cuDNN's fused attention is opaque to the trace. `cpu_attention` skips keys that no query sees,
    # and is counted like the implementations that compute them.
    if (
        name.startswith("dot_product_attention_fwd")
        or params.get("name") == "cpu_attention"
    ):
        return _attention_flops(equation)
    if name == "mpmd_map":
        return _mosaic_kernel_flops(equation)
    if name == "cond":
        return max(count_jaxpr_flops(branch.jaxpr) for branch in params["branches"])
    repeats = 1
    if name == "scan":
        repeats = params["length"]
    elif name == "pallas_call":
        grid = params["grid_mapping"].grid
        repeats = math.prod(size for size in grid if isinstance(size, int))
    return repeats * sum(count_jaxpr_flops(inner) for inner in inner_jaxprs(params))


def _dot_flops(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left_shape = _shape(equation.invars[0])
    products_per_output: int = math.prod(left_shape[dim] for dim in contracted)
    return 2.0 * math.prod(_shape(equation.outvars[0])) * products_per_output


def _convolution_flops(equation: core.JaxprEqn) -> float:
    kernel_shape = _shape(equation.invars[1])
    out_features: int = kernel_shape[equation.params["dimension_numbers"].rhs_spec[0]]
    output_size = math.prod(_shape(equation.outvars[0]))
    return 2.0 * output_size * math.prod(kernel_shape) / out_features


def _attention_flops(equation: core.JaxprEqn) -> float:
    """Two matmuls, `q @ k.T` and `scores @ v`, with q of shape (B, T, H, K) and k (B, S, H, K)."""
    q_shape, k_shape = map(_shape, equation.invars[:2])
    return 4.0 * math.prod(q_shape) * k_shape[1]


def _mosaic_kernel_flops(equation: core.JaxprEqn) -> float:
    """Kernels named `product_...` multiply their first two arguments, (N, D) and (D, F)."""
    if not _kernel_name(equation.params).startswith("product_"):
        return 0.0
    return 2.0 * math.prod(_shape(equation.invars[0])) * _shape(equation.outvars[0])[1]


def _shape(variable: core.Var | core.Literal) -> tuple[int, ...]:
    shape: tuple[int, ...] = cast(jax.core.ShapedArray, variable.aval).shape
    return shape


def _kernel_name(params: Mapping[str, object]) -> str:
    name = params.get("name") or getattr(params.get("name_and_src_info"), "name", None)
    return str(name or "kernel")
