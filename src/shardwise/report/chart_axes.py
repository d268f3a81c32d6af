"""What curves can be drawn over beside steps: the units, such as tokens, that a run had seen by then, and the time it had been running."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.rundir.columns import Column
from shardwise.rundir.files import EARLIEST, LATEST, RunRecord
from shardwise.rundir.time_accounting import Account

MOST_LABEL = 40


@dataclass(frozen=True)
class Axis:
    """Of each run some steps, rising, and what it had reached there; between two of them it is taken to grow evenly."""

    key: str  # "units" or "time"
    label: str
    runs: list[Column]

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "label": self.label,
            "runs": [
                {
                    "steps": run.steps.tolist(),
                    "at": [float(f"{value:.9g}") for value in run.values.tolist()],
                }
                for run in self.runs
            ],
        }


def axes_of(
    runs: Sequence[RunRecord], accounts: Sequence[Account], most: int, drawn: Collection[int]
) -> list[Axis]:
    """Those that are known of every run that is drawn, by its number; with at most about `most` points a run."""
    found = []
    units = {
        name.removesuffix("_per_s")
        for i in drawn
        for name, column in runs[i].columns.items()
        if name.endswith("_per_s") and len(column)
    }
    if len(units) == 1 and (unit := units.pop()):
        found.append(
            Axis(
                "units", unit[:MOST_LABEL], [_thinned(units_until(run, unit), most) for run in runs]
            )
        )
    times = [seconds_until(run, known) for run, known in zip(runs, accounts, strict=True)]
    found.append(Axis("time", "time", [_thinned(column, most) for column in times]))
    return [axis for axis in found if all(len(axis.runs[i]) for i in drawn)]


def units_until(run: RunRecord, unit: str) -> Column:
    """The units of all steps up to each. A step that was done again counts once."""
    rate, spent = run.column(f"{unit}_per_s"), run.column("step_s")
    if np.array_equal(rate.steps, spent.steps):
        steps, seen = rate.steps, rate.values * spent.values
    else:
        steps, i, j = np.intersect1d(
            rate.steps, spent.steps, assume_unique=True, return_indices=True
        )
        seen = rate.values[i] * spent.values[j]
    keep = np.isfinite(seen) & (seen >= 0) & (seen < 1e18)
    steps, seen = steps[keep], seen[keep]
    if not len(steps):
        return Column(steps, seen)
    total = np.cumsum(
        seen * np.diff(steps, prepend=0)
    )  # where a step is not written down, it is taken to be like the next
    return (
        Column(np.append(0, steps), np.append(0.0, total)) if steps[0] > 0 else Column(steps, total)
    )


def seconds_until(run: RunRecord, account: Account) -> Column:
    """The time from the beginning of the first start to the end of each step, without the time between starts."""
    times = run.column("time")
    keep = (times.values >= EARLIEST) & (times.values < LATEST)
    steps, values = times.steps[keep], times.values[keep]
    if not len(steps):
        return Column(steps, values)
    known = [
        (start.begun, start.down or 0.0) for start in account.starts if start.begun is not None
    ]
    begins = np.array([begun for begun, _ in known] or [values[0]])
    down = np.cumsum([seconds for _, seconds in known] or [0.0])
    start = np.maximum(
        np.searchsorted(begins, values, side="right") - 1, 0
    )  # the one that was going on then
    return Column(
        steps, np.maximum.accumulate(np.maximum(values - begins[0] - down[start], 0.0))
    )  # clocks are set back at times


def _thinned(column: Column, most: int) -> Column:
    """Points evenly spread over the records, and both ends of the longest leaps between two records."""
    if len(column) <= most:
        return column
    kept = np.linspace(0, len(column) - 1, most).round().astype(np.int64)
    leaps: NDArray[np.int64] = np.argpartition(np.diff(column.values), -20)[-20:]
    kept = np.unique(np.concatenate([kept, leaps, leaps + 1]))
    return Column(column.steps[kept], column.values[kept])
