"""Compute steps of a run again and compare them with what the run recorded.

`metrics.jsonl` has the loss and the gradient norm of every step, and a digest of the state every
`Run.digest_every` steps. On the same devices, versions and mesh all of them must be equal, bit for
bit. Elsewhere they are equal up to rounding, which grows from step to step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from shardwise.checkpoint.resume import check_accepted, compare, not_comparable
from shardwise.checkpoint.store import Checkpoints
from shardwise.console import warn
from shardwise.errors import ConfigError
from shardwise.loop import steps
from shardwise.metrics import read_metrics
from shardwise.plan.compile import compile_run
from shardwise.run import Prepared, Run, prepare
from shardwise.state import TrainState
from shardwise.step import Metrics
from shardwise.step.digests import Digests, combine, from_text, tree_digests
from shardwise.text import Json, columns
from shardwise.training import starting
from shardwise.tree import named_leaves

# The metrics of a step that are compared, with the relative difference that is allowed where bits
# may differ.
TOLERANCES = {"loss": 1e-3, "grad_norm": 1e-2}
# What must be the same for equal bits.
SAME_BITS = (
    *("mesh", "devices", "versions", "deterministic"),
    *("accumulate", "microbatches", "rounds"),
)
# How many arrays a text names at most.
MAX_NAMED = 12
# What a difference may come from.
MEANING = (
    "A faulty device, damaged memory, or a kernel that changed computes other bits. Replay the "
    "steps again: if the same numbers come out, the recorded ones are wrong; if not, a device of "
    "this machine is."
)


@dataclass(frozen=True)
class ReplayedStep:
    """A step of a run next to its second computation.

    Attributes:
        step: its number.
        recorded: the metrics in `metrics.jsonl`, by name.
        computed: the same metrics, computed again.
        recorded_digest: the digest of the state after the step, if the run recorded one.
        computed_digest: the same digest, computed again.
        arrays: the arrays of the state whose digests differ, if the run recorded digests of them.
    """

    step: int
    recorded: dict[str, float]
    computed: dict[str, float]
    recorded_digest: str | None = None
    computed_digest: str | None = None
    arrays: tuple[str, ...] = ()

    def differs(self, *, exact: bool) -> bool:
        """Return whether the two computations differ.

        Args:
            exact: whether bits must be equal. Otherwise `TOLERANCES` apply to the metrics, and
                digests do not count.
        """
        for name, value in self.recorded.items():
            if not _is_close(
                value, self.computed[name], 0 if exact else TOLERANCES[name]
            ):
                return True
        return exact and self.recorded_digest != self.computed_digest


@dataclass(frozen=True)
class Replay:
    """The result of `replay`.

    Attributes:
        start: the step of the checkpoint that the replay started from; 0 for the initial state.
        steps: the steps that were compared.
        exact: whether all bits must be equal, because devices, versions and mesh are the same.
        changed: what differs from the run, if bits may differ: the names of settings.
    """

    start: int
    steps: tuple[ReplayedStep, ...]
    exact: bool
    changed: tuple[str, ...] = field(default=())

    @property
    def first_difference(self) -> ReplayedStep | None:
        """The first step that differs from the run, or None."""
        return next((x for x in self.steps if x.differs(exact=self.exact)), None)

    @property
    def num_digests(self) -> int:
        """The number of states that were compared."""
        return sum(step.recorded_digest is not None for step in self.steps)

    def text(self) -> str:
        """Return the result as text."""
        first = self.steps[0].step
        last = self.steps[-1].step
        place = f"steps {first} to {last}, computed again from step {self.start}"
        expected = (
            "same devices, versions and mesh: all bits must be equal"
            if self.exact
            else f"{', '.join(self.changed)} differ: losses within "
            f"{TOLERANCES['loss']:.1%}, gradient norms within {TOLERANCES['grad_norm']:.0%}"
        )
        lines = [place, expected]
        found = self.first_difference
        if found is None:
            count = self.num_digests
            states = f" and {count} state{'s' * (count != 1)}" if self.exact else ""
            lines.append(f"equal: {len(self.steps)} steps{states}")
            return "\n".join(lines)
        lines.append(f"step {found.step} is the first that differs:")
        rows = [("", "recorded", "computed")]
        rows += [
            (name, f"{value:.9g}", f"{found.computed[name]:.9g}")
            for name, value in found.recorded.items()
        ]
        if found.recorded_digest is not None:
            rows.append(("state", found.recorded_digest, found.computed_digest or ""))
        lines.append(columns(rows))
        if found.arrays:
            shown = ", ".join(found.arrays[:MAX_NAMED])
            hidden = len(found.arrays) - MAX_NAMED
            more = f" and {hidden} more" if hidden > 0 else ""
            lines.append(f"arrays of the state that differ: {shown}{more}")
        lines.append(MEANING)
        return "\n".join(lines)

    def as_json(self) -> Json:
        """Return the result for `--json`."""
        found = self.first_difference
        return {
            "start": self.start,
            "first": self.steps[0].step,
            "last": self.steps[-1].step,
            "exact": self.exact,
            "changed": list(self.changed),
            "digests": self.num_digests,
            "first_difference": None if found is None else found.step,
            "arrays": [] if found is None else list(found.arrays),
        }


def replay(
    run: Run,
    first: int,
    last: int,
    *,
    console: Console | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Compute steps of a run again and compare them with what the run recorded.

    The run directory is read and not changed.

    Args:
        run: the run, with its directory in `run.out`.
        first: the first step to compare, counted from 1.
        last: the last step to compare.
        console: where to print warnings about damaged checkpoints; by default stderr.
        progress: called with the step and `last` after each step.

    Raises:
        ConfigError: the run has no directory, did not record these steps, or is another one than
            the one that wrote the directory.
        CheckpointError: a checkpoint cannot be read.

    Example:
        >>> result = replay(run, 400, 420)  # doctest: +SKIP
        >>> result.first_difference is None  # doctest: +SKIP
        True
    """
    if run.out is None:
        raise ConfigError("replay needs the directory of the run: set Run.out.")
    if not 1 <= first <= last:
        raise ConfigError(f"steps {first} to {last} are not a range of steps.")
    console = console or Console(stderr=True)
    records = _records(run.out, first, last)
    prepared = prepare(replace(run, steps=max(run.steps, last)))
    about = starting.describe(run, prepared, {})
    with Checkpoints(run.out / "checkpoints") as checkpoints:
        start, state = _state_before(run, prepared, checkpoints, first, console)
        saved = _description(run.out, checkpoints, start)
        changed = _check_same_run(run, saved, about)
        position = None
        if start:
            position = starting.find_position(run, prepared, checkpoints, start)
            starting.resume_data(prepared, start, position, checkpoints.group)
    _, prepared = compile_run(run, prepared)
    expected = _recorded_digests(run.out)
    names = tuple(named_leaves(prepared.spec.abstract))
    compared = []
    for n, state, metrics in steps(prepared.step, state, prepared.batches, until=last):
        if progress is not None:
            progress(n, last)
        if n >= first and n in records:
            digest = records[n].get("digest")
            digests = np.asarray(tree_digests(state)) if digest else None
            compared.append(
                _replayed(records[n], metrics, digests, expected.get(n), names)
            )
    return Replay(start, tuple(compared), not changed, changed)


