"""Programs that give the same bits every time, on GPUs.

CPUs and TPUs always do. On a GPU three things do not, by default:

- Scatters add with atomic instructions, in any order. `sum_rows` adds the gradients of embeddings
  in a fixed order, and XLA sorts the indices of all other scatters first.
- The backward pass of cuDNN's attention adds the gradient of the queries with atomic instructions.
  cuDNN has another kernel for it.
- XLA measures several algorithms for a matmul or a convolution and takes the fastest. A second
  start may take another one. With `OPTIONS`, XLA takes the first that the library proposes.

`OPTIONS` is the switch of XLA for all of them. Alone, it fails for a model with two equal
attention layers (jax 0.11.2, `raw_hash_map<>::at`): XLA looks up the program of an attention by its
configuration, but it sets `force_deterministic` only in the first of several equal ones. So it is
set in all of them before XLA compiles.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.mlir import ir
from jax.sharding import Mesh

from shardwise.kernels.lookup import sum_rows
from shardwise.kernels.platform import platform
from shardwise.tree import PyTree

OPTIONS: dict[str, bool | str] = {"xla_gpu_exclude_nondeterministic_ops": True}

# Custom calls of attention begin with this. Their configuration is JSON.
CUDNN_ATTENTION = "__cudnn$fmha"
ATTENTION_CONFIG = "cudnn_fmha_backend_config"
# The attribute of a custom call that holds its configuration.
CONFIG_ATTRIBUTES = ("mhlo.backend_config", "backend_config")


@dataclass(frozen=True, eq=False)
class DeterministicJit:
    """A jitted function of a state and other arguments whose attention is deterministic.

    Attributes:
        jitted: the function, jitted with `OPTIONS`.
        programs: the compiled programs, by shapes and shardings of all arguments but the state.
    """

    jitted: jax.stages.Wrapped
    programs: dict[tuple[object, ...], jax.stages.Compiled] = field(
        default_factory=dict
    )

    def trace(self, *args: PyTree) -> jax.stages.Traced:
        """Trace the function."""
        return self.jitted.trace(*args)

    def __call__(self, state: PyTree, *args: PyTree) -> PyTree:
        """Call the function; compile it for arguments of new shapes."""
        key = tuple(
            (leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))
            for leaf in jax.tree.leaves(args)
        )
        if key not in self.programs:
            lowered = adapt(self, self.trace(state, *args).lower())
            with explained(self):
                self.programs[key] = lowered.compile()
        return self.programs[key](state, *args)


def needs_options(mesh: Mesh, deterministic: bool) -> bool:
    """Return whether a program must be compiled with `OPTIONS` to be deterministic."""
    return deterministic and mesh.devices.flat[0].platform == "gpu"


@contextmanager
def explained(function: Callable[..., PyTree]) -> Iterator[None]:
    """Add the remedy to an error of the compiler, if the function must be deterministic."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if isinstance(function, DeterministicJit):
            error.add_note(
                "This program must be deterministic. If the compiler has no deterministic kernel "
                "for an operation, train with Run(deterministic=False) or --no-deterministic."
            )
        raise


def adapt(
    function: Callable[..., PyTree], lowered: jax.stages.Lowered
) -> jax.stages.Lowered:
    """Force the attention of a lowered function, if the function must be deterministic."""
    is_forced = isinstance(function, DeterministicJit)
    return force_attention(lowered) if is_forced else lowered


def deterministic_jit(
    function: Callable[..., PyTree], **options: Any
) -> DeterministicJit:
    """Return a function of a state and other arguments as a deterministic jitted function.

    Args:
        function: the function.
        **options: arguments of `jax.jit`, with `OPTIONS` among the `compiler_options`.
    """
    return DeterministicJit(jax.jit(function, **options))


def force_attention(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """Set `force_deterministic` in every attention of cuDNN. `lowered` is changed and returned."""
    module = cast(ir.Module, lowered.compiler_ir("stablehlo"))
    _force_attention(module.operation)
    return lowered


def _force_attention(operation: ir.Operation) -> None:
    for region in operation.regions:
        for block in region:
            for inner in block:
                _force_call(inner.operation)
                _force_attention(inner.operation)


def _force_call(call: ir.Operation) -> None:
    if call.name != "stablehlo.custom_call":
        return
    target = ir.StringAttr(call.attributes["call_target_name"]).value
    if not target.startswith(CUDNN_ATTENTION):
        return
    for name in CONFIG_ATTRIBUTES:
        text = (
            ir.StringAttr(call.attributes[name]).value
            if name in call.attributes
            else ""
        )
        if text:
            config = json.loads(text)
            config[ATTENTION_CONFIG]["force_deterministic"] = True
            with call.context:
                call.attributes[name] = ir.StringAttr.get(json.dumps(config))


def sum_rows_in_order(
    equation: JaxprEqn,
) -> Callable[[Sequence[jax.Array]], jax.Array] | None:
    """Return a function that computes an equation with `sum_rows`, if it is such a sum on a GPU.

    It is the gradient of a lookup of rows, such as that of `nnx.Embed`: a scatter that adds rows to
    a matrix. XLA would sort all their values, 20 ms for a (65536, 768) array on an H200.
    """
    if platform() != "gpu" or not _adds_rows(equation):
        return None
    clips = equation.params["mode"] == lax.GatherScatterMode.CLIP

    def add(args: Sequence[jax.Array]) -> jax.Array:
        table, indices, rows = args
        indices = indices.reshape(-1)
        if clips:
            indices = indices.clip(0, len(table) - 1)
        sums = sum_rows(len(table), indices, rows.reshape(-1, rows.shape[-1]))
        return table + sums.astype(table.dtype)

    return add


def _adds_rows(equation: JaxprEqn) -> bool:
    """Return whether an equation adds floating-point rows to a matrix at given indices."""
    if equation.primitive.name != "scatter-add" or equation.params["unique_indices"]:
        return False
    table, indices, rows = (
        cast(jax.core.ShapedArray, variable.aval) for variable in equation.invars
    )
    if table.ndim != 2 or not jax.numpy.issubdtype(table.dtype, jax.numpy.floating):
        return False
    adds_rows = lax.ScatterDimensionNumbers(
        update_window_dims=(rows.ndim - 1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    has_full_rows = rows.shape == (*indices.shape[:-1], table.shape[1])
    return has_full_rows and bool(equation.params["dimension_numbers"] == adds_rows)
