"""X axes for curves besides steps: units seen (such as tokens), and running time."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.rundir.columns import Column
from shardwise.rundir.files import EARLIEST, LATEST, RunRecord
from shardwise.rundir.time_accounting import Account
from shardwise.text import Json

MAX_LABEL = 40
# Jumps that thinning preserves, such as the pauses for evaluations and restarts.
NUM_JUMPS = 20
# Larger counts of units cannot be real; they would flatten the axis.
MAX_UNITS = 1e18


@dataclass(frozen=True)
class XAxis:
    """What curves can be drawn over, next to steps.

    Attributes:
        key: "units" or "time".
        label: Name for people, such as "tokens".
        runs: For each run, steps and the position on the axis at the end of each step. Positions
            between two of these steps are interpolated linearly.
    """

    key: str
    label: str
    runs: list[Column]

    def as_json(self) -> Json:
        """Return what the script needs to place steps on the axis."""
        runs = []
        for column in self.runs:
            positions = [float(f"{value:.9g}") for value in column.values.tolist()]
            runs.append({"steps": column.steps.tolist(), "at": positions})
        return {"key": self.key, "label": self.label, "runs": runs}


def x_axes(
    runs: Sequence[RunRecord],
    accounts: Sequence[Account],
    max_points: int,
    drawn: Collection[int],
) -> list[XAxis]:
    """Return the axes that are known for every drawn run.

    Args:
        runs: The runs on the page.
        accounts: The time accounting of each run.
        max_points: Approximate upper bound of the points per run and axis.
        drawn: Indices of the runs that have curves. A run without steps must not hide an axis.
    """
    axes = []
    units = _logged_units(runs, drawn)
    if len(units) == 1:
        (unit,) = units
        seen = [_thin(units_seen(run, unit), max_points) for run in runs]
        axes.append(XAxis("units", unit[:MAX_LABEL], seen))
    times = [
        running_seconds(run, account)
        for run, account in zip(runs, accounts, strict=True)
    ]
    axes.append(XAxis("time", "time", [_thin(column, max_points) for column in times]))
    return [axis for axis in axes if all(len(axis.runs[i]) for i in drawn)]


def _logged_units(runs: Sequence[RunRecord], drawn: Collection[int]) -> set[str]:
    """Return the names of units whose throughput was logged, from metrics like tokens_per_s."""
    units = set()
    for i in drawn:
        for name, column in runs[i].columns.items():
            if name.endswith("_per_s") and len(column):
                units.add(name.removesuffix("_per_s"))
    return units - {""}


def units_seen(run: RunRecord, unit: str) -> Column:
    """Return how many units the run had processed by the end of each step.

    A repeated step counts once. A step without a record counts like the next recorded one.
    """
    rate = run.column(f"{unit}_per_s")
    seconds = run.column("step_s")
    if np.array_equal(rate.steps, seconds.steps):
        # The usual case, in which both metrics come from the same records.
        steps, per_step = rate.steps, rate.values * seconds.values
    else:
        steps, in_rate, in_seconds = np.intersect1d(
            rate.steps, seconds.steps, assume_unique=True, return_indices=True
        )
        per_step = rate.values[in_rate] * seconds.values[in_seconds]
    is_usable = np.isfinite(per_step) & (per_step >= 0) & (per_step < MAX_UNITS)
    steps, per_step = steps[is_usable], per_step[is_usable]
    total = np.cumsum(per_step * np.diff(steps, prepend=0))
    if len(steps) and steps[0] > 0:
        steps, total = np.append(0, steps), np.append(0.0, total)
    return Column(steps, total)


def running_seconds(run: RunRecord, account: Account) -> Column:
    """Return the running time at the end of each step, without the downtime between starts."""
    times = run.column("time")
    is_usable = (times.values >= EARLIEST) & (times.values < LATEST)
    steps, values = times.steps[is_usable], times.values[is_usable]
    if not len(steps):
        return Column(steps, values)
    starts = [start for start in account.starts if start.begun is not None]
    begins = np.array([start.begun for start in starts] or [values[0]], np.float64)
    downtime = np.cumsum([start.down or 0.0 for start in starts] or [0.0])
    current_start = np.maximum(np.searchsorted(begins, values, side="right") - 1, 0)
    elapsed = np.maximum(values - begins[0] - downtime[current_start], 0.0)
    # Clocks can be set back, but time must not decrease along a curve.
    return Column(steps, np.maximum.accumulate(elapsed))


def _thin(column: Column, max_points: int) -> Column:
    """Keep evenly spaced points, and both ends of the largest jumps between neighbors."""
    if len(column) <= max_points:
        return column
    spaced = np.linspace(0, len(column) - 1, max_points).round().astype(np.int64)
    jumps: NDArray[np.int64] = np.argpartition(np.diff(column.values), -NUM_JUMPS)[
        -NUM_JUMPS:
    ]
    kept = np.unique(np.concatenate([spaced, jumps, jumps + 1]))
    return Column(column.steps[kept], column.values[kept])
