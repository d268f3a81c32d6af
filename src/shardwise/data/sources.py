"""Sources: anything with a length that gives the rows of a list of indices as arrays."""

import os
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.data.files import TokenFile, array_fingerprint
from shardwise.errors import DataError


class Source(Protocol):
    """`len(source)` rows; `source.rows(indices)` is a dictionary of arrays with a row for each index.

    `source.fingerprint()` is what JSON can hold of the content: another content gives another fingerprint.
    """

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...

    def fingerprint(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Arrays:
    """Arrays in memory that have their rows in common."""

    arrays: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        if len({len(array) for array in self.arrays.values()}) != 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
            raise DataError(
                f"the arrays of a source must have the same number of rows: {shapes or 'there are none'}."
            )

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[indices] for name, array in self.arrays.items()}

    def fingerprint(self) -> dict[str, Any]:
        return {"arrays": {name: array_fingerprint(array) for name, array in self.arrays.items()}}


@dataclass(frozen=True)
class Items:
    """Whatever has a length and gives a dictionary of arrays for each index: a list, a Grain `MapDataset`, a Hugging Face dataset."""

    items: Any

    def __len__(self) -> int:
        return len(self.items)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if not len(indices):
            return {name: array[:0] for name, array in self.rows(np.zeros(1, np.int64)).items()}
        rows = [self.items[int(index)] for index in indices]
        if None in rows:
            raise DataError(
                f"item {indices[rows.index(None)]} is None: a filter in a Grain pipeline leaves holes. Use keep()."
            )
        return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}

    def fingerprint(self) -> dict[str, Any]:
        sample = self.rows(np.unique(np.linspace(0, len(self) - 1, 16).astype(int)))
        return {
            "items": len(self),
            "sample": {name: array_fingerprint(array) for name, array in sample.items()},
        }


@dataclass(frozen=True)
class Tokens:
    """One long sequence, cut into windows of `length` inputs with the labels one token later."""

    tokens: np.ndarray | TokenFile
    length: int
    _windows: np.ndarray = field(init=False, repr=False, compare=False)
    _check: Callable[[], None] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.length < 1 or len(self.tokens) <= self.length:
            raise DataError(
                f"{len(self.tokens)} tokens are too few for one window of {self.length} and its last label."
            )
        array = self.tokens.array() if isinstance(self.tokens, TokenFile) else self.tokens
        array = np.ascontiguousarray(array)
        window = np.dtype(
            (np.void, array.itemsize * (self.length + 1))
        )  # one item, so that a gather copies it in one piece
        windows: np.ndarray = np.ndarray(
            len(self), window, array, strides=(array.itemsize * self.length,)
        )
        object.__setattr__(self, "_windows", windows)
        object.__setattr__(
            self, "_check", self.tokens.check if isinstance(self.tokens, TokenFile) else None
        )

    def __reduce__(self) -> Any:
        return Tokens, (self.tokens, self.length)

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self._check is not None:
            self._check()
        windows = (
            self._windows[indices]
            .view(self.tokens.dtype)
            .reshape(len(indices), self.length + 1)
            .astype(np.int32)
        )
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}

    def fingerprint(self) -> dict[str, Any]:
        return {"length": self.length, **tokens_fingerprint(self.tokens)}


def tokens_fingerprint(tokens: np.ndarray | TokenFile) -> dict[str, Any]:
    return (
        tokens.fingerprint()
        if isinstance(tokens, TokenFile)
        else {"tokens": array_fingerprint(tokens)}
    )


def stdlib_bytes(held_out_every: int = 20, max_bytes: int = 2**24) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) bytes of the source code of Python's own standard library, as found on this machine.

    Every `held_out_every`th file is held out, so no held-out text stands next to a training window.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [
            name
            for name in inner
            if name not in ("site-packages", "dist-packages", "test", "tests")
        ]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for number, path in enumerate(files):
        text = path.read_bytes() + b"\n"
        total += len(text)
        if total > max_bytes:
            break
        parts[number % held_out_every == held_out_every - 1].append(text)
    if not parts[0] or not parts[1]:
        raise DataError(
            f"found {len(files)} Python files below {root}; the standard library's source is not there."
        )
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out


def as_source(data: Any) -> Source:
    """Arrays, items, or a source as it is."""
    if isinstance(data, Mapping):
        return Arrays({name: np.asarray(array) for name, array in data.items()})
    return data if hasattr(data, "rows") else Items(data)
