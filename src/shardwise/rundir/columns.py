"""`metrics.jsonl` as columns of numbers, read as it grows. What is no record of a step is left out and counted."""

import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 2**21  # bytes read at a time
MOST_LINE = 2**22  # bytes
MOST_COLUMNS = 400
MOST_NAME = 200
MOST_STEP = 2**53
WIDEST = 24  # signs of the longest text that a float64 has
NUMBERS = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
}  # as the log writes what JSON has not


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

    def read(self, descriptor: int) -> None:
        now = os.fstat(descriptor)
        if self.known != (now.st_dev, now.st_ino) or now.st_size < self.offset:
            self._clear()
        self.known = (now.st_dev, now.st_ino)
        os.lseek(descriptor, self.offset, os.SEEK_SET)
        rest = b""
        while block := os.read(descriptor, BLOCK):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            self.offset += len(whole) + len(newline)
            self._take(whole)
            if len(rest) > MOST_LINE:
                self.offset += len(rest)
                self.bad_lines += 1
                rest = b""
        if (
            rest.endswith(b"}") and records_of([rest.decode(errors="replace")])[1] == 0
        ):  # whole, but for its end of line
            self.offset += len(rest)
            self._take(rest)

    def _take(self, content: bytes) -> None:
        self._columns = None
        for same in _alike(content):
            if (found := _same_fields(same)) is not None:
                self._extend(found)
                continue
            lines = [
                line
                for line in same.decode(errors="replace").split("\n")
                if line and not line.isspace()
            ]
            records, bad = records_of(lines) if lines else ([], 0)
            self.bad_lines += bad
            equal: dict[int, list[dict[str, Any]]] = {}
            for record in records:
                equal.setdefault(len(record), []).append(record)
            for group in equal.values():
                self._add(group)

    def _extend(self, columns: dict[str, NDArray[np.float64]]) -> None:
        """`step` is among them."""
        steps = columns["step"].astype(np.int64)
        self.records += len(steps)
        for name, values in columns.items():
            if name != "step":
                self._append(name, steps, values)

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
            inner = (
                {f"{name}/{key}": v for key, v in list(value.items())[:MOST_COLUMNS]}
                if isinstance(value, dict)
                else {name: value}
            )
            for key, one in inner.items():
                if (number := as_number(one)) is not None:
                    found.setdefault(key, []).append((step, number))
        for key, pairs in found.items():
            self._append(
                key,
                np.array([step for step, _ in pairs], np.int64),
                np.array([value for _, value in pairs]),
            )

    def _append(self, name: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        if name not in self._parts and (len(self._parts) >= MOST_COLUMNS or len(name) > MOST_NAME):
            self.left_out += len(values)
            return
        self._parts.setdefault(name, []).append((steps, values))

    def columns(self) -> dict[str, Column]:
        if self._columns is None:
            orders: dict[tuple[int, ...], _Order] = {}  # most columns have the very same steps
            self._columns = {name: _joined(parts, orders) for name, parts in self._parts.items()}
            self._parts = {
                name: [(column.steps, column.values)] for name, column in self._columns.items()
            }
        return self._columns


_Order = tuple[
    NDArray[np.int64], NDArray[np.int64] | None
]  # steps, rising, and where their values are if not in this order


def _joined(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]],
    orders: dict[tuple[int, ...], _Order],
) -> Column:
    key = tuple(id(steps) for steps, _ in parts)
    if key not in orders:
        orders[key] = _order(np.concatenate([steps for steps, _ in parts]))
    steps, places = orders[key]
    values = np.concatenate([values for _, values in parts])
    return Column(steps, values if places is None else values[places])


def _order(steps: NDArray[np.int64]) -> _Order:
    if np.all(steps[1:] > steps[:-1]):
        return steps, None
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    last = np.append(
        ordered[1:] != ordered[:-1], True
    )  # of several records of a step the last one counts
    return ordered[last], order[last]


def _alike(content: bytes) -> list[bytes]:
    """The lines with equally many quotation marks, together."""
    signs = np.frombuffer(content, np.uint8)
    ends = np.append(np.flatnonzero(signs == ord("\n")), len(signs))
    marks = np.diff(np.searchsorted(np.flatnonzero(signs == ord('"')), ends), prepend=0)
    first = np.flatnonzero(np.diff(marks, prepend=-1))  # of lines in a row that are alike
    begins, stops = np.append(0, ends[:-1] + 1)[first], ends[np.append(first[1:], len(ends)) - 1]
    found: dict[int, list[bytes]] = {}
    for count, begin, stop in zip(
        marks[first].tolist(), begins.tolist(), stops.tolist(), strict=True
    ):
        found.setdefault(count, []).append(content[begin:stop])
    return [b"\n".join(parts) for parts in found.values()]


def _same_fields(content: bytes) -> dict[str, NDArray[np.float64]] | None:
    """The columns of lines that differ in their numbers alone, as a run writes them; None where that is not so.

    All lines at once, in a fifth of the time that parsing each would take. What stands before a number is compared with the first line,
    sign for sign, so nothing else can pass for such lines.
    """
    count = content.count(b"\n") + 1
    try:
        first = json.loads(content.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    if (
        count < 8
        or type(first) is not dict
        or "step" not in first
        or any(type(v) not in (int, float) for v in first.values())
    ):
        return None
    signs = np.frombuffer(
        b"}\n" + content + b" " * WIDEST, np.uint8
    )  # so that the first line begins like the others
    colons = np.flatnonzero(signs == ord(":"))
    closes = np.flatnonzero((signs == ord(",")) | (signs == ord("}")))
    if (
        len(colons) != count * len(first)
        or len(closes) != len(colons) + 1
        or closes[-1] != len(content) + 1
    ):
        return None
    before, after = closes[:-1].reshape(count, -1), closes[1:].reshape(count, -1)
    begins = colons.reshape(count, -1) + 2
    lengths = begins[0] - before[0]
    if np.any(begins - before != lengths):
        return None
    found: dict[str, NDArray[np.float64]] = {}
    for i, (name, length) in enumerate(zip(first, lengths.tolist(), strict=True)):
        frames = np.ndarray(len(signs) - length + 1, f"S{length}", signs, strides=(1,))[
            before[:, i]
        ]
        if frames[0][-2:] != b": " or np.any(frames != frames[0]):
            return None
        values = _numbers_at(signs, begins[:, i], after[:, i] - begins[:, i])
        if values is None:
            return None
        found[name] = values
    steps = found["step"]
    return (
        found if np.all((steps >= 0) & (steps < MOST_STEP) & (steps == np.floor(steps))) else None
    )


def _numbers_at(
    signs: NDArray[np.uint8], begins: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """The numbers that begin at these places of a text, which goes on for `WIDEST` signs after the last; None where one is no number."""
    if np.any(lengths < 1) or np.any(lengths > WIDEST):
        return None
    words = (
        np.ndarray(len(signs) - WIDEST + 1, f"V{WIDEST}", signs, strides=(1,))[begins]
        .view(np.uint8)
        .reshape(-1, WIDEST)
    )
    inside = np.arange(WIDEST + 1) < lengths[:, None]
    padded = np.where(inside, np.pad(words, ((0, 0), (0, 1))), np.uint8(ord(" ")))
    if np.any((padded <= ord(" ")) & inside):  # one word shall be one number
        return None
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # what cannot be read to its end is noticed by its size
        try:
            values = np.fromstring(padded.tobytes(), np.float64, sep=" ")
        except ValueError:
            return None
    return values if len(values) == len(words) else None


def records_of(lines: list[str]) -> tuple[list[dict[str, Any]], int]:
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
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and value >= least
    )
