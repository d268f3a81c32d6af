"""Means that can be summed exactly, the log of a run, and early stopping on a metric."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from shardwise.errors import ConfigError
from shardwise.files.durable import write_atomically
from shardwise.files.lines import LineFile
from shardwise.files.regular import file_errors, read_regular
from shardwise.text import Json

Mask: TypeAlias = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A weighted mean whose total and weight are kept apart, so that parts add up exactly.

    The mean of a batch is the sum of all totals divided by the sum of all weights. Micro-batches,
    padding and packing therefore cannot change it.

    A loss returns one entry per example (shape `(B,)`), one entry per token (shape `(B, T)`), or
    values that are summed already (scalars). Only with one entry per example can a batch be padded,
    because only then can shardwise exclude the padding.

    Attributes:
        total: weighted values, for example the loss of each token times its weight.
        weight: weights of the values. A weight with fewer dimensions than `total`, or with
            dimensions of size 1, applies to each entry of `total`, so `Mean(nats)` is the plain
            mean.

    Example:
        >>> Mean(jnp.array([1.0, 2.0, 6.0]), jnp.array([1.0, 1.0, 2.0])).summed().value
        Array(2.25, dtype=float32)
    """

    total: ArrayLike
    weight: ArrayLike = 1.0

    def __add__(self, other: "Mean") -> "Mean":
        """Return the mean over the values of both."""
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> jax.Array:
        """The mean, `total / weight`. Call `summed` first unless both are scalars."""
        return self.total / self.weight  # type: ignore[return-value]

    def summed(self, mask: Mask | None = None) -> "Mean":
        """Return the mean with scalar total and weight, summed in float32.

        An entry of weight 0 must have a total of 0. Otherwise the total is NaN, so that the step
        is not applied: the weights were not multiplied into the total.

        Args:
            mask: booleans of shape `(B,)`; entries of examples where it is False are excluded.
        """
        total = _masked_sum(self.total, mask)
        weight = _masked_sum(self.weights, mask)
        if self.has_array_weight:
            total = jnp.where(self.unweighted().any(), jnp.nan, total)
        return Mean(total, weight)

    @property
    def has_array_weight(self) -> bool:
        """Whether entries have weights of their own, instead of one weight for all of them."""
        return jnp.ndim(self.weight) > 0

    def unweighted(self) -> jax.Array:
        """Return which entries have a weight of 0 and a total that is not 0."""
        total = jnp.asarray(self.total)
        weight = jnp.asarray(self.weights)
        # One total per example, and one weight per token of it.
        if weight.ndim > total.ndim:
            weight = jnp.abs(weight).sum(axis=tuple(range(total.ndim, weight.ndim)))
        if weight.shape != total.shape:
            return jnp.zeros((), bool)
        return (weight == 0) & (total != 0)

    def has_rows(self, rows: int) -> bool:
        """Return whether total and weight have one entry per example, for `rows` examples."""
        parts = (self.total, self.weights)
        return all(jnp.ndim(part) > 0 and jnp.shape(part)[0] == rows for part in parts)

    @property
    def items(self) -> int | None:
        """The sum of the weights as far as a trace knows it, or None.

        A traced array of weights counts as if it were all ones: its values, such as those of a
        mask, are known only when the step runs.
        """
        entries = max(jnp.size(self.total), jnp.size(self.weight))
        if isinstance(self.weight, jax.core.Tracer):
            return entries if jnp.ndim(self.weight) else None
        return round(float(np.mean(self.weight)) * entries)

    @property
    def weights(self) -> ArrayLike:
        """The weight of each entry of `total`."""
        missing = jnp.ndim(self.total) - jnp.ndim(self.weight)
        if missing < 0:
            return self.weight
        aligned = jnp.reshape(self.weight, (*jnp.shape(self.weight), *(1,) * missing))
        return jnp.broadcast_to(aligned, jnp.shape(self.total))


