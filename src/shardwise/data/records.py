"""Records of files, read at random: ArrayRecord, Parquet, JSON lines, lines of text.

Nothing is read ahead but an index. Every error names the file and the number of the record in it, counted from 0.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.data.files import (
    BadRecord,
    Descriptor,
    Paths,
    file_fingerprint,
    find_file,
    find_files,
)
from shardwise.errors import ConfigError, DataError

Decode = Callable[[Any], Mapping[str, Any]]


class Store(Protocol):
    """Records of one file. `read` gives those of several numbers; what is wrong with one of them it raises as BadRecord."""

    path: Path

    def __len__(self) -> int: ...

    def read(self, numbers: Sequence[int]) -> list[Any]: ...


@dataclass(frozen=True)
class Records:
    """The records of files, one after the other; `decode(record)` gives the arrays of a row, the same shapes for every record."""

    stores: tuple[Store, ...]
    decode: Decode
    tokenizer: Any = None  # whatever tells the tokenizer that `decode` uses from another one; enters the fingerprint

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError(
                f"there are no records in {', '.join(repr(str(store.path)) for store in self.stores)}."
            )

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if not len(indices):
            return {name: array[:0] for name, array in self.rows(np.zeros(1, np.int64)).items()}
        ends = np.cumsum([len(store) for store in self.stores])
        places = np.searchsorted(ends, indices, side="right")
        rows: list[Any] = [None] * len(indices)
        for place in np.unique(places):
            store, where = self.stores[place], np.flatnonzero(places == place)
            numbers = (indices[where] - (ends[place] - len(store))).tolist()
            for at, number, record in zip(where, numbers, store.read(numbers), strict=True):
                rows[at] = name_of(store, number), self._decoded(record, store, number)
        return _stacked(rows)

    def _decoded(self, record: Any, store: Store, number: int) -> dict[str, np.ndarray]:
        try:
            return {name: np.asarray(value) for name, value in self.decode(record).items()}
        except Exception as error:  # whatever a decode function may raise
            raise BadRecord(
                name_of(store, number), f"it cannot be decoded: {type(error).__name__}: {error}"
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        known = {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
        return {
            **known,
            "records": len(self),
            "files": [file_fingerprint(find_file(store.path)) for store in self.stores],
        }


def name_of(store: Store, number: int) -> str:
    return f"'{store.path}', record {number}"


def _stacked(rows: list[tuple[str, dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    first_name, first = rows[0]
    for name, row in rows:
        if {key: value.shape for key, value in row.items()} != {
            key: value.shape for key, value in first.items()
        }:
            shapes = [
                ", ".join(f"{key} {value.shape}" for key, value in r.items()) for r in (first, row)
            ]
            raise DataError(
                f"rows must be alike: {first_name} gives {shapes[0]}, and {name} gives {shapes[1]}. Let decode pad or cut."
            )
    return {key: np.stack([row[key] for _, row in rows]) for key in first}


def json_lines(
    paths: Paths, decode: Decode | None = None, *, columns: Sequence[str] | None = None
) -> Records:
    """One JSON object a line. Without `decode`, its fields, or those named in `columns`, are arrays as they stand."""
    return Records(
        tuple(Lines(path, is_json=True) for path in find_files(paths)), decode or Fields(columns)
    )


def text_lines(paths: Paths, decode: Decode) -> Records:
    """One line of UTF-8 text a record, given to `decode` without its line end."""
    return Records(tuple(Lines(path, is_json=False) for path in find_files(paths)), decode)


def array_records(paths: Paths, decode: Decode) -> Records:
    """ArrayRecord files; `decode` takes the bytes of a record."""
    return Records(tuple(ArrayRecord(path) for path in find_files(paths)), decode)


def parquet(
    paths: Paths, decode: Decode | None = None, *, columns: Sequence[str] | None = None
) -> Records:
    """Rows of Parquet files, of `columns` or of all, as dictionaries. Each batch decodes the whole row group of each of its rows."""
    return Records(
        tuple(Parquet(path, tuple(columns) if columns else None) for path in find_files(paths)),
        decode or Fields(columns),
    )


@dataclass(frozen=True)
class Fields:
    """The fields of a record as they stand; all of them, or some by name."""

    names: Sequence[str] | None = None

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if self.names and (missing := [name for name in self.names if name not in record]):
            raise KeyError(f"there is no {', '.join(missing)}; there are {', '.join(record)}")
        return {name: np.asarray(record[name]) for name in self.names or record}


class _Opened:
    """What reads the file is made when it is first needed, in each process."""

    path: Path

    @cached_property
    def reader(self) -> Any:
        return self.open()

    def open(self) -> Any:
        return Descriptor(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "reader"}


class Lines(_Opened):
    """Lines of a file, empty ones left out; found once, kept as two int64 for each."""

    def __init__(self, path: Path, *, is_json: bool):
        self.path, self.is_json = path, is_json
        self._starts, self._ends = _line_bounds(path)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return [self._record(number) for number in numbers]

    def _record(self, number: int) -> Any:
        start, end = int(self._starts[number]), int(self._ends[number])
        line = os.pread(self.reader.number, end - start, start)
        if len(line) < end - start:
            raise BadRecord(
                name_of(self, number),
                f"{end - start} bytes from byte {start} on, of which {len(line)} are left: truncated.",
            )
        try:
            text = line.decode().rstrip("\r\n")
            return json.loads(text) if self.is_json else text
        except ValueError as error:  # bad JSON or bad UTF-8
            raise BadRecord(
                name_of(self, number), f"{error} (the record begins at byte {start})"
            ) from None


def _line_bounds(path: Path) -> tuple[np.ndarray, np.ndarray]:
    ends, at = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(2**24):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + at + 1)
            at += len(chunk)
    bounds = np.concatenate(ends)
    kept = np.diff(bounds) > 1
    if bounds[-1] < at:  # the last line has no end
        bounds, kept = np.append(bounds, at), np.append(kept, True)
    return bounds[:-1][kept], bounds[1:][kept]


class ArrayRecord(_Opened):
    def __init__(self, path: Path):
        self.path = path
        if not self.reader.ok():
            raise DataError(
                f"'{path}' ({path.stat().st_size} bytes) is no ArrayRecord file, or a truncated one."
            )
        self._count = self.reader.num_records()

    def open(self) -> Any:
        from array_record.python import array_record_module

        return array_record_module.ArrayRecordReader(str(find_file(self.path)))

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return [self._record(number) for number in numbers]

    def _record(self, number: int) -> Any:
        try:
            return self.reader.read([number])[0]
        except (RuntimeError, ValueError, IndexError) as error:
            raise BadRecord(name_of(self, number), str(error)) from None


class Parquet(_Opened):
    def __init__(self, path: Path, columns: tuple[str, ...] | None = None):
        self.path, self.columns = path, columns
        names, metadata = self.reader.schema_arrow.names, self.reader.metadata
        if columns and (missing := [name for name in columns if name not in names]):
            raise DataError(
                f"'{path}' has no column {', '.join(missing)}; it has {', '.join(names)}."
            )
        self._ends = np.cumsum(
            [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)],
            dtype=np.int64,
        )

    def open(self) -> Any:
        return open_parquet(self.path)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Sequence[int]) -> list[Any]:
        groups = np.searchsorted(self._ends, numbers, side="right").tolist()
        tables = {
            group: self._group(group, number) for group, number in zip(groups, numbers, strict=True)
        }
        starts = {group: int(self._ends[group]) - tables[group].num_rows for group in tables}
        pairs = zip(groups, numbers, strict=True)
        return [
            tables[group].slice(number - starts[group], 1).to_pylist()[0] for group, number in pairs
        ]

    def _group(self, group: int, number: int) -> Any:
        try:
            return _row_group(self.reader, group, self.columns)
        except (
            Exception
        ) as error:  # pyarrow has its own kinds of OSError and ValueError, and others for bad pages
            raise BadRecord(
                name_of(self, number), f"row group {group} cannot be read: {error}"
            ) from None


def open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet files need pyarrow: pip install 'shardwise[parquet]'.") from None
    try:
        return pyarrow.parquet.ParquetFile(find_file(path), page_checksum_verification=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"'{path}' ({path.stat().st_size} bytes) cannot be read as Parquet: {error}"
        ) from None


@lru_cache(maxsize=8)
def _row_group(reader: Any, group: int, columns: tuple[str, ...] | None) -> Any:
    return reader.read_row_group(group, columns=columns, use_threads=False)
