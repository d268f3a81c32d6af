"""Check that padding and micro-batches do not change the loss."""

import math
from dataclasses import replace
from typing import Literal, TypeAlias

from shardwise.data.layout import BatchLayout, make_layout, num_rows
from shardwise.errors import ConfigError
from shardwise.findings import Finding
from shardwise.kernels import float8
from shardwise.loss import Loss, TracedLoss, trace_loss
from shardwise.loss.trace import (
    inexact_metrics,
    size_dependent,
    summed_scalars,
    weight_is_trained,
)
from shardwise.loss.value import Kind
from shardwise.models.stack import default_microbatches
from shardwise.module import num_layers
from shardwise.sharding import Pipeline, num_batch_shards, num_stages
from shardwise.state import StateSpec

# What accumulation does with a loss that combines examples, see `Run.coupled_examples`.
CoupledExamples: TypeAlias = Literal["exact", "separate"]
# See `Run.matmul_dtype`.
MatmulDtype: TypeAlias = Literal["float8"]
# The first compute capability of NVIDIA GPUs with matmuls of 8 bits.
FLOAT8_CAPABILITY = (8, 9)


def train_layout(
    spec: StateSpec,
    loss: Loss,
    traced: TracedLoss,
    accumulate: int,
    microbatches: int | None = None,
    rounds: int = 1,
) -> tuple[StateSpec, BatchLayout]:
    """Return the layout of training batches, and the state with the `Pipeline` for them.

    Args:
        spec: the abstract state.
        loss: the loss.
        traced: the loss, traced with a batch.
        accumulate: the number of micro-batches that are computed one after the other.
        microbatches: the number of microbatches that a pipeline divides each of them into; None
            chooses it. It has no effect without a stage axis.
        rounds: how often each of them passes through all stages.

    Raises:
        ConfigError: if the batch size or the number of layers does not fit the mesh.
    """
    rows = num_rows(traced.shapes)
    shards = num_batch_shards(spec.mesh, spec.rules)
    if accumulate < 1 or accumulate > rows:
        raise ConfigError(
            f"accumulate={accumulate} cannot split a batch of {rows} examples. "
            f"Use a value between 1 and {rows}."
        )
    stages = num_stages(spec.mesh, spec.rules)
    per_stage, rest = divmod(microbatches or stages, stages)
    if stages > 1 and rest:
        raise ConfigError(
            f"microbatches={microbatches} is not a multiple of the {stages} stages of the mesh. "
            f"Use {max(per_stage, 1) * stages} or {(per_stage + 1) * stages}."
        )
    parts = accumulate * (per_stage if stages > 1 else 1)
    multiple = shards * parts
    padded = -(-rows // multiple) * multiple
    if padded != rows:
        _check_padding(spec, loss, traced, padded, shards, parts)
    layout = make_layout(traced.shapes, rows, padded, spec.mesh, spec.rules)
    if stages == 1:
        return spec, layout
    layers = num_layers(spec.definition)
    if layers % (stages * rounds):
        raise ConfigError(
            f"rounds={rounds}: {layers} layers cannot be divided into {stages} stages times "
            f"{rounds} rounds. Use rounds={math.gcd(layers // stages, rounds)}."
        )
    in_pipeline = padded * stages // (shards * accumulate)
    count = microbatches or default_microbatches(stages, in_pipeline)
    return replace(spec, pipeline=Pipeline(count, rounds)), layout


def check_pipeline(
    spec: StateSpec, loss: Loss, traced: TracedLoss, coupled_examples: CoupledExamples
) -> None:
    """Check that the layers of a pipeline may compute microbatches instead of the batch.

    Args:
        spec: the abstract state.
        loss: the loss.
        traced: the loss, traced with the complete batch.
        coupled_examples: see `Run.coupled_examples`.

    Raises:
        ConfigError: if examples meet each other or depend on their number, maybe in a layer, and
            the loss must be exact. Operations of which this is unknown are accepted.
    """
    if num_stages(spec.mesh, spec.rules) == 1 or coupled_examples == "separate":
        return
    metric = traced.metrics["loss"]
    if metric.worst.kind >= Kind.COUPLED:
        raise ConfigError(
            "on a mesh with a stage axis, the layers of a stack see the examples of one "
            f"microbatch, and {metric.reason}. Use a mesh without a stage axis. If examples are "
            'combined outside of the stack only, use coupled_examples="separate".'
        )
    larger = trace_loss(spec, loss, traced.shapes, rows=2 * num_rows(traced.shapes))
    if size_dependent(traced, larger):
        raise ConfigError(
            "on a mesh with a stage axis, the layers of a stack see the examples of one "
            "microbatch, and the loss of an example depends on their number. Use a mesh without a "
            "stage axis. If the number is used outside of the stack only, use "
            'coupled_examples="separate".'
        )


def check_matmul_dtype(
    spec: StateSpec, loss: Loss, traced: TracedLoss, matmul_dtype: str | None
) -> TracedLoss:
    """Check that the devices of a mesh multiply in this dtype.

    Returns:
        `traced`, which knows the matmuls that it changes.

    Raises:
        ConfigError: if they do not, or if the dtype is unknown.
    """
    if matmul_dtype is None:
        return traced
    if matmul_dtype != "float8":
        raise ConfigError(
            f"matmul_dtype={matmul_dtype!r} is unknown. Use 'float8' or None."
        )
    device = spec.mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", "9.0"))
    version = tuple(int(part) for part in capability.split("."))
    is_old = device.platform == "gpu" and version < FLOAT8_CAPABILITY
    if device.platform not in ("cpu", "gpu") or is_old:
        raise ConfigError(
            f"matmul_dtype='float8': {device.device_kind} has no matmuls of 8-bit floats. Use "
            "matmul_dtype=None there. Ada GPUs and newer ones have them, and CPUs emulate them."
        )
    if num_stages(spec.mesh, spec.rules) > 1:
        raise ConfigError(
            "matmul_dtype='float8' does not work in a pipeline yet. Use a mesh without a stage "
            "axis, or matmul_dtype=None."
        )
    with float8.matmul_dtype("float8"):
        choices = trace_loss(spec, loss, traced.shapes).matmuls.choices
    return replace(traced, matmuls=replace(traced.matmuls, choices=choices))


def check_accumulate(
    spec: StateSpec,
    loss: Loss,
    traced: TracedLoss,
    accumulate: int,
    coupled_examples: CoupledExamples,
) -> tuple[TracedLoss, tuple[str, ...]]:
    """Check that micro-batches give the result of the complete batch.

    Args:
        spec: the abstract state.
        loss: the loss.
        traced: the loss, traced with the complete batch.
        accumulate: the number of micro-batches; there is nothing to check for 1.
        coupled_examples: see `Run.coupled_examples`.

    Returns:
        The traced loss, with findings about metrics, and the scalars that are sums.

    Raises:
        ConfigError: if the loss would change and `coupled_examples` is "exact".
    """
    if accumulate == 1:
        return traced, ()
    rows = -(-num_rows(traced.shapes) // accumulate)
    part = trace_loss(spec, loss, traced.shapes, rows=rows)
    sums = summed_scalars(traced, part, accumulate)
    if weight_is_trained(spec, loss, part.shapes):
        raise ConfigError(
            f"accumulate={accumulate} would drop a part of the gradient: the weight of the loss "
            "depends on trained parameters. Use accumulate=1, or jax.lax.stop_gradient(weight)."
        )
    if coupled_examples == "separate":
        return traced, sums
    if traced.has_custom_gradient:
        raise ConfigError(
            f"accumulate={accumulate} may change the gradient: the loss or the model has a custom "
            "gradient (jax.custom_vjp), and shardwise cannot tell whether its backward pass is "
            'linear. If it is, coupled_examples="separate" gives the exact result. Otherwise use '
            "accumulate=1."
        )
    inexact = inexact_metrics(traced, part, accumulate)
    if "loss" in inexact:
        metric = traced.metrics["loss"]
        remedy = (
            'Use accumulate=1, or coupled_examples="separate" to compute the loss within each '
            f"micro-batch of {rows} examples and average."
        )
        if metric.worst.kind in (Kind.SUM, Kind.STATISTIC):
            remedy = (
                "Return Mean(total, weight) with both sums, for example "
                f"Mean((nats * mask).sum(), mask.sum()). Or: {remedy}"
            )
        raise ConfigError(
            f"accumulate={accumulate} would change the loss: {metric.reason}. {remedy}"
        )
    findings = [
        Finding(
            "metric-of-micro-batches",
            f"metric '{name}' is averaged over {accumulate} micro-batches, which differs from its "
            f"value for the whole batch: {traced.metrics[name].reason}",
            "Return Mean(total, weight) to make it exact.",
        )
        for name in inexact
    ]
    return replace(traced, findings=(*traced.findings, *findings)), sums


def _check_padding(
    spec: StateSpec,
    loss: Loss,
    traced: TracedLoss,
    padded: int,
    shards: int,
    parts: int,
) -> None:
    """Raise if padding to `padded` examples would change the loss or variables of the model."""
    rows = num_rows(traced.shapes)
    multiple = shards * parts
    is_pipelined = num_stages(spec.mesh, spec.rules) > 1
    name = "accumulate and microbatches" if is_pipelined else "accumulate"
    fact = (
        f"a batch of {rows} examples is not divisible by {multiple} "
        f"({shards} batch shards x {name}={parts})"
    )
    above = -(-rows // multiple) * multiple
    sizes = sorted({max(above - multiple, multiple), above})
    remedy = f"Use a batch size of {' or '.join(map(str, sizes))}"
    if traced.scalars:
        names = " and ".join(repr(name) for name in traced.scalars)
        raise ConfigError(
            f"{fact}. {remedy}, or return Mean(total, weight) with one entry per example for "
            f"{names}, so that the batch can be padded."
        )
    moving = spec.definition.moving
    if moving:
        first = moving[0]
        raise ConfigError(
            f"{fact}, and padding would change the statistics that the model keeps ('{first}'). "
            f"{remedy}."
        )
    larger = trace_loss(spec, loss, traced.shapes, rows=padded)
    changed = traced.dependent or size_dependent(traced, larger)
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{fact}, and padding would change '{name}': "
            f"{traced.metrics[name].reason}. {remedy}."
        )