class BatchMean(nnx.Variable[jax.Array]):
    """A variable that the forward pass updates with a mean over the batch.

    With accumulation, all micro-batches read the value from before the step, and the new value is
    the mean of those that they compute. That is the result of the complete batch if the update is
    linear in the examples. Other variables pass from one micro-batch to the next.

    Args:
        value: the initial value, an array.
        hijax: see `nnx.Variable`, as for the other options.
        ref: see `nnx.Variable`.
        eager_sharding: see `nnx.Variable`.
        metadata: see `nnx.Variable`.

    Example:
        >>> self.center = BatchMean(jnp.zeros(width))  # doctest: +SKIP
        >>> self.center[...] += 0.01 * (x.mean(0) - self.center[...])  # doctest: +SKIP
    """


def _masked_sum(x: ArrayLike, mask: Mask | None) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    if mask is not None and x.ndim:
        x = jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
    return x.sum()


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


class MetricsLog:
    """A file of JSON objects, one per line, each with a "step": `metrics.jsonl` and its like.

    Opening the log removes the records after `step`, which the resumed run writes again.

    Attributes:
        seen: the last step in the file before records were removed, or 0.
        kept: the records that were kept.
    """

    def __init__(
        self,
        path: Path,
        step: int = 0,
        warn: Callable[[str], None] = _print_warning,
    ):
        """Open the log for appending.

        Args:
            path: the file; it is created if missing.
            step: the step at which the run resumes; 0 starts an empty log.
            warn: prints a warning if a record cannot be written.

        Raises:
            CheckpointError: if the file cannot be read or written.
        """
        records = read_metrics(path)
        self.seen = max((record["step"] for record in records), default=0)
        self.kept = [record for record in records if record["step"] <= step]
        with file_errors(path):
            lines = [json.dumps(record) + "\n" for record in self.kept]
            write_atomically(path, "".join(lines))
        self._file = LineFile(path, warn)

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. Non-finite floats are written as strings, because JSON has none.

        A record that cannot be written is kept, and written with a later one, see `LineFile`.
        """
        line = {name: _json_safe(value) for name, value in record.items()}
        self._file.write(json.dumps(line))

    def close(self) -> None:
        """Close the file. Report records that could not be written."""
        self._file.close()


def _json_safe(value: object) -> object:
    is_nonfinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_nonfinite else value


def read_metrics(path: Path) -> list[Json]:
    """Return the records of a log; there are none if the file does not exist.

    Lines that are not records are skipped, for example a last line that a crash cut short.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    records = []
    with file_errors(path):
        try:
            content = read_regular(path)
        except FileNotFoundError:
            return []
    for line in content.decode(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _is_step(record.get("step")):
            records.append(record)
    return records


def _is_step(value: object) -> bool:
    # A bool is an int for `isinstance`. Larger numbers are not exact as floats.
    return type(value) is int and 0 <= value < 2**53


@dataclass(frozen=True)
class EarlyStop:
    """Stop after `patience` consecutive evaluations without improvement.

    The decision is a function of all evaluations so far. No state is kept, so a resumed run decides
    as a run that was never interrupted.

    Attributes:
        metric: a metric of an evaluation, by its name in `metrics.jsonl`.
        patience: the number of consecutive evaluations without improvement after which the run
            stops.
        min_delta: a value counts as an improvement if it is better than the best one by more than
            this.
        largest: whether larger values are better.

    Example:
        >>> Run(..., eval_every=100, stop_when=EarlyStop("eval_accuracy", patience=5, largest=True))
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    largest: bool = False

    def __post_init__(self) -> None:
        # `not >=` also refuses NaN.
        if self.patience < 1 or not self.min_delta >= 0:
            raise ConfigError(
                f"{self}: `patience` must be at least 1 and `min_delta` at least 0."
            )

    def why(self, evaluations: Sequence[tuple[int, float]]) -> str | None:
        """Return why the run stops after the last evaluation, or None if it continues.

        Args:
            evaluations: `(step, value)` of each evaluation, in order.
        """
        best, best_step, count = math.nan, 0, 0
        for step, value in evaluations:
            gain = value - best if self.largest else best - value
            # `not <=` is also true for the first finite value, when `best` is NaN.
            if math.isfinite(value) and not gain <= self.min_delta:
                best, best_step, count = value, step, 0
            else:
                count += 1
        if count < self.patience:
            return None
        if not best_step:
            return f"{self.metric} has not been finite for {count} evaluations"
        margin = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.metric} has not improved on {best:.6g} (step {best_step}){margin} "
            f"for {count} evaluations"
        )
