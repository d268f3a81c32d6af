"""What is written down of a run while it goes on: every step, evaluations, samples, and where the time goes."""

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import jax
from rich.console import Console

from shardwise.cluster.group import ProcessGroup
from shardwise.console import plot_losses, show_metrics
from shardwise.errors import NumericsError
from shardwise.files.durable import write_atomically
from shardwise.metrics import MetricsLog
from shardwise.plan.plan import Plan
from shardwise.run import Prepared, Run
from shardwise.text import show_bytes, show_seconds
from shardwise.trackers.base import Tracking
from shardwise.training.saver import is_due

PHASES = {
    "compile": "compile",
    "steps": "steps",
    "eval": "evaluate",
    "sample": "evaluate",
    "save": "save",
}  # as phases.jsonl calls them
NOTE_EVERY = 30.0  # seconds between two lines of phases.jsonl


class Bookkeeper:
    """Writes down each step once the next one is under way, so that reading its metrics never leaves the devices idle."""

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
        self.began = began or round(time.time(), 3)
        self.phases = phases  # of the start, each with the moment it began
        self.starting: dict[
            str, float
        ] = {}  # how long each of them took, once the first step is done
        self.run, self.prepared, self.first, self.plan = run, prepared, start + 1, plan
        self.group = group or ProcessGroup()
        self.log = self.samples = None
        if run.out is not None and self.group.is_first:
            self.log = MetricsLog(run.out / "metrics.jsonl", start)
            self.samples = (
                MetricsLog(run.out / "samples.jsonl", start) if run.sample is not None else None
            )
        self._sampled = (
            {record["step"] for record in self.samples.kept} if self.samples is not None else set()
        )
        self.tracking: Tracking | None = None
        self.on_bad: Callable[[int, str, dict[str, Any]], None] = lambda n, why, values: None
        self.waited = 0.0  # for data, in all
        self.clock = _Clock({"compile": plan.compile_seconds} if plan is not None else {})
        self.last: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self.skips = 0  # in a row
        self.bad_records = 0
        self.step_seconds: deque[float] = deque(maxlen=1000)  # of the latest steps
        self._pending: tuple[int, dict[str, jax.Array], float] | None = None
        self._noted, self._noted_total = self.clock.now, 0.0

    def __enter__(self) -> "Bookkeeper":
        return self

    def __exit__(self, *_: Any) -> None:
        self.note_phases()
        for log in (self.log, self.samples):
            if log is not None:
                log.close()

    def owes_evaluation(self, start: int) -> bool:
        """Whether the run was stopped after step `start`, before the evaluation that was due there."""
        if (
            start == 0
            or self.run.eval_data is None
            or not is_due(start, self.run.eval_every, start == self.run.steps)
        ):
            return False
        kept = self.log.kept if self.log is not None else []
        was_made = any(
            record["step"] == start and any(name.startswith("eval_") for name in record)
            for record in kept
        )
        return bool(self.group.share("owes evaluation", self.log is not None and not was_made))

    def record(self, n: int, metrics: dict[str, jax.Array], waited: float = 0.0) -> None:
        """Takes the metrics of step n, and the time spent on waiting for data so far; finishes the step before it."""
        self.finish()
        self._pending = (n, metrics, waited - self.waited)
        self.waited = waited

    def finish(self) -> bool:
        """Waits for the step that is pending, if there is one; applies the policy for numbers that are not finite."""
        if self._pending is None:
            return False
        (n, metrics, data_s), self._pending = self._pending, None
        values = {name: value.item() for name, value in metrics.items()}
        finite, weight = values.pop("finite"), values.pop("weight")
        seconds = self.clock.lap("compile" if n == self.first and self.plan is None else "steps")
        if n > self.first:
            self.step_seconds.append(seconds)
        else:
            self._note_start()
        self.last = {
            "step": n,
            **values,
            "step_s": seconds,
            "data_s": data_s,
            f"{self.run.unit}_per_s": weight / seconds,
        }
        if self.bad_records:
            self.last["bad_records"] = self.bad_records
        if self.prepared.peak_flops:
            self.last["mfu"] = self.prepared.flops / seconds / self.prepared.peak_flops
        skipped = not finite or bool(values.get("skipped"))
        self.last = {k: v for k, v in self.last.items() if k != "skipped"} | (
            {"skipped": True} if skipped else {}
        )
        self.write(self.last)
        if skipped:
            self.on_bad(n, "not finite" if not finite else "a spike and skipped", values)
            self.clock.lap("looking")
        if self.clock.now - self._noted > NOTE_EVERY:
            self.note_phases()
        self.skips = self.skips + 1 if skipped else 0
        if self.skips > self.run.max_skips:
            raise NumericsError(
                f"step {n}: {self.skips} updates in a row were skipped, the last with loss {values['loss']} and gradient norm "
                f"{values['grad_norm']}; max_skips={self.run.max_skips}. The run has diverged: go back to a checkpoint with a lower "
                f"learning rate."
            )
        if not finite and self.run.on_nonfinite == "stop":
            raise NumericsError(
                f"step {n}: loss {values['loss']}, gradient norm {values['grad_norm']}: not finite, so the update was not applied. "
                f"Lower the learning rate, or look at the batch: shardwise data show RECIPE --step {n}. on_nonfinite='skip' would leave "
                f"such batches out."
            )
        return True

    def _note_start(self) -> None:
        """The first step is done: how long each phase up to it took goes into `starting.jsonl`, a line for each start."""
        for (name, begun), (_, end) in pairwise([*self.phases, ("", time.monotonic())]):
            self.starting[name] = self.starting.get(name, 0.0) + end - begun
        if self.log is not None and self.run.out is not None and self.starting:
            line = {
                "step": self.first - 1,
                "time": time.time(),
                "total": sum(self.starting.values()),
                "seconds": self.starting,
            }
            with (self.run.out / "starting.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def note_phases(self) -> None:
        """Where the time of this start went so far, into `phases.jsonl`: a line now and then, and one at the end, however that comes."""
        self._noted = self.clock.now
        step = max(self.last.get("step", 0), self._evaluation.get("step", 0))
        if self.log is None or self.run.out is None or not step:
            return
        seconds = dict.fromkeys(PHASES.values(), 0.0) | {"data": self.waited}
        for name, lap in self.clock.seconds.items():
            seconds[PHASES.get(name, name)] = seconds.get(PHASES.get(name, name), 0.0) + lap
        total = sum(self.clock.seconds.values())
        if total - self._noted_total < 0.1:  # nothing has happened since
            return
        self._noted_total = total
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        line = {
            "start": self.began,
            "time": round(time.time(), 3),
            "step": step,
            "seconds": rounded,
        }
        with suppress(OSError), (self.run.out / "phases.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def newly_skipped(self) -> list[tuple[str, str]]:
        """(name, why) of records that could not be read, and have not been told yet."""
        found = list(getattr(self.run.data, "skipped", {}).items())[self.bad_records :]
        self.bad_records += len(found)
        return found

    def evaluated(self, n: int, metrics: dict[str, float]) -> None:
        self._evaluation = {"step": n, **{f"eval_{name}": value for name, value in metrics.items()}}
        self.clock.lap("eval")
        self.write(self._evaluation)

    def sampled(self, n: int, text: str) -> None:
        self.clock.lap("sample")
        if (
            not text or n in self._sampled
        ):  # at the end of a run that ends with an evaluation, or had ended before
            return
        self._sampled.add(n)
        if self.samples is not None:
            with suppress(OSError):
                self.samples.write({"step": n, "text": text})
        if self.tracking is not None:
            self.tracking.text(n, "sample", text)

    @property
    def of_step(self) -> dict[str, Any]:
        """The metrics of the last step that is finished, with those of its evaluation, if there was one."""
        return {
            **self.last,
            **(self._evaluation if self._evaluation.get("step") == self.last.get("step") else {}),
        }

    def write(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write({**record, "time": round(time.time(), 3)})
        if self.tracking is not None:
            self.tracking.log(record["step"], record)


class _Clock:
    """Where the time went, in named laps."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.now = time.perf_counter()  # at the end of the last lap

    def lap(self, name: str) -> float:
        now = time.perf_counter()
        lap, self.now = now - self.now, now
        self.seconds[name] = self.seconds.get(name, 0.0) + lap
        return lap


def _compare(console: Console, run: Run, book: Bookkeeper, plan: Plan) -> None:
    """Plan and measurement side by side; for programs in plan.json."""
    step = statistics.median(book.step_seconds)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    measured = f"{step * 1e3:.1f} ms a step" + (f", {show_bytes(peak)} at the peak" if peak else "")
    console.print(f"planned: {plan.line()}; measured: {measured}", highlight=False, soft_wrap=True)
    if run.out is not None:
        record = {"plan": plan.as_json(), "measured": {"seconds": step, "peak": peak}}
        write_atomically(run.out / "plan.json", json.dumps(record, indent=2, default=str) + "\n")


def summary(
    console: Console, run: Run, book: Bookkeeper, eval_metrics: dict[str, float], text: str | None
) -> None:
    """The end of a run, for people."""
    if eval_metrics:
        console.print(f"held out: {show_metrics(eval_metrics)}")
    if book.plan is not None and book.step_seconds:
        _compare(console, run, book, book.plan)
    if book.starting:
        parts = ", ".join(
            f"{name} {show_seconds(seconds)}"
            for name, seconds in book.starting.items()
            if seconds >= 0.05
        )
        console.print(
            f"start: {show_seconds(sum(book.starting.values()))} to the end of the first step ({parts})",
            soft_wrap=True,
        )
    times = ", ".join(
        f"{name} {show_seconds(seconds)}" for name, seconds in book.clock.seconds.items()
    )
    console.print(f"time: {times}; of these {show_seconds(book.waited)} waiting for data")
    if text is not None:
        console.rule("a sample")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    if run.out is not None and book.last:
        picture = run.out / "loss.png"
        plot_losses(run.out / "metrics.jsonl", picture)
        console.print(
            f"run directory: {run.out}\nloss curve:    {picture}", highlight=False, soft_wrap=True
        )
