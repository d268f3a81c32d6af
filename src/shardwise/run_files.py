"""A run directory as it is found, by whoever looks at it: half-written, damaged or made by a stranger.

Nothing outside the directory is read, no link is followed, and what is not as it should be is left out and noted. Nothing is
locked or written, so a run that goes on does not notice. Needs no JAX.
"""

import json
import math
import os
import stat
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.files import boot_id

BLOCK = 2**21  # bytes read at a time
MOST_LINE = 2**22  # bytes
MOST_FILE = 2**26  # bytes of a file that is read as a whole
MOST_COLUMNS = 400
MOST_NAME = 200
MOST_STEP = 2**53
NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # as the log writes what JSON has not


@dataclass(frozen=True)
class Column:
    """One metric: the steps that have it, rising, and its values there."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def between(self, after: float, until: float) -> "Column":
        """Of the steps after one step and up to another."""
        begin, end = np.searchsorted(self.steps, [after, until], side="right")
        return Column(self.steps[begin:end], self.values[begin:end])


EMPTY = Column(np.zeros(0, np.int64), np.zeros(0))


class MetricsFile:
    """`metrics.jsonl` as columns; reads what was added since the last time."""

    def __init__(self) -> None:
        self.known: tuple[int, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self.offset = 0
        self.bad_lines = 0
        self.left_out = 0
        self.records = 0
        self._parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        self._columns: dict[str, Column] | None = None

    def read(self, directory: int) -> None:
        with _opened(directory, "metrics.jsonl") as found:
            now = os.fstat(found.descriptor)
            if self.known != (now.st_dev, now.st_ino) or now.st_size < self.offset:
                self._clear()
            self.known = (now.st_dev, now.st_ino)
            os.lseek(found.descriptor, self.offset, os.SEEK_SET)
            rest = b""
            while block := os.read(found.descriptor, BLOCK):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                self.offset += len(whole) + len(newline)
                self._take(whole)
                if len(rest) > MOST_LINE:
                    self.offset += len(rest)
                    self.bad_lines += 1
                    rest = b""
            if rest.endswith(b"}") and _records([rest.decode(errors="replace")])[1] == 0:  # whole, but for its end of line
                self.offset += len(rest)
                self._take(rest)

    def _take(self, content: bytes) -> None:
        self._columns = None
        alike: dict[int, list[bytes]] = {}
        for line in content.split(b"\n"):
            alike.setdefault(line.count(b'"'), []).append(line)
        for same in alike.values():
            if (found := _same_fields(same)) is not None:
                self._extend(*found)
                continue
            lines = [line for line in b"\n".join(same).decode(errors="replace").split("\n") if line and not line.isspace()]
            records, bad = _records(lines) if lines else ([], 0)
            self.bad_lines += bad
            equal: dict[int, list[dict[str, Any]]] = {}
            for record in records:
                equal.setdefault(len(record), []).append(record)
            for group in equal.values():
                self._add(group)

    def _extend(self, names: list[str], values: NDArray[np.float64]) -> None:
        """A row for each record, a column for each name; `step` is among them."""
        self.records += len(values)
        steps = values[:, names.index("step")].astype(np.int64)
        for i, name in enumerate(names):
            if name != "step":
                self._append(name, steps, values[:, i].copy())

    def _add(self, group: list[dict[str, Any]]) -> None:
        """Records with equally many names, taken a column at a time where these are the same."""
        names = list(group[0])
        try:
            columns = {name: list(map(itemgetter(name), group)) for name in names}
        except KeyError:
            alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
            for record in group:
                alike.setdefault(tuple(sorted(record)), []).append(record)
            for same in alike.values():
                self._add(same)
            return
        steps = columns.pop("step", [])
        if set(map(type, steps)) != {int} or min(steps) < 0 or max(steps) >= MOST_STEP:
            kept = [r for r in group if type(r.get("step")) is int and 0 <= r["step"] < MOST_STEP]
            self.bad_lines += len(group) - len(kept)
            if kept:
                self._add(kept)
            return
        self.records += len(group)
        numbers = np.array(steps, np.int64)
        for name, values in columns.items():
            if set(map(type, values)) <= {int, float}:
                try:
                    self._append(name, numbers, np.array(values, np.float64))
                    continue
                except OverflowError:
                    pass
            self._add_mixed(name, numbers, values)

    def _add_mixed(self, name: str, steps: NDArray[np.int64], values: Sequence[Any]) -> None:
        found: dict[str, list[tuple[int, float]]] = {}
        for step, value in zip(steps.tolist(), values, strict=True):
            inner = {f"{name}/{key}": v for key, v in list(value.items())[:MOST_COLUMNS]} if isinstance(value, dict) else {name: value}
            for key, one in inner.items():
                if (number := as_number(one)) is not None:
                    found.setdefault(key, []).append((step, number))
        for key, pairs in found.items():
            self._append(key, np.array([step for step, _ in pairs], np.int64), np.array([value for _, value in pairs]))

    def _append(self, name: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        if name not in self._parts and (len(self._parts) >= MOST_COLUMNS or len(name) > MOST_NAME):
            self.left_out += len(values)
            return
        self._parts.setdefault(name, []).append((steps, values))

    def columns(self) -> dict[str, Column]:
        if self._columns is None:
            self._columns = {name: _joined(parts) for name, parts in self._parts.items()}
            self._parts = {name: [(column.steps, column.values)] for name, column in self._columns.items()}
        return self._columns


def _joined(parts: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> Column:
    steps = np.concatenate([steps for steps, _ in parts])
    values = np.concatenate([values for _, values in parts])
    if len(steps) > 1 and not np.all(steps[1:] > steps[:-1]):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)  # of several records of a step the last one counts
        steps, values = steps[last], values[last]
    return Column(steps, values)


def _same_fields(lines: list[bytes]) -> tuple[list[str], NDArray[np.float64]] | None:
    """The names and numbers of lines that differ in their numbers alone, as a run writes them; None where that is not so.

    All lines at once, in a third of the time that parsing each would take. What stands outside of the numbers is compared with the
    first line, sign for sign, so nothing else can pass for such lines.
    """
    try:
        first = json.loads(lines[0])
    except (ValueError, RecursionError):
        return None
    if len(lines) < 8 or type(first) is not dict or "step" not in first or any(type(v) not in (int, float) for v in first.values()):
        return None
    signs = np.frombuffer(b"\n".join([*lines, b""]), np.uint8)
    begins = signs == ord(":")
    within = np.cumsum(begins.view(np.int8) - ((signs == ord(",")) | (signs == ord("}"))).view(np.int8), dtype=np.int8) == 1
    frame = signs[~within]
    size = len(frame) // len(lines)
    if len(frame) != size * len(lines) or np.any(frame.reshape(len(lines), size) != frame[:size]):
        return None
    numbers = np.where(begins, np.uint8(32), signs)[within].tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what cannot be read to its end is noticed by its size
        try:
            values = np.fromstring(numbers, np.float64, sep=" ")
        except ValueError:
            return None
    if len(values) != len(first) * len(lines):
        return None
    values = values.reshape(len(lines), len(first))
    steps = values[:, list(first).index("step")]
    return (list(first), values) if np.all((steps >= 0) & (steps < MOST_STEP) & (steps == np.floor(steps))) else None


def _records(lines: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The objects in the lines, and how many lines are none. Many are parsed at once, which takes half the time."""
    try:
        found = json.loads(f"[{','.join(lines)}]")
        if len(found) == len(lines) and all(type(record) is dict for record in found):
            return found, 0
    except (ValueError, RecursionError):
        pass
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, len(lines) - len(records)


