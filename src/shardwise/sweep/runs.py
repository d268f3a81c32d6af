"""The runs of a sweep: `sweep.json`, which records them, and the loop that trains them in turn."""

import contextlib
import json
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
from shardwise.text import Json

FILE = "sweep.json"
# Each run is a new process, because JAX must not be forked. It ends when the sweep is killed.
CHILD = """\
from shardwise.cluster.launch import end_with_parent
from shardwise.cli import entry
end_with_parent()
entry()
"""
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
class Sweep:
    """Trains the remaining runs of a sweep, one after the other.

    Attributes:
        target: the recipe.
        words: arguments and options of every run.
        out: the directory of the sweep.
        record: how each run has ended.
        points: the runs of the grid.
        retry: whether failed runs are trained again.
    """

    target: str
    words: list[str]
    out: Path
    record: SweepRecord
    points: list[GridPoint]
    retry: bool
    _signals: list[int] = field(default_factory=list)
    _num_forwarded: int = 0

    def run(self) -> int:
        """Train all runs that are left.

        Returns:
            0, or 75 after a signal, or the exit code of the first run that failed.
        """
        failed = []
        with noted_signals() as self._signals:
            for number, point in enumerate(self.points, 1):
                code = self._run_point(
                    f"[{number} of {len(self.points)}] {point.name}", point
                )
                if self._num_forwarded:
                    _log(
                        f"a signal stopped the sweep; the same command resumes at {point.name}."
                    )
                    return ExitCode.STOPPED
                if code != 0:
                    failed.append(code)
        if not failed:
            return 0
        # A negative code means that a signal killed the process.
        return failed[0] if failed[0] > 0 else ExitCode.LOST

    def _run_point(self, label: str, point: GridPoint) -> int:
        """Train one run unless it is finished; return its exit code."""
        before = self.record.points[point.name].get("code")
        if before == 0:
            self._report(label, "is done")
            return 0
        if before not in (None, ExitCode.STOPPED) and not self.retry:
            self._report(
                label, f"failed before ({describe_exit(before)}); --retry runs it again"
            )
            return int(before)
        self._report(label, "resumes" if before == ExitCode.STOPPED else "starts")
        started = time.monotonic()
        code = self._train(point)
        self.record.set_ended(point.name, code, time.monotonic() - started)
        if code != 0 and not self._num_forwarded:
            self._report(label, f"failed: {describe_exit(code)}")
        return code

    def _report(self, label: str, text: str) -> None:
        print(f"shardwise sweep: {label} {text}", file=sys.stderr, flush=True)

    def _train(self, point: GridPoint) -> int:
        """Run `shardwise train` for one point, and forward signals to it."""
        out = self.out / point.name
        if not self._wait_until_unlocked(out):
            return ExitCode.STOPPED if self._num_forwarded else ExitCode.IN_USE
        command = ["train", self.target, *self.words, *point.words, "--out", str(out)]
        child = subprocess.Popen(
            # -P: modules of the current directory must not shadow others.
            [sys.executable, "-P", "-c", CHILD, *command],
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches the sweep alone, which forwards it once.
            start_new_session=True,
        )
        while child.poll() is None:
            for number in self._signals[self._num_forwarded :]:
                self._num_forwarded += 1
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.1)
        self._num_forwarded = len(self._signals)
        return child.returncode

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
                    self._num_forwarded = len(self._signals)
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
