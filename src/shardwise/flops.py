"""Counts the arithmetic of a function from its trace, independent of any compiler or device."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of the matrix products and convolutions of `function`, two for each multiply and add.

    `args` may be arrays or shapes. The body of a scan counts as often as it runs. Element-wise work is left out, as is
    usual for MFU; so is what rematerialization does twice, when `function` is the forward pass.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: core.Jaxpr) -> float:
    return sum(_count_one(equation) for equation in jaxpr.eqns)


def _count_one(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return (
            2.0
            * math.prod(equation.outvars[0].aval.shape)
            * math.prod(left[dim] for dim in contracted)
        )
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / out_features
    if name.startswith(
        "dot_product_attention_fwd"
    ):  # cuDNN's, opaque to the trace: q is (B, T, H, K), k is (B, S, H, K)
        q, k = (variable.aval.shape for variable in equation.invars[:2])
        return 4.0 * math.prod(q) * k[1]
    if (
        params.get("name") == "cpu_attention"
    ):  # leaves out keys that no query sees; counted like the others, which compute them
        q, k = (variable.aval.shape for variable in equation.invars[:2])
        return 4.0 * math.prod(q) * k[1]
    if (
        name == "mpmd_map"
    ):  # a kernel in Mosaic GPU: `product_...` multiplies its first two arguments, of which the first is (N, D)
        return (
            2.0 * math.prod(equation.invars[0].aval.shape) * equation.outvars[0].aval.shape[1]
            if _is_product(params)
            else 0.0
        )
    if name == "cond":
        return max(_count(branch.jaxpr) for branch in params["branches"])
    times = params["length"] if name == "scan" else 1
    if name == "pallas_call":
        times = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return times * sum(_count(inner) for inner in _inner(params))


def count_kernels(jaxpr: core.Jaxpr) -> dict[str, float]:
    """Arithmetic of one call of each Pallas kernel in `jaxpr`, by the kernel's name: compilers see only that it is called."""
    found: dict[str, float] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            found[_kernel_name(equation.params)] = _count_one(equation)
        else:
            for inner in _inner(equation.params):
                found.update(count_kernels(inner))
    return found


def _is_product(params: dict[str, Any]) -> bool:
    return _kernel_name(params).startswith("product_")


def _kernel_name(params: dict[str, Any]) -> str:
    name = params.get("name") or getattr(params.get("name_and_src_info"), "name", None) or "kernel"
    return str(name)


def _inner(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one
