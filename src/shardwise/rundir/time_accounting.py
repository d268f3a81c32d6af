"""Account for the time of a run: each start up to its last sign of life, and the downtime between.

`metrics.jsonl` contains each step once: a restart removes the records of the steps that it repeats.
The sum over its records is therefore the time of the steps that count. Step time in `phases.jsonl`
beyond that sum was spent on steps that were repeated.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from shardwise.rundir.columns import Column, is_finite
from shardwise.rundir.files import RunRecord, moment
from shardwise.rundir.phases import Phase
from shardwise.text import Json

# Longer times in a file are not believed: 1e8 s is three years.
MAX_STEP_SECONDS = 1e8
MAX_SECONDS = 1e9
# A phase line belongs to the start with the same time. Both were rounded to milliseconds.
SAME_TIME = 0.01


class TimeKind(StrEnum):
    """What the time of a run was spent on. The values are keys in `shardwise report --json`."""

    IMPORTING = "importing"
    PREPARING = "preparing"
    VERIFYING = "verifying"
    COMPILING = "compiling"
    LOADING = "loading"
    OTHER_STARTING = "other starting"
    FIRST_STEP = "first step"
    STEPS = "steps that count"
    REPEATED_STEPS = "steps done again"
    DATA = "data"
    EVALUATION = "evaluation"
    SAVING = "saving"
    AUDITS = "audits"
    UNKNOWN = "not told apart"
    DOWN = "down"


# An explanation of each kind, in the order in which reports show them.
KINDS = {
    TimeKind.IMPORTING: "Python and JAX, until the recipe is read",
    TimeKind.PREPARING: "shapes of the model, its sharding, the data",
    TimeKind.VERIFYING: "digests of the newest checkpoint",
    TimeKind.COMPILING: "the step, or loading it from the compilation cache",
    TimeKind.LOADING: "the state: initial weights or a checkpoint",
    TimeKind.OTHER_STARTING: "waiting for other processes and other work of a start",
    TimeKind.FIRST_STEP: "the first step of each start, including programs loaded on the way",
    TimeKind.STEPS: "all other steps in metrics.jsonl, without waiting for data",
    TimeKind.REPEATED_STEPS: "steps after the last checkpoint before a restart, from phases.jsonl",
    TimeKind.DATA: "steps waiting for their batch",
    TimeKind.EVALUATION: "on validation data",
    TimeKind.SAVING: "checkpoints, as far as the steps waited for them",
    TimeKind.AUDITS: "second computations of steps, to find faulty devices",
    TimeKind.UNKNOWN: (
        "up to the last sign of life; includes evaluation and saving if phases.jsonl is missing"
    ),
    TimeKind.DOWN: "between the last sign of life and the next start",
}

# Phases up to the first step that have a kind; all others are OTHER_STARTING.
STARTING_KINDS = {
    Phase.IMPORTING: TimeKind.IMPORTING,
    Phase.PREPARING: TimeKind.PREPARING,
    Phase.VERIFYING: TimeKind.VERIFYING,
    Phase.COMPILING: TimeKind.COMPILING,
    Phase.LOADING: TimeKind.LOADING,
    Phase.FIRST_STEP: TimeKind.FIRST_STEP,
    # An evaluation that was due when the run was stopped is made before the first step.
    Phase.EVALUATING: TimeKind.EVALUATION,
}


@dataclass(frozen=True)
class Start:
    """One start of a run. Times are in seconds since 1970; None means unknown.

    Attributes:
        first: the step that it resumed from, or 0.
        last: the step that it reached, including steps that the next start repeated.
        begun: when it began.
        end: its last sign of life.
        seconds: time by kind; kinds without time are missing.
        down: seconds between the end of the previous start and this one.
        again: number of its steps that the next start repeated.
    """

    first: int
    last: int | None
    begun: float | None
    end: float | None
    seconds: dict[TimeKind, float]
    down: float | None
    again: int | None

    @property
    def total(self) -> float:
        """Seconds of all kinds together."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Account:
    """The time of a run.

    Attributes:
        starts: all starts, oldest first; at least one.
        seconds: time by kind over all starts, with the downtime.
        wall: seconds from the first moment to the last sign of life, if known.
        useful: seconds of steps that count, without waiting for data.
        is_estimated: whether the end of a start is unknown. Its downtime may then be too long.
    """

    starts: list[Start]
    seconds: dict[TimeKind, float]
    wall: float | None
    useful: float
    is_estimated: bool

    @property
    def goodput(self) -> float | None:
        """The useful share of the wall time, between 0 and 1, if known."""
        return min(1.0, self.useful / self.wall) if self.wall else None

    @property
    def again(self) -> int | None:
        """Number of steps that were repeated, if known for every start."""
        repeated = 0
        for start in self.starts[:-1]:
            if start.again is None:
                return None
            repeated += start.again
        return repeated


