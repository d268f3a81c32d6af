"""The facts that a trace of the loss reveals before anything is compiled."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.extend import core
from jax.typing import ArrayLike

from shardwise.data.layout import batch_shapes, num_rows
from shardwise.errors import ConfigError, ShardwiseError, place_of, where
from shardwise.findings import Finding
from shardwise.flops import (
    MatmulDtypes,
    count_inactive,
    count_jaxpr_flops,
    matmul_dtypes,
)
from shardwise.kernels.float8 import matmul_choices, uses_float8
from shardwise.loss.contract import Loss, Metric, call_loss, named_metrics
from shardwise.loss.dependence import Dependence, analyze
from shardwise.loss.fingerprint import jaxpr_fingerprint
from shardwise.loss.unkept import find_outside_modules, find_unkept, take_snapshot
from shardwise.loss.value import Kind, Value
from shardwise.metrics import Mean
from shardwise.module import Pure
from shardwise.precision import find_other_dtypes
from shardwise.state import StateSpec, TrainState
from shardwise.tracing.assertions import calls_with_checks, has_checks
from shardwise.tracing.jaxpr import (
    Shape,
    calls_function,
    shape_of,
    without_side_effects,
)
from shardwise.tree import Batch, Params, PyTree, abstract_key, named_leaves

# What JAX says to a model that names shardings of activations on axes of type Auto.
NOT_EXPLICIT = ("axis names that are of type Auto", "Reshard should only be used")
# What to do instead of changing an object from outside of the loss, by type of its variable.
OUTSIDE = {
    "MetricState": "Return the metric next to the loss, as a Mean: "
    'return loss, {"accuracy": Mean(hits)}.',
    "RngCount": "Take random numbers from the argument `rngs`: loss(model, batch, rngs). In the "
    "model, use nnx.remat, nnx.scan and nnx.vmap instead of the functions of JAX.",
    "Variable": "Make it a part of the model. In the model, use nnx.remat, nnx.scan and nnx.vmap "
    "instead of the functions of JAX.",
}


@dataclass(frozen=True)
class TracedMetric:
    """How the loss or one of its metrics depends on the examples of a batch.

    Attributes:
        has_rows: whether it is a `Mean` with one entry per example.
        is_mean: whether it is a `Mean`, or else a scalar.
        total: the dependence of the total, or of the scalar.
        weight: the dependence of the weight; FREE for a scalar.
    """

    has_rows: bool
    is_mean: bool
    total: Value
    weight: Value

    @property
    def worst(self) -> Value:
        """The total or the weight, whichever depends on the examples in the worse way."""
        return max(self.total, self.weight, key=lambda value: value.kind)

    @property
    def is_independent(self) -> bool:
        """Whether each entry depends on its own example alone."""
        return self.has_rows and self.worst.kind <= Kind.ROWS

    @property
    def reason(self) -> str:
        """Why splitting or padding a batch would change the metric, for a message."""
        kind, cause = self.worst.kind, self.worst.cause
        if self.is_independent:
            return "it depends on the number of examples in the batch"
        if cause is not None and cause.is_positional:
            return f"{cause} depends on the positions of examples in the batch"
        if kind == Kind.COUPLED:
            return f"{cause} combines examples with each other"
        if kind == Kind.UNKNOWN:
            return f"shardwise cannot tell whether {cause} combines examples"
        if kind == Kind.STATISTIC:
            return f"{cause} is applied to a sum over the whole batch"
        return "it is a sum over the examples, combined with values that do not grow with them"


@dataclass(frozen=True)
class TracedLoss:
    """Facts about a loss that are known before anything is compiled.

    Attributes:
        shapes: shapes and dtypes of the batch that the loss was traced with.
        metrics: "loss", then the additional metrics, by name.
        flops: floating-point operations of one forward pass.
        matmuls: the dtypes of these operations.
        inactive: the number of parameters of experts that a token does not pass through.
        items: the sum of the weights of one batch, for example its number of tokens; masks count as
            all ones. None if the sum is only known when the step runs.
        draws: shapes of the draws of random numbers, see `Dependence`.
        has_custom_gradient: whether the user's code has a `jax.custom_vjp`. Its backward pass may
            not be linear.
        has_barrier: whether the forward pass calls `stream_barrier` of `kernels.norm`.
        has_checks: whether the forward pass has value assertions, see `tracing.assertions`.
        fingerprint: a digest of what the forward pass computes, see `jaxpr_fingerprint`.
        findings: likely mistakes in the loss or the model.
    """

    shapes: Batch
    metrics: Mapping[str, TracedMetric]
    flops: float
    matmuls: MatmulDtypes
    inactive: int
    items: int | None
    draws: tuple[tuple[int, ...], ...]
    has_custom_gradient: bool
    has_barrier: bool
    has_checks: bool
    fingerprint: str
    findings: tuple[Finding, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """ "loss", then the names of the additional metrics."""
        return tuple(self.metrics)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The metrics that come without one entry per example."""
        return tuple(
            name for name, metric in self.metrics.items() if not metric.has_rows
        )

    @property
    def dependent(self) -> tuple[str, ...]:
        """The metrics whose entries depend on other examples, or may do so."""
        return tuple(
            name for name, metric in self.metrics.items() if not metric.is_independent
        )