def as_number(value: Any) -> float | None:
    """A number, or a word for one that JSON lacks; None for anything else."""
    if isinstance(value, str):
        return NUMBERS.get(value.lower().lstrip("+")) if len(value) < 10 else None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


def is_finite(value: Any, least: float = -math.inf) -> bool:
    """Whether it is a usual number, and not smaller than `least`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and value >= least


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
        return max((int(column.steps[-1]) for column in self.columns.values() if len(column)), default=0)

    @property
    def num_steps(self) -> int | None:
        """How many the run is to have."""
        steps = self.about.get("steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps < MOST_STEP else None


class RunFiles:
    """Reads a run directory again and again; what has been read of its metrics is kept."""

    def __init__(self, path: Path, name: str = ""):
        self.path, self.name = path, name or path.resolve().name or str(path)
        self._metrics = MetricsFile()

    def stamp(self) -> tuple[Any, ...]:
        """Changes when a file of the directory does."""
        found = []
        for name in ("run.json", "metrics.jsonl", "starts.jsonl", "starting.jsonl", "phases.jsonl", "samples.jsonl", "plan.json", "lock"):
            try:
                now = os.stat(self.path / name, follow_symlinks=False)
                found.append((now.st_ino, now.st_size, now.st_mtime_ns))
            except OSError:
                found.append((0, 0, 0))
        try:
            found.append((0, 0, os.stat(self.path / "checkpoints", follow_symlinks=False).st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
        return tuple(found)

    def read(self) -> RunRecord:
        notes: list[str] = []
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            written = None
            try:
                self._metrics.read(directory)
                written = os.stat("metrics.jsonl", dir_fd=directory, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                notes.append("metrics.jsonl is not there: no step has been done, or it was removed.")
                self._metrics = MetricsFile()
            except OSError as error:
                notes.append(f"metrics.jsonl cannot be read: {_why(error)}.")
                self._metrics = MetricsFile()
            if self._metrics.bad_lines:
                notes.append(f"metrics.jsonl: {self._metrics.bad_lines:,} lines are no records of a step and are left out.")
            if self._metrics.left_out:
                notes.append(f"metrics.jsonl: {self._metrics.left_out:,} values of more than {MOST_COLUMNS} metrics are left out.")
            about = _read_object(directory, "run.json", notes, needed=True)
            found = _read_object(directory, "plan.json", notes)
            plan = checked_plan(found.get("plan")) if found else None
            if found and plan is None:
                notes.append("plan.json: the plan in it is not what shardwise writes, and is left out.")
            measured = found.get("measured") if isinstance(found.get("measured"), dict) else {}
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
                measured={name: value if is_finite(value, 0) else None for name, value in (measured or {}).items()},
                checkpoints=_checkpoints(directory, notes),
                owner=_owner(directory),
                written=written,
                notes=notes,
            )
        finally:
            os.close(directory)


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return "it is a link, and links are not followed" if error.errno == 40 else error.strerror or str(error)
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


def _read_object(directory: int, name: str, notes: list[str], needed: bool = False) -> dict[str, Any]:
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
    lines = [line for line in content.decode(errors="replace").split("\n") if line and not line.isspace()]
    records, bad = _records(lines) if lines else ([], 0)
    if bad:
        notes.append(f"{name}: {bad:,} lines are no records and are left out.")
    return [record for record in records if is_finite(record.get("step"), 0)]


def _checkpoints(directory: int, notes: list[str]) -> list[dict[str, Any]]:
    try:
        inner = os.open("checkpoints", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"checkpoints cannot be read: {_why(error)}.")
        return []
    try:
        names = [entry.name for entry in os.scandir(inner) if entry.name.isascii() and entry.name.isdigit() and len(entry.name) < 17]
        found = []
        for name in sorted(names, key=int)[-200:]:
            try:
                with _opened(inner, name, "meta.json") as file:
                    saved = os.fstat(file.descriptor).st_mtime
                meta = json.loads(_read_bytes(inner, name, "meta.json"))
            except (OSError, ValueError, RecursionError):
                continue
            metrics = meta.get("metrics") if isinstance(meta, dict) else None
            numbers = {k: n for k, v in metrics.items() if (n := as_number(v)) is not None} if isinstance(metrics, dict) else {}
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
        plan["times"] = {"total": _checked(times["total"], _NUMBER), "bound": _checked(times["bound"], _TEXT)} if times else None
        for name in ("items_per_second", "mfu"):
            plan[name] = None if found.get(name) is None else _checked(found[name], _NUMBER)
        if math.prod(plan["mesh"].values()) != plan["num_devices"] or len(plan["mesh"]) > 12 or 0 in plan["mesh"].values():
            return None
        if any(len(leaf["axes"]) > len(leaf["shape"]) or len(leaf["shape"]) > 32 for leaf in plan["leaves"]):
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
        return {str(name)[:MOST_NAME]: _checked(value[name], kind.get("*", kind.get(name))) for name in names}
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
    if not is_finite(value, 0) or (kind == _COUNT and (not isinstance(value, int) or value >= MOST_STEP)):
        raise ValueError(value)
    return value


def moment(value: Any) -> float | None:
    """Seconds since 1970, if they are some of the years from 2000 to 2200."""
    return float(value) if is_finite(value) and 946684800 <= value < 7258118400 else None


def show_moment(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds is not None else "not known"
