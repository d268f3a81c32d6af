"""A step that was not applied, taken apart: its batch, and what its gradients and the parameters look like, leaf by leaf.

    bad/17/report.json   why, the loss, the first bad leaf, and norm, largest value and share of numbers that are not finite of every leaf
    bad/17/report.txt    the same as a table, in the order in which the model uses its parameters
    bad/17/batch.npz     the batch, or as many of its rows as fit

Nothing of this is computed before a step is bad.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console

from shardwise.cluster.group import ProcessGroup
from shardwise.data.batches import Stream
from shardwise.errors import where
from shardwise.run import Prepared, Run
from shardwise.state import TrainState
from shardwise.step import as_means, num_rows
from shardwise.text import columns
from shardwise.training.nan_origin import first_nan, order_of_use
from shardwise.training.progress import warn
from shardwise.tree import named_leaves

MOST = 3  # steps of a run that are kept
MOST_BYTES = 2**26  # of a batch on the disk
Batches = Callable[[int], Any]


class BadSteps:
    """Looks at the first few bad steps of a run. All processes do it alike; the first one writes."""

    def __init__(
        self, run: Run, prepared: Prepared, batches: Batches, group: ProcessGroup, console: Console
    ):
        self.run, self.prepared, self.batches, self.group, self.console = (
            run,
            prepared,
            batches,
            group,
            console,
        )
        self.folder = run.out / "bad" if run.out is not None else None
        there = (
            len(list(self.folder.glob("[0-9]*")))
            if self.folder is not None and group.is_first
            else 0
        )
        self.left = MOST - int(group.share("bad steps", there)) if self.folder is not None else 0

    def look(
        self, n: int, why: str, values: dict[str, Any], state: TrainState, is_untouched: bool
    ) -> None:
        """Writes down what can be found out of step n, in a line on the terminal too.

        The parameters are those of `state`: the same as before step n if nothing was applied since (`is_untouched`), else one update later.
        """
        if self.left <= 0 or self.folder is None:
            return
        self.left -= 1
        found: dict[str, Any] = {
            "step": n,
            "why": why,
            "loss": values.get("loss"),
            "grad_norm": values.get("grad_norm"),
        }
        found["parameters_are"] = (
            "those of the step" if is_untouched else "one update later than in the step"
        )
        batch, problem = self._read(n)
        try:
            self._measure(found, batch, problem, n, state)
        except Exception as error:  # too little memory, perhaps: the rest is still worth having
            found["problem"] = f"not recomputed: {where(error)}"
        if not self.group.is_first:
            return
        place, told = (
            self.folder / str(n),
            f"step {n} was {why}: {found.get('first') or found['problem']}",
        )
        try:
            _write(place, found, batch, self.prepared.step.layout.ranges)
        except OSError as error:
            warn(self.console, f"{told}; {place} could not be written: {error.strerror or error}")
            return
        warn(self.console, f"{told}; dump in {place}")

    def _read(self, n: int) -> tuple[Any, str]:
        """The batch of step n once more, and why it cannot be had; the same answer in all processes."""
        batch, problem = None, ""
        try:
            if isinstance(self.batches, Stream):
                problem = "the data is an iterator, which cannot go back to the batch"
            else:
                batch = self.batches(n - 1)
        except Exception as error:
            problem = f"the batch cannot be read again: {error}"
        problem = next(filter(None, self.group.union(f"bad/{n}", problem)), "")
        return batch, problem

    def _measure(
        self, found: dict[str, Any], batch: Any, problem: str, n: int, state: TrainState
    ) -> None:
        spec, step = self.prepared.spec, self.prepared.step
        measure = jax.jit(_statistics, out_shardings=spec.sharding(PartitionSpec()))
        found["parameters"] = parameters = _rows(state.params, measure)
        if problem:
            found["problem"] = problem
            found["first"] = _first(parameters, "parameter") or problem
            return
        found["batch"] = {
            name: _describe(np.asarray(leaf)) for name, leaf in named_leaves(batch).items()
        }
        before = replace(state, step=jnp.full_like(state.step, n - 1))
        gradients, means, _ = step.gradients(before, step.place(batch))
        found["recomputed"] = {name: float(mean.value) for name, mean in means.items()}
        found["gradients"] = _rows(gradients, measure)
        order = self._order(batch)
        for name in ("parameters", "gradients"):
            found[name] = {path: found[name][path] for path in order if path in found[name]}
        found["first"], found["first_path"] = self._name_first(found, batch, before)

    def _order(self, batch: Any) -> list[str]:
        """The parameters in the order in which the loss uses them."""
        spec = self.prepared.spec
        try:
            traced = jax.make_jaxpr(self._loss)(
                spec.abstract.params,
                spec.abstract.other,
                jax.eval_shape(lambda: batch),
                spec.abstract.frozen,
            )
            return order_of_use(traced, list(named_leaves(spec.abstract.params)))
        except Exception:
            return list(named_leaves(spec.abstract.params))

    def _loss(self, params: Any, other: Any, batch: Any, frozen: Any) -> Any:
        model = self.prepared.spec.definition.merge(
            params, other, jax.random.key(self.run.seed), frozen=frozen
        )
        return as_means(self.run.loss(model, batch), num_rows(batch))["loss"].value

    def _name_first(
        self, found: dict[str, Any], batch: Any, state: TrainState
    ) -> tuple[str, str | None]:
        """Where it began, in words, and the path of the leaf: a parameter, the batch, the loss, or a gradient."""
        parameters, gradients = found["parameters"], found["gradients"]
        if words := _first(parameters, "parameter"):
            return words, next(path for path, row in parameters.items() if row["nonfinite"])
        for name, about in found["batch"].items():
            if about["nonfinite"]:
                return f"first in '{name}' of the batch, {about['nonfinite']:.2%} of it", None
        bad = [path for path, row in gradients.items() if row["nonfinite"]]
        if not math.isfinite(found["recomputed"]["loss"]):
            return self._name_operation(batch, state), None
        if bad:  # the backward pass begins with what is used last
            row = gradients[bad[-1]]
            inside = (
                f" [{row['first_index']}]" if len(row["shape"]) > 1 and row["first_index"] else ""
            )
            return f"first in gradient of {bad[-1]}{inside}", bad[-1]
        largest = max(gradients, key=lambda path: gradients[path]["norm"], default=None)
        share = gradients[largest]["norm"] if largest is not None else 0.0
        return (
            f"every number is finite when computed again; largest in gradient of {largest}, norm {share:.3g}",
            largest,
        )

    def _name_operation(self, batch: Any, state: TrainState) -> str:
        """The operation of the forward pass that made the first NaN, found by computing one after the other."""
        if self.group.count > 1:
            return "first in the loss itself"
        try:
            placed = jax.tree.map(jnp.asarray, batch)
            found = first_nan(self._loss, state.params, state.other, placed, state.frozen)
        except Exception:
            found = None
        return f"first in {found}, in the forward pass" if found else "first in the loss itself"


def _rows(tree: Any, measure: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """What `_statistics` finds, by path."""
    floats = {
        path: leaf
        for path, leaf in named_leaves(tree).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    rows = {}
    for path, (norm, largest, bad, first) in jax.device_get(measure(floats)).items():
        rows[path] = {
            "shape": list(floats[path].shape),
            "norm": float(norm),
            "largest": float(largest),
            "nonfinite": float(bad) / max(floats[path].size, 1),
            "first_index": int(first) if bad else None,
        }
    return rows


def _statistics(leaves: dict[str, jax.Array]) -> Any:
    """Of each: norm and largest value of its finite numbers, how many are not, and where along dim 0 the first of those is."""

    def of(leaf: jax.Array) -> Any:
        x = leaf.astype(jnp.float32)
        finite = jnp.isfinite(x)
        clean = jnp.where(finite, x, 0)
        largest = jnp.max(jnp.abs(clean), initial=0)
        norm = largest * jnp.sqrt(
            jnp.sum((clean / jnp.maximum(largest, 1e-37)) ** 2)
        )  # squares of large numbers would not be finite
        rows = jnp.any(~finite, axis=tuple(range(1, x.ndim))) if x.ndim else ~finite[None]
        return norm, largest, jnp.sum(~finite), jnp.argmax(rows) if rows.size else 0

    return {path: of(leaf) for path, leaf in leaves.items()}


def _first(rows: dict[str, dict[str, Any]], kind: str) -> str:
    bad = [path for path, row in rows.items() if row["nonfinite"]]
    return f"first in {kind} {bad[0]}" if bad else ""


def _describe(leaf: np.ndarray) -> dict[str, Any]:
    about: dict[str, Any] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "nonfinite": 0.0}
    if leaf.dtype.kind in "iufb" or jnp.issubdtype(leaf.dtype, jnp.floating):
        numbers = leaf.astype(np.float64)
        finite = np.isfinite(numbers)
        about["nonfinite"] = 1.0 - float(finite.mean()) if leaf.size else 0.0
        if finite.any():
            about |= {
                "least": float(numbers[finite].min()),
                "largest": float(numbers[finite].max()),
                "mean": float(numbers[finite].mean()),
            }
    return about


def _write(
    place: Path, found: dict[str, Any], batch: Any, ranges: tuple[tuple[int, int], ...]
) -> None:
    """Whole or not there."""
    temporary = place.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700, parents=True)
    if batch is not None:
        leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(batch).items()}
        leaves = {
            name: leaf if leaf.dtype.kind in "iufbc" else leaf.astype(np.float32)
            for name, leaf in leaves.items()
        }
        rows = num_rows(batch)
        kept = min(
            rows,
            max(1, int(rows * MOST_BYTES / max(1, sum(leaf.nbytes for leaf in leaves.values())))),
        )
        with (temporary / "batch.npz").open("wb") as file:
            np.savez(
                file, allow_pickle=False, **{name: leaf[:kept] for name, leaf in leaves.items()}
            )
        found["rows_kept"], found["rows_of_the_batch"] = kept, [list(part) for part in ranges]
    (temporary / "report.json").write_text(json.dumps(_plain(found), indent=1) + "\n")
    (temporary / "report.txt").write_text(_table(found))
    if place.exists():  # of an earlier start
        shutil.rmtree(place)
    os.rename(temporary, place)


def _plain(value: Any) -> Any:
    """The same, numbers that JSON does not have as text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"step {found['step']} was {found['why']}: loss {found['loss']}, gradient norm {found['grad_norm']}"
    ]
    lines += [found[key] for key in ("first", "problem") if found.get(key)]
    lines += [f"The parameters are {found['parameters_are']}.", ""]
    rows = [
        ("", "gradient", "", "", "parameter", "", ""),
        ("path", *("norm", "largest", "not finite") * 2),
    ]
    for path, parameter in found.get("parameters", {}).items():
        mark = f"{path}  <- first" if path == found.get("first_path") else path
        rows.append((mark, *_cells(found.get("gradients", {}).get(path)), *_cells(parameter)))
    return "\n".join([*lines, columns(rows)]) + "\n"


def _cells(row: dict[str, Any] | None) -> tuple[str, str, str]:
    if row is None or row["nonfinite"] == 1:
        return "-", "-", "-" if row is None else "all"
    return (
        f"{row['norm']:.4g}",
        f"{row['largest']:.4g}",
        f"{row['nonfinite']:.2%}" if row["nonfinite"] else "0",
    )
