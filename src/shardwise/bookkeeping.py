"""What is written down of a run while it goes on: metrics, checkpoints, and what people see."""

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

from shardwise.checkpoint import Checkpoints
from shardwise.errors import CheckpointError, NumericsError
from shardwise.files import write_whole
from shardwise.group import Group
from shardwise.mesh import mesh_text
from shardwise.metrics import MetricsLog, read_metrics
from shardwise.planning import Plan
from shardwise.report import plot_losses, progress_bar, show_count, show_metrics, show_seconds
from shardwise.run import Prepared, Run
from shardwise.sharding import show_bytes
from shardwise.state import TrainState
from shardwise.watch import Watch


class Bookkeeper:
    """Writes down each step once the next one is under way, so that reading its metrics never leaves the devices idle."""

    def __init__(
        self,
        run: Run,
        prepared: Prepared,
        start: int,
        plan: Plan | None = None,
        group: Group | None = None,
        phases: Sequence[tuple[str, float]] = (),
    ):
        self.phases = phases  # of the start, each with the moment it began
        self.starting: dict[str, float] = {}  # how long each of them took, once the first step is done
        self.run, self.prepared, self.first, self.plan = run, prepared, start + 1, plan
        self.group = group or Group()
        self.log = MetricsLog(run.out / "metrics.jsonl", start) if run.out is not None and self.group.is_first else None
        self.waited = 0.0  # for data, in all
        self.clock = _Clock({"compile": plan.compile_seconds} if plan is not None else {})
        self.last: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self.skips = 0  # in a row
        self.bad_records = 0
        self.step_seconds: deque[float] = deque(maxlen=1000)  # of the latest steps
        self._pending: tuple[int, dict[str, jax.Array], float] | None = None

    def __enter__(self) -> "Bookkeeper":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.log is not None:
            self.log.close()

    def owes_evaluation(self, start: int) -> bool:
        """Whether the run was stopped after step `start`, before the evaluation that was due there."""
        if start == 0 or self.run.eval_data is None or not is_due(start, self.run.eval_every, start == self.run.steps):
            return False
        kept = self.log.kept if self.log is not None else []
        was_made = any(record["step"] == start and any(name.startswith("eval_") for name in record) for record in kept)
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
        self.last = {"step": n, **values, "step_s": seconds, "data_s": data_s, f"{self.run.unit}_per_s": weight / seconds}
        if self.bad_records:
            self.last["bad_records"] = self.bad_records
        if self.prepared.peak_flops:
            self.last["mfu"] = self.prepared.flops / seconds / self.prepared.peak_flops
        skipped = not finite or bool(values.get("skipped"))
        self.last = {k: v for k, v in self.last.items() if k != "skipped"} | ({"skipped": True} if skipped else {})
        self.write(self.last)
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
            line = {"step": self.first - 1, "time": time.time(), "total": sum(self.starting.values()), "seconds": self.starting}
            with (self.run.out / "starting.jsonl").open("a") as file:
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

    @property
    def of_step(self) -> dict[str, Any]:
        """The metrics of the last step that is finished, with those of its evaluation, if there was one."""
        return {**self.last, **(self._evaluation if self._evaluation.get("step") == self.last.get("step") else {})}

    def write(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(record)


class _Clock:
    """Where the time went, in named laps."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self._last = time.perf_counter()

    def lap(self, name: str) -> float:
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + lap
        return lap


class Saver:
    """Saves when it is due. A save that fails is told at the next step and tried again; only the last one must succeed."""

    def __init__(self, run: Run, checkpoints: Checkpoints | None, about: dict[str, Any], console: Console, start: int, watch: Watch):
        self.run, self.checkpoints, self.about, self.console, self.watch = run, checkpoints, about, console, watch
        self.failures = 0  # in a row
        self.retry_at: int | None = None
        self.saved_at = time.monotonic()
        if not watch.group.is_first:
            return
        if run.out is not None and start < run.steps and _starts_in_a_row(run.out, start) >= 2:
            self.retry_at = start + 1
            warn(
                self.console,
                f"this is the third start in a row from step {start}: the run is stopped sooner than a checkpoint is reached. "
                f"Saving after the next step; a smaller save_every than {run.save_every or run.steps} would lose less.",
            )

    def is_due(self, n: int) -> bool:
        """Whether step n is to be saved in passing; looks after the save that goes on, too."""
        if self.checkpoints is None:
            return False
        try:
            if self.checkpoints.check():
                self.failures = 0
        except CheckpointError as error:
            self._note(n, error)
        minutes = (time.monotonic() - self.saved_at) / 60
        if self.watch.group.is_first and ((self.retry_at is not None and n >= self.retry_at) or 0 < self.run.save_minutes <= minutes):
            self.retry_at, self.saved_at = None, time.monotonic()
            self.watch.ask("save")
        is_asked = self.watch.takes_save()
        return n != self.run.steps and (is_asked or is_due(n, self.run.save_every, False))

    def save(self, state: TrainState, metrics: dict[str, Any]) -> None:
        assert self.checkpoints is not None
        self._settle(int(state.step))
        try:
            self.checkpoints.save(state, {**self.about, "metrics": metrics})
            self.retry_at, self.saved_at = None, time.monotonic()
        except CheckpointError as error:
            self._note(int(state.step), error)

    def finish(self, state: TrainState, metrics: dict[str, Any], tries: int = 3) -> None:
        """Sees to it that this state is on the disk, verified; waits for it."""
        if self.checkpoints is None or int(state.step) == 0:
            return
        self._settle(int(state.step))
        for left in reversed(range(tries)):
            try:
                if not self.checkpoints.is_newest(int(state.step)):
                    self.checkpoints.save(state, {**self.about, "metrics": metrics})
                    self.checkpoints.wait()
                break
            except CheckpointError as error:
                if not left:
                    raise CheckpointError(f"{error}.\nThe run is not saved at step {int(state.step)}.{self.newest()}") from error
                warn(self.console, f"{error}; trying again")
                time.sleep(0.5)
        if problems := self.checkpoints.verify(int(state.step)):
            raise CheckpointError("the last checkpoint is not what was written:\n" + "\n".join(problems))

    def newest(self) -> str:
        """A sentence on where one can go back to."""
        steps: list[int] = []
        if self.checkpoints is not None:
            with suppress(CheckpointError):  # it was told, or will be
                self.checkpoints.wait()
            steps = self.checkpoints.steps()
        return f" The newest checkpoint is step {steps[-1]}." if steps else " There is no checkpoint to go back to."

    def _settle(self, n: int) -> None:
        """Waits for the save that goes on; what became of it is told, and the next begins in all processes alike."""
        assert self.checkpoints is not None
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._note(n, error)

    def _note(self, n: int, error: CheckpointError) -> None:
        self.failures += 1
        self.retry_at = n + 2 ** min(self.failures - 1, 10)
        warn(self.console, f"{error}. Training goes on; the next try is after step {self.retry_at}.")


def _starts_in_a_row(directory: Path, step: int) -> int:
    """How often the run was started from this very step before, without another in between; notes this start."""
    path = directory / "starts.jsonl"
    before = read_metrics(path) if path.exists() else []
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "time": time.time()}) + "\n")
    return len(list(takewhile(lambda start: start["step"] == step, reversed(before))))


def is_due(n: int, every: int, last: bool) -> bool:
    return last or bool(every and n % every == 0)


def warn(console: Console, text: str) -> None:
    console.print(f"[bold yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def working(console: Console, text: str) -> Iterator[None]:
    """While something takes long: a sign of life on a terminal, elsewhere a line."""
    if console.is_terminal:
        with console.status(text):
            yield
        return
    console.print(text, highlight=False)
    yield


@contextmanager
def progress(console: Console, run: Run, start: int) -> Iterator[Callable[[dict[str, float], dict[str, float]], None]]:
    """A live bar on a terminal; elsewhere a line now and then. A launcher is told all of it, and may draw the bar itself."""
    launcher, _, draws = os.environ.get("SHARDWISE_PROGRESS", "").partition(":")
    if launcher:
        _tell(int(launcher), start=start, steps=run.steps)
    if console.is_terminal:
        with progress_bar(console) as bar:
            task = bar.add_task("starting", total=run.steps, completed=start, status="")

            def show(record: dict[str, float], eval_metrics: dict[str, float]) -> None:
                bar.update(task, description="training", completed=int(record["step"]), status=_status(run, record, eval_metrics))

            yield show
        return
    shown = [time.monotonic()]

    def show_line(record: dict[str, float], eval_metrics: dict[str, float]) -> None:
        if launcher:
            _tell(int(launcher), step=record["step"], text=_status(run, record, eval_metrics))
        if not draws and (time.monotonic() - shown[0] > 10 or record["step"] in (start + 1, run.steps)):
            shown[0] = time.monotonic()
            console.print(f"step {record['step']:.0f} of {run.steps}: {_status(run, record, eval_metrics)}")

    yield show_line


def _tell(descriptor: int, **what: Any) -> None:
    with suppress(OSError):  # the launcher is gone; that is its business
        os.write(descriptor, json.dumps(what).encode() + b"\n")


def _status(run: Run, record: dict[str, Any], eval_metrics: dict[str, float]) -> str:
    text = f"loss {record['loss']:.4f}"
    if eval_metrics:
        text += f", held out {show_metrics(eval_metrics)}"
    text += f", {show_count(record[f'{run.unit}_per_s'])} {run.unit}/s"
    if record["data_s"] > 0.1 * record["step_s"]:
        text += f", {record['data_s'] / record['step_s']:.0%} waiting for data"
    return text + (f", MFU {record['mfu']:.1%}" if "mfu" in record else "")


def headline(console: Console, prepared: Prepared) -> None:
    spec = prepared.spec
    console.print(
        f"[bold]{show_count(spec.num_params)} parameters[/] on mesh [bold]{mesh_text(spec.mesh)}[/] "
        f"({spec.mesh.devices.flat[0].device_kind}), {show_bytes(spec.bytes_per_device)} of state on each device, "
        f"{show_count(prepared.flops, ' ')}FLOP a step",
        soft_wrap=True,
    )


def _compare(console: Console, run: Run, book: Bookkeeper, plan: Plan) -> None:
    """Plan and measurement side by side; for programs in plan.json."""
    step = statistics.median(book.step_seconds)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    measured = f"{step * 1e3:.1f} ms a step" + (f", {show_bytes(peak)} at the peak" if peak else "")
    console.print(f"planned: {plan.line()}; measured: {measured}", highlight=False, soft_wrap=True)
    if run.out is not None:
        record = {"plan": plan.as_json(), "measured": {"seconds": step, "peak": peak}}
        write_whole(run.out / "plan.json", json.dumps(record, indent=2, default=str) + "\n")


def summary(console: Console, run: Run, book: Bookkeeper, eval_metrics: dict[str, float], text: str | None) -> None:
    if eval_metrics:
        console.print(f"held out: {show_metrics(eval_metrics)}")
    if book.plan is not None and book.step_seconds:
        _compare(console, run, book, book.plan)
    if book.starting:
        parts = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in book.starting.items() if seconds >= 0.05)
        console.print(f"start: {show_seconds(sum(book.starting.values()))} to the end of the first step ({parts})", soft_wrap=True)
    times = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in book.clock.seconds.items())
    console.print(f"time: {times}; of these {show_seconds(book.waited)} waiting for data")
    if text is not None:
        console.rule("a sample")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    if run.out is not None and book.last:
        picture = run.out / "loss.png"
        plot_losses(run.out / "metrics.jsonl", picture)
        console.print(f"run directory: {run.out}\nloss curve:    {picture}", highlight=False, soft_wrap=True)