def account(run: RunRecord) -> Account:
    """Return where the time of a run went, as far as its files say."""
    typical = _median(run.column("step_s"))
    starts: list[Start] = []
    useful = 0.0
    is_estimated = False
    for records in _records_by_start(run):
        useful += _useful_seconds(records, typical)
        seconds = _seconds(records)
        begun = records.begun
        end, is_guess = _end(records, seconds, run.written)
        is_estimated = is_estimated or is_guess
        if begun is not None and end is not None:
            seconds[TimeKind.UNKNOWN] = max(0.0, end - begun - sum(seconds.values()))
        last = _last_step(records, run.last_step)
        again = None
        if last is not None and records.next_step is not None:
            again = max(0, last - records.next_step)
        previous_end = starts[-1].end if starts else None
        down = None
        if begun is not None and previous_end is not None:
            down = max(0.0, begun - previous_end)
        kinds = {kind: seconds[kind] for kind in KINDS if seconds.get(kind, 0.0) > 0}
        starts.append(
            Start(
                first=records.step,
                last=last,
                begun=begun,
                end=end,
                seconds=kinds,
                down=down,
                again=again,
            )
        )
    return Account(
        starts=starts,
        seconds=_total_seconds(starts),
        wall=_wall(starts),
        useful=max(0.0, useful),
        is_estimated=is_estimated,
    )


@dataclass(frozen=True)
class _Line:
    """A line of `starts.jsonl`, `starting.jsonl` or `phases.jsonl` with valid values."""

    step: int
    time: float
    seconds: dict[str, float]
    start: float | None


@dataclass(frozen=True)
class _StartRecords:
    """The records that belong to one start."""

    # The step it resumed from and, unless it is the last start, that of the next one.
    step: int
    next_step: int | None
    # It lived from `since` (-inf: unknown) to `limit`, when the next start began (inf: none).
    since: float
    limit: float
    # Its line in starting.jsonl and its last line in phases.jsonl.
    starting: _Line | None
    phases: _Line | None
    # Columns of its steps that count: step_s, data_s, time, and step_s and data_s of steps whose
    # update was skipped.
    spent: Column
    waited: Column
    times: Column
    skipped: float

    @property
    def starting_seconds(self) -> dict[TimeKind, float]:
        return _starting_seconds(self.starting)

    @property
    def begun(self) -> float | None:
        """When the process began: before the first phase."""
        if self.starting is not None and self.starting_seconds:
            return self.starting.time - sum(self.starting_seconds.values())
        return self.since if math.isfinite(self.since) else None

    @property
    def first_step(self) -> float:
        """Seconds of the first step."""
        spent = _valid_seconds(self.spent)
        return float(spent[0]) if len(spent) else 0.0


