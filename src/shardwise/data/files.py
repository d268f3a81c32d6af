"""Files of data: found or refused by name, memory-mapped, and known again by what they hold."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import DataError
from shardwise.text import did_you_mean

SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 2**16  # 4 MiB are read of a larger file
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class BadRecord(DataError):
    """One record that cannot be read or decoded; `Batches(..., skip_bad=n)` can do without it. `name` is its file and number."""

    def __init__(self, name: str, why: str):
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why

    def __reduce__(self) -> Any:
        return BadRecord, (self.name, self.why)


def find_file(path: str | os.PathLike[str]) -> Path:
    """The path, or a DataError that names it and the closest name beside it."""
    path = Path(path)
    if path.is_file():
        return path
    if path.is_dir():
        raise DataError(f"'{path}' is a directory; a file is needed.")
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"there is no data file '{path}': there is no directory '{folder}'.")
    guess = did_you_mean(path.name, [other.name for other in folder.iterdir()])
    raise DataError(f"there is no data file '{path}'.{guess}")


class Descriptor:
    """A file that stays open as long as this object: deleted or replaced, it can still be read."""

    def __init__(self, path: Path):
        self.number = os.open(find_file(path), os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def find_files(paths: Paths) -> list[Path]:
    """One path or several, each of which must be a file. A pattern such as `data/*.jsonl` stands for what it matches, sorted."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        pattern = Path(path)
        if "*" in pattern.name and not pattern.exists():
            matches = sorted(
                other for other in pattern.parent.glob(pattern.name) if other.is_file()
            )
            if not matches:
                raise DataError(f"no data file matches '{pattern}'.")
            found += matches
        else:
            found.append(find_file(path))
    if not found:
        raise DataError("no data files were given.")
    return found


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Name, size, and a hash of blocks from head to tail, of all of it up to 4 MiB. Where it lies and its times do not matter."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        blocks = (os.pread(file.fileno(), SAMPLE_BYTES, at) for at in sample_offsets(size))
        return {"file": path.name, "size": size, "hash": _hash(blocks)}


def array_fingerprint(array: np.ndarray) -> dict[str, Any]:
    """Shape, dtype and a hash of blocks as of a file."""
    flat = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if array.dtype != object and array.size
        else np.empty(0, np.uint8)
    )
    blocks = (flat[at : at + SAMPLE_BYTES].tobytes() for at in sample_offsets(len(flat)))
    return {"shape": list(array.shape), "dtype": str(array.dtype), "hash": _hash(blocks)}


def sample_offsets(size: int) -> list[int]:
    """Where to read blocks of a file: all of them when they are few, else evenly spaced with the first and the last."""
    if size <= SAMPLE_BLOCKS * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [
        number * (size - SAMPLE_BYTES) // (SAMPLE_BLOCKS - 1) for number in range(SAMPLE_BLOCKS)
    ]


def _hash(blocks: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


class TokenFile:
    """Tokens in a file, memory-mapped: `.bin` (nothing but tokens) or `.npy`. See `open_tokens`."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], count: int, start: int, info: dict[str, Any]
    ):
        self.path, self.dtype, self.count, self.start, self.info = path, dtype, count, start, info
        self.end = start + count * dtype.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return self.array()[index]

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.count:,} tokens of {self.dtype})"

    def __reduce__(self) -> Any:  # another process maps the file itself
        return TokenFile, (self.path, self.dtype, self.count, self.start, self.info)

    def array(self) -> np.ndarray:
        """The tokens; `check()` comes before each reading of them."""
        self.check()
        return self._opened[1]

    def check(self) -> None:
        """Reading a part of a map that its file no longer has would end the process, so the size is looked at first."""
        size = os.lseek(self._opened[0].number, 0, os.SEEK_END)  # half the time of fstat
        if size < self.end:
            raise DataError(
                f"'{self.path}' has been truncated: it has {size} bytes, and {self.end} are needed for its {self.count} tokens "
                f"(the first one lost is number {max(size - self.start, 0) // self.dtype.itemsize}). Restore it and start again."
            )

    @cached_property
    def _opened(self) -> tuple[Descriptor, np.ndarray]:
        file = Descriptor(self.path)
        if os.fstat(file.number).st_size < self.end:
            return file, np.empty(0, self.dtype)  # check() says so
        with os.fdopen(os.dup(file.number), "rb") as same:
            return file, np.asarray(
                np.memmap(same, self.dtype, "r", offset=self.start, shape=(self.count,))
            )

    @cached_property
    def documents(self) -> np.ndarray:
        """Where each document begins, and at the end the number of tokens; as `shardwise data prepare` wrote them."""
        name = self.info.get("document_offsets")
        if name is None:
            raise DataError(
                f"'{self.path}' has no documents: only a file made by `shardwise data prepare` knows where they begin."
            )
        path = find_file(self.path.with_name(name))
        count = self.info["documents"] + 1
        if path.stat().st_size != 8 * count:
            raise DataError(
                f"'{path}' has {path.stat().st_size} bytes; {count} offsets of 8 bytes were written."
            )
        offsets = np.fromfile(path, "<i8")
        if offsets[0] != 0 or offsets[-1] != self.count or (np.diff(offsets) < 0).any():
            raise DataError(
                f"the document offsets in '{path}' do not run from 0 to the {self.count} tokens; prepare the data again."
            )
        return offsets

    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tokens": self.count,
            "dtype": str(self.dtype),
            "files": [file_fingerprint(find_file(self.path))],
        }
        if "tokenizer" in self.info:
            found["tokenizer"] = self.info["tokenizer"]
        return found


def open_tokens(path: str | os.PathLike[str], dtype: Any = None) -> TokenFile:
    """A `.npy` file of one dimension; a `.bin` file with its `.json` beside it, or with an explicit dtype; or a prepared directory."""
    path = Path(path)
    path = find_file(path / "tokens.bin" if path.is_dir() else path)
    size = path.stat().st_size
    if path.suffix == ".npy":
        return _open_npy(path, size)
    info: dict[str, Any] = {}
    if dtype is None:
        info = read_info(path)
        dtype = info["dtype"]
    dtype = np.dtype(dtype).newbyteorder("<")
    count = info.get("tokens", size // dtype.itemsize)
    if count * dtype.itemsize != size:
        wanted = (
            f"its description says {count} tokens of {dtype}"
            if info
            else f"tokens of {dtype} have {dtype.itemsize} bytes each"
        )
        raise DataError(
            f"'{path}' has {size} bytes, and {wanted}: it is truncated, or another file."
        )
    if not count:
        raise DataError(f"'{path}' is empty.")
    return TokenFile(path, dtype, count, 0, info)


def read_info(path: Path) -> dict[str, Any]:
    """The description that lies beside a `.bin` file."""
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise DataError(
            f"'{path}' has no '{beside.name}' beside it that tells its dtype. Say it: open_tokens(path, dtype='uint16')."
        )
    try:
        info = json.loads(beside.read_bytes())
        if (
            not isinstance(info, dict)
            or info["dtype"] not in ("uint8", "uint16", "uint32", "int32")
            or not isinstance(info["tokens"], int)
        ):
            raise ValueError("it has no dtype and number of tokens")
    except (ValueError, KeyError) as error:
        raise DataError(
            f"'{beside}' does not describe a token file: {error}. Prepare the data again."
        ) from None
    return info


def _open_npy(path: Path, size: int) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"'{path}' ({size} bytes) cannot be read as an array: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise DataError(
            f"'{path}' holds {array.dtype} of shape {array.shape}; tokens are integers in one dimension, at least one."
        )
    return TokenFile(path, array.dtype, array.size, array.offset, {})
