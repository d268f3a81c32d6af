"""Read a run directory as it is found: growing, damaged, or written by a stranger.

Nothing outside the directory is read and no link is followed. Content that is not valid is skipped,
with a note. Nothing is locked or written, so a run in progress is not affected. Needs no JAX.
"""

import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.files.lock import boot_id
from shardwise.files.regular import open_regular, read_regular
from shardwise.rundir.columns import (
    EMPTY,
    MAX_COLUMNS,
    MAX_STEP,
    Column,
    MetricsFile,
    as_number,
    is_finite,
    parse_line,
)
from shardwise.text import Json

# Larger files are not read at once.
MAX_FILE_BYTES = 2**26
MAX_LOCK_BYTES = 4096
MAX_CHECKPOINTS = 200
# The years 2000 and 2200, in seconds since 1970. Other times in a file are not believed.
EARLIEST, LATEST = 946684800.0, 7258118400.0
# Files whose change changes what `RunFiles.read` returns.
FILES = (
    "run.json",
    "metrics.jsonl",
    "starts.jsonl",
    "starting.jsonl",
    "phases.jsonl",
    "samples.jsonl",
    "plan.json",
    "lock",
)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory.

    Attributes:
        path: the directory.
        name: its name, for people.
        about: `run.json`: recipe, arguments, versions, devices and so on.
        columns: the metrics in `metrics.jsonl`, by name.
        num_records: number of records in `metrics.jsonl`.
        starts: `starts.jsonl`: one object per start, with "step" and "time".
        starting: `starting.jsonl`: one object per start, with the seconds of each phase up to the
            end of the first step.
        phases: `phases.jsonl`: seconds per kind of work, written about every 30 seconds.
        samples: `samples.jsonl`: text sampled from the model, with "step" and "text".
        plan: the plan in `plan.json` as it is there, not validated, or None.
        measured: measurements in `plan.json`, or None for a value that is not a number.
        checkpoints: the complete checkpoints, each with "step", "time" and "metrics".
        owner: the content of the lock if a run may be writing to the directory, else empty.
        written: time of the last change of `metrics.jsonl` in seconds since 1970.
        notes: sentences on files that are missing or damaged.
    """

    path: Path
    name: str
    about: Json
    columns: dict[str, Column]
    num_records: int
    starts: list[Json]
    starting: list[Json]
    phases: list[Json]
    samples: list[Json]
    plan: Json | None
    measured: dict[str, float | None]
    checkpoints: list[Json]
    owner: Json
    written: float | None
    notes: list[str] = field(default_factory=list)

    def column(self, name: str) -> Column:
        """Return the column of a metric; it is empty if the run has none of this name."""
        return self.columns.get(name, EMPTY)

    @property
    def last_step(self) -> int:
        """The last step of any metric, or 0."""
        return max(
            (int(c.steps[-1]) for c in self.columns.values() if len(c)), default=0
        )

    @property
    def num_steps(self) -> int | None:
        """The number of steps that the run is configured for, if known."""
        steps = self.about.get("steps")
        if not isinstance(steps, int) or isinstance(steps, bool):
            return None
        return steps if 0 < steps < MAX_STEP else None


class RunFiles:
    """Reads a run directory repeatedly. Metrics that were read once are kept.

    Example:
        >>> record = RunFiles(Path("runs/a")).read()  # doctest: +SKIP
        >>> record.column("loss").values[-1]  # doctest: +SKIP
        2.31
    """

    def __init__(self, path: Path, name: str = ""):
        """Remember the directory; nothing is read yet.

        Args:
            path: the run directory.
            name: its name for people; by default the last part of the path.
        """
        self.path = path
        self.name = name or path.resolve().name or str(path)
        self._metrics = MetricsFile()

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes whenever a file of the directory changes."""
        stamps = []
        for name in FILES:
            try:
                now = os.stat(self.path / name, follow_symlinks=False)
                stamps.append((now.st_ino, now.st_size, now.st_mtime_ns))
            except OSError:
                stamps.append((0, 0, 0))
        # Only the time counts for a directory.
        try:
            now = os.stat(self.path / "checkpoints", follow_symlinks=False)
            stamps.append((0, 0, now.st_mtime_ns))
        except OSError:
            stamps.append((0, 0, 0))
        return tuple(stamps)

    def read(self) -> RunRecord:
        """Return the content of the directory as it is now.

        Raises:
            OSError: the directory does not exist or cannot be opened.
        """
        notes: list[str] = []
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            written = self._read_metrics(directory, notes)
            about = _read_object(directory, "run.json", notes, is_required=True)
            plan_file = _read_object(directory, "plan.json", notes)
            plan = plan_file.get("plan")
            if plan_file and not isinstance(plan, dict):
                notes.append("plan.json has no plan.")
            return RunRecord(
                path=self.path,
                name=self.name,
                about=about,
                columns=self._metrics.columns(),
                num_records=self._metrics.num_records,
                starts=_read_lines(directory, "starts.jsonl", notes),
                starting=_read_lines(directory, "starting.jsonl", notes),
                phases=_read_lines(directory, "phases.jsonl", notes),
                samples=_read_lines(directory, "samples.jsonl", notes),
                plan=plan if isinstance(plan, dict) else None,
                measured=_measured(plan_file.get("measured")),
                checkpoints=_read_checkpoints(directory, notes),
                owner=_read_owner(directory),
                written=written,
                notes=notes,
            )
        finally:
            os.close(directory)

    def _read_metrics(self, directory: int, notes: list[str]) -> float | None:
        """Read what was added to `metrics.jsonl`; return when it was last written."""
        written = None
        try:
            with _opened(directory, "metrics.jsonl") as descriptor:
                self._metrics.read(descriptor)
                written = os.fstat(descriptor).st_mtime
        except FileNotFoundError:
            notes.append(
                "metrics.jsonl is missing: no step has run yet, or it was removed."
            )
            self._metrics = MetricsFile()
        except OSError as error:
            notes.append(f"metrics.jsonl cannot be read: {_reason(error)}.")
            self._metrics = MetricsFile()
        if bad_lines := self._metrics.bad_lines:
            notes.append(
                f"metrics.jsonl: skipped {bad_lines:,} lines that are not records."
            )
        if num_dropped := self._metrics.num_dropped:
            notes.append(
                f"metrics.jsonl: skipped {num_dropped:,} values, because it has more than "
                f"{MAX_COLUMNS} metrics or names that are too long."
            )
        return written


