"""The evaluation step: the summed means of a batch, with the model in evaluation mode."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from shardwise.data.layout import BatchLayout, make_layout, num_rows
from shardwise.errors import CheckError, ConfigError, DataError
from shardwise.loss import (
    Loss,
    LossValue,
    TracedLoss,
    as_means,
    call_loss,
    settle_loss,
    trace_loss,
)
from shardwise.loss.trace import (
    inexact_metrics,
    size_dependent,
    summed_scalars,
)
from shardwise.loss.value import Kind
from shardwise.metrics import Mask
from shardwise.module import Pure
from shardwise.optim.parts import evaluation_params
from shardwise.sharding import num_batch_shards, put
from shardwise.state import StateSpec, TrainState
from shardwise.step.access import access_hooks
from shardwise.step.deterministic import OPTIONS, deterministic_jit, needs_options
from shardwise.step.train import Means
from shardwise.tracing.assertions import Failure, describe_failure, functionalize
from shardwise.tree import Batch, PyTree


@dataclass(frozen=True)
class EvalStep:
    """An evaluation step: the summed means of a batch, with the model in evaluation mode.

    Attributes:
        function: the jitted step. It takes the state, a batch, its mask and its number, and
            returns the failed check (None for a loss without checks), and the means by name.
        spec: the state that the step takes.
        pads: whether shorter batches are padded. If not, the step is compiled for each batch size:
            padding would change the metrics, because they are scalars or combine examples.
        traced: facts about the loss in evaluation mode.
        loss: the loss.
    """

    function: Callable[
        [TrainState, Batch, Mask | None, np.int32], tuple[Failure | None, Means]
    ]
    spec: StateSpec
    pads: bool
    traced: TracedLoss
    loss: Loss
    _traces: dict[int, TracedLoss] = field(default_factory=dict, repr=False)

    def __call__(self, state: TrainState, batch: Batch, rows: int) -> Means:
        """Evaluate a host batch of at most `rows` examples."""
        return self.on(state, batch, self.layout(num_rows(batch), rows))

    def _traced_with(self, rows: int) -> TracedLoss:
        """Return the loss, traced with batches of `rows` examples."""
        if rows not in self._traces:
            shapes = self.traced.shapes
            self._traces[rows] = trace_loss(
                self.spec, self.loss, shapes, rows=rows, is_training=False
            )
        return self._traces[rows]

    def inexact(self, sizes: Collection[int]) -> dict[str, str]:
        """Return the metrics whose mean over several batches is not that over all examples.

        A metric that combines examples with each other has no other meaning than its mean over the
        batches, and is not among them.

        Args:
            sizes: the different sizes of the batches.

        Returns:
            Why each metric is inexact, by name.
        """
        metrics = self.traced.metrics
        reasons = {
            name: metric.reason
            for name, metric in metrics.items()
            if metric.worst.kind == Kind.STATISTIC
        }
        if not self.traced.scalars or len(sizes) < 2:
            return reasons
        large, small = max(sizes), min(sizes)
        whole, part = self._traced_with(large), self._traced_with(small)
        names = summed_scalars(whole, part, large / small)
        for name in (*names, *inexact_metrics(whole, part, large / small)):
            if metrics[name].worst.kind == Kind.SUM:
                reasons[name] = (
                    f"it is a sum over the examples, and batches have {small} and {large} of them"
                )
        return reasons

    def check_sizes(self, sizes: Collection[int]) -> None:
        """Raise if the loss cannot be averaged over batches of these sizes.

        Raises:
            ConfigError: if its mean over the batches is not that over all examples.
        """
        reason = self.inexact(sizes).get("loss")
        if reason is not None:
            raise ConfigError(
                f"the loss cannot be evaluated in several batches: {reason}. Return "
                "Mean(total, weight) with both sums, for example "
                "Mean((nats * mask).sum(), mask.sum())."
            )

    def layout(self, size: int, rows: int) -> BatchLayout:
        """Return the layout of a batch. It is not padded if that would change the metrics.

        Args:
            size: the number of examples in this batch.
            rows: the number of examples in the largest batch, to which this one is padded.
        """
        if size > rows:
            raise DataError(
                f"a batch of {size} examples follows a batch of {rows}. "
                "Put the largest batch first, or pass its size: "
                f"evaluate(..., rows={size})."
            )
        shards = num_batch_shards(self.spec.mesh, self.spec.rules)
        padded = -(-rows // shards) * shards if self.pads else size
        # Axes of type Explicit cannot shard a batch of another size than a multiple.
        other = 2 * padded if self.spec.is_explicit else size
        if padded != size and size_dependent(
            self._traced_with(other), self._traced_with(padded)
        ):
            padded = size
        return make_layout(
            self.traced.shapes, size, padded, self.spec.mesh, self.spec.rules
        )

    def on(
        self, state: TrainState, batch: Batch, layout: BatchLayout, number: int = 0
    ) -> Means:
        """Evaluate a host batch, or the examples of it that this process needs.

        Args:
            state: the state.
            batch: the batch.
            layout: its layout.
            number: the number of the batch in this evaluation. Random streams depend on it.

        Raises:
            CheckError: if a check in the model or the loss failed.
        """
        mask = None
        if self.pads:
            is_example = np.arange(layout.padded_rows) < layout.rows
            mask = put(is_example, layout.sharding)
        placed = layout.place(batch)
        failure, means = self.function(state, placed, mask, np.int32(number))
        if failure is not None and failure[0]:
            raise CheckError(
                f"evaluation after step {int(state.step)}, batch {number + 1}: check failed: "
                f"{describe_failure(failure[1])}."
            )
        return means


def make_eval_step(
    spec: StateSpec,
    loss: Loss,
    batch: Batch,
    *,
    compute_dtype: DTypeLike | None = None,
    deterministic: bool = True,
) -> EvalStep:
    """Build the evaluation step. Nothing is compiled.

    The step uses the averaged weights if the optimizer keeps an average. Random streams that remain
    in evaluation mode depend on the number of the batch, and are the same in every evaluation.

    Args:
        spec: the abstract state.
        loss: `loss(model, batch)`.
        batch: a batch, as arrays or shapes.
        compute_dtype: as for `make_train_step`.
        deterministic: as for `make_train_step`.
    """
    spec = spec.computing_in(compute_dtype)
    spec, traced = settle_loss(spec, loss, batch, is_training=False)
    hooks = access_hooks(spec, compute_dtype)

    def means_of(
        state: TrainState, batch: Batch, mask: Mask | None, number: jax.Array
    ) -> Means:
        key = jax.random.fold_in(jax.random.key(0), number)
        params = evaluation_params(state.opt_state, state.params)

        def forward(model: nnx.Module, _: Pure, *args: PyTree) -> LossValue:
            model.eval()
            return call_loss(loss, model, *args)

        arrays = (params, state.frozen, state.other)
        output = spec.call(forward, arrays, batch, key, state.step, hooks=hooks)
        return as_means(output, num_rows(batch), mask)

    def step(
        state: TrainState, batch: Batch, mask: Mask | None, number: jax.Array
    ) -> tuple[Failure | None, Means]:
        if not traced.has_checks:
            return None, means_of(state, batch, mask, number)
        return functionalize(means_of)(state, batch, mask, number)

    replicated = spec.sharding(PartitionSpec())
    function: Callable[..., PyTree]
    if needs_options(spec.mesh, deterministic):
        function = deterministic_jit(
            step, out_shardings=replicated, compiler_options=OPTIONS
        )
    else:
        function = jax.jit(step, out_shardings=replicated)
    return EvalStep(function, spec, pads=not traced.dependent, traced=traced, loss=loss)