def _records_by_start(run: RunRecord) -> Iterator[_StartRecords]:
    """Yield the records of each start, oldest first."""
    starting = _valid_lines(run.starting)
    phases = _valid_lines(p for p in run.phases if isinstance(p.get("seconds"), dict))
    # Old runs have no starts.jsonl, and starting.jsonl has only starts that made a step.
    begins = sorted(_valid_lines(run.starts) or starting, key=_time)
    spent = run.column("step_s")
    waited = run.column("data_s")
    if not begins:
        before_first = int(spent.steps[0]) - 1 if len(spent) else 0
        begins = [_Line(before_first, -math.inf, {}, None)]
    for begin, following in zip_longest(begins, begins[1:]):
        until = following.time if following else math.inf
        limit = until - _seconds_before(following, starting)
        last_step = following.step if following else math.inf
        own_spent = spent.between(begin.step, last_step)
        own_waited = waited.between(begin.step, last_step)
        yield _StartRecords(
            step=begin.step,
            next_step=following.step if following else None,
            since=begin.time,
            limit=limit,
            starting=next((s for s in starting if begin.time <= s.time < until), None),
            phases=_last_phases(phases, begin.time, limit),
            spent=own_spent,
            waited=own_waited,
            times=run.column("time").between(begin.step, last_step),
            skipped=_skipped_seconds(run.column("skipped"), own_spent, own_waited),
        )


def _valid_lines(records: Iterable[Json]) -> list[_Line]:
    """Return the records with a valid time."""
    lines = []
    for record in records:
        time = moment(record.get("time"))
        if time is None:
            continue
        seconds = record.get("seconds")
        valid = {}
        if isinstance(seconds, dict):
            valid = {
                k: float(v)
                for k, v in seconds.items()
                if is_finite(v, 0) and v < MAX_SECONDS
            }
        start = record.get("start")
        lines.append(
            _Line(
                int(record["step"]),
                time,
                valid,
                float(start) if is_finite(start) else None,
            )
        )
    return lines


def _time(line: _Line) -> float:
    return line.time


def _starting_seconds(line: _Line | None) -> dict[TimeKind, float]:
    """Return the seconds up to the end of the first step, by kind."""
    by_kind: dict[TimeKind, float] = {}
    for name, seconds in line.seconds.items() if line is not None else ():
        phase = Phase.of(name)
        kind = (
            STARTING_KINDS.get(phase, TimeKind.OTHER_STARTING)
            if phase
            else TimeKind.OTHER_STARTING
        )
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    return by_kind


def _seconds_before(following: _Line | None, starting: list[_Line]) -> float:
    """Return how long the next start was running when it wrote its line in `starts.jsonl`."""
    if following is None:
        return 0.0
    line = next((s for s in starting if s.time >= following.time), None)
    after = (TimeKind.FIRST_STEP, TimeKind.EVALUATION)
    return sum(s for kind, s in _starting_seconds(line).items() if kind not in after)


def _last_phases(phases: list[_Line], since: float, limit: float) -> _Line | None:
    """Return the last phase line of a start: one that names it, or else one in its time."""
    named = [
        p for p in phases if p.start is not None and abs(p.start - since) < SAME_TIME
    ]
    candidates = named or [p for p in phases if since <= p.time < limit]
    return max(candidates, key=_time, default=None)


def _useful_seconds(records: _StartRecords, typical: float) -> float:
    """Return the seconds of applied steps; a first step counts as a typical one."""
    spent = float(_valid_seconds(records.spent).sum())
    waited = float(_valid_seconds(records.waited).sum())
    excess = max(0.0, records.first_step - typical)
    return max(0.0, spent - waited - excess) - records.skipped


