"""A run directory as it is found, by whoever looks at it: half-written, damaged or made by a stranger.

Nothing outside the directory is read, no link is followed, and what is not as it should be is left out and noted. Nothing is
locked or written, so a run that goes on does not notice. Needs no JAX.
"""

import json
import math
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.files.lock import boot_id
from shardwise.rundir.columns import (
    BLOCK,
    EMPTY,
    MOST_COLUMNS,
    MOST_NAME,
    MOST_STEP,
    Column,
    MetricsFile,
    as_number,
    is_finite,
    records_of,
)

MOST_FILE = 2**26  # bytes of a file that is read as a whole
EARLIEST, LATEST = 946684800.0, 7258118400.0  # seconds since 1970: the years from 2000 to 2200


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says of its run."""

    path: Path
    name: str
    about: dict[str, Any]  # run.json
    columns: dict[str, Column]
    num_records: int
    starts: list[dict[str, Any]]
    starting: list[dict[str, Any]]
    phases: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    plan: dict[str, Any] | None  # of plan.json, as far as it is what `Plan.as_json` gives
    measured: dict[str, float | None]
    checkpoints: list[dict[str, Any]]  # step, time, metrics
    owner: dict[str, Any]  # of the lock: who writes to the directory now
    written: float | None  # when metrics.jsonl was last written to, by the file system
    notes: list[str] = field(default_factory=list)  # what was not as it should be

    def column(self, name: str) -> Column:
        return self.columns.get(name, EMPTY)

    @property
    def last_step(self) -> int:
        return max(
            (int(column.steps[-1]) for column in self.columns.values() if len(column)), default=0
        )

    @property
    def num_steps(self) -> int | None:
        """How many the run is to have."""
        steps = self.about.get("steps")
        return (
            steps
            if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps < MOST_STEP
            else None
        )


class RunFiles:
    """Reads a run directory again and again; what has been read of its metrics is kept."""

    def __init__(self, path: Path, name: str = ""):
        self.path, self.name = path, name or path.resolve().name or str(path)
        self._metrics = MetricsFile()

    def stamp(self) -> tuple[Any, ...]:
        """Changes when a file of the directory does."""
        found = []
        for name in (
            "run.json",
            "metrics.jsonl",
            "starts.jsonl",
            "starting.jsonl",
            "phases.jsonl",
            "samples.jsonl",
            "plan.json",
            "lock",
        ):
            try:
                now = os.stat(self.path / name, follow_symlinks=False)
                found.append((now.st_ino, now.st_size, now.st_mtime_ns))
            except OSError:
                found.append((0, 0, 0))
        try:
            found.append(
                (0, 0, os.stat(self.path / "checkpoints", follow_symlinks=False).st_mtime_ns)
            )
        except OSError:
            found.append((0, 0, 0))
        return tuple(found)

    def read(self) -> RunRecord:
        notes: list[str] = []
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            written = None
            try:
                with _opened(directory, "metrics.jsonl") as found:
                    self._metrics.read(found.descriptor)
                written = os.stat("metrics.jsonl", dir_fd=directory, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                notes.append(
                    "metrics.jsonl is not there: no step has been done, or it was removed."
                )
                self._metrics = MetricsFile()
            except OSError as error:
                notes.append(f"metrics.jsonl cannot be read: {_why(error)}.")
                self._metrics = MetricsFile()
            if self._metrics.bad_lines:
                notes.append(
                    f"metrics.jsonl: {self._metrics.bad_lines:,} lines are no records of a step and are left out."
                )
            if self._metrics.left_out:
                notes.append(
                    f"metrics.jsonl: {self._metrics.left_out:,} values of more than {MOST_COLUMNS} metrics are left out."
                )
            about = _read_object(directory, "run.json", notes, needed=True)
            planned = _read_object(directory, "plan.json", notes)
            plan = checked_plan(planned.get("plan")) if planned else None
            if planned and plan is None:
                notes.append(
                    "plan.json: the plan in it is not what shardwise writes, and is left out."
                )
            measured = planned.get("measured") if isinstance(planned.get("measured"), dict) else {}
            return RunRecord(
                path=self.path,
                name=self.name,
                about=about,
                columns=dict(self._metrics.columns()),
                num_records=self._metrics.records,
                starts=_read_lines(directory, "starts.jsonl", notes),
                starting=_read_lines(directory, "starting.jsonl", notes),
                phases=_read_lines(directory, "phases.jsonl", notes),
                samples=_read_lines(directory, "samples.jsonl", notes),
                plan=plan,
                measured={
                    name: value if is_finite(value, 0) else None
                    for name, value in (measured or {}).items()
                },
                checkpoints=_checkpoints(directory, notes),
                owner=_owner(directory),
                written=written,
                notes=notes,
            )
        finally:
            os.close(directory)


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return (
            "it is a link, and links are not followed"
            if error.errno == 40
            else error.strerror or str(error)
        )
    return str(error)


@dataclass
class _Opened:
    descriptor: int

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self.descriptor)


def _opened(directory: int, *names: str) -> _Opened:
    """A plain file below a directory; nothing on the way may be a link, and what is no file is not waited for."""
    at, close = directory, False
    try:
        for i, name in enumerate(names):
            kind = os.O_DIRECTORY if i < len(names) - 1 else os.O_NONBLOCK
            inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=at)
            if close:
                os.close(at)
            at, close = inner, True
        if not stat.S_ISREG(os.fstat(at).st_mode):
            raise OSError(f"{names[-1]} is no plain file")
        return _Opened(at)
    except BaseException:
        if close:
            os.close(at)
        raise


def _read_bytes(directory: int, *names: str, most: int = MOST_FILE) -> bytes:
    with _opened(directory, *names) as found:
        size = os.fstat(found.descriptor).st_size
        if size > most:
            raise OSError(f"it has {size:,} bytes; {most:,} are read")
        parts = []
        while block := os.read(found.descriptor, BLOCK):
            parts.append(block)
        return b"".join(parts)


def _read_object(
    directory: int, name: str, notes: list[str], needed: bool = False
) -> dict[str, Any]:
    try:
        found = json.loads(_read_bytes(directory, name).decode(errors="replace"))
    except FileNotFoundError:
        if needed:
            notes.append(f"{name} is not there.")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{name} cannot be read: {_why(error)}.")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{name} holds no JSON object.")
        return {}
    return found


def _read_lines(directory: int, name: str, notes: list[str]) -> list[dict[str, Any]]:
    try:
        content = _read_bytes(directory, name)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{name} cannot be read: {_why(error)}.")
        return []
    lines = [
        line for line in content.decode(errors="replace").split("\n") if line and not line.isspace()
    ]
    records, bad = records_of(lines) if lines else ([], 0)
    if bad:
        notes.append(f"{name}: {bad:,} lines are no records and are left out.")
    return [record for record in records if is_finite(record.get("step"), 0)]


def _checkpoints(directory: int, notes: list[str]) -> list[dict[str, Any]]:
    try:
        inner = os.open(
            "checkpoints", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"checkpoints cannot be read: {_why(error)}.")
        return []
    try:
        names = [
            entry.name
            for entry in os.scandir(inner)
            if entry.name.isascii() and entry.name.isdigit() and len(entry.name) < 17
        ]
        found = []
        for name in sorted(names, key=int)[-200:]:
            try:
                with _opened(inner, name, "meta.json") as file:
                    saved = os.fstat(file.descriptor).st_mtime
                meta = json.loads(_read_bytes(inner, name, "meta.json"))
            except (OSError, ValueError, RecursionError):
                continue
            metrics = meta.get("metrics") if isinstance(meta, dict) else None
            numbers = (
                {k: n for k, v in metrics.items() if (n := as_number(v)) is not None}
                if isinstance(metrics, dict)
                else {}
            )
            found.append({"step": int(name), "time": saved, "metrics": numbers})
        return found
    finally:
        os.close(inner)


def _owner(directory: int) -> dict[str, Any]:
    """Who holds the directory, as far as the text of the lock tells; the lock itself is not touched."""
    try:
        found = json.loads(_read_bytes(directory, "lock", most=4096) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or not found:
        return {}
    pid = found.get("pid")
    if found.get("boot_id") == boot_id() and type(pid) is int and pid > 0:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return {}
        except (OSError, OverflowError):
            pass
    return found


# Plans


_TEXT, _NUMBER, _COUNT = "text", "number", "count"
_LEAF: dict[str, Any] = {
    "path": _TEXT,
    "shape": [_COUNT],
    "dtype": _TEXT,
    "axes": [[_TEXT]],
    "layout": _TEXT,
    "bytes": _NUMBER,
    "why": _TEXT,
}
_PLAN: dict[str, Any] = {
    "target": _TEXT,
    "chip": _TEXT,
    "mesh": {"*": _COUNT},
    "options": {"*": None},
    "items": _COUNT,
    "unit": _TEXT,
    "num_params": _COUNT,
    "num_devices": _COUNT,
    "memory": dict.fromkeys(("parameters", "optimizer", "other", "batch", "temporaries"), _NUMBER),
    "peak": _NUMBER,
    "limit": _NUMBER,
    "buffers": [{"name": _TEXT, "shape": _TEXT, "bytes": _NUMBER}],
    "leaves": [_LEAF],
}


def checked_plan(found: Any) -> dict[str, Any] | None:
    """The fields of a plan that pages show, each of the kind that it has to be; None where that is not so."""
    try:
        plan: dict[str, Any] = _checked(found, _PLAN)
        times = found.get("times")
        plan["times"] = (
            {"total": _checked(times["total"], _NUMBER), "bound": _checked(times["bound"], _TEXT)}
            if times
            else None
        )
        for name in ("items_per_second", "mfu"):
            plan[name] = None if found.get(name) is None else _checked(found[name], _NUMBER)
        if (
            math.prod(plan["mesh"].values()) != plan["num_devices"]
            or len(plan["mesh"]) > 12
            or 0 in plan["mesh"].values()
        ):
            return None
        if any(
            len(leaf["axes"]) > len(leaf["shape"]) or len(leaf["shape"]) > 32
            for leaf in plan["leaves"]
        ):
            return None
        return plan
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _checked(value: Any, kind: Any) -> Any:
    if kind is None:
        return str(value)[:MOST_NAME]
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            raise TypeError(value)
        names: Iterable[str] = list(value) if "*" in kind else kind
        return {
            str(name)[:MOST_NAME]: _checked(value[name], kind.get("*", kind.get(name)))
            for name in names
        }
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise TypeError(value)
        return [_checked(one, kind[0]) for one in value]
    if kind == _TEXT:
        if not isinstance(value, str):
            raise TypeError(value)
        return value[:2000]
    if value == math.inf:
        return value
    if not is_finite(value, 0) or (
        kind == _COUNT and (not isinstance(value, int) or value >= MOST_STEP)
    ):
        raise ValueError(value)
    return value


def moment(value: Any) -> float | None:
    """Seconds since 1970, if they are of a year that a run can be of."""
    return float(value) if is_finite(value) and EARLIEST <= value < LATEST else None


def show_moment(seconds: float | None) -> str:
    return (
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
        if seconds is not None
        else "not known"
    )