def _measured(values: object) -> dict[str, float | None]:
    if not isinstance(values, dict):
        return {}
    return {
        name: value if is_finite(value, 0) else None for name, value in values.items()
    }


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        if error.errno == errno.ELOOP:
            return "it is a link, and links are not followed"
        return error.strerror or str(error)
    return str(error)


@contextmanager
def _opened(directory: int, *names: str) -> Iterator[int]:
    """Yield the descriptor of a regular file below an open directory.

    `names` are the parts of its path. No part may be a link: the file would be somewhere else.
    """
    with _parent(directory, names) as parent:
        descriptor = open_regular(names[-1], dir_fd=parent)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def _parent(directory: int, names: Sequence[str]) -> Iterator[int]:
    """Yield the descriptor of the directory that holds a file, see `_opened`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
    with ExitStack() as stack:
        parent = directory
        for name in names[:-1]:
            parent = os.open(name, flags, dir_fd=parent)
            stack.callback(os.close, parent)
        yield parent


def _read_bytes(directory: int, *names: str, limit: int = MAX_FILE_BYTES) -> bytes:
    with _parent(directory, names) as parent:
        return read_regular(names[-1], limit, dir_fd=parent)


def _read_object(
    directory: int, name: str, notes: list[str], is_required: bool = False
) -> Json:
    """Return the JSON object in a file; it is empty, with a note, if there is none."""
    try:
        content = json.loads(_read_bytes(directory, name).decode(errors="replace"))
    except FileNotFoundError:
        if is_required:
            notes.append(f"{name} is missing.")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{name} cannot be read: {_reason(error)}.")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{name} is not a JSON object.")
        return {}
    return content


def _read_lines(directory: int, name: str, notes: list[str]) -> list[Json]:
    """Return the objects in a file of lines that have a valid "step"."""
    try:
        content = _read_bytes(directory, name)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{name} cannot be read: {_reason(error)}.")
        return []
    text = content.decode(errors="replace")
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    parsed = [parse_line(line) for line in lines]
    records = [record for record in parsed if record is not None]
    if len(records) < len(lines):
        notes.append(
            f"{name}: skipped {len(lines) - len(records):,} lines that are not records."
        )
    return [record for record in records if is_finite(record.get("step"), 0)]


def _read_checkpoints(directory: int, notes: list[str]) -> list[Json]:
    """Return step, time and metrics of the newest checkpoints, oldest first."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        folder = os.open("checkpoints", flags, dir_fd=directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"checkpoints cannot be read: {_reason(error)}.")
        return []
    try:
        # A directory with another name is a partial checkpoint. 10**16 is less than MAX_STEP.
        steps = [
            entry.name
            for entry in os.scandir(folder)
            if entry.name.isascii() and entry.name.isdigit() and len(entry.name) < 17
        ]
        newest = sorted(steps, key=int)[-MAX_CHECKPOINTS:]
        read = [_read_checkpoint(folder, step) for step in newest]
        return [checkpoint for checkpoint in read if checkpoint is not None]
    finally:
        os.close(folder)


def _read_checkpoint(folder: int, step: str) -> Json | None:
    try:
        with _opened(folder, step, "meta.json") as descriptor:
            saved = os.fstat(descriptor).st_mtime
        meta = json.loads(_read_bytes(folder, step, "meta.json"))
    except (OSError, ValueError, RecursionError):
        return None
    metrics = meta.get("metrics") if isinstance(meta, dict) else None
    if not isinstance(metrics, dict):
        metrics = {}
    numbers = {name: as_number(value) for name, value in metrics.items()}
    known = {name: number for name, number in numbers.items() if number is not None}
    return {"step": int(step), "time": saved, "metrics": known}


def _read_owner(directory: int) -> Json:
    """Return who holds the directory, as the text of the lock says.

    The lock itself is not touched. The result is empty if the process that is named there has
    ended on this machine.
    """
    try:
        owner = json.loads(
            _read_bytes(directory, "lock", limit=MAX_LOCK_BYTES) or b"{}"
        )
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(owner, dict):
        return {}
    pid = owner.get("pid")
    if owner.get("boot_id") == boot_id() and type(pid) is int and pid > 0:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return {}
        except (OSError, OverflowError):
            # It exists and belongs to somebody else, or the number means nothing here.
            pass
    return owner


def moment(value: object) -> float | None:
    """Return a time in seconds since 1970, or None if no run can have this time."""
    return float(value) if is_finite(value) and EARLIEST <= value < LATEST else None


def show_moment(seconds: float | None) -> str:
    """Return a time in seconds since 1970 as text, in UTC."""
    if seconds is None:
        return "not known"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
