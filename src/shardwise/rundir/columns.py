"""`metrics.jsonl` as columns of numbers, read incrementally while the file grows."""

import json
import math
import os
from array import array
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from shardwise.text import Json

# Bytes that are read at once.
BLOCK = 2**21
# Limits on what a stranger's file may make a reader allocate.
MAX_LINE_BYTES = 2**22
MAX_COLUMNS = 400
MAX_NAME_LENGTH = 200
MAX_STEP = 2**53
# JSON has no non-finite numbers; the log writes them as these strings.
NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Column:
    """One metric of a run.

    Attributes:
        steps: the steps that have the metric, increasing, shape `(N,)`.
        values: its value at each of these steps, shape `(N,)`.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.steps)

    def between(self, after: float, until: float) -> "Column":
        """Return the values of the steps `after < step <= until`."""
        begin, end = np.searchsorted(self.steps, [after, until], side="right")
        return Column(self.steps[begin:end], self.values[begin:end])


EMPTY = Column(np.zeros(0, np.int64), np.zeros(0))


class MetricsFile:
    """Reads `metrics.jsonl` into columns; each call of `read` reads only what was added.

    A plain `json.loads` per line reads 100,000 lines of 12 fields in about a second. Parsing all
    lines of a block together with NumPy saved less than a third of that time.

    Attributes:
        bad_lines: lines that are not the record of a step. They are skipped.
        num_records: records read.
        num_dropped: values dropped because the file has too many metrics or too long names.
    """

    def __init__(self) -> None:
        """Start with nothing read."""
        self._identity: tuple[int, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self.bad_lines = 0
        self.num_records = 0
        self.num_dropped = 0
        # Steps and values of each metric, in the order of the file.
        self._parts: dict[str, tuple[array[int], array[float]]] = {}

    def read(self, descriptor: int) -> None:
        """Read what was added to the file since the last call.

        A file that was replaced or truncated is read again from its beginning. A last line
        without a newline is read if it is complete, and otherwise left for the next call.

        Args:
            descriptor: a file descriptor of the file.
        """
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if self._identity != identity or status.st_size < self._offset:
            self._clear()
        self._identity = identity
        os.lseek(descriptor, self._offset, os.SEEK_SET)
        rest = b""
        while block := os.read(descriptor, BLOCK):
            complete, newline, rest = (rest + block).rpartition(b"\n")
            self._offset += len(complete) + len(newline)
            self._add_lines(complete)
            if len(rest) > MAX_LINE_BYTES:
                self._offset += len(rest)
                self.bad_lines += 1
                rest = b""
        if (
            rest.endswith(b"}")
            and parse_line(rest.decode(errors="replace")) is not None
        ):
            self._offset += len(rest)
            self._add_lines(rest)

    def _add_lines(self, content: bytes) -> None:
        for line in content.decode(errors="replace").split("\n"):
            if not line or line.isspace():
                continue
            record = parse_line(line)
            if record is None or not _is_step(record.get("step")):
                self.bad_lines += 1
            else:
                self._add(record)

    def _add(self, record: Json) -> None:
        self.num_records += 1
        step = record.pop("step")
        for name, value in record.items():
            part = self._parts.get(name)
            # Nearly all values are floats of a known metric.
            if part is not None and type(value) is float:
                part[0].append(step)
                part[1].append(value)
            elif isinstance(value, dict):
                for key, inner in list(value.items())[:MAX_COLUMNS]:
                    self._append(f"{name}/{key}", step, as_number(inner))
            else:
                self._append(name, step, as_number(value))

    def _append(self, name: str, step: int, value: float | None) -> None:
        if value is None:
            return
        if name not in self._parts:
            if len(self._parts) >= MAX_COLUMNS or len(name) > MAX_NAME_LENGTH:
                self.num_dropped += 1
                return
            self._parts[name] = (array("q"), array("d"))
        steps, values = self._parts[name]
        steps.append(step)
        values.append(value)

    def columns(self) -> dict[str, Column]:
        """Return the column of each metric read so far."""
        return {name: _as_column(*part) for name, part in self._parts.items()}


def _is_step(value: object) -> bool:
    # A bool is an int for `isinstance`, but not a step.
    return type(value) is int and 0 <= value < MAX_STEP


def _as_column(steps: "array[int]", values: "array[float]") -> Column:
    """Return a column with increasing steps; the last record of a step counts."""
    all_steps = np.array(steps, np.int64)
    all_values = np.array(values, np.float64)
    if np.all(all_steps[1:] > all_steps[:-1]):
        return Column(all_steps, all_values)
    order = np.argsort(all_steps, kind="stable")
    ordered = all_steps[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    return Column(ordered[is_last], all_values[order[is_last]])


def parse_line(line: str) -> Json | None:
    """Return the JSON object in a line, or None if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def as_number(value: object) -> float | None:
    """Return a JSON value as a float, or None if it is not a number.

    Strings for the numbers that JSON lacks count as numbers: "nan", "inf" and "-inf".
    """
    if isinstance(value, str):
        return NONFINITE.get(value.lower().lstrip("+")) if len(value) < 10 else None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_finite(value: object, least: float = -math.inf) -> TypeGuard[float]:
    """Return whether `value` is a finite number of ordinary size, at least `least`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 1e300 and value >= least
