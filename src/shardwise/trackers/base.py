"""The interface of experiment trackers, and the threads that feed them during a run.

A tracker can never slow down or stop a run. Records go into a bounded queue, and one thread per
tracker empties that queue about once per second. If the tracker's library raises, the tracker is
disabled with one warning and training continues. Libraries are imported in those threads, when a
run starts. None of the built-in trackers sends data to another machine unless the user's own
settings of that library ask for it.
"""

import importlib
import importlib.util
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from shardwise.errors import ConfigError
from shardwise.files.durable import write_atomically
from shardwise.files.regular import read_regular

# The project or experiment name where the user sets none.
PROJECT = "shardwise"
# The class of each tracker, in the module of this package that is named after its library. To add
# a tracker, add that module and a line here.
TRACKERS = {
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
    "mlflow": "MLflow",
    "trackio": "Trackio",
}
# The largest `trackers.json` that is read, in bytes.
MAX_IDS = 2**16
# Records that may wait for one tracker. Further records are dropped.
MAX_QUEUED = 10_000
# Seconds between two deliveries to a tracker. Records that arrive in between share one call.
INTERVAL = 1.0

Values: TypeAlias = Mapping[str, float]
Record: TypeAlias = tuple[int, Values]
Warn: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker receives when the run starts.

    Attributes:
        name: the name of the run directory.
        directory: the run directory, as an absolute path.
        config: arguments, mesh, versions and so on; every value can be written as JSON.
        step: training continues after this step; 0 for a new run.
        id: the value that `Tracker.start` returned for the first start of this run, or None if the
            tracker has not seen the run yet.
    """

    name: str
    directory: Path
    config: Mapping[str, object]
    step: int
    id: str | None = None


class Tracker(Protocol):
    """The interface of a tracker.

    One thread calls all methods, in order. If a method raises, the tracker is disabled for the rest
    of the run.

    Attributes:
        name: identifies the tracker in `trackers.json` and in warnings.
        rewinds: whether the tracker replaces records of steps after `TrackedRun.step` when a
            resumed run logs these steps again. If False, a step is not sent twice.
    """

    name: str
    rewinds: bool

    def start(self, run: TrackedRun) -> str:
        """Open a new run, or the run `run.id` if it is set, and return the run's id."""

    def log(self, records: Sequence[Record]) -> None:
        """Record `(step, {metric: value})` pairs, in order of arrival."""

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text, such as a sample from the model."""

    def finish(self, exit_code: int) -> None:
        """Close the run. `exit_code` is 0 if it finished and 75 if a signal stopped it."""


def make_trackers(names: Sequence[str]) -> tuple[Tracker, ...]:
    """Return a tracker with default settings for each distinct name.

    The libraries are only looked up here; each is imported when the run starts.

    Args:
        names: keys of `TRACKERS`.

    Raises:
        ConfigError: if the library of a tracker is not installed.
    """
    unique = list(dict.fromkeys(names))
    missing = [name for name in unique if importlib.util.find_spec(name) is None]
    if missing:
        options = " ".join(f"--track {name}" for name in missing)
        extras = ",".join(missing)
        raise ConfigError(
            f"{options}: not installed. Run: pip install 'shardwise[{extras}]'"
        )
    return tuple(_make_tracker(name) for name in unique)


def _make_tracker(name: str) -> Tracker:
    module = importlib.import_module(f"shardwise.trackers.{name}")
    return cast(Tracker, getattr(module, TRACKERS[name])())


class Tracking:
    """Passes the records of a run on to its trackers.

    Only `close` waits for the trackers, and only for a limited time.

    Args:
        trackers: the trackers of the run.
        run: the description of the run.
        seen: the last step that an earlier start of the run has sent to trackers.
        warn: prints a warning; also called from the threads of the trackers.
    """

    def __init__(
        self, trackers: Sequence[Tracker], run: TrackedRun, seen: int, warn: Warn
    ):
        ids = _RunIds(run.directory / "trackers.json")
        self._channels = [
            _Channel(tracker, run, seen, ids, warn) for tracker in trackers
        ]

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Queue the numbers among `values`; other types and the key "step" are skipped."""
        if not self._channels:
            return
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        for channel in self._channels:
            channel.put(step, numbers)

    def text(self, step: int, name: str, text: str) -> None:
        """Queue a text."""
        for channel in self._channels:
            channel.put(step, _TextRecord(name, text))

    def close(self, exit_code: int, seconds: float = 20.0) -> None:
        """Close all trackers. Waits at most `seconds` in total for queued records."""
        deadline = time.monotonic() + seconds
        for channel in self._channels:
            channel.close(exit_code)
        for channel in self._channels:
            channel.join(max(0.0, deadline - time.monotonic()))


