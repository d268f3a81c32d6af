"""Facts about a function that are read from its trace: FLOPs, kernels, primitives.

A jaxpr is the program as JAX traced it, before any compiler changes it. Counting there gives the
same number on every platform, and before anything is compiled. Compilers report less: XLA's cost
analysis counts the body of a loop once, does not look inside custom kernels, and includes
rematerialized work, which MFU must exclude.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import flax
import jax
from jax.extend import core

from shardwise.errors import PACKAGE
from shardwise.text import show_matmuls
from shardwise.tracing.jaxpr import (
    JAX,
    Frame,
    frames_of,
    inner_jaxprs,
    is_defined_in_jax,
    shape_of,
    user_frame,
)
from shardwise.tree import PyTree

# Code whose choice of a dtype is deliberate: a layer of Flax computes in the compute dtype unless
# the user set another one, and so do the models of shardwise.
DELIBERATE = (str(Path(flax.__file__).parent), PACKAGE)
# Kernels compute in the dtypes that their caller passes, so the caller decides.
TRANSPARENT = (JAX, f"{PACKAGE}/kernels")
# The functions of `kernels.experts` that apply experts to tokens.
EXPERTS = ("_apply_experts", "_apply_experts_with_capacity")
# The kernels of `kernels.flash`, and how many matmuls of the size of `q @ k.T` they compute.
ATTENTION_MATMULS = {"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4}


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
    return sum(matmul.flops for matmul in _matmuls(jaxpr))


def count_step_flops(jaxpr: core.Jaxpr) -> float:
    """Return the FLOPs of a traced step as the devices compute it, all of them together.

    The blocks of rows that experts multiply are not full, and with few tokens that is most of the
    work: it counts here, but not in `count_jaxpr_flops`. TPUs have no blocks.
    """
    padded = sum(matmul.flops for matmul in _matmuls(jaxpr, is_padded=True))
    return max(padded, count_jaxpr_flops(jaxpr))


@dataclass(frozen=True)
class MatmulDtypes:
    """The dtypes of the matmuls and convolutions of a function.

    Attributes:
        flops: floating-point operations by the dtype of the operands, most operations first.
        unasked: the part of `flops` whose dtype nobody chose. An operation inside a layer of Flax
            or inside shardwise has a chosen dtype; an operation in the user's own code has the
            dtype that JAX promotes its operands to.
        lines: the line of the user's code with the most operations, by dtype: "model.py:41".
        unasked_lines: the same, for the operations in `unasked`.
        choices: with `Run.matmul_dtype`, the matmuls and which of them use 8 bits. The dtypes in
            the other fields are those without it.
    """

    flops: Mapping[str, float]
    unasked: Mapping[str, float]
    lines: Mapping[str, str]
    unasked_lines: Mapping[str, str]
    choices: tuple["MatmulChoice", ...] = ()

    def __str__(self) -> str:
        """Return a text such as "matmuls: 93 % bfloat16, 7 % float32 (model.py:41)"."""
        note = "; float8 where that is faster" if self.choices else ""
        return show_matmuls(self.flops, self.lines) + note


@dataclass(frozen=True)
class MatmulChoice:
    """Matmuls of one size in a forward pass, and whether they use 8 bits.

    Attributes:
        rows: the size of the left operand, usually the number of tokens.
        depth: the size of the dimension that is contracted.
        columns: the size of the right operand.
        why_not: why they do not use 8 bits; "" if they do.
        count: how many there are.
    """

    rows: int
    depth: int
    columns: int
    why_not: str
    count: int


def matmul_dtypes(jaxpr: core.Jaxpr) -> MatmulDtypes:
    """Return the FLOPs of the matmuls and convolutions of `jaxpr` by the dtype of their operands.

    Operands of two dtypes count as the dtype that JAX promotes them to.

    Example:
        >>> x = jax.ShapeDtypeStruct((8, 16), "bfloat16")
        >>> w = jax.ShapeDtypeStruct((16, 4), "bfloat16")
        >>> matmul_dtypes(jax.make_jaxpr(lambda x, w: x @ w)(x, w).jaxpr).flops
        {'bfloat16': 1024.0}
    """
    matmuls = list(_matmuls(jaxpr))
    unasked = [matmul for matmul in matmuls if not matmul.is_asked]
    return MatmulDtypes(
        _by_dtype(matmuls),
        _by_dtype(unasked),
        _lines(matmuls),
        _lines(unasked),
    )


def _by_dtype(matmuls: list["_Matmul"]) -> dict[str, float]:
    flops: dict[str, float] = {}
    for matmul in matmuls:
        flops[matmul.dtype] = flops.get(matmul.dtype, 0.0) + matmul.flops
    return dict(sorted(flops.items(), key=lambda item: -item[1]))


def _lines(matmuls: list["_Matmul"]) -> dict[str, str]:
    """Return the line with the most operations of each dtype."""
    flops: dict[tuple[str, str], float] = {}
    for matmul in matmuls:
        if matmul.line:
            place = (matmul.dtype, matmul.line)
            flops[place] = flops.get(place, 0.0) + matmul.flops
    # Ascending, so that the line with the most operations is the last to be stored.
    return dict(sorted(flops, key=lambda place: flops[place]))


def count_kernels(jaxpr: core.Jaxpr) -> dict[str, float]:
    """Return the FLOPs of one call of each Pallas kernel in `jaxpr`, by kernel name.

    The text of a compiled program says only that a kernel is called, not what the kernel computes.
    """
    flops: dict[str, float] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            own = _equation_matmuls(equation, equation)
            flops[kernel_name(equation.params)] = sum(matmul.flops for matmul in own)
        else:
            for inner in inner_jaxprs(equation.params):
                flops.update(count_kernels(inner))
    return flops


def count_inactive(jaxpr: core.Jaxpr) -> int:
    """Return the number of parameters of experts that a token does not pass through, on average.

    Args:
        jaxpr: a forward pass.
    """
    inactive = 0
    for equation in jaxpr.eqns:
        if equation.params.get("name") in EXPERTS and _has_choices(equation):
            num_choices = shape_of(equation.invars[1])[-1]
            kernels = [shape_of(kernel) for kernel in equation.invars[3:]]
            inactive += sum(
                math.prod(shape[1:]) * (shape[0] - num_choices) for shape in kernels
            )
            continue
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in inner_jaxprs(equation.params):
            inactive += repeats * count_inactive(inner)
    return inactive


@dataclass(frozen=True)
class _Matmul:
    """A matmul or a convolution.

    Attributes:
        flops: its operations, in all iterations of the loops around it.
        dtype: the dtype of its operands.
        line: the line of the user's code that it belongs to, or "" if there is none.
        is_asked: whether a layer of Flax or shardwise chose the dtype.
    """

    flops: float
    dtype: str
    line: str
    is_asked: bool


def _matmuls(
    jaxpr: core.Jaxpr, caller: core.JaxprEqn | None = None, is_padded: bool = False
) -> Iterator[_Matmul]:
    """Yield all matmuls.

    Args:
        jaxpr: the traced function.
        caller: the equation to name as the source, if not their own.
        is_padded: whether experts count with the blocks that they multiply, see
            `count_step_flops`.
    """
    for equation in jaxpr.eqns:
        yield from _equation_matmuls(equation, caller or equation, is_padded)


def _equation_matmuls(
    equation: core.JaxprEqn, source: core.JaxprEqn, is_padded: bool = False
) -> Iterator[_Matmul]:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        yield _matmul(_dot_flops(equation), equation, source)
    elif name == "conv_general_dilated":
        yield _matmul(_convolution_flops(equation), equation, source)
    # cuDNN's fused attention is opaque to the trace. `cpu_attention` skips keys that no query sees,
    # and is counted like the implementations that compute them. If it has other outputs, it was
    # differentiated, and its matmuls are counted.
    elif name.startswith("dot_product_attention_fwd") or (
        params.get("name") == "cpu_attention" and len(equation.outvars) == 1
    ):
        yield _matmul(_attention_flops(equation), equation, source)
    # Each token passes through the experts that it chose, whatever the implementation computes.
    elif not is_padded and params.get("name") in EXPERTS and _has_choices(equation):
        yield _matmul(_expert_flops(equation), equation, source)
    elif name == "mpmd_map":
        if flops := _mosaic_kernel_flops(equation):
            yield _matmul(flops, equation, source)
    elif name == "cond":
        branches = [branch.jaxpr for branch in params["branches"]]
        costliest = max(branches, key=count_jaxpr_flops)
        yield from _matmuls(costliest, is_padded=is_padded)
    else:
        yield from _inner_matmuls(equation, source, is_padded)


def _inner_matmuls(
    equation: core.JaxprEqn, source: core.JaxprEqn, is_padded: bool
) -> Iterator[_Matmul]:
    name, params = equation.primitive.name, equation.params
    repeats = 1
    if name == "scan":
        repeats = params["length"]
    elif name == "while":
        # `kernels.grouped` names its loops after the number of iterations that it expects.
        scope = str(equation.source_info.name_stack)
        repeats = int(trips[1]) if (trips := re.search(r"trips_(\d+)", scope)) else 1
    elif name == "pallas_call":
        grid = params["grid_mapping"].grid
        repeats = math.prod(size for size in grid if isinstance(size, int))
    elif name == "shard_map":
        # The shapes inside are those of one device. Names differ between JAX releases.
        mesh = params["mesh"]
        axes = params.get("newly_manual_axes") or params["manual_axes"]
        repeats = math.prod(mesh.shape[axis] for axis in axes)
    for inner in inner_jaxprs(params):
        # JAX traces its jitted library functions once, and every caller gets the same equations.
        # Their source is then the first caller, so the equation of the call is used instead.
        is_shared = name in ("jit", "pjit") and is_defined_in_jax(inner)
        for matmul in _matmuls(inner, source if is_shared else None, is_padded):
            yield replace(matmul, flops=repeats * matmul.flops)


def _matmul(flops: float, equation: core.JaxprEqn, source: core.JaxprEqn) -> _Matmul:
    operands = [
        cast(jax.core.ShapedArray, operand.aval).dtype
        for operand in equation.invars[:2]
    ]
    # JAX has no common type of two formats of 8 bits, which devices multiply.
    is_float8 = all(str(dtype).startswith("float8") for dtype in operands)
    dtype = "float8" if is_float8 else str(jax.numpy.result_type(*operands))
    deciding = [
        frame for frame in frames_of(source) if not _starts_in(frame, TRANSPARENT)
    ]
    own = user_frame(source)
    return _Matmul(
        flops,
        dtype,
        line=f"{Path(own.file_name).name}:{own.line_num}" if own else "",
        is_asked=bool(deciding) and _starts_in(deciding[0], DELIBERATE),
    )


def _starts_in(frame: Frame, folders: tuple[str, ...]) -> bool:
    return frame.file_name.startswith(folders)


def _dot_flops(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left_shape = shape_of(equation.invars[0])
    products_per_output: int = math.prod(left_shape[dim] for dim in contracted)
    return 2.0 * math.prod(shape_of(equation.outvars[0])) * products_per_output


def _convolution_flops(equation: core.JaxprEqn) -> float:
    kernel_shape = shape_of(equation.invars[1])
    out_features: int = kernel_shape[equation.params["dimension_numbers"].rhs_spec[0]]
    output_size = math.prod(shape_of(equation.outvars[0]))
    return 2.0 * output_size * math.prod(kernel_shape) / out_features


def _attention_flops(equation: core.JaxprEqn) -> float:
    """Two matmuls, `q @ k.T` and `scores @ v`, with q of shape (B, T, H, K) and k (B, S, H, K)."""
    q_shape, k_shape = map(shape_of, equation.invars[:2])
    return 4.0 * math.prod(q_shape) * k_shape[1]


def _has_choices(equation: core.JaxprEqn) -> bool:
    """Return whether the second argument are choices (B, T, k), as in a forward pass."""
    if len(equation.invars) < 4:
        # A part of it that does not depend on what is differentiated.
        return False
    aval = cast(jax.core.ShapedArray, equation.invars[1].aval)
    return aval.ndim == 3 and jax.numpy.issubdtype(aval.dtype, jax.numpy.integer)


def _expert_flops(equation: core.JaxprEqn) -> float:
    """The matmuls of the chosen experts, with choices (B, T, k) and kernels (E, D, F)."""
    choice_shape = shape_of(equation.invars[1])
    kernels = [shape_of(kernel) for kernel in equation.invars[3:]]
    per_choice = sum(math.prod(shape[1:]) for shape in kernels)
    return 2.0 * math.prod(choice_shape) * per_choice


def _mosaic_kernel_flops(equation: core.JaxprEqn) -> float:
    """Kernels named `product_...` multiply their first two arguments, (N, D) and (D, F)."""
    name = kernel_name(equation.params)
    if name in ATTENTION_MATMULS:
        return _attention_flops(equation) / 2 * ATTENTION_MATMULS[name]
    if not name.startswith("product_"):
        return 0.0
    return (
        2.0 * math.prod(shape_of(equation.invars[0])) * shape_of(equation.outvars[0])[1]
    )


def kernel_name(params: Mapping[str, object]) -> str:
    """Return the name of a Pallas kernel, from the parameters of its equation."""
    name = params.get("name") or getattr(params.get("name_and_src_info"), "name", None)
    return str(name or "kernel")
