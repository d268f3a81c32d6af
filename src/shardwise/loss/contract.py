"""The contract of a loss function: what it is called with, and what it may return."""

import inspect
import zlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.metrics import Mask, Mean
from shardwise.tracing.assertions import chex_assertions
from shardwise.tree import Batch

# One number: a scalar, or a mean with its weight.
Metric: TypeAlias = jax.Array | float | Mean
LossValue: TypeAlias = Metric | tuple[Metric, Mapping[str, Metric]]
# `loss(model, batch)`, with an `nnx.Module` and a batch; also with `rngs` and `step`, by name.
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
# Arguments that a loss gets if its signature has them.
OPTIONAL = ("rngs", "step")
# The name of the stream of `rngs` among the random streams of a step.
STREAM = zlib.crc32(b"rngs of the loss")

FORMS = "Return a scalar, Mean(total, weight), or (loss, {name: metric}) for additional metrics."


def call_loss(
    loss: Loss, model: nnx.Module, batch: Batch, key: jax.Array, step: jax.Array
) -> LossValue:
    """Call a loss with the arguments that its signature asks for.

    Args:
        loss: `loss(model, batch)`, and by name `rngs` and `step` if it has such arguments.
        model: the model.
        batch: the batch.
        key: the root key of the random streams of this step.
        step: the number of steps before this one, an int32 scalar.
    """
    wanted = optional_arguments(loss)
    arguments: dict[str, nnx.Rngs | jax.Array] = {}
    if "rngs" in wanted:
        arguments["rngs"] = nnx.Rngs(jax.random.fold_in(key, STREAM))
    if "step" in wanted:
        arguments["step"] = step
    with chex_assertions():
        return loss(model, batch, **arguments)


def optional_arguments(loss: Loss) -> tuple[str, ...]:
    """Return which of `rngs` and `step` a loss takes.

    Raises:
        ConfigError: if the loss cannot be called with a model, a batch and these arguments.
    """
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        # Some callables written in C have no signature.
        return ()
    # `accelerate` wraps a loss.
    inner = inspect.unwrap(loss)
    bound = inner.keywords if isinstance(inner, partial) else {}
    wanted = tuple(
        name
        for name in OPTIONAL
        if name in signature.parameters
        and signature.parameters[name].kind
        in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and name not in bound
    )
    try:
        signature.bind(None, None, **dict.fromkeys(wanted))
    except TypeError as error:
        raise ConfigError(
            f"the loss has the signature {signature}, which does not fit: {error}. It is called "
            "as loss(model, batch), and with the keyword arguments rngs and step if it has them."
        ) from None
    return wanted


def as_means(
    output: LossValue,
    rows: int,
    mask: Mask | None = None,
    *,
    sums: Collection[str] = (),
    parts: int = 1,
) -> dict[str, Mean]:
    """Return the output of a loss as summed means, by name.

    Args:
        output: what the loss returned.
        rows: the number of examples in the batch, which is the weight of scalars.
        mask: booleans of shape `(rows,)`, False for padding.
        sums: the scalars that are sums over the examples rather than means.
        parts: the number of micro-batches that the batch is split into. The sum over the whole
            batch is that over all of them, so each one counts `parts` times in their mean.

    Returns:
        The loss as "loss", then its additional metrics.

    Raises:
        ConfigError: if the output has another form, if a metric has a reserved name, or if it is an
            array that is not in a `Mean`.
    """
    named = named_metrics(output)
    means = {}
    for name, value in named.items():
        if isinstance(value, Mean):
            means[name] = value.summed(mask)
        else:
            times = rows * parts if name in sums else rows
            means[name] = Mean(
                jnp.asarray(value, jnp.float32) * times, jnp.float32(rows)
            )
    return means


def named_metrics(output: LossValue) -> dict[str, Metric]:
    """Return the loss as "loss" and its additional metrics, by name.

    Raises:
        ConfigError: as for `as_means`.
    """
    loss, extra = _as_pair(output)
    named: dict[str, Metric] = {"loss": loss, **extra}
    clashes = [name for name in extra if name in RESERVED]
    if clashes:
        raise ConfigError(
            f"the loss returns metrics named {', '.join(clashes)}. These names are reserved "
            f"({', '.join(RESERVED)}); rename the metrics."
        )
    # Anything can be returned, whatever the types say.
    returned: dict[str, object] = {**named}
    for name, value in returned.items():
        if isinstance(value, Mean):
            continue
        if isinstance(value, tuple | list | Mapping) or value is None:
            raise ConfigError(
                f"the loss returned {_describe(value)} for '{name}'. {FORMS}"
            )
        if shape := getattr(value, "shape", ()):
            raise ConfigError(
                f"the loss returned an array of shape {shape} for '{name}'. Return a "
                "scalar, or Mean(total, weight) with one entry per example."
            )
    return named


def _as_pair(output: LossValue) -> tuple[Metric, Mapping[str, Metric]]:
    """Return the loss and its dictionary of metrics; raise for other tuples."""
    if not isinstance(output, tuple):
        return output, {}
    # Anything can be returned, whatever the types say.
    returned: tuple[object, ...] = output
    if len(returned) == 2 and isinstance(returned[1], Mapping):
        return output
    remedy = FORMS
    if len(returned) == 2:
        remedy = (
            "If this is a total and its weight, return Mean(total, weight). If the second value "
            'is a metric, return (loss, {"name": metric}).'
        )
    raise ConfigError(f"the loss returned {_describe(output)}. {remedy}")


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        parts = ", ".join(_describe(part) for part in value)
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