def _seconds(records: _StartRecords) -> dict[TimeKind, float]:
    """Return the known time of a start by kind."""
    seconds = records.starting_seconds
    spent = float(_valid_seconds(records.spent).sum())
    waited = float(_valid_seconds(records.waited).sum())
    first_step = records.first_step if TimeKind.FIRST_STEP in seconds else 0.0
    counted = max(0.0, spent - first_step - waited)
    seconds[TimeKind.STEPS] = counted
    seconds[TimeKind.DATA] = waited
    if records.phases is None:
        return seconds

    phases = records.phases.seconds
    seconds[TimeKind.EVALUATION] = phases.get("evaluate", 0.0)
    seconds[TimeKind.SAVING] = phases.get("save", 0.0)
    if "audit" in phases:
        seconds[TimeKind.AUDITS] = phases["audit"]
    seconds[TimeKind.DATA] = max(waited, phases.get("data", 0.0))
    compiled = phases.get("compile", 0.0)
    compiling = seconds.setdefault(TimeKind.COMPILING, compiled)
    # Without a plan the first step compiles, and "compile" in phases.jsonl is that step.
    is_first_step_apart = compiling < 0.5 * compiled
    if is_first_step_apart:
        first_step = 0.0
    # Steps in phases.jsonl include their waiting for data, as step_s does.
    repeated = phases.get("steps", 0.0) - first_step - counted - seconds[TimeKind.DATA]
    # Ignore differences of rounding.
    if repeated > 0.02 * counted + 0.05:
        seconds[TimeKind.REPEATED_STEPS] = repeated
    return seconds


def _end(
    records: _StartRecords, seconds: dict[TimeKind, float], written: float | None
) -> tuple[float | None, bool]:
    """Return the last sign of life of a start, and whether it is an estimate.

    Args:
        records: the records of the start.
        seconds: its known time by kind.
        written: when `metrics.jsonl` was last written.
    """
    signs = [
        line.time for line in (records.starting, records.phases) if line is not None
    ]
    for time in records.times.values[-1:].tolist():
        if moment(time) is not None and records.since <= time < records.limit:
            signs.append(time)
    end = max(signs, default=None)
    if len(records.times) or records.phases is not None:
        return end, False
    # Runs of old versions: no record has a time.
    begun = records.begun
    if records.next_step is None and begun is not None:
        return (written if written is not None and written > begun else end), False
    if end is None:
        return None, False
    return min(
        end + seconds[TimeKind.STEPS] + seconds[TimeKind.DATA], records.limit
    ), True


def _last_step(records: _StartRecords, last_of_run: int) -> int | None:
    """Return the step that a start reached, if known."""
    reached = records.phases.step if records.phases is not None else None
    if records.next_step is None:
        return max(reached or 0, last_of_run)
    return reached


def _total_seconds(starts: list[Start]) -> dict[TimeKind, float]:
    totals = {
        kind: sum(start.seconds.get(kind, 0.0) for start in starts) for kind in KINDS
    }
    totals[TimeKind.DOWN] = sum(start.down or 0.0 for start in starts)
    return {kind: seconds for kind, seconds in totals.items() if seconds > 0}


def _wall(starts: list[Start]) -> float | None:
    """Return the seconds between the first moment and the last, of starts that have both."""
    spans = [
        (s.begun, s.end) for s in starts if s.begun is not None and s.end is not None
    ]
    if not spans:
        return None
    return max(end for _, end in spans) - min(begun for begun, _ in spans)


def _valid_seconds(column: Column) -> NDArray[np.float64]:
    values = column.values
    return values[np.isfinite(values) & (values >= 0) & (values < MAX_STEP_SECONDS)]


def _median(column: Column) -> float:
    return float(np.median(column.values)) if len(column) else 0.0


def _skipped_seconds(skipped: Column, spent: Column, waited: Column) -> float:
    """Return the seconds of steps whose update was not applied, without waiting for data."""
    steps = skipped.steps[skipped.values != 0]
    return max(0.0, _sum_at(spent, steps) - _sum_at(waited, steps))


def _sum_at(column: Column, steps: NDArray[np.int64]) -> float:
    selected = np.isin(column.steps, steps)
    return float(
        _valid_seconds(Column(column.steps[selected], column.values[selected])).sum()
    )
