"""Data files: finding them, mapping tokens into memory, and fingerprints of their content."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from shardwise.errors import DataError
from shardwise.files.paths import AnyPath, local_path
from shardwise.text import Json, did_you_mean

# A fingerprint reads at most 64 blocks of 64 KiB: 4 MiB of a larger file.
SAMPLE_BLOCKS = 64
SAMPLE_BYTES = 2**16
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32")

Paths: TypeAlias = AnyPath | Sequence[AnyPath]


class BadRecord(DataError):
    """A record that cannot be read or decoded. `Batches(..., skip_bad=n)` tolerates n of them.

    Attributes:
        name: the file and the number of the record.
        why: what is wrong with it.
    """

    def __init__(self, name: str, why: str):
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[type["BadRecord"], tuple[str, str]]:
        return BadRecord, (self.name, self.why)


def find_file(path: AnyPath) -> Path:
    """Return the path of an existing file.

    Raises:
        ConfigError: if it is a URL.
        DataError: if it does not exist, with the closest name in its directory.
    """
    path = local_path(path)
    if path.is_file():
        return path
    if path.is_dir():
        raise DataError(f"'{path}' is a directory; a file is needed.")
    folder = path.parent
    if not folder.is_dir():
        raise DataError(
            f"data file '{path}' does not exist: directory '{folder}' is missing."
        )
    hint = did_you_mean(path.name, [other.name for other in folder.iterdir()])
    raise DataError(f"data file '{path}' does not exist.{hint}")


def find_files(paths: Paths) -> list[Path]:
    """Return the files that one or several paths name.

    Args:
        paths: paths of files; a pattern such as `data/*.jsonl` means its matches, sorted.

    Raises:
        DataError: if a path is not a file, or a pattern matches nothing.
    """
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        pattern = local_path(path)
        if "*" not in pattern.name or pattern.exists():
            files.append(find_file(path))
            continue
        matches = [
            other for other in pattern.parent.glob(pattern.name) if other.is_file()
        ]
        if not matches:
            raise DataError(f"no data file matches '{pattern}'.")
        files += sorted(matches)
    if not files:
        raise DataError("no data files were given.")
    return files


class Descriptor:
    """An open file. It can still be read after it was deleted or replaced.

    Attributes:
        number: the file descriptor; closed together with this object.
    """

    def __init__(self, path: Path):
        self.number = os.open(find_file(path), os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


# Fingerprints


def file_fingerprint(path: Path) -> Json:
    """Return name, size and a hash of a file. Its directory and times do not matter.

    The hash covers all of a file up to 4 MiB, and evenly spaced blocks of a larger one.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        blocks = (
            os.pread(file.fileno(), SAMPLE_BYTES, offset)
            for offset in sample_offsets(size)
        )
        return {"file": path.name, "size": size, "hash": _hash(blocks)}


def array_fingerprint(array: np.ndarray) -> Json:
    """Return shape, dtype and a hash of an array, with blocks as in `file_fingerprint`."""
    data = np.empty(0, np.uint8)
    if array.dtype != object and array.size:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    offsets = sample_offsets(len(data))
    blocks = (data[offset : offset + SAMPLE_BYTES].tobytes() for offset in offsets)
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "hash": _hash(blocks),
    }