class _RunIds:
    """The file `trackers.json`: the id of the run in each tracker."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        try:
            content = json.loads(read_regular(path, MAX_IDS))
            self._ids = {str(name): str(run_id) for name, run_id in content.items()}
        except (OSError, ValueError, AttributeError, RecursionError):
            # Without the ids every tracker opens a new run.
            pass

    def get(self, name: str) -> str | None:
        return self._ids.get(name)

    def set(self, name: str, run_id: str) -> None:
        with self._lock:
            if self._ids.get(name) != run_id:
                self._ids[name] = run_id
                write_atomically(self._path, json.dumps(self._ids, indent=2) + "\n")


@dataclass(frozen=True)
class _TextRecord:
    """A queued text."""

    name: str
    text: str


class _Channel:
    """One tracker, its thread and its queue."""

    def __init__(
        self, tracker: Tracker, run: TrackedRun, seen: int, ids: _RunIds, warn: Warn
    ):
        self._tracker = tracker
        self._ids = ids
        self._warn = warn
        self._run = replace(run, id=ids.get(tracker.name))
        # A tracker that joins a run late has seen none of its steps.
        self._seen = 0 if self._run.id is None else seen
        self._queue: deque[tuple[int, Values | _TextRecord]] = deque()
        self._is_disabled = False
        self._has_dropped = False
        self._exit_code = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._work, daemon=True, name=f"shardwise-{tracker.name}"
        )
        self._thread.start()

    def put(self, step: int, item: Values | _TextRecord) -> None:
        if self._is_disabled or self._was_sent(step, item):
            return
        if len(self._queue) < MAX_QUEUED:
            self._queue.append((step, item))
        elif not self._has_dropped:
            self._has_dropped = True
            self._warn(
                f"{self._tracker.name} cannot keep up with the run: it misses some steps. "
                "metrics.jsonl has all of them."
            )

    def _was_sent(self, step: int, item: Values | _TextRecord) -> bool:
        """Whether an earlier start sent this item, and the tracker cannot replace it."""
        can_replace = self._tracker.rewinds and not isinstance(item, _TextRecord)
        return step <= self._seen and not can_replace

    def close(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._closing.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive() and not self._is_disabled:
            self._warn(
                f"{self._tracker.name} did not finish in time and misses some records. "
                "metrics.jsonl has all of them."
            )

    def _work(self) -> None:
        """Run in the tracker's thread, from the start of the run to its end."""
        try:
            self._ids.set(self._tracker.name, self._tracker.start(self._run))
            while not self._closing.wait(INTERVAL):
                self._deliver()
            self._deliver()
            self._tracker.finish(self._exit_code)
        except BaseException as error:
            # Some libraries raise SystemExit. Whatever happens, the run must continue.
            self._is_disabled = True
            self._queue.clear()
            fact = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            self._warn(
                f"{self._tracker.name} is disabled: {fact}. "
                "Training continues; metrics.jsonl has every step."
            )

    def _deliver(self) -> None:
        """Send everything in the queue; consecutive records share one call."""
        records: list[Record] = []
        while self._queue:
            step, item = self._queue.popleft()
            if not isinstance(item, _TextRecord):
                records.append((step, item))
                continue
            if records:
                self._tracker.log(records)
                records = []
            self._tracker.text(step, item.name, item.text)
        if records:
            self._tracker.log(records)