def trace_loss(
    spec: StateSpec,
    loss: Loss,
    batch: Batch,
    *,
    rows: int | None = None,
    is_training: bool = True,
) -> TracedLoss:
    """Trace `loss` for the model of `spec` and batches like `batch`. Nothing is compiled.

    Args:
        spec: the abstract state.
        loss: the loss.
        batch: a batch, as arrays or shapes.
        rows: the number of examples to trace with; by default that of `batch`.
        is_training: whether the model is in training mode, or else in evaluation mode.

    Raises:
        ConfigError: if the loss raises, or if it returns something that is not a `LossValue`.
    """
    rows = num_rows(batch) if rows is None else rows
    shapes = batch_shapes(batch, rows)
    # Filled while `forward` is traced: these facts are not part of its output.
    kinds: dict[str, tuple[bool, bool]] = {}
    items: list[int | None] = []
    unkept: list[Finding] = []

    def forward(
        state: TrainState, batch: Batch, key: jax.Array
    ) -> tuple[list[tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
        named, fixed = _call(spec, loss, state, batch, key, is_training, unkept)
        value = named["loss"]
        items.append(value.items if isinstance(value, Mean) else rows)
        parts: list[tuple[ArrayLike, ArrayLike]] = []
        for name, value in named.items():
            if isinstance(value, Mean):
                kinds[name] = (value.has_rows(rows), True)
                parts.append((value.total, value.weights))
            else:
                kinds[name] = (False, False)
                parts.append((value, 1.0))
        arrays = [(jnp.asarray(total), jnp.asarray(weight)) for total, weight in parts]
        return arrays, fixed

    arguments = (_without_shardings(spec.abstract), shapes, abstract_key())
    try:
        traced = jax.make_jaxpr(forward)(*arguments)
    except ShardwiseError:
        raise
    except Exception as error:
        raise _as_config_error(error, batch) from error
    _check_side_effects(traced, spec)
    closed = without_side_effects(traced)
    matmuls = matmul_dtypes(closed.jaxpr)
    if uses_float8():
        matmuls = replace(matmuls, choices=matmul_choices(closed.jaxpr))
    dependence = _analyze(closed, arguments)
    num_values = 2 * len(kinds)
    shapes_out = [shape_of(variable) for variable in closed.jaxpr.outvars]
    values = list(zip(dependence.outputs, shapes_out, strict=True))
    metrics = {
        name: _traced_metric(values[2 * index], values[2 * index + 1], *kind)
        for index, (name, kind) in enumerate(kinds.items())
    }
    _check_unchanged(spec, dependence.outputs[num_values:])
    return TracedLoss(
        shapes=shapes,
        metrics=metrics,
        flops=count_jaxpr_flops(closed.jaxpr),
        matmuls=matmuls,
        inactive=count_inactive(closed.jaxpr),
        items=items[-1],
        draws=dependence.draws,
        has_custom_gradient=dependence.has_custom_gradient,
        has_barrier=calls_function(closed.jaxpr, "stream_barrier"),
        has_checks=has_checks(traced),
        fingerprint=jaxpr_fingerprint(closed),
        findings=(
            *_findings(dependence),
            *unkept,
            *find_outside_modules(loss),
            *find_other_dtypes(matmuls, spec.definition.compute_dtype),
        ),
    )


def _without_shardings(state: TrainState) -> TrainState:
    """Return an abstract state whose leaves are on no mesh."""
    bare: TrainState = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state
    )
    return bare


def _call(
    spec: StateSpec,
    loss: Loss,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    is_training: bool,
    findings: list[Finding],
) -> tuple[dict[str, Metric], dict[str, jax.Array]]:
    """Return the loss and its metrics by name, and the parameters after the forward pass.

    What the forward pass changes and nobody keeps is added to `findings`.
    """

    def forward(
        model: nnx.Module, _: Pure, *args: PyTree
    ) -> tuple[dict[str, Metric], dict[str, jax.Array]]:
        if not is_training:
            model.eval()
        before = take_snapshot(model)
        named = named_metrics(call_loss(loss, model, *args))
        findings.extend(find_unkept(before, take_snapshot(model)))
        return named, spec.definition.read_fixed(model)

    arrays = (state.params, state.frozen, state.other)
    return spec.call(forward, arrays, batch, key, state.step, is_compiled=False)


def settle_loss(
    spec: StateSpec, loss: Loss, batch: Batch, *, is_training: bool = True
) -> tuple[StateSpec, TracedLoss]:
    """Trace a loss, and find out whether the model needs mesh axes of type Explicit.

    Most models leave the shardings of activations to the compiler. A model that names them, such
    as `nnx.Linear(...)(x, out_sharding=P("data"))`, fails with axes of type Auto.

    Args:
        spec: the abstract state.
        loss: the loss.
        batch: a batch, as arrays or shapes.
        is_training: as for `trace_loss`.

    Returns:
        The state with `is_explicit`, and the traced loss.
    """
    try:
        return spec, trace_loss(spec, loss, batch, is_training=is_training)
    except ConfigError as error:
        if not any(text in str(error) for text in NOT_EXPLICIT):
            raise
    explicit = replace(spec, is_explicit=True)
    return explicit, trace_loss(explicit, loss, batch, is_training=is_training)


def _as_config_error(error: Exception, batch: Batch) -> ConfigError:
    """Return the error that a user should see for an exception in the loss."""
    if isinstance(error, TraceContextError):
        # "Cannot mutate MetricState from a different trace level"
        name = str(error).removeprefix("Cannot mutate ").partition(" ")[0]
        return ConfigError(
            f"the loss changes a Flax object that was created outside of it: {name} "
            f"({place_of(error)}). {OUTSIDE.get(name, OUTSIDE['Variable'])}"
        )
    remedy = ""
    if "chexify" in str(error):
        remedy = (
            ". Do not use chex.chexify in a model or a loss: checks in them work as they are. "
            "Import chex at the top of the module"
        )
    arrays = [
        f"{name} {x.dtype}{list(x.shape)}" for name, x in named_leaves(batch).items()
    ]
    return ConfigError(
        f"the loss failed for a batch of {', '.join(arrays)}: {where(error)}{remedy}"
    )


def _check_side_effects(traced: core.ClosedJaxpr, spec: StateSpec) -> None:
    """Raise for checks that cannot be reported, and prints that cannot be ordered."""
    if calls_with_checks(traced.jaxpr, "shard_map"):
        raise ConfigError(
            "a check is inside of jax.shard_map, where each device has its own result. Check "
            "the arguments or the results of the shard_map instead."
        )
    is_ordered = any(
        type(effect).__name__.startswith("Ordered") for effect in traced.effects
    )
    if is_ordered and spec.mesh.size > 1:
        raise ConfigError(
            f"the loss has a print or callback with ordered=True, and the mesh has "
            f"{spec.mesh.size} devices. JAX orders callbacks on one device only. Remove "
            "ordered=True."
        )


def _traced_metric(
    total: tuple[Value, Shape],
    weight: tuple[Value, Shape],
    has_rows: bool,
    is_mean: bool,
) -> TracedMetric:
    """Return what is known about a metric from its total and its weight, with their shapes.

    Args:
        total: the total, or the scalar.
        weight: the weight.
        has_rows: whether the first dim has as many entries as there are examples.
        is_mean: whether it is a `Mean`.
    """
    rows = [value for value, _ in (total, weight) if value.kind == Kind.ROWS]
    # A loss of shape (T, B) may have as many tokens as examples.
    has_rows &= all((value.dim, value.entries) == (0, 1) for value in rows)
    if has_rows or not is_mean:
        return TracedMetric(has_rows, is_mean, total[0], weight[0])
    return TracedMetric(has_rows, is_mean, _summed(*total), _summed(*weight))


def _summed(value: Value, shape: Shape) -> Value:
    """Return the value of the sum of an array."""
    if value.kind == Kind.ROWS:
        return replace(value, kind=Kind.SUM, dim=0, entries=1)
    if value.kind == Kind.FREE and value.constant is not None:
        return replace(value, constant=value.constant * math.prod(shape))
    return value


def _check_unchanged(spec: StateSpec, values: Sequence[Value]) -> None:
    """Raise if the forward pass has assigned to a parameter: the step would drop the value.

    Args:
        spec: the abstract state.
        values: the parameters after the pass, by name in sorted order.
    """
    inputs = list(named_leaves(spec.abstract))
    parameters = [name for name in inputs if name.startswith(("params/", "frozen/"))]
    for name, value in zip(sorted(parameters), values, strict=True):
        if value.origin != inputs.index(name):
            raise ConfigError(
                f"the forward pass assigns to the parameter '{name.partition('/')[2]}', which is "
                "trained or frozen. The optimizer alone changes parameters. Make it another type "
                "of nnx.Variable, or exclude it from training: Run(wrt=...)."
            )


def _analyze(closed: core.ClosedJaxpr, arguments: Sequence[object]) -> Dependence:
    state, batch, _ = arguments
    num_state = len(jax.tree.leaves(state))
    # A number that all examples share depends on none of them.
    has_rows = [leaf.ndim > 0 for leaf in jax.tree.leaves(batch)]
    is_batch = [False] * len(closed.jaxpr.invars)
    is_batch[num_state : num_state + len(has_rows)] = has_rows
    return analyze(closed, is_batch)


def _findings(dependence: Dependence) -> tuple[Finding, ...]:
    findings = [
        Finding(
            "examples-broadcast",
            f"{cause} combines every example with every other one",
            "If that is a mistake, give both arrays the same shape, for example with "
            "x[:, 0] or y[:, None].",
        )
        for cause in dependence.broadcasts[:1]
    ]
    findings += [
        Finding(
            "fixed-random-key",
            f"random numbers are drawn from a key that is the same in every step ({cause.place})",
            "Take `rngs` as an argument of the loss: loss(model, batch, rngs).",
        )
        for cause in dependence.fixed_keys[:1]
    ]
    return tuple(findings)


def summed_scalars(
    whole: TracedLoss, part: TracedLoss, parts: float
) -> tuple[str, ...]:
    """Return the scalars of a loss that are sums over the examples.

    A mean of means is the mean, and a sum of sums is the sum. Whether a scalar is a mean or a sum
    shows when it is traced for two batch sizes: the factor of a mean is `1 / B`.

    Args:
        whole: the loss, traced with the complete batch.
        part: the loss, traced with a part of it.
        parts: the number of parts.
    """
    return tuple(
        name
        for name in whole.scalars
        if not whole.metrics[name].is_mean
        and growth(whole.metrics[name].total, part.metrics[name].total, parts) == 1
    )


def inexact_metrics(
    whole: TracedLoss, part: TracedLoss, parts: float
) -> tuple[str, ...]:
    """Return the metrics that cannot be computed exactly from micro-batches.

    Args:
        whole: the loss, traced with the complete batch.
        part: the loss, traced with a micro-batch.
        parts: the number of micro-batches.
    """
    inexact = []
    for name, metric in whole.metrics.items():
        other = part.metrics[name]
        if metric.is_independent:
            if not is_same_function(metric, other):
                inexact.append(name)
            continue
        total = growth(metric.total, other.total, parts)
        weight = growth(metric.weight, other.weight, parts)
        # A scalar is a mean or a sum; both are exact, see `as_means`.
        is_exact = total == weight if metric.is_mean else total in (1, 1 / parts)
        if metric.has_rows or total is None or not is_exact:
            inexact.append(name)
    return tuple(inexact)


def is_same_function(metric: TracedMetric, other: TracedMetric) -> bool:
    """Return whether the entries of a metric do not depend on the size of the batch.

    Args:
        metric: the metric, traced with one batch size.
        other: the same metric, traced with another one.
    """
    pairs = ((metric.total, other.total), (metric.weight, other.weight))
    return other.is_independent and all(
        a.digest == b.digest
        and len(a.factors) == len(b.factors)
        and np.allclose(a.factors, b.factors, rtol=1e-5)
        for a, b in pairs
    )


def size_dependent(one: TracedLoss, two: TracedLoss) -> tuple[str, ...]:
    """Return the metrics with entries per example that depend on the size of the batch.

    Args:
        one: the loss, traced with one batch size.
        two: the loss, traced with another one.
    """
    return tuple(
        name
        for name, metric in one.metrics.items()
        if metric.is_independent
        and not (is_same_function(metric, two.metrics[name]) and one.draws == two.draws)
    )


def weight_is_trained(spec: StateSpec, loss: Loss, batch: Batch) -> bool:
    """Return whether the weight of the loss has a gradient.

    Args:
        spec: the abstract state.
        loss: the loss.
        batch: a batch, as arrays or shapes.
    """

    def weight(params: Params, state: TrainState, batch: Batch) -> jax.Array:
        key = jax.random.key(0)
        state = replace(state, params=params)
        value = _call(spec, loss, state, batch, key, is_training=True, findings=[])[0][
            "loss"
        ]
        if not isinstance(value, Mean):
            return jnp.ones((), jnp.float32)
        return jnp.asarray(jnp.sum(jnp.asarray(value.weights, jnp.float32)))

    state = _without_shardings(spec.abstract)
    gradient: Callable[..., PyTree] = jax.grad(weight)
    closed = without_side_effects(jax.make_jaxpr(gradient)(state.params, state, batch))
    is_batch = [False] * len(closed.jaxpr.invars)
    gradients = analyze(closed, is_batch).outputs
    return any(value.constant != 0 for value in gradients)


def growth(whole: Value, part: Value, parts: float) -> float | None:
    """Return the ratio of a value of the batch to the sum of its values for all micro-batches.

    Args:
        whole: the value, traced with the complete batch.
        part: the value, traced with a micro-batch.
        parts: the number of micro-batches.

    Returns:
        1 for a sum, `1 / parts` for a mean or a constant, and None if it depends on the values.
    """
    if whole.kind == part.kind == Kind.FREE:
        if whole.constant is None or part.constant is None:
            return 1 / parts if whole.digest == part.digest else None
        if not part.constant:
            return 1 / parts if not whole.constant else None
        return _rounded(whole.constant / (parts * part.constant), parts)
    if not whole.kind == part.kind == Kind.SUM or whole.digest != part.digest:
        return None
    if len(whole.factors) != len(part.factors) or 0 in part.factors:
        return None
    ratios = {
        _rounded(a / b, parts) for a, b in zip(whole.factors, part.factors, strict=True)
    }
    if whole.has_offset:
        ratios.add(1 / parts)
    return ratios.pop() if len(ratios) == 1 else None


def _rounded(ratio: float, parts: float) -> float:
    """Return 1 or `1 / parts` if the ratio is equal to it, but for rounding."""
    for exact in (1.0, 1 / parts):
        if math.isclose(ratio, exact, rel_tol=1e-5):
            return exact
    return ratio
