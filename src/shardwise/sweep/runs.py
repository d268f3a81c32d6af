"""The runs of a sweep: `sweep.json`, which records them, and the loop that trains them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint.reader import read_json
from shardwise.cluster.signals import noted_signals
from shardwise.errors import ConfigError, DirectoryInUseError, ExitCode, ShardwiseError
from shardwise.files.durable import write_atomically
from shardwise.files.lock import check_unlocked
from shardwise.sweep.grid import GridPoint, flat
from shardwise.text import Json, show_seconds

FILE = "sweep.json"
# Each run is a new process, because JAX must not be forked. It ends when the sweep is killed.
CHILD = """\
from shardwise.cluster.launch import end_with_parent
from shardwise.cli import entry
end_with_parent()
entry()
"""
# The fraction of the memory of a GPU that runs at the same time allocate, as one run does.
GPU_MEMORY = 0.75
# The variables that set this fraction. JAX refuses two of them.
MEMORY_FRACTION = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# A process that a second signal ends exits with more than this number.
SIGNALED = 128
# Seconds to wait for a run that a killed sweep has left behind and that is still saving.
MAX_WAIT = 60.0


@dataclass
class SweepRecord:
    """The content of `sweep.json`.

    Attributes:
        path: the file.
        about: the recipe, the arguments that span the grid, and those shared by all runs.
        points: by name, the values of each run; once it has ended, its exit code and seconds.
    """

    path: Path
    about: Json
    points: dict[str, Json]

    @classmethod
    def open(cls, out: Path, about: Json, points: Sequence[GridPoint]) -> "SweepRecord":
        """Read or create the record of a sweep.

        Further or fewer values of its arguments are accepted.

        Raises:
            ConfigError: if the directory holds a different sweep.
        """
        path = out / FILE
        known = _read_points(path, about, points) if path.exists() else {}
        for point in points:
            known[point.name] = {**known.get(point.name, {}), "values": point.values}
        record = cls(path, about, known)
        record.write()
        return record

    def write(self) -> None:
        """Write the file."""
        content = {"sweep": self.about, "points": self.points}
        write_atomically(self.path, json.dumps(content, indent=2) + "\n")

    def set_ended(self, name: str, code: int, seconds: float) -> None:
        """Record that a run has ended; seconds add up over its starts."""
        point = self.points[name]
        point.update(code=code, seconds=round(point.get("seconds", 0.0) + seconds, 1))
        self.write()


def _read_points(
    path: Path, about: Json, points: Sequence[GridPoint]
) -> dict[str, Json]:
    """Return the points of an existing record, after checking that it is the same sweep."""
    out = path.parent
    try:
        content = read_json(path)
        before = content["sweep"]
        known = {str(name): dict(point) for name, point in content["points"].items()}
        different = [
            name for name in ("recipe", "axes", "fixed") if before[name] != about[name]
        ]
    except (
        ShardwiseError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise ConfigError(
            f"{path} is not the record of a sweep ({error}). Choose another --out, or remove it."
        ) from error
    if different:
        lines = "\n".join(
            f"  {name}: {_show(before[name])} before, {_show(about[name])} now"
            for name in different
        )
        raise ConfigError(
            f"{out} holds a different sweep. Choose another --out, or the same arguments:\n{lines}"
        )
    if before.get("source_digest") != about["source_digest"]:
        _log(
            f"the recipe has changed since {out} was started; finished runs used the old one."
        )
    names = {point.name for point in points}
    num_new = len(names - known.keys())
    num_gone = len(known.keys() - names)
    if num_new:
        _log(f"{num_new} runs are new in this sweep.")
    if num_gone:
        _log(f"{num_gone} runs are no longer in this grid; they are kept and shown.")
    return known


def _show(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(flat(value)) or "nothing"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _log(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)


@dataclass
class _Child:
    """A run that is being trained.

    Attributes:
        label: its place in the sweep, and its name.
        name: its name.
        process: the process.
        started: when it started, on the clock of `time.monotonic`.
    """

    label: str
    name: str
    process: subprocess.Popen[bytes]
    started: float


@dataclass
class Sweep:
    """Trains the remaining runs of a sweep.

    Attributes:
        target: the recipe.
        words: arguments and options of every run.
        out: the directory of the sweep.
        record: how each run has ended.
        points: the runs of the grid.
        retry: whether failed runs are trained again.
        jobs: how many runs are trained at a time. If there are several, each one prints to a file.
    """

    target: str
    words: list[str]
    out: Path
    record: SweepRecord
    points: list[GridPoint]
    retry: bool
    jobs: int = 1
    _signals: list[int] = field(default_factory=list)
    _num_forwarded: int = 0

    def run(self) -> int:
        """Train all runs that are left.

        Returns:
            0, or 75 after a signal, or the exit code of the first run of the grid that failed.
        """
        waiting = list(enumerate(self.points, 1))
        running: list[_Child] = []
        with noted_signals() as self._signals:
            while running or (waiting and not self._signals):
                while waiting and len(running) < self.jobs and not self._signals:
                    number, point = waiting.pop(0)
                    label = f"[{number} of {len(self.points)}] {point.name}"
                    running += self._start(label, point)
                self._forward_signals(running)
                ended = [child for child in running if child.process.poll() is not None]
                for child in ended:
                    running.remove(child)
                    self._note_end(child)
                if running and not ended:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running[0].process.wait(0.1)
            if self._signals:
                _log(f"a signal stopped the sweep; {self._what_is_next()}.")
                return ExitCode.STOPPED
        codes = [self.record.points[point.name].get("code") for point in self.points]
        failed = [int(code) for code in codes if code]
        if not failed:
            return 0
        # A negative code means that a signal killed the process.
        return failed[0] if failed[0] > 0 else ExitCode.LOST

    def _what_is_next(self) -> str:
        """Return where the sweep resumes: at the first run that is not finished."""
        for point in self.points:
            if self.record.points[point.name].get("code") in (None, ExitCode.STOPPED):
                return f"the same command resumes at {point.name}"
        return "all runs have ended"

    def _start(self, label: str, point: GridPoint) -> list[_Child]:
        """Start a run, unless it has ended before; return its process, or nothing."""
        before = self.record.points[point.name].get("code")
        if before == 0:
            self._report(label, "is done")
            return []
        if before not in (None, ExitCode.STOPPED) and not self.retry:
            self._report(
                label, f"failed before ({describe_exit(before)}); --retry runs it again"
            )
            return []
        out = self.out / point.name
        if not self._wait_until_unlocked(out):
            code = ExitCode.STOPPED if self._signals else ExitCode.IN_USE
            self.record.set_ended(point.name, code, 0.0)
            return []
        log = self.out / f"{point.name}.log"
        where = f"; its output: {log}" if self.jobs > 1 else ""
        verb = "resumes" if before == ExitCode.STOPPED else "starts"
        self._report(label, f"{verb}{where}")
        command = ["train", self.target, *self.words, *point.words, "--out", str(out)]
        with contextlib.ExitStack() as stack:
            output = None
            if self.jobs > 1:
                # Lines and progress bars of several runs would mix.
                output = stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                # -P: modules of the current directory must not shadow others.
                [sys.executable, "-P", "-c", CHILD, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                # Ctrl-C reaches the sweep alone, which forwards it once.
                start_new_session=True,
            )
        return [_Child(label, point.name, process, time.monotonic())]

    def _environment(self) -> dict[str, str]:
        """Return the environment of a run. Several runs share the memory of a GPU."""
        environment = dict(os.environ)
        if self.jobs > 1 and not any(name in environment for name in MEMORY_FRACTION):
            environment[MEMORY_FRACTION[0]] = f"{GPU_MEMORY / self.jobs:.3f}"
        return environment

    def _note_end(self, child: _Child) -> None:
        """Record that a run has ended."""
        code, seconds = child.process.returncode, time.monotonic() - child.started
        if self._signals and (code < 0 or code > SIGNALED):
            # The signal came before the run could handle it, or a second one ended its saving.
            code = ExitCode.STOPPED
        self.record.set_ended(child.name, code, seconds)
        if code != 0 and not self._signals:
            self._report(child.label, f"failed: {describe_exit(code)}")
        elif self.jobs > 1 and code == 0:
            self._report(child.label, f"is done after {show_seconds(seconds)}")

    def _report(self, label: str, text: str) -> None:
        print(f"shardwise sweep: {label} {text}", file=sys.stderr, flush=True)

    def _forward_signals(self, running: list[_Child]) -> None:
        for number in self._signals[self._num_forwarded :]:
            self._num_forwarded += 1
            for child in running:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    def _wait_until_unlocked(self, directory: Path) -> bool:
        """Wait for a run that a killed sweep left behind; return whether its lock is free."""
        deadline = time.monotonic() + MAX_WAIT
        has_reported = False
        while True:
            try:
                check_unlocked(directory)
                return True
            except DirectoryInUseError as error:
                if self._signals or time.monotonic() > deadline:
                    _log(str(error))
                    return False
                if not has_reported:
                    _log(f"waiting: {error}")
                has_reported = True
                time.sleep(0.2)


def describe_exit(code: int) -> str:
    """Return how a run ended, from its exit code; negative codes are signals."""
    if code < 0:
        note = ", possibly out of memory" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{note}"
    known = {int(exit_code): exit_code.meaning for exit_code in ExitCode}
    return f"exit code {code}: {known.get(code, 'unknown')}"
