"""Inspect steps whose update was not applied: their batch, gradients and parameters, leaf by leaf.

    bad/17/report.json   reason, loss, the first bad leaf, and for every leaf its norm, largest
                         value and fraction of non-finite values
    bad/17/report.txt    the same as a table, in the order in which the model uses its parameters
    bad/17/batch.npz     the batch, or as many of its examples as fit into 64 MiB

Nothing of this is computed before a step is bad.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from rich.console import Console

from shardwise.cluster.group import ProcessGroup
from shardwise.console import warn
from shardwise.data.stream import Stream
from shardwise.errors import where
from shardwise.loss import LossValue, call_loss
from shardwise.module import Pure
from shardwise.run import Prepared, Run
from shardwise.state import TrainState
from shardwise.step import as_means, num_rows
from shardwise.text import Json, columns
from shardwise.training.nan_origin import first_nan, order_of_use
from shardwise.tree import Batch, Params, PyTree, named_leaves

# Steps of a run that are kept, and bytes of a batch on the disk.
MAX_STEPS = 3
MAX_BATCH_BYTES = 2**26


@dataclass(frozen=True)
class LeafStats:
    """Statistics of a gradient or a parameter.

    Attributes:
        shape: its shape.
        norm: the norm of its finite values.
        largest: the largest absolute value of its finite values.
        nonfinite: the fraction of its values that are non-finite.
        first_index: the first index along dim 0 with a non-finite value, or None.
    """

    shape: list[int]
    norm: float
    largest: float
    nonfinite: float
    first_index: int | None


@dataclass
class BadStep:
    """What is known about a step whose update was not applied; the fields are in `report.json`.

    Attributes:
        step: the step.
        why: "non-finite", "loss spike" or "failed check".
        loss: its loss.
        grad_norm: the norm of its gradient.
        parameters_are: the step that `parameters` belong to, in words.
        parameters: statistics of each parameter, in order of use.
        batch: statistics of each leaf of the batch.
        recomputed: the metrics when computed again.
        gradients: statistics of each gradient, in order of use.
        first: where non-finite values appear first, in words.
        first_path: the path of the first bad parameter or gradient.
        problem: why the step could not be computed again.
        check: the message of the check that failed. Such a step is not computed again.
        rows_kept: number of examples in `batch.npz`.
        rows_of_the_batch: the ranges of the global batch that this process reads.
    """

    step: int
    why: str
    loss: float | None
    grad_norm: float | None
    parameters_are: str
    parameters: dict[str, LeafStats] = field(default_factory=dict)
    batch: dict[str, Json] = field(default_factory=dict)
    recomputed: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, LeafStats] = field(default_factory=dict)
    first: str | None = None
    first_path: str | None = None
    problem: str | None = None
    check: str | None = None
    rows_kept: int | None = None
    rows_of_the_batch: list[list[int]] | None = None


class BadSteps:
    """Inspects the first few bad steps of a run.

    All processes call the same methods; the first one writes.

    Args:
        run: the run.
        prepared: the same run, prepared.
        batches: returns the part of a batch that this process reads.
        group: the processes of the run.
        console: where to print one line per step.
    """

    def __init__(
        self,
        run: Run,
        prepared: Prepared,
        batches: Callable[[int], Batch],
        group: ProcessGroup,
        console: Console,
    ):
        self.run = run
        self.prepared = prepared
        self.batches = batches
        self.group = group
        self.console = console
        self._folder: Path | None = None
        self._steps_left = MAX_STEPS
        if run.out is not None:
            self._folder = run.out / "bad"
            earlier = len(list(self._folder.glob("[0-9]*"))) if group.is_first else 0
            self._steps_left = MAX_STEPS - int(group.share("bad steps", earlier))

    def inspect(
        self,
        n: int,
        why: str,
        values: Json,
        state: TrainState,
        is_untouched: bool,
        check: str | None = None,
    ) -> None:
        """Write a report on step `n`, and print one line of it.

        Args:
            n: the step.
            why: why its update was not applied.
            values: its metrics.
            state: the newest state.
            is_untouched: whether no update was applied since step `n`, so that the parameters of
                `state` are those of the step. Otherwise they are one update later.
            check: the message of the check that failed, if any.
        """
        if self._steps_left <= 0:
            return
        self._steps_left -= 1
        if self._folder is None:
            if self.group.is_first:
                warn(self.console, f"the update of step {n} was not applied ({why})")
            return
        later = "one update later than in the step"
        report = BadStep(
            step=n,
            why=why,
            loss=values.get("loss"),
            grad_norm=values.get("grad_norm"),
            parameters_are="those of the step" if is_untouched else later,
            check=check,
        )
        batch, problem = self._read_batch(n)
        try:
            self._measure(report, batch, problem, n, state)
        except Exception as error:
            # There may be too little memory. The rest of the report is still useful.
            report.problem = f"not recomputed: {where(error)}"
        if self.group.is_first:
            self._write(self._folder / str(n), report, batch)

    def _write(self, place: Path, report: BadStep, batch: Batch | None) -> None:
        text = f"the update of step {report.step} was not applied ({report.why})"
        if finding := report.first or report.problem:
            text += f": {finding}"
        try:
            _write_report(place, report, batch, self.prepared.step.layout.ranges)
        except OSError as error:
            warn(
                self.console,
                f"{text}; {place} could not be written: {error.strerror or error}",
            )
            return
        warn(self.console, f"{text}; details in {place}")

    def _read_batch(self, n: int) -> tuple[Batch | None, str]:
        """Read the batch of step `n` again.

        Returns:
            The batch of this process, and why some process cannot read its own; "" if all can.
        """
        batch = None
        problem = ""
        try:
            if isinstance(self.batches, Stream):
                problem = "the data is an iterator, which cannot return to this batch"
            else:
                batch = self.batches(n - 1)
        except Exception as error:
            problem = f"the batch cannot be read again: {error}"
        problems = self.group.union(f"bad/{n}", problem)
        return batch, next(filter(None, problems), "")

    def _measure(
        self,
        report: BadStep,
        batch: Batch | None,
        problem: str,
        n: int,
        state: TrainState,
    ) -> None:
        """Fill the report, in an order that leaves something if a part fails."""
        spec = self.prepared.spec
        step = self.prepared.step
        measure = jax.jit(_statistics, out_shardings=spec.sharding(PartitionSpec()))
        report.parameters = _leaf_stats(state.params, measure)
        if problem:
            report.problem = problem
            path = _first_nonfinite(report.parameters)
            report.first = problem if path is None else _in_parameter(path)
            return
        leaves = named_leaves(batch)
        report.batch = {
            name: _describe(np.asarray(leaf)) for name, leaf in leaves.items()
        }
        if report.check is not None:
            return
        # Random streams depend on the step, so it must be the one that is inspected.
        before = replace(state, step=jnp.full_like(state.step, n - 1))
        gradients, means, _ = step.gradients(before, step.place(batch))
        report.recomputed = {name: float(mean.value) for name, mean in means.items()}
        report.gradients = _leaf_stats(gradients, measure)
        order = self._order(batch)
        report.parameters = _ordered(report.parameters, order)
        report.gradients = _ordered(report.gradients, order)
        report.first, report.first_path = self._find_first(report, batch, before)

    def _order(self, batch: Batch) -> list[str]:
        """Return the paths of the parameters in the order in which the loss uses them."""
        abstract = self.prepared.spec.abstract
        paths = list(named_leaves(abstract.params))
        try:
            shapes = jax.eval_shape(lambda: batch)
            traced = jax.make_jaxpr(self._loss)(
                abstract.params, abstract.other, shapes, abstract.frozen
            )
            return order_of_use(traced, paths)
        except Exception:
            return paths

    def _loss(
        self, params: Params, other: PyTree, batch: Batch, frozen: Params
    ) -> jax.Array:
        def forward(model: nnx.Module, _: Pure, *args: PyTree) -> LossValue:
            return call_loss(self.run.loss, model, *args)

        output = self.prepared.step.spec.call(
            forward,
            (params, frozen, other),
            batch,
            jax.random.key(self.run.seed),
            jnp.int32(0),
            is_compiled=False,
        )
        return as_means(output, num_rows(batch))["loss"].value

    def _find_first(
        self, report: BadStep, batch: Batch, state: TrainState
    ) -> tuple[str, str | None]:
        """Return where non-finite values appear first, and the path if that is a leaf."""
        path = _first_nonfinite(report.parameters)
        if path is not None:
            return _in_parameter(path), path
        for name, described in report.batch.items():
            share = described["nonfinite"]
            if share:
                return (
                    f"first non-finite values in '{name}' of the batch ({share:.2%} of it)",
                    None,
                )
        if not math.isfinite(report.recomputed["loss"]):
            return self._find_operation(batch, state), None
        gradients = report.gradients
        # The backward pass begins with the parameter that is used last.
        path = _first_nonfinite(dict(reversed(gradients.items())))
        if path is not None:
            stats = gradients[path]
            is_indexed = len(stats.shape) > 1 and stats.first_index
            index = f"[{stats.first_index}]" if is_indexed else ""
            return f"first non-finite values in the gradient of {path}{index}", path
        largest = max(gradients, key=lambda path: gradients[path].norm, default=None)
        norm = gradients[largest].norm if largest is not None else 0.0
        text = (
            "all values are finite when computed again; the largest gradient is that of"
        )
        return f"{text} {largest}, norm {norm:.3g}", largest

    def _find_operation(self, batch: Batch, state: TrainState) -> str:
        """Return the operation of the forward pass that produced the first NaN."""
        operation = None
        if self.group.count == 1:
            try:
                placed = jax.tree.map(jnp.asarray, batch)
                operation = first_nan(
                    self._loss, state.params, state.other, placed, state.frozen
                )
            except Exception:
                operation = None
        if operation is None:
            return "the first non-finite value is the loss itself"
        return f"first NaN from {operation}, in the forward pass"


# Norm, largest value, number of non-finite values, and the first index of one.
_Statistics: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_Measure: TypeAlias = Callable[[dict[str, jax.Array]], dict[str, _Statistics]]


def _statistics(leaves: dict[str, jax.Array]) -> dict[str, _Statistics]:
    """Compute the statistics of each leaf, see `LeafStats`."""

    def measure(leaf: jax.Array) -> _Statistics:
        x = jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf.astype(jnp.float32)
        finite = jnp.isfinite(x)
        clean = jnp.where(finite, x, 0)
        largest = jnp.max(jnp.abs(clean), initial=0)
        # Scaled, because the squares of large numbers overflow.
        norm = largest * jnp.sqrt(jnp.sum((clean / jnp.maximum(largest, 1e-37)) ** 2))
        is_bad = (
            jnp.any(~finite, axis=tuple(range(1, x.ndim))) if x.ndim else ~finite[None]
        )
        first = jnp.argmax(is_bad) if is_bad.size else jnp.zeros((), int)
        return norm, largest, jnp.sum(~finite), first

    return {path: measure(leaf) for path, leaf in leaves.items()}


def _leaf_stats(tree: PyTree, measure: _Measure) -> dict[str, LeafStats]:
    """Return the statistics of each leaf of floating-point or complex numbers, by path."""
    leaves = named_leaves(tree)
    floats = {
        path: leaf
        for path, leaf in leaves.items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    stats = {}
    for path, (norm, largest, num_bad, first) in jax.device_get(
        measure(floats)
    ).items():
        stats[path] = LeafStats(
            shape=list(floats[path].shape),
            norm=float(norm),
            largest=float(largest),
            nonfinite=float(num_bad) / max(floats[path].size, 1),
            first_index=int(first) if num_bad else None,
        )
    return stats


def _ordered(stats: Mapping[str, LeafStats], order: list[str]) -> dict[str, LeafStats]:
    return {path: stats[path] for path in order if path in stats}


def _first_nonfinite(stats: Mapping[str, LeafStats]) -> str | None:
    return next((path for path, leaf in stats.items() if leaf.nonfinite), None)


def _in_parameter(path: str) -> str:
    return f"first non-finite values in parameter {path}"


def _describe(leaf: np.ndarray) -> Json:
    """Return shape, dtype and range of a leaf of a batch."""
    described: Json = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "nonfinite": 0.0,
    }
    # `kind` is "V" for bfloat16 and other types that JAX adds to NumPy.
    if leaf.dtype.kind not in "iufb" and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return described
    numbers = leaf.astype(np.float64)
    is_finite = np.isfinite(numbers)
    if leaf.size:
        described["nonfinite"] = 1.0 - float(is_finite.mean())
    if is_finite.any():
        finite = numbers[is_finite]
        described["least"] = float(finite.min())
        described["largest"] = float(finite.max())
        described["mean"] = float(finite.mean())
    return described


def _write_report(
    place: Path,
    report: BadStep,
    batch: Batch | None,
    ranges: tuple[tuple[int, int], ...],
) -> None:
    """Write the directory of a step; it appears complete or not at all."""
    temporary = place.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700, parents=True)
    if batch is not None:
        report.rows_kept = _write_batch(temporary / "batch.npz", batch)
        report.rows_of_the_batch = [list(part) for part in ranges]
    known = {
        name: value for name, value in asdict(report).items() if value not in (None, {})
    }
    (temporary / "report.json").write_text(
        json.dumps(_json_safe(known), indent=1) + "\n"
    )
    (temporary / "report.txt").write_text(_table(report))
    # An earlier start of the run may have written it.
    if place.exists():
        shutil.rmtree(place)
    os.rename(temporary, place)


def _write_batch(path: Path, batch: Batch) -> int:
    """Write as many examples of a batch as fit; return how many."""
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(batch).items()}
    for name, leaf in leaves.items():
        # Without pickle, NumPy reads only its own types.
        if leaf.dtype.kind not in "iufbc":
            leaves[name] = leaf.astype(np.float32)
    num_bytes = sum(leaf.nbytes for leaf in leaves.values())
    num_examples = num_rows(batch)
    num_kept = int(num_examples * MAX_BATCH_BYTES / max(1, num_bytes))
    num_kept = min(num_examples, max(1, num_kept))
    with path.open("wb") as file:
        kept = {
            name: leaf[:num_kept] if leaf.ndim else leaf
            for name, leaf in leaves.items()
        }
        np.savez(file, allow_pickle=False, **kept)
    return num_kept


def _json_safe(value: object) -> object:
    """Return `value` with non-finite numbers as text, because JSON has none."""
    if isinstance(value, dict):
        return {key: _json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _table(report: BadStep) -> str:
    lines = [
        f"step {report.step}: {report.why}, loss {report.loss}, gradient norm {report.grad_norm}"
    ]
    lines += [text for text in (report.check, report.first, report.problem) if text]
    lines += [f"The parameters are {report.parameters_are}.", ""]
    rows = [
        ("", "gradient", "", "", "parameter", "", ""),
        ("path", *("norm", "largest", "non-finite") * 2),
    ]
    for path, parameter in report.parameters.items():
        label = f"{path}  <- first" if path == report.first_path else path
        rows.append((label, *_cells(report.gradients.get(path)), *_cells(parameter)))
    return "\n".join([*lines, columns(rows)]) + "\n"


def _cells(stats: LeafStats | None) -> tuple[str, str, str]:
    if stats is None:
        return "-", "-", "-"
    if stats.nonfinite == 1:
        return "-", "-", "all"
    share = f"{stats.nonfinite:.2%}" if stats.nonfinite else "0"
    return f"{stats.norm:.4g}", f"{stats.largest:.4g}", share
