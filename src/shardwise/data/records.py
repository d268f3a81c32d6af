"""Records in files with random access: ArrayRecord, Parquet, JSON lines, lines of text.

Only an index is read ahead. Every error names the file and the number of the record, from 0.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from shardwise.data.files import (
    BadRecord,
    Descriptor,
    Paths,
    file_fingerprint,
    find_file,
    find_files,
)
from shardwise.data.sources import Examples, no_examples
from shardwise.errors import ConfigError, DataError
from shardwise.text import Json

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet
    from array_record.python import array_record_module

# A record as its file holds it: bytes, a line of text, or a dictionary.
Record: TypeAlias = Any
# Turns a record into the arrays of an example.
Decode: TypeAlias = Callable[[Record], Mapping[str, Any]]


class Store(Protocol):
    """The records of one file.

    Attributes:
        path: the file.
    """

    path: Path

    def __len__(self) -> int: ...

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """Return the records with these numbers.

        Raises:
            BadRecord: for the first that cannot be read.
        """
        ...


@dataclass(frozen=True)
class Records:
    """The records of several files, one file after the other, as a source.

    Attributes:
        stores: the files.
        decode: turns a record into the arrays of an example; shapes must be the same for all.
        tokenizer: identifies the tokenizer that `decode` uses, as JSON; part of the fingerprint.

    Raises:
        DataError: if there are no records.
    """

    stores: tuple[Store, ...]
    decode: Decode
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if not len(self):
            files = ", ".join(repr(str(store.path)) for store in self.stores)
            raise DataError(f"there are no records in {files}.")

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def rows(self, indices: np.ndarray) -> Examples:
        """Return the examples at `indices`.

        Raises:
            BadRecord: if a record cannot be read or decoded.
            DataError: if two examples have different shapes.
        """
        if not len(indices):
            return no_examples(self)
        ends = np.cumsum([len(store) for store in self.stores])
        owners = np.searchsorted(ends, indices, side="right")
        names = [""] * len(indices)
        examples: list[Examples] = [{}] * len(indices)
        for owner in np.unique(owners):
            store = self.stores[owner]
            positions = np.flatnonzero(owners == owner)
            numbers = (indices[positions] - (ends[owner] - len(store))).tolist()
            records = store.read(numbers)
            for position, number, record in zip(
                positions, numbers, records, strict=True
            ):
                names[position] = name_of(store, number)
                examples[position] = self._decode(record, names[position])
        _check_shapes(names, examples)
        return {
            key: np.stack([example[key] for example in examples]) for key in examples[0]
        }

    def _decode(self, record: Record, name: str) -> Examples:
        try:
            return {
                key: np.asarray(value) for key, value in self.decode(record).items()
            }
        except Exception as error:
            # A user's decode function may raise anything.
            reason = f"{type(error).__name__}: {error}"
            raise BadRecord(name, f"it cannot be decoded: {reason}") from error

    def fingerprint(self) -> Json:
        """Return the number of records, the fingerprints of the files, and the tokenizer."""
        fingerprint: Json = (
            {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
        )
        fingerprint["records"] = len(self)
        fingerprint["files"] = [
            file_fingerprint(find_file(store.path)) for store in self.stores
        ]
        return fingerprint


def name_of(store: Store, number: int) -> str:
    """Return how messages name a record."""
    return f"'{store.path}', record {number}"


def _check_shapes(names: Sequence[str], examples: Sequence[Examples]) -> None:
    expected = _shapes(examples[0])
    for name, example in zip(names, examples, strict=True):
        shapes = _shapes(example)
        if shapes != expected:
            raise DataError(
                f"all examples must have the same shapes: {names[0]} has {_show(expected)}, and"
                f" {name} has {_show(shapes)}. Pad or truncate in decode."
            )


def _shapes(example: Examples) -> dict[str, tuple[int, ...]]:
    return {key: value.shape for key, value in example.items()}


def _show(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {shape}" for key, shape in shapes.items())


# The four kinds of files


def json_lines(
    paths: Paths, decode: Decode | None = None, *, columns: Sequence[str] | None = None
) -> Records:
    """Return a source of JSON objects, one per line.

    Args:
        paths: files or patterns such as `data/*.jsonl`.
        decode: turns an object into the arrays of an example. By default its fields are converted
            to arrays as they are.
        columns: which fields to take without `decode`; all by default.

    Raises:
        DataError: if a file is missing.
    """
    stores = tuple(Lines(path, is_json=True) for path in find_files(paths))
    return Records(stores, decode or Fields(columns))


def text_lines(paths: Paths, decode: Decode) -> Records:
    """Return a source of lines of UTF-8 text.

    Args:
        paths: files or patterns.
        decode: turns a line, without its line end, into the arrays of an example.

    Raises:
        DataError: if a file is missing.
    """
    return Records(
        tuple(Lines(path, is_json=False) for path in find_files(paths)), decode
    )


def array_records(paths: Paths, decode: Decode) -> Records:
    """Return a source of ArrayRecord files.

    Args:
        paths: files or patterns.
        decode: turns the bytes of a record into the arrays of an example.

    Raises:
        DataError: if a file is missing or not an ArrayRecord file.
    """
    return Records(tuple(ArrayRecord(path) for path in find_files(paths)), decode)


def parquet(
    paths: Paths, decode: Decode | None = None, *, columns: Sequence[str] | None = None
) -> Records:
    """Return a source of Parquet rows.

    Every example costs the decoding of its row group; write files with small row groups.

    Args:
        paths: files or patterns.
        decode: turns a row, as a dictionary, into the arrays of an example. By default its columns
            are converted to arrays as they are.
        columns: which columns to read; all by default.

    Raises:
        ConfigError: if pyarrow is not installed.
        DataError: if a file is missing or has no such column.
    """
    names = tuple(columns) if columns else None
    stores = tuple(Parquet(path, names) for path in find_files(paths))
    return Records(stores, decode or Fields(columns))


@dataclass(frozen=True)
class Fields:
    """Decodes a record by taking its fields as they are.

    Attributes:
        names: which fields; all if None.
    """

    names: Sequence[str] | None = None

    def __call__(self, record: Mapping[str, Any]) -> Examples:
        """Return the fields as arrays.

        Raises:
            KeyError: if a field is missing.
        """
        missing = [name for name in self.names or () if name not in record]
        if missing:
            raise KeyError(
                f"there is no {', '.join(missing)}; there are {', '.join(record)}"
            )
        return {name: np.asarray(record[name]) for name in self.names or record}


class Lines:
    """The lines of a file, without empty ones. Their offsets are found once, 16 bytes per line."""

    def __init__(self, path: Path, *, is_json: bool):
        self.path = path
        self.is_json = is_json
        self._starts, self._ends = _line_bounds(path)

    @cached_property
    def _file(self) -> Descriptor:
        return Descriptor(self.path)

    def __getstate__(self) -> dict[str, object]:
        return _without("_file", self.__dict__)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """Return the lines with these numbers, as text or as JSON values."""
        return [self._read_one(number) for number in numbers]

    def _read_one(self, number: int) -> Record:
        start = int(self._starts[number])
        size = int(self._ends[number]) - start
        line = os.pread(self._file.number, size, start)
        if len(line) < size:
            raise BadRecord(
                name_of(self, number),
                f"the file was truncated: {len(line)} of {size} bytes from byte {start} are left.",
            )
        try:
            text = line.decode().rstrip("\r\n")
            return json.loads(text) if self.is_json else text
        except ValueError as error:
            # Invalid JSON or invalid UTF-8.
            reason = f"{error} (the record starts at byte {start})"
            raise BadRecord(name_of(self, number), reason) from None


def _line_bounds(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of the start and the end of every line that is not empty."""
    ends = [np.zeros(1, np.int64)]
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(2**24):
            newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            ends.append(newlines + size + 1)
            size += len(chunk)
    bounds = np.concatenate(ends)
    is_kept = np.diff(bounds) > 1
    # The last line may have no line end.
    if bounds[-1] < size:
        bounds = np.append(bounds, size)
        is_kept = np.append(is_kept, True)
    return bounds[:-1][is_kept], bounds[1:][is_kept]


