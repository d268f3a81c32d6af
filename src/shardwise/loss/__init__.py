"""The contract of a loss function, and the facts that a trace of it reveals before compilation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from shardwise.data.layout import batch_shapes, num_rows
from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.flops import calls_function, count_jaxpr_flops
from shardwise.metrics import Mask, Mean
from shardwise.state import StateSpec, TrainState
from shardwise.tree import Batch, named_leaves

# One number: a scalar that is the mean over the batch, or a mean with its weight.
Metric: TypeAlias = jax.Array | float | Mean
LossValue: TypeAlias = Metric | tuple[Metric, Mapping[str, Metric]]
# `loss(model, batch)`, with an `nnx.Module` and a batch.
Loss: TypeAlias = Callable[..., LossValue]

# Metrics that the step computes itself. A loss cannot return a metric of one of these names.
RESERVED = (
    "loss",
    "weight",
    "grad_norm",
    "clipped_norm",
    "update_norm",
    "param_norm",
    "finite",
    "skipped",
    "lr",
    "step",
)


@dataclass(frozen=True)
class TracedLoss:
    """Facts about a loss that are known before anything is compiled.

    Attributes:
        shapes: shapes and dtypes of the batch that the loss was traced with.
        names: "loss", then the names of the additional metrics that the loss returns.
        scalars: those of `names` that come without one entry per example. If there are any, a batch
            cannot be padded.
        flops: floating-point operations of one forward pass.
        items: the sum of the weights of one batch, for example its number of tokens; masks count as
            all ones. None if the sum is only known when the step runs.
        has_barrier: whether the forward pass calls `stream_barrier` of `kernels.norm`.
    """

    shapes: Batch
    names: tuple[str, ...]
    scalars: tuple[str, ...]
    flops: float
    items: int | None
    has_barrier: bool


def trace_loss(spec: StateSpec, loss: Loss, batch: Batch) -> TracedLoss:
    """Trace `loss` for the model of `spec` and batches like `batch`. Nothing is compiled.

    Raises:
        ConfigError: if the loss raises, or if it returns something that is not a `LossValue`.
    """
    shapes = batch_shapes(batch)
    rows = num_rows(batch)
    # Filled while `forward` is traced: these facts are not part of its output.
    names: list[str] = []
    scalars: list[str] = []
    items: list[int | None] = []

    def forward(state: TrainState, batch: Batch, key: jax.Array) -> dict[str, Mean]:
        output = loss(spec.module(state, key), batch)
        means = as_means(output, rows)
        named = _named(output)
        names.extend(named)
        scalars.extend(
            name for name, value in named.items() if not _has_rows(value, rows)
        )
        value = named["loss"]
        items.append(value.items if isinstance(value, Mean) else rows)
        return means

    try:
        closed = jax.make_jaxpr(forward)(spec.abstract, shapes, jax.random.key(0))
    except ShardwiseError:
        raise
    except Exception as error:
        arrays = [
            f"{name} {x.dtype}{list(x.shape)}"
            for name, x in named_leaves(batch).items()
        ]
        raise ConfigError(
            f"the loss failed for a batch of {', '.join(arrays)}: {where(error)}"
        ) from error
    return TracedLoss(
        shapes=shapes,
        names=tuple(names),
        scalars=tuple(scalars),
        flops=count_jaxpr_flops(closed.jaxpr),
        items=items[-1],
        has_barrier=calls_function(closed.jaxpr, "stream_barrier"),
    )


def _has_rows(value: Metric, rows: int) -> bool:
    return isinstance(value, Mean) and value.has_rows(rows)


def as_means(output: LossValue, rows: int, mask: Mask | None = None) -> dict[str, Mean]:
    """Return the output of a loss as summed means, by name.

    Args:
        output: what the loss returned.
        rows: the number of examples in the batch, which is the weight of scalars.
        mask: booleans of shape `(rows,)`, False for padding.

    Returns:
        The loss as "loss", then its additional metrics.

    Raises:
        ConfigError: if a metric has a reserved name, or is an array that is not in a `Mean`.
    """
    named = _named(output)
    clashes = [name for name in list(named)[1:] if name in RESERVED]
    if clashes:
        raise ConfigError(
            f"the loss returns metrics named {', '.join(clashes)}. These names are reserved "
            f"({', '.join(RESERVED)}); rename the metrics."
        )
    means = {}
    for name, value in named.items():
        if isinstance(value, Mean):
            means[name] = value.summed(mask)
        elif jnp.ndim(value) == 0:
            means[name] = Mean(
                jnp.asarray(value, jnp.float32) * rows, jnp.float32(rows)
            )
        else:
            raise ConfigError(
                f"the loss returned an array of shape {jnp.shape(value)} for '{name}'. Return a "
                "scalar, or Mean(total, weight) with one entry per example."
            )
    return means


def _named(output: LossValue) -> dict[str, Metric]:
    loss, extra = output if isinstance(output, tuple) else (output, {})
    return {"loss": loss, **extra}
