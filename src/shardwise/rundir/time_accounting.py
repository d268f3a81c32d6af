"""Where the time of a run went: each start from its first moment to its last sign of life, and the time between them.

Steps stand once in `metrics.jsonl`: those that a restart has done again are cut from it. So the sum over its records is the time
of the steps that count; what `phases.jsonl` has beyond that was done for nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.rundir.columns import Column, is_finite
from shardwise.rundir.files import RunRecord, moment

STARTING = {  # phases of a start as fitting.py names them, and what people call them
    "importing": "importing",
    "preparing": "preparing",
    "verifying the newest checkpoint": "verifying",
    "compiling the step": "compiling",
    "loading the state": "loading",
    "first step": "first step",
}
KINDS = {
    "importing": "Python and JAX, until the recipe is read",
    "preparing": "the model's shapes, the layout, the data",
    "verifying": "digests of the newest checkpoint",
    "compiling": "the step, or fetching the kept program",
    "loading": "the state: first weights or a checkpoint",
    "other starting": "waiting for other processes, and the like",
    "first step": "the first step of each start, programs loaded on the way",
    "steps that count": "the other steps in metrics.jsonl, without waiting for data",
    "steps done again": "steps after the last checkpoint before a restart; known from phases.jsonl",
    "data": "steps waiting for their batch",
    "evaluation": "on held-out data",
    "saving": "checkpoints, as far as the steps waited for them",
    "not told apart": "up to the last sign of life; evaluation and saving too where phases.jsonl lacks",
    "down": "between the last sign of life and the next start",
}


@dataclass(frozen=True)
class Start:
    """One start of a run. Times are seconds since 1970; None is not known."""

    first: int  # the step it began from
    last: int | None  # the step it reached, counted even if a restart has undone it
    begun: float | None
    end: float | None
    seconds: dict[str, float]  # by the kinds above
    down: float | None  # before it
    again: int | None  # steps that the next start did again

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Account:
    starts: list[Start]
    seconds: dict[str, float]  # of all starts, and down
    wall: float | None  # from the first moment to the last sign of life
    useful: float  # seconds of steps that count
    is_estimated: (
        bool  # some ends are not known, so downtime may be too long and its start too short
    )

    @property
    def goodput(self) -> float | None:
        return min(1.0, self.useful / self.wall) if self.wall else None

    @property
    def again(self) -> int | None:
        known = [start.again for start in self.starts[:-1]]
        return None if any(steps is None for steps in known) else sum(steps or 0 for steps in known)


def account(run: RunRecord) -> Account:
    """Puts together what the files of a run say of its time."""
    begins: list[dict[str, Any]] = sorted(
        (
            {"step": int(s["step"]), "time": t}
            for s in run.starts
            if (t := moment(s.get("time"))) is not None
        ),
        key=_time,
    )
    if not begins:
        begins = sorted(
            (
                {"step": int(s["step"]), "time": t}
                for s in run.starting
                if (t := moment(s.get("time"))) is not None
            ),
            key=_time,
        )
    starting = [{**s, "time": t} for s in run.starting if (t := moment(s.get("time"))) is not None]
    phases = [
        {**p, "time": t}
        for p in run.phases
        if (t := moment(p.get("time"))) is not None and isinstance(p.get("seconds"), dict)
    ]
    spent, waited = run.column("step_s"), run.column("data_s")
    times = run.column("time")
    if not begins:
        begins = [{"step": int(spent.steps[0]) - 1 if len(spent) else 0, "time": None}]
    usual = float(np.median(spent.values)) if len(spent) else 0.0
    starts: list[Start] = []
    useful, is_estimated = 0.0, False
    for i, begin in enumerate(begins):
        following = begins[i + 1] if i + 1 < len(begins) else None
        until = following["time"] if following else math.inf
        since = begin["time"] if begin["time"] is not None else -math.inf
        entry = next((s for s in starting if since <= s["time"] < until), None)
        seconds = _starting(entry)
        begun = entry["time"] - sum(seconds.values()) if entry and seconds else begin["time"]
        limit = until - _lead(starting, following)
        named = [p for p in phases if is_finite(p.get("start")) and abs(p["start"] - since) < 0.01]
        phase = max(
            named or (p for p in phases if since <= p["time"] < limit), key=_time, default=None
        )
        most = following["step"] if following else math.inf
        own, own_waited = spent.between(begin["step"], most), waited.between(begin["step"], most)
        usual_steps = _clean(own)
        first = float(usual_steps[0]) if len(usual_steps) else 0.0
        step_seconds, data_seconds = float(usual_steps.sum()), float(_clean(own_waited).sum())
        useful += max(0.0, step_seconds - data_seconds - max(0.0, first - usual)) - _skipped(
            run, own, own_waited
        )
        if "first step" in seconds:
            step_seconds -= first
        kept = max(0.0, step_seconds - data_seconds)
        seconds["steps that count"] = kept
        seconds["data"] = data_seconds
        if phase is not None:
            seconds |= _later(
                phase,
                kept,
                data_seconds,
                first if "first step" in seconds else 0.0,
                seconds.get("compiling"),
            )
        alive = [s["time"] for s in (entry, phase) if s is not None]
        seen = times.between(begin["step"], most).values
        alive += [float(t) for t in seen[-1:] if moment(t) is not None and since <= t < limit]
        end = max(alive, default=None)
        if following is None and len(seen) == 0 and phase is None and begun is not None:
            end = run.written if run.written is not None and run.written > begun else end
        elif phase is None and len(seen) == 0 and end is not None:
            end, is_estimated = min(end + kept + data_seconds, limit), True
        if begun is not None and end is not None:
            left = end - begun - sum(seconds.values())
            seconds["not told apart"] = max(0.0, left)
        before = starts[-1].end if starts else None
        down = max(0.0, begun - before) if before is not None and begun is not None else None
        last = int(phase["step"]) if phase is not None else None
        if following is None:
            last = max(last or 0, run.last_step)
        again = (
            max(0, last - following["step"]) if following is not None and last is not None else None
        )
        kinds = {kind: seconds[kind] for kind in KINDS if seconds.get(kind, 0.0) > 0}
        starts.append(Start(begin["step"], last, begun, end, kinds, down, again))
    known = [start for start in starts if start.begun is not None and start.end is not None]
    wall = (
        max(s.end or 0.0 for s in known) - min(s.begun or math.inf for s in known)
        if known
        else None
    )
    total = {kind: sum(start.seconds.get(kind, 0.0) for start in starts) for kind in KINDS}
    total["down"] = sum(start.down or 0.0 for start in starts)
    return Account(
        starts,
        {kind: s for kind, s in total.items() if s > 0},
        wall,
        max(0.0, useful),
        is_estimated,
    )


def _time(record: dict[str, Any]) -> float:
    return float(record["time"])


def _starting(entry: dict[str, Any] | None) -> dict[str, float]:
    """The phases up to the first step, under the names of `KINDS`."""
    found: dict[str, float] = {}
    given = entry.get("seconds") if entry else None
    for name, value in given.items() if isinstance(given, dict) else ():
        if is_finite(value, 0) and value < 1e8:
            kind = (
                "evaluation"
                if name.startswith("evaluating")
                else STARTING.get(name, "other starting")
            )
            found[kind] = found.get(kind, 0.0) + value
    return found


def _lead(starting: list[dict[str, Any]], following: dict[str, Any] | None) -> float:
    """How long before it was noted down the next start began."""
    entry = next((s for s in starting if following and s["time"] >= following["time"]), None)
    parts = _starting(entry)
    lead = sum(
        seconds for kind, seconds in parts.items() if kind not in ("first step", "evaluation")
    )
    return lead if following else 0.0


def _later(
    phase: dict[str, Any], kept: float, waited: float, first: float, compiling: float | None
) -> dict[str, float]:
    """What phases.jsonl adds: its steps include their waiting for data, as `step_s` does."""
    given = {name: float(v) for name, v in phase["seconds"].items() if is_finite(v, 0) and v < 1e9}
    found = {
        "evaluation": given.get("evaluate", 0.0),
        "saving": given.get("save", 0.0),
        "data": max(waited, given.get("data", 0.0)),
    }
    compiled = given.get("compile", 0.0)
    if compiling is None:
        found["compiling"] = compiled
    is_apart = (
        compiling is not None and compiling < 0.5 * compiled
    )  # no plan was made: the first step is the compilation
    lost = given.get("steps", 0.0) - (0.0 if is_apart else first) - kept - found["data"]
    if lost > 0.02 * kept + 0.05:
        found["steps done again"] = lost
    return found


def _clean(column: Column) -> NDArray[np.float64]:
    values = column.values
    return values[np.isfinite(values) & (values >= 0) & (values < 1e8)]


def _skipped(run: RunRecord, spent: Column, waited: Column) -> float:
    """Seconds of steps whose update was not applied."""
    skipped = run.column("skipped")
    if not len(skipped) or not len(spent):
        return 0.0
    steps = skipped.steps[skipped.values != 0]
    return max(
        0.0,
        float(
            sum(
                _clean(Column(c.steps, np.where(np.isin(c.steps, steps), c.values, 0.0))).sum() * f
                for c, f in ((spent, 1), (waited, -1))
            )
        ),
    )
