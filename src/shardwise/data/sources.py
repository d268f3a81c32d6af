"""Sources: objects with a length that return examples by index, as arrays."""

import os
import reprlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from shardwise.data.files import TokenFile, array_fingerprint
from shardwise.data.grain import is_dataset, is_map_dataset
from shardwise.errors import ConfigError, DataError
from shardwise.text import Json

# Arrays whose first dimension counts the examples: usually by name, or in a tuple, or just one. No
# type says "a nested structure of arrays".
Examples: TypeAlias = Any


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
SourceLike: TypeAlias = Source | Mapping[str, np.ndarray] | Sequence[Any]


def map_columns(
    function: Callable[..., object], examples: Examples, *others: Examples
) -> Examples:
    """Apply a function to each array of `examples`, and to the same array of `others`."""
    if isinstance(examples, Mapping):
        return {
            name: map_columns(function, value, *(other[name] for other in others))
            for name, value in examples.items()
        }
    if isinstance(examples, tuple):
        values = zip(examples, *others, strict=True)
        return like_tuple(examples, [map_columns(function, *parts) for parts in values])
    return function(examples, *others)


def like_tuple(example: tuple[Any, ...], values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same type, which may have named fields."""
    return type(example)(*values) if hasattr(example, "_fields") else tuple(values)


def named_columns(examples: Examples, name: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of `examples` by path, such as "image" or "0"."""
    if isinstance(examples, Mapping):
        items = list(examples.items())
    elif isinstance(examples, tuple):
        items = list(enumerate(examples))
    else:
        return {name: examples}
    columns: dict[str, np.ndarray] = {}
    for key, value in items:
        columns |= named_columns(value, f"{name}/{key}" if name else str(key))
    return columns


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
    """Any object with a length that returns an example for an index.

    An example is a dictionary of arrays, a tuple of them, or one array.

    Attributes:
        items: a list, a Grain `MapDataset`, a Hugging Face data set.
    """

    items: Sequence[Any]

    def __len__(self) -> int:
        return len(self.items)

    def rows(self, indices: np.ndarray) -> Examples:
        """Return the examples at `indices`, stacked.

        Raises:
            DataError: if an item is None, as a filter in a Grain pipeline leaves it, if it has
                text, or if two items have different shapes.
        """
        if not len(indices):
            return no_examples(self)
        items = []
        for index in indices:
            item = self.items[int(index)]
            if item is None:
                raise DataError(
                    f"item {index} is None: a filter in a Grain pipeline leaves gaps."
                    " Use shardwise.keep() instead of the filter, or"
                    " Run(data=dataset.to_iter_dataset().batch(batch_size))."
                )
            items.append(item)
        if isinstance(items[0], tuple):
            columns = [
                _stack(indices, column, str(number))
                for number, column in enumerate(zip(*items, strict=True))
            ]
            return like_tuple(items[0], columns)
        return _stack(indices, items)

    def fingerprint(self) -> Json:
        """Return the number of items, and hashes of 16 of them."""
        sample = self.rows(np.unique(np.linspace(0, len(self) - 1, 16).astype(int)))
        hashes = {
            name: array_fingerprint(array)
            for name, array in named_columns(sample).items()
        }
        return {"items": len(self), "sample": hashes}


def _stack(indices: np.ndarray, values: Sequence[Any], name: str = "") -> Examples:
    """Return the values of a column as one array; of a dictionary, each of its columns.

    Args:
        indices: the items that the values come from, for messages.
        values: one value per item.
        name: the path of the column.
    """
    if isinstance(values[0], Mapping):
        return {
            key: _stack(
                indices, [value[key] for value in values], f"{name}/{key}".lstrip("/")
            )
            for key in values[0]
        }
    what = f"column '{name}'" if name else "an example"
    arrays = [np.asarray(value) for value in values]
    for index, value, array in zip(indices, values, arrays, strict=True):
        # Strings, bytes and objects.
        if array.dtype.kind in "USO":
            kind = (
                "is not an array of numbers" if array.dtype.kind == "O" else "is text"
            )
            removal = ""
            if name:
                removal = f", or remove it (Hugging Face: remove_columns('{name}'))"
            raise DataError(
                f"{what} {kind}: {reprlib.repr(value)} in item {index}. Convert it to numbers, for"
                f" example to tokens with dataset.map(...){removal}."
            )
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{what} has shape {arrays[0].shape} in item {indices[0]} and {array.shape} in"
                f" item {index}. All examples need the same shapes: pad or truncate them, or pack"
                " sequences of tokens (shardwise.Packed)."
            )
    return np.stack(arrays)


def no_examples(source: Source) -> Examples:
    """Return arrays of zero examples, with the shapes and dtypes of the first example."""
    first = source.rows(np.zeros(1, np.int64))
    return map_columns(lambda array: array[:0], first)


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
    if is_dataset(data) and not is_map_dataset(data):
        raise ConfigError(
            f"Batches needs examples by index, which a Grain {type(data).__name__} does not have."
            " Pass it to Run(data=...) itself, with batch() as its last transformation, or use a"
            " MapDataset."
        )
    return Items(data)
