"""Other programs' records of a run: TensorBoard, Weights & Biases, MLflow, Trackio.

A tracker is an object with four methods; each has a thread of its own, so a slow or broken one costs a run nothing. Their libraries
are imported there, when a run begins. None of them sends anything elsewhere unless the user's own settings of that library say so.
"""

import html
import importlib.util
import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError
from shardwise.files.durable import write_atomically

PROJECT = "shardwise"
MOST = 10_000  # records that wait for a tracker; later ones are left out
PAUSE = (
    1.0  # seconds between two looks of a tracker's thread: it gets what has come since in one call
)
Record = tuple[int, dict[str, float]]  # a step, and its values by name


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run."""

    name: str
    directory: Path
    config: Mapping[str, Any]  # arguments, mesh, versions ... as JSON
    step: int  # it begins, or goes on, after this one
    id: str | None = None  # what `start` returned when the run was begun, if it resumes


class Tracker(Protocol):
    """All methods are called by one thread, in order. What one of them raises switches the tracker off."""

    name: str
    rewinds: bool  # whether records after `TrackedRun.step` that it has seen before may come again, in place of those

    def start(self, run: TrackedRun) -> str:
        """Opens a new run, or the one with `run.id` if that is known; its id."""

    def log(self, records: Sequence[Record]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class TensorBoard:
    """Event files, by default in `RUN/tensorboard`."""

    name, rewinds = "tensorboard", True

    def __init__(self, directory: Path | None = None):
        self.directory = directory

    def start(self, run: TrackedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self.directory or run.directory / "tensorboard"))
        if run.id is not None:  # readers then drop what an earlier start wrote of later steps
            self._writer.add_event(
                Event(
                    wall_time=time.time(),
                    step=run.step + 1,
                    session_log=SessionLog(status=SessionLog.START),
                )
            )
        else:
            self.text(run.step, "config", json.dumps(run.config, indent=2, default=str))
        return "tensorboard"

    def log(self, records: Sequence[Record]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, values in records:
            self._add(
                step,
                Summary(
                    value=[
                        Summary.Value(tag=name, simple_value=value)
                        for name, value in values.items()
                    ]
                ),
            )
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shown = "\n".join(
            "    " + line for line in text.splitlines()
        )  # Markdown would take it apart
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(
            dtype=DT_STRING, string_val=[shown.encode(errors="replace")], tensor_shape=shape
        )
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(step, Summary(value=[Summary.Value(tag=name, metadata=kind, tensor=tensor)]))

    def finish(self, exit_code: int) -> None:
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


class WandB:
    """Weights & Biases; its files are in `RUN/wandb`. Without a login, and unless WANDB_MODE says otherwise, it stays offline."""

    name, rewinds = "wandb", False

    def __init__(self, project: str | None = None, **options: Any):
        self.project, self.options = (
            project,
            options,
        )  # options: of `wandb.init`, such as entity or mode

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # its reports of its own errors would leave the machine
        import wandb

        is_told = bool(os.environ.get("WANDB_MODE")) or "mode" in self.options
        mode = {} if is_told or wandb.login(prompt=False, verify=False) else {"mode": "offline"}
        self._html = wandb.Html
        self._run = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id or uuid.uuid4().hex[:12],
            resume="allow",
            dir=run.directory,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
            **mode,
            **self.options,
        )
        return str(self._run.id)

    def log(self, records: Sequence[Record]) -> None:
        for step, values in records:
            self._run.log(values, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log(
            {name: self._html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step
        )

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MLflow:
    """A run of MLflow, where its own settings say (MLFLOW_TRACKING_URI); without any, that is a database in the working directory."""

    name, rewinds = "mlflow", False

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None):
        self.tracking_uri, self.experiment = tracking_uri, experiment

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = client = MlflowClient(self.tracking_uri)
        if run.id is not None:
            with suppress(MlflowException):  # it was in another store, or has been deleted
                client.update_run(run.id, status="RUNNING")
                self._id = run.id
                return run.id
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else client.create_experiment(name)
        self._id = client.create_run(experiment, run_name=run.name).info.run_id
        client.log_batch(
            self._id,
            params=[Param(key, str(value)[:500]) for key, value in _flat(run.config).items()][:100],
        )
        return str(self._id)

    def log(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step)
            for step, values in records
            for name, value in values.items()
        ]
        for i in range(0, len(metrics), 1000):  # its limit
            self._client.log_batch(self._id, metrics=metrics[i : i + 1000])

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/{step}.txt")

    def finish(self, exit_code: int) -> None:
        self._client.set_terminated(
            self._id, {0: "FINISHED", 75: "KILLED"}.get(exit_code, "FAILED")
        )


class Trackio:
    """A run of Trackio: on this machine, unless its own settings name a Space or a server."""

    name, rewinds = "trackio", False

    def __init__(self, project: str | None = None, **options: Any):
        self.project, self.options = project, options  # options: of `trackio.init`

    def start(self, run: TrackedRun) -> str:
        import trackio

        name = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"  # it knows its runs by name
        options = {"embed": False, "resume": "allow", "config": dict(run.config), **self.options}
        self._markdown = trackio.Markdown
        self._run = trackio.init(project=self.project or PROJECT, name=name, **options)
        return name

    def log(self, records: Sequence[Record]) -> None:
        for step, values in records:
            self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log(
            {name: self._markdown("\n".join("    " + line for line in text.splitlines()))},
            step=step,
        )

    def finish(self, exit_code: int) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def make_trackers(names: Sequence[str]) -> tuple[Tracker, ...]:
    """By name, each once. A library that is not there is told now; it is imported when the run begins."""
    names = list(dict.fromkeys(names))
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        extras = ",".join(missing)
        raise ConfigError(
            f"--track {' --track '.join(missing)}: not installed. Install it with: pip install 'shardwise[{extras}]'"
        )
    return tuple(TRACKERS[name]() for name in names)


class Tracking:
    """Hands what a run says to its trackers. Never waits for them, but for `close`, and there not long."""

    def __init__(
        self, trackers: Sequence[Tracker], run: TrackedRun, seen: int, warn: Callable[[str], None]
    ):
        """seen: the last step that an earlier start of the run has told trackers of."""
        ids = _Ids(run.directory / "trackers.json")
        self._channels = [_Channel(tracker, run, seen, ids, warn) for tracker in trackers]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._channels:
            numbers = {
                name: float(value)
                for name, value in values.items()
                if isinstance(value, int | float) and name != "step"
            }
            for channel in self._channels:
                channel.put(step, numbers)

    def text(self, step: int, name: str, text: str) -> None:
        for channel in self._channels:
            channel.put(step, (name, text))

    def close(self, exit_code: int, seconds: float = 20.0) -> None:
        """Waits until everything is told, `seconds` at most for all of them together."""
        end = time.monotonic() + seconds
        for channel in self._channels:
            channel.end(exit_code)
        for channel in self._channels:
            channel.join(max(0.0, end - time.monotonic()))


class _Ids:
    """`trackers.json`: the id of the run in each tracker."""

    def __init__(self, path: Path):
        self.path, self.lock = path, threading.Lock()
        try:
            found = json.loads(path.read_text())
            self.known = {str(name): str(id) for name, id in found.items()}
        except (OSError, ValueError, AttributeError, RecursionError):
            self.known = {}

    def keep(self, name: str, id: str) -> None:
        with self.lock:
            if self.known.get(name) != id:
                self.known[name] = id
                write_atomically(self.path, json.dumps(self.known, indent=2) + "\n")


class _Channel:
    """One tracker, its thread, and what waits for it."""

    def __init__(
        self, tracker: Tracker, run: TrackedRun, seen: int, ids: _Ids, warn: Callable[[str], None]
    ):
        self.tracker, self.ids, self.warn = tracker, ids, warn
        self.run = replace(run, id=ids.known.get(tracker.name))
        self.seen = 0 if self.run.id is None else seen  # what came up to there is not told twice
        self.waiting: deque[tuple[int, dict[str, float] | tuple[str, str]]] = deque()
        self.is_off = self.is_late = False
        self.exit_code = 0
        self.ending = threading.Event()
        self.thread = threading.Thread(
            target=self._work, daemon=True, name=f"shardwise-{tracker.name}"
        )
        self.thread.start()

    def put(self, step: int, what: dict[str, float] | tuple[str, str]) -> None:
        if self.is_off or (
            step <= self.seen and not (self.tracker.rewinds and isinstance(what, dict))
        ):
            return
        if len(self.waiting) < MOST:
            self.waiting.append((step, what))
        elif not self.is_late:
            self.is_late = True
            self.warn(
                f"{self.tracker.name} cannot keep up with the run: steps are left out there; metrics.jsonl has all of them."
            )

    def end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.ending.set()

    def join(self, seconds: float) -> None:
        self.thread.join(seconds)
        if self.thread.is_alive() and not self.is_off:
            self.warn(
                f"{self.tracker.name} has not finished in time; what it has not taken is in metrics.jsonl."
            )

    def _work(self) -> None:
        try:
            self.ids.keep(self.tracker.name, self.tracker.start(self.run))
            while not self.ending.wait(PAUSE):
                self._tell()
            self._tell()
            self.tracker.finish(self.exit_code)
        except BaseException as error:  # whatever a library does, the run goes on
            self.is_off = True
            self.waiting.clear()
            fact = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            self.warn(
                f"{self.tracker.name} is switched off: {fact}. Training goes on; metrics.jsonl has every step."
            )

    def _tell(self) -> None:
        records: list[Record] = []
        while self.waiting:
            step, what = self.waiting.popleft()
            if isinstance(what, dict):
                records.append((step, what))
                continue
            self.tracker.log(records)
            records = []
            self.tracker.text(step, *what)
        if records:
            self.tracker.log(records)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            _flat(value, f"{prefix}{key}/")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat
