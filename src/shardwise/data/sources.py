"""Sources: objects with a length that return examples by index, as arrays."""

import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from shardwise.data.files import TokenFile, array_fingerprint
from shardwise.errors import DataError
from shardwise.text import Json

# Examples as arrays by name; the first dimension counts the examples.
Examples: TypeAlias = dict[str, np.ndarray]


class Source(Protocol):
    """Random-access data.

    `len(source)` is the number of examples. Write a class with these three methods to bring data of
    your own.
    """

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> Examples:
        """Return the examples at `indices`: arrays whose first dimension is `len(indices)`."""
        ...

    def fingerprint(self) -> Json:
        """Return JSON that identifies the content: other content has another fingerprint."""
        ...


# What `as_source` accepts.
SourceLike: TypeAlias = Source | Mapping[str, np.ndarray] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Arrays:
    """Arrays in memory with a common first dimension.

    Attributes:
        arrays: the arrays by name.

    Raises:
        DataError: if their first dimensions differ, or there are none.

    Example:
        >>> source = Arrays({"x": np.zeros((100, 8)), "y": np.zeros(100)})
        >>> len(source)
        100
    """

    arrays: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        if len({len(array) for array in self.arrays.values()}) != 1:
            shapes = ", ".join(
                f"{name} {array.shape}" for name, array in self.arrays.items()
            )
            raise DataError(
                "the arrays of a source must have the same first dimension:"
                f" {shapes or 'there are none'}."
            )

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def rows(self, indices: np.ndarray) -> Examples:
        """Return the examples at `indices`."""
        return {name: array[indices] for name, array in self.arrays.items()}

    def fingerprint(self) -> Json:
        """Return shapes, dtypes and hashes of the arrays."""
        return {
            "arrays": {
                name: array_fingerprint(array) for name, array in self.arrays.items()
            }
        }


@dataclass(frozen=True)
class Items:
    """Any object with a length that returns a dictionary of arrays for an index.

    Attributes:
        items: a list, a Grain `MapDataset`, a Hugging Face data set.
    """

    items: Sequence[Mapping[str, Any] | None]

    def __len__(self) -> int:
        return len(self.items)

    def rows(self, indices: np.ndarray) -> Examples:
        """Return the examples at `indices`, stacked.

        Raises:
            DataError: if an item is None, as a filter in a Grain pipeline leaves it.
        """
        if not len(indices):
            return no_examples(self)
        items = []
        for index in indices:
            item = self.items[int(index)]
            if item is None:
                raise DataError(
                    f"item {index} is None: a filter in a Grain pipeline leaves gaps."
                    " Use shardwise.keep() instead of the filter."
                )
            items.append(item)
        return {
            name: np.stack([np.asarray(item[name]) for item in items])
            for name in items[0]
        }

    def fingerprint(self) -> Json:
        """Return the number of items, and hashes of 16 of them."""
        sample = self.rows(np.unique(np.linspace(0, len(self) - 1, 16).astype(int)))
        hashes = {name: array_fingerprint(array) for name, array in sample.items()}
        return {"items": len(self), "sample": hashes}


def no_examples(source: Source) -> Examples:
    """Return arrays of zero examples, with the shapes and dtypes of the first example."""
    first = source.rows(np.zeros(1, np.int64))
    return {name: array[:0] for name, array in first.items()}


@dataclass(frozen=True)
class Tokens:
    """One long sequence of tokens, in windows with labels one token later.

    Window i has the inputs `tokens[i * length : (i + 1) * length]`.

    Attributes:
        tokens: integers, in memory or in a file (`open_tokens`).
        length: tokens per window.

    Raises:
        DataError: if there are too few tokens for one window and its last label.

    Example:
        >>> example = Tokens(np.arange(9), length=4).rows(np.array([1]))
        >>> example["inputs"], example["labels"]
        (array([[4, 5, 6, 7]], dtype=int32), array([[5, 6, 7, 8]], dtype=int32))
    """

    tokens: np.ndarray | TokenFile
    length: int
    _windows: np.ndarray = field(init=False, repr=False, compare=False)
    _check: Callable[[], None] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.length < 1 or len(self.tokens) <= self.length:
            raise DataError(
                f"{len(self.tokens)} tokens are too few for one window of {self.length} tokens and"
                " its last label."
            )
        check = None
        array = self.tokens
        if isinstance(array, TokenFile):
            check = array.check
            array = array.array()
        array = np.ascontiguousarray(array)
        # A window is one element, so that indexing copies it in one piece.
        window = np.dtype((np.void, array.itemsize * (self.length + 1)))
        stride = array.itemsize * self.length
        windows: np.ndarray = np.ndarray(len(self), window, array, strides=(stride,))
        object.__setattr__(self, "_windows", windows)
        object.__setattr__(self, "_check", check)

    def __reduce__(self) -> tuple[type["Tokens"], tuple[np.ndarray | TokenFile, int]]:
        return Tokens, (self.tokens, self.length)

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def rows(self, indices: np.ndarray) -> Examples:
        """Return `inputs` and `labels` of the windows, int32 of shape (len(indices), length)."""
        if self._check is not None:
            self._check()
        tokens = self._windows[indices].view(self.tokens.dtype)
        windows = tokens.reshape(len(indices), self.length + 1).astype(np.int32)
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}

    def fingerprint(self) -> Json:
        """Return the window length and the fingerprint of the tokens."""
        return {"length": self.length, **tokens_fingerprint(self.tokens)}


def tokens_fingerprint(tokens: np.ndarray | TokenFile) -> Json:
    """Return the fingerprint of tokens in memory or in a file."""
    if isinstance(tokens, TokenFile):
        return tokens.fingerprint()
    return {"tokens": array_fingerprint(tokens)}


def stdlib_bytes(
    held_out_every: int = 20, max_bytes: int = 2**24
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source code of Python's standard library on this machine, as bytes.

    It is a data set that every machine has, for examples and tests.

    Args:
        held_out_every: every n-th file goes to the validation data, so that no validation text is
            next to a training window.
        max_bytes: maximum size in total.

    Returns:
        Training and validation data, each an array of uint8.

    Raises:
        DataError: if the source code is not installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = ("site-packages", "dist-packages", "test", "tests")
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # os.walk visits the subfolders that are left in this list.
        subfolders[:] = [name for name in subfolders if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    training: list[bytes] = []
    validation: list[bytes] = []
    total = 0
    for number, path in enumerate(files):
        text = path.read_bytes() + b"\n"
        total += len(text)
        if total > max_bytes:
            break
        is_held_out = number % held_out_every == held_out_every - 1
        (validation if is_held_out else training).append(text)
    if not training or not validation:
        raise DataError(
            f"found {len(files)} Python files below {root}; the source code of the standard"
            " library is not installed there."
        )
    train, held_out = (
        np.frombuffer(b"".join(part), np.uint8) for part in (training, validation)
    )
    return train, held_out


def as_source(data: SourceLike) -> Source:
    """Return `data` as a source: arrays and items are wrapped, a source is returned as it is."""
    if isinstance(data, Mapping):
        return Arrays({name: np.asarray(array) for name, array in data.items()})
    if hasattr(data, "rows"):
        return cast(Source, data)
    return Items(data)