def _records(directory: Path, first: int, last: int) -> dict[int, Json]:
    """Return the records of all steps in a range, by step."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: {directory} is not a run directory.")
    records = {x["step"]: x for x in read_metrics(path) if "loss" in x}
    if not records:
        raise ConfigError(f"{path} has no steps.")
    if first not in records or last not in records:
        raise ConfigError(
            f"{path} has the steps {min(records)} to {max(records)}, and not all of {first} to "
            f"{last}."
        )
    return {n: record for n, record in records.items() if first <= n <= last}


def _recorded_digests(directory: Path) -> dict[int, Digests]:
    """Return the digests of all arrays, by step, as far as the run recorded them."""
    path = directory / "digests.jsonl"
    found: dict[int, Digests] = {}
    for record in read_metrics(path) if path.exists() else []:
        try:
            found[record["step"]] = from_text(record["arrays"])
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _state_before(
    run: Run, prepared: Prepared, checkpoints: Checkpoints, first: int, console: Console
) -> tuple[int, TrainState]:
    """Return the newest state before a step that can be read: a checkpoint, or the initial one."""
    for step in reversed(checkpoints.steps()):
        if step >= first:
            continue
        problems = checkpoints.verify(step)
        if problems:
            warn(console, f"{problems[0]}; starting from an earlier checkpoint")
            continue
        checkpoints.check_fits(prepared.spec, step)
        return step, starting.load_state(
            run, prepared.spec, checkpoints, step, {}, console
        )
    return 0, starting.load_state(run, prepared.spec, None, None, {}, console)


def _description(directory: Path, checkpoints: Checkpoints, start: int) -> Json:
    """Return the description of the run at a checkpoint, or the one in run.json."""
    if start:
        return checkpoints.metadata(start)
    from shardwise.rundir.files import RunFiles

    return RunFiles(directory).read().about


def _check_same_run(run: Run, saved: Json, about: Json) -> tuple[str, ...]:
    """Raise if it is another run; return the settings that make its bits differ."""
    known = {key: value for key, value in saved.items() if key in about}
    # Sampled learning rates depend on the number of steps.
    now = {key: value for key, value in about.items() if key in known and key != "lr"}
    known.pop("lr", None)
    for key in not_comparable(known, now):
        known.pop(key, None)
        now.pop(key, None)
    changes = compare(known, now)
    check_accepted(changes, run.accept, f"the run in {run.out}")
    return tuple(
        dict.fromkeys(change.name for change in changes if change.key in SAME_BITS)
    )


def _replayed(
    record: Json,
    metrics: Metrics,
    digests: Digests | None,
    expected: Digests | None,
    names: tuple[str, ...],
) -> ReplayedStep:
    recorded = {name: float(record[name]) for name in TOLERANCES if name in record}
    computed = {name: float(metrics[name]) for name in recorded}
    different: tuple[str, ...] = ()
    if digests is not None and expected is not None and len(expected) == len(names):
        different = tuple(
            name
            for name, is_same in zip(names, digests == expected, strict=True)
            if not is_same
        )
    return ReplayedStep(
        step=record["step"],
        recorded=recorded,
        computed=computed,
        recorded_digest=record.get("digest"),
        computed_digest=None if digests is None else combine(digests),
        arrays=different,
    )


def _is_close(a: float, b: float, tolerance: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))
