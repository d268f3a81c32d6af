"""Decide when checkpoints are due, and retry saves that fail."""

import json
import math
import time
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

from rich.console import Console

from shardwise.checkpoint.store import Checkpoints
from shardwise.cluster.watch import Watch
from shardwise.console import warn
from shardwise.errors import CheckpointError
from shardwise.files.lines import LineFile
from shardwise.metrics import read_metrics
from shardwise.run import Run
from shardwise.state import TrainState
from shardwise.text import Json
from shardwise.training.due import is_due

# A failed save is tried again after 1, 2, 4 ... steps, at most after this power of two.
MAX_BACKOFF = 10
# Tries for the last checkpoint of a run, and seconds between them.
FINAL_TRIES = 3
FINAL_PAUSE = 0.5


class Saver:
    """Saves checkpoints when they are due.

    Saves run in the background. One that fails is reported at the next step and tried again later;
    only the last one of a run must succeed. All processes of a run call every method in the same
    order.

    Args:
        run: the run.
        checkpoints: where to save, or None for a run without a directory.
        about: the description of the run, which each checkpoint carries. It may still be extended.
        console: where to print warnings.
        start: the step that the run starts from.
        watch: coordinates saves between processes.

    Attributes:
        began: when this start began, in seconds since 1970. It identifies the start in
            `starts.jsonl` and `phases.jsonl`.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints | None,
        about: Json,
        console: Console,
        start: int,
        watch: Watch,
    ):
        self.began = round(time.time(), 3)
        self.run = run
        self.checkpoints = checkpoints
        self.about = about
        self.console = console
        self.watch = watch
        # The best values of the metric that `keep` names, the best first.
        self._best: list[float] = watch.group.share("best", self._saved_values())
        # Whether the evaluation of the current step is one of them.
        self._is_best = False
        # Failed saves since the last successful one, and the step of the next try.
        self._failures = 0
        self._retry_at: int | None = None
        self._saved_at = time.monotonic()
        self._directory = _identity(run.out)
        if watch.group.is_first and run.out is not None and start < run.steps:
            self._check_repeated_starts(run.out, start)

    def _saved_values(self) -> list[float]:
        if (
            self.checkpoints is None
            or not self.watch.group.is_first
            or not self.run.keep.best
        ):
            return []
        return [
            value for value in self.checkpoints.metrics().values() if value is not None
        ]

    def _check_repeated_starts(self, directory: Path, start: int) -> None:
        """Add this start to `starts.jsonl`; save soon if the run never reaches a checkpoint."""
        log = LineFile(directory / "starts.jsonl", partial(warn, self.console))
        earlier = read_metrics(directory / "starts.jsonl")
        log.write(json.dumps({"step": start, "time": self.began}))
        log.close()
        same = takewhile(lambda record: record["step"] == start, reversed(earlier))
        if len(list(same)) < 2:
            return
        self._retry_at = start + 1
        warn(
            self.console,
            f"this is the third start in succession from step {start}: the run stops before it "
            f"reaches a checkpoint. Saving after the next step. Set save_every to less than "
            f"{self.run.save_every or self.run.steps} to lose fewer steps.",
        )

    def add_evaluation(self, metrics: dict[str, float]) -> None:
        """Have the current step saved if its evaluation is among the best that `keep` keeps.

        Args:
            metrics: the validation metrics, the same in all processes.
        """
        keep = self.run.keep
        value = metrics.get(keep.metric.removeprefix("eval_"), math.nan)
        if (
            not keep.best
            or not keep.metric.startswith("eval_")
            or not math.isfinite(value)
        ):
            return
        best = sorted([*self._best, value], reverse=keep.largest)[: keep.best]
        self._is_best = value in best and value not in self._best
        self._best = best

    def is_due(self, n: int) -> bool:
        """Return whether to save step `n` and continue; also check on the save in progress.

        A save is due every `save_every` steps, every `save_minutes` minutes, after an evaluation
        that is among the best, and for a retry. The last step is not due here: see `finish`.
        """
        if self.checkpoints is None:
            return False
        try:
            if self.checkpoints.check():
                self._failures = 0
        except CheckpointError as error:
            self._plan_retry(n, error)
        if self.watch.group.is_first and self._is_requested(n):
            self._retry_at = None
            self._saved_at = time.monotonic()
            self.watch.ask("save")
        # Only the first process knows about minutes and retries: all processes agree on the step.
        is_asked = self.watch.takes_save()
        is_best = self._is_best
        self._is_best = False
        return n != self.run.steps and (
            is_asked or is_best or is_due(n, self.run.save_every)
        )

    def _is_requested(self, n: int) -> bool:
        """Return whether a retry or `save_minutes` asks for a save."""
        if self._retry_at is not None and n >= self._retry_at:
            return True
        minutes = (time.monotonic() - self._saved_at) / 60
        return 0 < self.run.save_minutes <= minutes

    def save(
        self, state: TrainState, metrics: Json, position: str | None = None
    ) -> None:
        """Start to save in the background. A failure is reported and tried again later.

        Args:
            state: the state; its arrays may be donated as soon as this returns.
            metrics: the metrics of its step, stored with the checkpoint.
            position: where the data iterator of this process is after the step, if there is one.

        Raises:
            CheckpointError: the run directory is another one than at the start.
        """
        assert self.checkpoints is not None
        n = int(state.step)
        self._wait(n)
        self._check_directory(n)
        try:
            self.checkpoints.save(
                state, {**self.about, "metrics": metrics}, position=position
            )
            self._retry_at = None
            self._saved_at = time.monotonic()
        except CheckpointError as error:
            self._plan_retry(n, error)

    def finish(
        self, state: TrainState, metrics: Json, position: str | None = None
    ) -> None:
        """Make sure that this state is on the disk, wait for it, and verify it.

        Args:
            state: the last state of the run.
            metrics: the metrics of its step.
            position: as for `save`.

        Raises:
            CheckpointError: the state could not be saved, or the files have other content than was
                written.
        """
        n = int(state.step)
        if self.checkpoints is None or n == 0:
            return
        self._wait(n)
        self._check_directory(n)
        for tries_left in reversed(range(FINAL_TRIES)):
            try:
                if not self.checkpoints.is_newest(n):
                    self.checkpoints.save(
                        state, {**self.about, "metrics": metrics}, position=position
                    )
                    self.checkpoints.wait()
                break
            except CheckpointError as error:
                if not tries_left:
                    raise CheckpointError(
                        f"{_fact(error)}.\nStep {n} of the run is not saved."
                        f"{self.describe_newest()}"
                    ) from error
                warn(self.console, f"{_fact(error)}; trying again")
                time.sleep(FINAL_PAUSE)
        if problems := self.checkpoints.verify(n, state):
            raise CheckpointError(
                "the last checkpoint is not what was written, or cannot be read back:\n"
                + "\n".join(problems)
            )

    def _check_directory(self, n: int) -> None:
        """Raise if the run directory was taken away: a save would create another one."""
        if self.watch.group.is_first and _identity(self.run.out) != self._directory:
            raise CheckpointError(
                f"{self.run.out} was moved or removed while the run was writing to it. Step {n} is "
                "not saved. Put the directory back to resume."
            )

    def describe_newest(self) -> str:
        """Return a sentence that names the newest checkpoint, with a leading space."""
        steps: list[int] = []
        if self.checkpoints is not None:
            # A failure of this save was reported already, or an error is about to be.
            with suppress(CheckpointError):
                self.checkpoints.wait()
            steps = self.checkpoints.steps()
        if steps:
            return f" The newest checkpoint is step {steps[-1]}."
        return " There is no checkpoint to resume from."

    def _wait(self, n: int) -> None:
        """Wait for the save in progress, so that the next one starts alike in all processes."""
        assert self.checkpoints is not None
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._plan_retry(n, error)

    def _plan_retry(self, n: int, error: CheckpointError) -> None:
        self._failures += 1
        self._retry_at = n + 2 ** min(self._failures - 1, MAX_BACKOFF)
        warn(
            self.console,
            f"{_fact(error)}. Training continues; the next save is after step {self._retry_at}.",
        )


def _fact(error: CheckpointError) -> str:
    """Return a message without its period, to continue the sentence."""
    return str(error).removesuffix(".")


def _identity(directory: Path | None) -> tuple[int, int] | None:
    """Return what identifies a directory, also if it is renamed; None if there is none."""
    if directory is None:
        return None
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