class ArrayRecord:
    """The records of an ArrayRecord file."""

    def __init__(self, path: Path):
        self.path = path
        if not self._reader.ok():
            size = path.stat().st_size
            raise DataError(
                f"'{path}' ({size} bytes) is not an ArrayRecord file, or truncated."
            )
        self._count = int(self._reader.num_records())

    @cached_property
    def _reader(self) -> "array_record_module.ArrayRecordReader":
        from array_record.python import array_record_module

        return array_record_module.ArrayRecordReader(str(find_file(self.path)))

    def __getstate__(self) -> dict[str, object]:
        return _without("_reader", self.__dict__)

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """Return the bytes of the records with these numbers."""
        return [self._read_one(number) for number in numbers]

    def _read_one(self, number: int) -> Record:
        try:
            return self._reader.read([number])[0]
        except (RuntimeError, ValueError, IndexError) as error:
            raise BadRecord(name_of(self, number), str(error)) from None


class Parquet:
    """A Parquet file, with one record per row."""

    def __init__(self, path: Path, columns: tuple[str, ...] | None = None):
        self.path = path
        self.columns = columns
        names = self._reader.schema_arrow.names
        missing = [name for name in columns or () if name not in names]
        if missing:
            raise DataError(
                f"'{path}' has no column {', '.join(missing)}; it has {', '.join(names)}."
            )
        metadata = self._reader.metadata
        sizes = [
            metadata.row_group(group).num_rows
            for group in range(metadata.num_row_groups)
        ]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    @cached_property
    def _reader(self) -> "pyarrow.parquet.ParquetFile":
        return open_parquet(self.path)

    def __getstate__(self) -> dict[str, object]:
        return _without("_reader", self.__dict__)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """Return the rows with these numbers, as dictionaries."""
        groups = np.searchsorted(self._ends, numbers, side="right").tolist()
        tables: dict[int, pyarrow.Table] = {}
        rows = []
        for group, number in zip(groups, numbers, strict=True):
            if group not in tables:
                tables[group] = self._read_group(group, number)
            start = int(self._ends[group]) - tables[group].num_rows
            rows.append(tables[group].slice(number - start, 1).to_pylist()[0])
        return rows

    def _read_group(self, group: int, number: int) -> "pyarrow.Table":
        try:
            return _row_group(self._reader, group, self.columns)
        except Exception as error:
            # pyarrow has its own kinds of OSError and ValueError, and others for bad pages.
            reason = f"row group {group} cannot be read: {error}"
            raise BadRecord(name_of(self, number), reason) from None


def _without(name: str, attributes: Mapping[str, object]) -> dict[str, object]:
    """Return attributes without an open file: another process opens its own."""
    return {key: value for key, value in attributes.items() if key != name}


def open_parquet(path: Path) -> "pyarrow.parquet.ParquetFile":
    """Open a Parquet file.

    Raises:
        ConfigError: if pyarrow is not installed.
        DataError: if the file is missing or not a Parquet file.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "Parquet files need pyarrow: pip install 'shardwise[parquet]'"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(
            find_file(path), page_checksum_verification=True
        )
    except (OSError, ValueError) as error:
        size = path.stat().st_size
        raise DataError(
            f"'{path}' ({size} bytes) cannot be read as Parquet: {error}"
        ) from None


# Examples of a batch often share row groups.
@lru_cache(maxsize=8)
def _row_group(
    reader: "pyarrow.parquet.ParquetFile", group: int, columns: tuple[str, ...] | None
) -> "pyarrow.Table":
    return reader.read_row_group(group, columns=columns, use_threads=False)
