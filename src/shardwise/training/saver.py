"""When checkpoints are due, and that they are saved: a save that fails is tried again, the last one must succeed."""

import json
import math
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.checkpoint.store import Checkpoints
from shardwise.cluster.watch import Watch
from shardwise.errors import CheckpointError
from shardwise.metrics import read_metrics
from shardwise.run import Run
from shardwise.state import TrainState
from shardwise.training.progress import warn


class Saver:
    """Saves when it is due. A save that fails is told at the next step and tried again; only the last one must succeed."""

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints | None,
        about: dict[str, Any],
        console: Console,
        start: int,
        watch: Watch,
    ):
        self.began = round(time.time(), 3)  # in starts.jsonl and phases.jsonl
        best = (
            checkpoints.metrics()
            if checkpoints is not None and watch.group.is_first and run.keep.best
            else {}
        )
        self.best: list[float] = watch.group.share(
            "best", [value for value in best.values() if value is not None]
        )
        self.is_best = False  # the evaluation of this step is among the best, so it is saved
        self.run, self.checkpoints, self.about, self.console, self.watch = (
            run,
            checkpoints,
            about,
            console,
            watch,
        )
        self.failures = 0  # in a row
        self.retry_at: int | None = None
        self.saved_at = time.monotonic()
        if not watch.group.is_first:
            return
        if (
            run.out is not None
            and start < run.steps
            and _starts_in_a_row(run.out, start, self.began) >= 2
        ):
            self.retry_at = start + 1
            warn(
                self.console,
                f"this is the third start in a row from step {start}: the run is stopped sooner than a checkpoint is reached. "
                f"Saving after the next step; a smaller save_every than {run.save_every or run.steps} would lose less.",
            )

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Takes an evaluation, the same in all processes: a step that is to be kept for it is saved, whatever `save_every` says."""
        keep = self.run.keep
        value = metrics.get(keep.metric.removeprefix("eval_"), math.nan)
        if not keep.best or not keep.metric.startswith("eval_") or not math.isfinite(value):
            return
        order = sorted([*self.best, value], reverse=keep.largest)
        self.is_best = value in order[: keep.best] and value not in self.best
        self.best = order[: keep.best]

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
        if self.watch.group.is_first and (
            (self.retry_at is not None and n >= self.retry_at)
            or 0 < self.run.save_minutes <= minutes
        ):
            self.retry_at, self.saved_at = None, time.monotonic()
            self.watch.ask("save")
        is_asked = self.watch.takes_save() or self.is_best
        self.is_best = False
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
                    raise CheckpointError(
                        f"{error}.\nThe run is not saved at step {int(state.step)}.{self.newest()}"
                    ) from error
                warn(self.console, f"{error}; trying again")
                time.sleep(0.5)
        if problems := self.checkpoints.verify(int(state.step)):
            raise CheckpointError(
                "the last checkpoint is not what was written:\n" + "\n".join(problems)
            )

    def newest(self) -> str:
        """A sentence on where one can go back to."""
        steps: list[int] = []
        if self.checkpoints is not None:
            with suppress(CheckpointError):  # it was told, or will be
                self.checkpoints.wait()
            steps = self.checkpoints.steps()
        return (
            f" The newest checkpoint is step {steps[-1]}."
            if steps
            else " There is no checkpoint to go back to."
        )

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
        warn(
            self.console, f"{error}. Training goes on; the next try is after step {self.retry_at}."
        )


def _starts_in_a_row(directory: Path, step: int, now: float) -> int:
    """How often the run was started from this very step before, without another in between; notes this start."""
    path = directory / "starts.jsonl"
    before = read_metrics(path) if path.exists() else []
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "time": now}) + "\n")
    return len(list(takewhile(lambda start: start["step"] == step, reversed(before))))


def is_due(n: int, every: int, last: bool) -> bool:
    return last or bool(every and n % every == 0)