def sample_offsets(size: int) -> list[int]:
    """Return where to read blocks: all of them if few, else evenly spaced with first and last."""
    if size <= SAMPLE_BLOCKS * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    last = size - SAMPLE_BYTES
    return [number * last // (SAMPLE_BLOCKS - 1) for number in range(SAMPLE_BLOCKS)]


def _hash(blocks: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


# Files of tokens


class TokenFile:
    """Tokens in a memory-mapped file. Create it with `open_tokens`.

    Attributes:
        path: a `.bin` file, which holds nothing but tokens, or a `.npy` file.
        dtype: an integer dtype.
        count: the number of tokens.
        start: offset of the first token in bytes.
        end: offset after the last token in bytes.
        info: the description next to a `.bin` file.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int, start: int, info: Json):
        self.path = path
        self.dtype = dtype
        self.count = count
        self.start = start
        self.end = start + count * dtype.itemsize
        self.info = info

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice | int | np.ndarray) -> np.ndarray:
        return self.array()[index]

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.count:,} tokens of {self.dtype})"

    def __reduce__(
        self,
    ) -> tuple[type["TokenFile"], tuple[Path, np.dtype, int, int, Json]]:
        # Another process maps the file itself.
        return TokenFile, (self.path, self.dtype, self.count, self.start, self.info)

    def array(self) -> np.ndarray:
        """Return the tokens. Call `check()` again before each later access to the array."""
        self.check()
        return self._opened[1]

    def check(self) -> None:
        """Refuse a file that has become shorter.

        Reading a part of a memory map that its file no longer has would kill the process.

        Raises:
            DataError: if the file was truncated.
        """
        # lseek takes half the time of fstat.
        size = os.lseek(self._opened[0].number, 0, os.SEEK_END)
        if size < self.end:
            first_lost = max(size - self.start, 0) // self.dtype.itemsize
            raise DataError(
                f"'{self.path}' was truncated: it has {size} bytes, but its {self.count} tokens"
                f" need {self.end} (the first lost token is number {first_lost})."
                " Restore the file and start again."
            )

    @cached_property
    def _opened(self) -> tuple[Descriptor, np.ndarray]:
        descriptor = Descriptor(self.path)
        if os.fstat(descriptor.number).st_size < self.end:
            # check() reports it.
            return descriptor, np.empty(0, self.dtype)
        with os.fdopen(os.dup(descriptor.number), "rb") as file:
            mapped = np.memmap(
                file, self.dtype, "r", offset=self.start, shape=(self.count,)
            )
            return descriptor, np.asarray(mapped)

    @cached_property
    def documents(self) -> np.ndarray:
        """The offset of each document in tokens, then the number of tokens.

        Raises:
            DataError: if the file was not written by `shardwise data prepare`, or is damaged.
        """
        name = self.info.get("document_offsets")
        if name is None:
            raise DataError(
                f"'{self.path}' has no documents: only files written by `shardwise data prepare`"
                " record where documents start."
            )
        path = find_file(self.path.with_name(name))
        count = self.info["documents"] + 1
        size = path.stat().st_size
        if size != 8 * count:
            raise DataError(
                f"'{path}' has {size} bytes; {count} offsets of 8 bytes were written."
            )
        offsets = np.fromfile(path, "<i8")
        if not are_offsets(offsets, self.count):
            raise DataError(
                f"the document offsets in '{path}' do not rise from 0 to the {self.count} tokens."
                " Prepare the data again."
            )
        return offsets

    def fingerprint(self) -> Json:
        """Return the number of tokens, the fingerprint of the file, and the tokenizer."""
        fingerprint: Json = {
            "tokens": self.count,
            "dtype": str(self.dtype),
            "files": [file_fingerprint(find_file(self.path))],
        }
        if "tokenizer" in self.info:
            fingerprint["tokenizer"] = self.info["tokenizer"]
        return fingerprint


def are_offsets(offsets: np.ndarray, total: int) -> bool:
    """Return whether `offsets` rise from 0 to `total`."""
    is_bounded = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == total
    return bool(is_bounded and (np.diff(offsets) >= 0).all())


def open_tokens(path: AnyPath, dtype: DTypeLike | None = None) -> TokenFile:
    """Open a file of tokens without reading it into memory.

    Args:
        path: a directory written by `shardwise data prepare`, a one-dimensional `.npy` file, or a
            `.bin` file with its `.json` file next to it.
        dtype: dtype of a `.bin` file without a `.json` file.

    Raises:
        DataError: if the file is missing, empty, truncated or of another kind.
    """
    path = local_path(path)
    path = find_file(path / "tokens.bin" if path.is_dir() else path)
    size = path.stat().st_size
    if path.suffix == ".npy":
        return _open_npy(path, size)
    info: Json = {}
    if dtype is None:
        info = read_info(path)
        dtype = info["dtype"]
    dtype = np.dtype(dtype).newbyteorder("<")
    count = info.get("tokens", size // dtype.itemsize)
    if count * dtype.itemsize != size:
        if info:
            expected = f"its description says {count} tokens of {dtype}"
        else:
            expected = f"tokens of {dtype} have {dtype.itemsize} bytes each"
        raise DataError(
            f"'{path}' has {size} bytes, but {expected}: it is truncated or a different file."
        )
    if not count:
        raise DataError(f"'{path}' is empty.")
    return TokenFile(path, dtype, count, 0, info)


def read_info(path: Path) -> Json:
    """Return the description next to a `.bin` file: its dtype, number of tokens, and tokenizer.

    Raises:
        DataError: if there is none, or it is not one.
    """
    description = path.with_suffix(".json")
    if not description.is_file():
        raise DataError(
            f"'{path}' has no '{description.name}' next to it that gives its dtype."
            " Pass the dtype: open_tokens(path, dtype='uint16')."
        )
    try:
        info = json.loads(description.read_bytes())
        is_valid = (
            isinstance(info, dict)
            and info["dtype"] in TOKEN_DTYPES
            and isinstance(info["tokens"], int)
        )
        if not is_valid:
            raise ValueError("it has no dtype and number of tokens")
    except (ValueError, KeyError) as error:
        raise DataError(
            f"'{description}' does not describe a token file: {error}. Prepare the data again."
        ) from None
    return dict(info)


def _open_npy(path: Path, size: int) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"'{path}' ({size} bytes) cannot be read as an array: {error}"
        ) from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise DataError(
            f"'{path}' holds {array.dtype} of shape {array.shape}; tokens are a one-dimensional,"
            " non-empty array of integers."
        )
    return TokenFile(path, array.dtype, array.size, array.offset, {})
