"""The log of a run: a record of every step, evaluations, samples, and where the time goes."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwise.cluster.group import ProcessGroup
from shardwise.errors import NumericsError
from shardwise.files.lines import LineFile
from shardwise.metrics import MetricsLog
from shardwise.plan.plan import Plan
from shardwise.run import Prepared, Run
from shardwise.step import Metrics
from shardwise.step.digests import as_text, combine
from shardwise.text import Json
from shardwise.trackers.base import Tracking
from shardwise.training.due import is_evaluation_due

# The name of the digests of the state among the metrics of a step, see `step.digests`.
DIGESTS = "digests"
# Names of laps of the clock in phases.jsonl, where they differ.
PHASE_NAMES = {"eval": "evaluate", "sample": "evaluate", "inspect": "looking"}
# Names that every line of phases.jsonl has.
PHASES = ("compile", "steps", "evaluate", "save")
# Seconds between two lines of phases.jsonl, and the least time worth a line for the same step.
PHASES_INTERVAL = 30.0
MIN_NEW_SECONDS = 0.1
# Step times that the median at the end is taken over.
NUM_STEP_TIMES = 1000


class _RunningStep(NamedTuple):
    """A step whose metrics have not been read from the devices yet."""

    n: int
    metrics: Metrics
    waited: float


class RunLog:
    """Records each step while the next one runs, so that reading metrics never idles the devices.

    Only the first process writes files. All processes read the metrics, because all of them decide
    alike whether to continue after a non-finite step. Use it as a context manager.

    Args:
        run: the run.
        prepared: the same run, prepared.
        start: the step that the run starts from. Later records in the files are removed.
        plan: the plan, if the step was compiled for one before the first step.
        group: the processes of the run; by default this one alone.
        phases: `(phase, time)` of each phase of the start, on the monotonic clock. It is read
            after the first step.
        began: when the start began, in seconds since 1970; by default now.

    Attributes:
        metrics: the log `metrics.jsonl`, or None if this process writes none.
        tracking: receives all records too, if set.
        warn: prints a warning, for example that a file cannot be written.
        on_bad_step: called with the step, the reason and the metrics of a step whose update was
            not applied.
        last: the record of the last finished step.
        clock: where the time went.
        waited: seconds of waiting for data, up to the last recorded step.
        step_seconds: seconds of the latest steps, without the first one.
        starting: seconds of each phase of the start, once the first step is finished.
    """

    def __init__(
        self,
        run: Run,
        prepared: Prepared,
        start: int,
        plan: Plan | None = None,
        group: ProcessGroup | None = None,
        phases: Sequence[tuple[str, float]] = (),
        began: float = 0.0,
    ):
        self.run = run
        self.prepared = prepared
        self.plan = plan
        self.group = group or ProcessGroup()
        self.metrics: MetricsLog | None = None
        self.tracking: Tracking | None = None
        self.warn: Callable[[str], None] = print
        self.on_bad_step: Callable[[int, str, Json], None] = lambda n, why, values: None
        self.last: Json = {}
        self.clock = Clock(
            {"compile": plan.compile_seconds} if plan is not None else {}
        )
        self.waited = 0.0
        self.step_seconds: deque[float] = deque(maxlen=NUM_STEP_TIMES)
        self.starting: dict[str, float] = {}
        self._first = start + 1
        self._phases = phases
        self._began = began or round(time.time(), 3)
        self._samples: MetricsLog | None = None
        self._digests: MetricsLog | None = None
        # Logs that earlier starts of the run have written to, too.
        self._start_lines: LineFile | None = None
        self._phase_lines: LineFile | None = None
        if run.out is not None and self.group.is_first:

            def warn(text: str) -> None:
                self.warn(text)

            self.metrics = MetricsLog(run.out / "metrics.jsonl", start, warn)
            if run.digest_every:
                self._digests = MetricsLog(run.out / "digests.jsonl", start, warn)
            if run.sample is not None:
                self._samples = MetricsLog(run.out / "samples.jsonl", start, warn)
            self._start_lines = LineFile(run.out / "starting.jsonl", warn)
            self._phase_lines = LineFile(run.out / "phases.jsonl", warn)
        self._sampled_steps: set[int] = set()
        if self._samples is not None:
            self._sampled_steps = {record["step"] for record in self._samples.kept}
        self._evaluation: Json = {}
        self._pending: _RunningStep | None = None
        # Skipped updates since the last one that was applied.
        self._skips = 0
        # Records of the data that could not be read.
        self._bad_records = 0
        # When phases.jsonl was written last, with its step and the sum of its seconds.
        self._phases_written = self.clock.now
        self._phases_step = 0
        self._phases_total = 0.0

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        """Write where the time went, and close the files, however the run ends."""
        self.write_phases()
        logs = (
            self.metrics,
            self._samples,
            self._digests,
            self._start_lines,
            self._phase_lines,
        )
        for log in logs:
            if log is not None:
                log.close()

    def owes_evaluation(self, start: int) -> bool:
        """Return whether the run was stopped after step `start` but before its evaluation."""
        if start == 0 or not is_evaluation_due(self.run, start):
            return False
        is_missing = self.metrics is not None and not _has_evaluation(
            self.metrics.kept, start
        )
        # Only the first process has the log.
        return bool(self.group.share("owes evaluation", is_missing))

    def record(self, n: int, metrics: Metrics, waited: float = 0.0) -> None:
        """Take the metrics of step `n`, and finish the step before it.

        Args:
            n: the step.
            metrics: its metrics; they may still be computed.
            waited: seconds of waiting for data since the run started.
        """
        self.finish()
        self._pending = _RunningStep(n, metrics, waited - self.waited)
        self.waited = waited

    def finish(self) -> bool:
        """Wait for the pending step and write its record.

        Returns:
            Whether there was a pending step.

        Raises:
            NumericsError: the step is non-finite and `on_nonfinite` is "stop", or more than
                `max_skips` updates in succession were skipped.
        """
        if self._pending is None:
            return False
        n, metrics, waited = self._pending
        self._pending = None
        # Reading a value waits for the devices.
        values: Json = {
            name: value.item() for name, value in metrics.items() if name != DIGESTS
        }
        is_finite = values.pop("finite")
        weight = values.pop("weight")
        is_skipped = not is_finite or bool(values.pop("skipped", False))
        seconds = self._lap(n)
        throughput = {f"{self.run.unit}_per_s": weight / seconds}
        self.last = {
            "step": n,
            **values,
            "step_s": seconds,
            "data_s": waited,
            **throughput,
        }
        if self._bad_records:
            self.last["bad_records"] = self._bad_records
        if self.prepared.peak_flops:
            self.last["mfu"] = self.prepared.flops / seconds / self.prepared.peak_flops
        if is_skipped:
            self.last["skipped"] = True
        if DIGESTS in metrics:
            self._add_digests(n, np.asarray(metrics[DIGESTS]))
        self._write(self.last)
        if is_skipped:
            self.on_bad_step(n, "loss spike" if is_finite else "non-finite", values)
            self.clock.lap("inspect")
        if self.clock.now - self._phases_written > PHASES_INTERVAL:
            self.write_phases()
        self._skips = self._skips + 1 if is_skipped else 0
        self._check_numerics(n, is_finite, values)
        return True

    def _add_digests(self, n: int, digests: np.ndarray) -> None:
        """Add the digest of the state to the record of step `n`; write those of its arrays."""
        self.last["digest"] = combine(digests)
        if self._digests is not None:
            self._digests.write({"step": n, "arrays": as_text(digests)})

    def _lap(self, n: int) -> float:
        """Return the seconds of step `n`, which has just ended."""
        if n > self._first:
            seconds = self.clock.lap("steps")
            self.step_seconds.append(seconds)
            return seconds
        # Without a plan the first step compiles.
        seconds = self.clock.lap("compile" if self.plan is None else "steps")
        self._write_start()
        return seconds

    def _check_numerics(self, n: int, is_finite: bool, values: Json) -> None:
        loss, grad_norm = values["loss"], values["grad_norm"]
        if self._skips > self.run.max_skips:
            raise NumericsError(
                f"step {n}: {self._skips} updates in succession were skipped, the last with loss "
                f"{loss} and gradient norm {grad_norm}; max_skips={self.run.max_skips}. The run "
                f"has diverged: resume from an earlier checkpoint with a lower learning rate."
            )
        if not is_finite and self.run.on_nonfinite == "stop":
            fact = f"step {n}: loss {loss}, gradient norm {grad_norm}"
            if math.isfinite(loss) and math.isfinite(grad_norm):
                raise NumericsError(
                    f"{fact}: both are finite, but the update or a variable of the model is not, "
                    "so it was not applied. Look at the optimizer: shardwise explain RECIPE."
                )
            raise NumericsError(
                f"{fact}: non-finite, so the update was not applied. {self._mask_hint(loss)}Lower "
                f"the learning rate, or look at the batch: shardwise data show RECIPE --step {n}. "
                "With on_nonfinite='skip' the run skips such batches."
            )

    def _mask_hint(self, loss: float) -> str:
        """Return a sentence for a loss that is NaN, if its weights depend on the batch."""
        metric = self.prepared.step.traced.metrics["loss"]
        if not math.isnan(loss) or metric.weight.constant is not None:
            return ""
        return (
            "An entry of Mean(total, weight) with weight 0 and another total is NaN: multiply a "
            "mask into both, Mean(nats * mask, mask). "
        )

    def _write_start(self) -> None:
        """Append the seconds of each phase up to the first step to `starting.jsonl`."""
        for (name, begin), (_, end) in pairwise(
            [*self._phases, ("", time.monotonic())]
        ):
            self.starting[name] = self.starting.get(name, 0.0) + end - begin
        if self._start_lines is None or not self.starting:
            return
        line = {
            "step": self._first - 1,
            "time": time.time(),
            "total": sum(self.starting.values()),
            "seconds": self.starting,
        }
        self._start_lines.write(json.dumps(line))

    def write_phases(self) -> None:
        """Append where the time of this start went so far to `phases.jsonl`.

        It is written regularly and not only at the end, so that a killed run has a recent line.
        """
        self._phases_written = self.clock.now
        step = max(self.last.get("step", 0), self._evaluation.get("step", 0))
        if self._phase_lines is None or not step:
            return
        total = sum(self.clock.seconds.values())
        is_new = total - self._phases_total > MIN_NEW_SECONDS
        if step == self._phases_step and not is_new:
            return
        self._phases_step, self._phases_total = step, total
        seconds = dict.fromkeys(PHASES, 0.0)
        seconds["data"] = self.waited
        for lap, lap_seconds in self.clock.seconds.items():
            name = PHASE_NAMES.get(lap, lap)
            seconds[name] = seconds.get(name, 0.0) + lap_seconds
        line = {
            "start": self._began,
            "time": round(time.time(), 3),
            "step": step,
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
        }
        self._phase_lines.write(json.dumps(line))

    def new_bad_records(self) -> list[tuple[str, str]]:
        """Return `(name, reason)` of records of the data that could not be read since last time."""
        skipped = getattr(self.run.data, "skipped", {})
        new = list(skipped.items())[self._bad_records :]
        self._bad_records += len(new)
        return new

    def add_evaluation(self, n: int, metrics: dict[str, float]) -> None:
        """Write the validation metrics after step `n`."""
        self._evaluation = {
            "step": n,
            **{f"eval_{name}": value for name, value in metrics.items()},
        }
        self.clock.lap("eval")
        self._write(self._evaluation)

    def add_sample(self, n: int, text: str) -> None:
        """Write a sample after step `n`; an empty one, or a second one of a step, is ignored."""
        self.clock.lap("sample")
        # A run that ends with an evaluation, or had ended before, has this sample already.
        if not text or n in self._sampled_steps:
            return
        self._sampled_steps.add(n)
        if self._samples is not None:
            self._samples.write({"step": n, "text": text})
        if self.tracking is not None:
            self.tracking.text(n, "sample", text)

    @property
    def checkpoint_metrics(self) -> Json:
        """The metrics of the last finished step, with its validation metrics if it has any."""
        if self._evaluation.get("step") == self.last.get("step"):
            return {**self.last, **self._evaluation}
        return dict(self.last)

    def _write(self, record: Json) -> None:
        if self.metrics is not None:
            self.metrics.write({**record, "time": round(time.time(), 3)})
        if self.tracking is not None:
            self.tracking.log(record["step"], record)


def _has_evaluation(records: Sequence[Json], step: int) -> bool:
    for record in records:
        if record["step"] == step and any(name.startswith("eval_") for name in record):
            return True
    return False


class Clock:
    """Measures time in named laps.

    Args:
        seconds: laps that were measured already.

    Attributes:
        seconds: total seconds of the laps of each name.
        now: the end of the last lap, from `time.perf_counter`.
    """

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self.now = time.perf_counter()

    def lap(self, name: str) -> float:
        """End a lap: count the time since the end of the last one as `name`, and return it."""
        before = self.now
        self.now = time.perf_counter()
        lap = self.now - before
        self.seconds[name] = self.seconds.get(name, 0.0) + lap
        return lap

    @contextmanager
    def counting_as(self, name: str) -> Iterator[None]:
        """Count the time of this context as `name`, and not as part of the current lap."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.now += seconds
