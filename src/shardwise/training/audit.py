"""Find devices that compute wrong numbers without an error (`Run.audit_every`).

An audit compares the bits of two computations that must be equal:

- Copies. Devices that hold the same shard of the state after a step must hold the same bits.
- With data parallelism, all replicas compute the gradients of the same examples, a part of the
  batch of this step, and must get the same bits. The part rotates from audit to audit. A device
  whose arithmetic is always wrong differs from the others here.
- Without it, the step is computed a second time from a copy of the state. That finds errors that do
  not repeat. It needs memory for the copy.

An audit cannot see that a bit of the only copy of the state changed between two steps: `shardwise
replay` finds that.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console

from shardwise.cluster.watch import Watch
from shardwise.console import warn, working
from shardwise.errors import ConfigError, CorruptionError, ShardwiseError
from shardwise.files.durable import write_atomically
from shardwise.run import Prepared, Run
from shardwise.rundir.phases import Phase
from shardwise.sharding import axes_of_entry
from shardwise.state import StateSpec, TrainState
from shardwise.step import StepResult, TrainStep, make_train_step
from shardwise.step.digests import device_digests, disagreeing
from shardwise.text import Json
from shardwise.training.due import is_due
from shardwise.training.log import RunLog
from shardwise.tree import Batch, PyTree, named_leaves

# How many arrays of a difference the message names. report.json has all of them.
MAX_NAMED = 3


@dataclass(frozen=True)
class Difference:
    """An array whose bits differ between two computations that must be equal.

    Attributes:
        name: the name of the array.
        devices: the devices that differ from the others, or all that may be wrong.
    """

    name: str
    devices: list[jax.Device]


@dataclass(eq=False)
class Auditor:
    """Audits the steps of a run.

    All processes of the run call the same methods; the first one writes the report.

    Attributes:
        run: the run.
        prepared: the same run, prepared.
        watch: coordinates the processes of the run.
        console: where to print.
        log: records steps, and the time of audits.
        step_number: the number of the last step.
        count: the number of audits so far.
        last_clean: the step of the last audit that found nothing; None before the first.
    """

    run: Run
    prepared: Prepared
    watch: Watch
    console: Console
    log: RunLog
    step_number: int
    count: int = 0
    last_clean: int | None = None
    # Digests of the state after this step, if it was computed once before.
    _expected: np.ndarray | None = None
    # The batch of this step.
    _batch: Batch = None

    def is_due(self, n: int) -> bool:
        """Return whether step `n` is audited."""
        return is_due(n, self.run.audit_every)

    def audited(self, step: TrainStep) -> TrainStep:
        """Return the step with the first half of an audit before each step that is due."""
        if not self.run.audit_every:
            return step

        def function(state: TrainState, batch: Batch) -> StepResult:
            self.step_number += 1
            if self.is_due(self.step_number):
                self._before(step, state, batch)
            return step.function(state, batch)

        return replace(step, function=function)

    def _before(self, step: TrainStep, state: TrainState, batch: Batch) -> None:
        """Compare the replicas, or compute the step once from a copy of the state."""
        # The time of the step before does not count as that of an audit.
        self.log.finish()
        # The first audit compiles, so it may take much longer than a step.
        self.watch.phase(Phase.AUDITING.at(self.step_number))
        self._batch = batch
        if self._replicas is not None:
            digests, specs, names = self._replicas(state, batch, self.count)
            found = _differences(digests, step.spec.mesh, specs, names)
            self._check("gradients of the same examples", found)
        else:
            copy = jax.tree.map(jnp.copy, state)
            self._expected = device_digests(step.function(copy, batch)[0])
        self.log.clock.lap("audit")

    def after(self, state: TrainState) -> None:
        """Compare the state after an audited step with its copies and its first computation.

        Raises:
            CorruptionError: they differ.
        """
        named = named_leaves(state)
        mesh = self.prepared.spec.mesh
        digests = device_digests(state)
        if self._expected is not None:
            found = _changed(digests, self._expected, mesh, list(named))
            self._check("two computations of the step", found)
        specs = [leaf.sharding.spec for leaf in named.values()]
        found = _differences(digests, mesh, specs, list(named))
        self._check("copies of the state", found)
        self._expected = self._batch = None
        self.count += 1
        self.last_clean = self.step_number
        self.log.clock.lap("audit")

    @cached_property
    def _replicas(self) -> "_Replicas | None":
        """The replicas of the run; None without data parallelism, or if the loss needs a batch."""
        spec = self.prepared.spec
        axes = replica_axes(spec)
        if not axes:
            return None
        try:
            with working(self.console, "compiling the audit"):
                return _Replicas.of(self.run, spec, self.prepared.step, axes)
        except ShardwiseError as error:
            warn(
                self.console,
                f"audits compute each step twice, and not one part of the batch on all replicas: "
                f"{error}",
            )
            return None

    def _check(self, what: str, found: Sequence[Difference]) -> None:
        if not found:
            return
        n = self.step_number
        report = self._report(n, what, found)
        place = ""
        if self.run.out is not None and self.watch.group.is_first:
            folder = self.run.out / "audit" / str(n)
            _keep_evidence(folder, report, self._batch)
            place = f" {folder / 'report.json'} lists them."
        names = ", ".join(difference.name for difference in found[:MAX_NAMED])
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        clean = (
            f"The last audit without a difference was step {self.last_clean}"
            if self.last_clean is not None
            else "No earlier audit of this start"
        )
        raise CorruptionError(
            f"step {n}: {what} differ in {names}{more} ({report['suspects']}): a device computed "
            f"or stored wrong bits.{place} {clean}: later checkpoints may be damaged. Replace the "
            "device, remove them, and resume."
        )

    def _report(self, n: int, what: str, found: Sequence[Difference]) -> Json:
        devices = list(dict.fromkeys(d for x in found for d in x.devices))
        suspects = ", ".join(
            f"device {device.id} of {self.watch.group.name(device.process_index)}"
            for device in devices
        )
        return {
            "step": n,
            "compared": what,
            "suspects": suspects,
            "last_clean_audit": self.last_clean,
            "arrays": {x.name: [str(device) for device in x.devices] for x in found},
        }


@dataclass(frozen=True, eq=False)
class _Replicas:
    """Computes the gradients of the same examples on all replicas of a data-parallel run.

    Attributes:
        step: the step for a part of the batch, on a mesh whose replica axes do not shard it.
        parts: the number of parts of a batch.
    """

    step: TrainStep
    parts: int

    @classmethod
    def of(
        cls, run: Run, spec: StateSpec, step: TrainStep, axes: tuple[str, ...]
    ) -> "_Replicas":
        kept = tuple(axis for axis in spec.rules.batch if axis not in axes)
        parts = math.prod(spec.mesh.shape[axis] for axis in axes) * run.accumulate
        size = step.layout.padded_rows // parts

        def shape_of_part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (size, *x.shape[1:]) if x.ndim else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype)

        own = make_train_step(
            replace(spec, rules=replace(spec.rules, batch=kept)),
            run.loss,
            jax.tree.map(shape_of_part, step.batch),
            seed=run.seed,
            compute_dtype=run.compute_dtype,
            matmul_dtype=run.matmul_dtype,
            deterministic=run.deterministic,
        )
        return cls(own, parts)

    def __call__(
        self, state: TrainState, batch: Batch, count: int
    ) -> tuple[np.ndarray, list[PartitionSpec], list[str]]:
        """Return the digests of the gradients on each device, their specs, and their names."""
        size = self.step.layout.rows
        shardings = self.step.layout.shardings(self.step.batch)

        def take(batch: Batch, start: jax.Array) -> Batch:
            return jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, start, size) if x.ndim else x,
                batch,
            )

        start = jnp.int32(count % self.parts * size)
        part = jax.jit(take, out_shardings=shardings)(batch, start)
        grads = self.step.gradients(state, part)[0]
        named = named_leaves(grads)
        specs = [leaf.sharding.spec for leaf in named.values()]
        return device_digests(grads), specs, [f"gradient of {name}" for name in named]


def replica_axes(spec: StateSpec) -> tuple[str, ...]:
    """Return the axes of the mesh along which the state is replicated and the batch sharded."""
    used = {
        axis
        for leaf in jax.tree.leaves(spec.abstract)
        for entry in leaf.sharding.spec
        for axis in axes_of_entry(entry)
    }
    return tuple(
        axis
        for axis, size in spec.mesh.shape.items()
        if size > 1 and axis in spec.rules.batch and axis not in used
    )


def check_auditable(run: Run, spec: StateSpec) -> None:
    """Raise if two computations of a step may differ without an error."""
    is_gpu = spec.mesh.devices.flat[0].platform == "gpu"
    if run.audit_every and is_gpu and not run.deterministic:
        raise ConfigError(
            f"audit_every={run.audit_every} compares bits, and with deterministic=False the sums "
            "of a GPU have no fixed order. Remove one of the two."
        )


def _differences(
    digests: np.ndarray, mesh: Mesh, specs: Sequence[PartitionSpec], names: list[str]
) -> list[Difference]:
    return [
        Difference(names[leaf], devices)
        for leaf, devices in disagreeing(digests, mesh, specs)
    ]


def _changed(
    digests: np.ndarray, expected: np.ndarray, mesh: Mesh, names: list[str]
) -> list[Difference]:
    """Return the arrays whose digest differs on a device between two computations."""
    differs = digests != expected
    return [
        Difference(name, list(mesh.devices[differs[..., leaf]]))
        for leaf, name in enumerate(names)
        if differs[..., leaf].any()
    ]


def _keep_evidence(folder: Path, report: Json, batch: Batch) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(folder / "report.json", json.dumps(report, indent=2) + "\n")
    arrays: dict[str, PyTree] = {
        name.replace("/", "."): np.asarray(leaf)
        for name, leaf in named_leaves(batch).items()
        if leaf.is_fully_addressable
    }
    np.savez(folder / "batch.npz", **arrays)
