"""Sources made of other sources: a split, a filter, a weighted mix. All allow random access."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from shardwise.data.batches import fingerprint_of, order_of
from shardwise.data.files import BadRecord
from shardwise.data.shuffle import keys_of, permute, seed_of
from shardwise.data.sources import (
    Examples,
    Source,
    SourceLike,
    as_source,
    map_columns,
    named_columns,
)
from shardwise.errors import ConfigError, DataError
from shardwise.text import Json

# Positions after which the pattern of a mix repeats, at most. Shares are exact to 1/10,000.
MAX_PATTERN = 10_000
# Seconds after which a filter shows a progress bar.
PROGRESS_DELAY = 2.0


@dataclass(frozen=True)
class Subset:
    """The examples of a source at given indices, in that order.

    Attributes:
        source: the source.
        indices: which of its examples.

    Raises:
        ConfigError: if the source is a mix, whose order would be lost.
    """

    source: Source
    indices: np.ndarray

    def __post_init__(self) -> None:
        if hasattr(self.source, "order"):
            raise ConfigError(
                "a mix defines its order, which a part of it would lose."
                " Split or filter the sources, then mix them."
            )

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, indices: np.ndarray) -> Examples:
        """Return the examples at `indices` of the subset."""
        return self.source.rows(self.indices[indices])

    def fingerprint(self) -> Json:
        """Return a hash of the indices and the fingerprint of the source."""
        digest = hashlib.blake2b(
            self.indices.astype("<i8").tobytes(), digest_size=16
        ).hexdigest()
        return {"rows": len(self), "indices": digest, "of": fingerprint_of(self.source)}


def split(
    source: SourceLike, held_out: float = 0.01, seed: int = 0, *, block: int = 1
) -> tuple[Subset, Subset]:
    """Split a source at random into training and validation data.

    Args:
        source: what to split.
        held_out: fraction of the examples for validation.
        seed: selects the examples.
        block: neighbors that stay together. Windows next to each other often come from one
            document, which must not be in both parts.

    Returns:
        Training and validation data.

    Raises:
        DataError: if one of the two would be empty.

    Example:
        >>> training, validation = split({"x": np.arange(1000)}, held_out=0.1)
        >>> len(training), len(validation)
        (900, 100)
    """
    source = as_source(source)
    num_blocks = -(-len(source) // block)
    count = round(num_blocks * held_out)
    if not 0 < held_out < 1 or not 0 < count < num_blocks:
        raise DataError(
            f"held_out={held_out} of {num_blocks} blocks of {block} examples selects {count};"
            " each part needs at least one block."
        )
    is_held_out = np.zeros(num_blocks, bool)
    is_held_out[permute(np.arange(count), num_blocks, keys_of(seed))] = True
    is_held_out = np.repeat(is_held_out, block)[: len(source)]
    return Subset(source, np.flatnonzero(~is_held_out)), Subset(
        source, np.flatnonzero(is_held_out)
    )


def keep(
    source: SourceLike, predicate: Callable[[Examples], object], *, chunk: int = 256
) -> Subset:
    """Filter a source. Reads every example once, now, with a progress bar after 2 seconds.

    Args:
        source: what to filter.
        predicate: takes one example, usually a dictionary of arrays; true keeps it.
        chunk: examples to read at once.

    Returns:
        The examples that were kept.

    Raises:
        DataError: if none was kept.
    """
    source = as_source(source)
    size = len(source)
    kept = np.zeros(size, bool)
    for first in _with_progress(range(0, size, chunk), "filtering"):
        indices = np.arange(first, min(first + chunk, size))
        examples = source.rows(indices)
        for position, index in enumerate(indices):
            kept[index] = bool(predicate(_example_at(examples, position)))
    if not kept.any():
        raise DataError(f"the filter kept 0 of {size} examples.")
    return Subset(source, np.flatnonzero(kept))


def _example_at(examples: Examples, position: int) -> Examples:
    return map_columns(lambda array: array[position], examples)


def _with_progress(items: Sequence[int], title: str) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    progress = Progress(console=console, transient=console.is_terminal)
    task = progress.add_task(title, total=len(items))
    start = time.monotonic()
    try:
        for item in items:
            yield item
            progress.advance(task)
            if (
                not progress.live.is_started
                and time.monotonic() - start > PROGRESS_DELAY
            ):
                progress.start()
    finally:
        if progress.live.is_started:
            progress.stop()


@dataclass(frozen=True)
class _MixPart:
    """One source of a mix, and its number of positions in the pattern."""

    name: str
    source: Source
    count: int


@dataclass(frozen=True)
class Mix:
    """Several sources, each with its share of the examples of a run.

    The order of sources is a pattern that repeats, in which each source has exactly its share, to
    1/10,000. Each source is shuffled separately and has its own epochs, so a small source repeats
    more often.

    Attributes:
        sources: `(source, weight)` pairs, as a mapping by name or as a sequence.

    Raises:
        DataError: if a weight is not positive, a source is empty, or the sources have examples of
            different names, shapes or dtypes.

    Example:
        >>> mix = Mix({"code": ({"x": np.arange(10)}, 0.7), "prose": ({"x": np.arange(9)}, 0.3)})
        >>> mix.shares
        {'code': 0.7, 'prose': 0.3}
    """

    sources: Mapping[str, tuple[SourceLike, float]] | Sequence[tuple[SourceLike, float]]
    _parts: tuple[_MixPart, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.sources, Mapping):
            named = dict(self.sources)
        else:
            named = {str(number): pair for number, pair in enumerate(self.sources)}
        counts = apportion({name: weight for name, (_, weight) in named.items()})
        parts = tuple(
            _MixPart(name, as_source(source), count)
            for (name, (source, _)), count in zip(named.items(), counts, strict=True)
        )
        object.__setattr__(self, "_parts", parts)
        for part in parts:
            if not len(part.source):
                raise DataError(f"source '{part.name}' of the mix has no examples.")
        _check_same_structure(parts)

    def __len__(self) -> int:
        return sum(len(part.source) for part in self._parts)

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of the examples of a run that each source supplies."""
        total = sum(part.count for part in self._parts)
        return {part.name: part.count / total for part in self._parts}

    def rows(self, indices: np.ndarray) -> Examples:
        """Return examples by index; the sources follow each other."""
        ends = np.cumsum([len(part.source) for part in self._parts])
        owners = np.searchsorted(ends, indices, side="right")
        examples: Examples = None
        for owner in np.unique(owners) if len(indices) else [0]:
            positions = np.flatnonzero(owners == owner)
            source = self._parts[owner].source
            offset = ends[owner] - len(source)
            rows = source.rows(indices[positions] - offset)
            if examples is None:
                examples = map_columns(partial(_empty_like, len(indices)), rows)
            columns, new = named_columns(examples), named_columns(rows)
            for name, column in columns.items():
                column[positions] = new[name]
        return examples

    def order(self, first: int, last: int, seed: int, shuffle: bool) -> np.ndarray:
        """Return the examples at positions `first` to `last - 1` of a run."""
        pattern, earlier = _pattern(tuple(part.count for part in self._parts), seed)
        repeats, position = np.divmod(np.arange(first, last), len(pattern))
        owners = pattern[position]
        indices = np.empty(last - first, np.int64)
        offset = 0
        for owner, part in enumerate(self._parts):
            where = np.flatnonzero(owners == owner)
            if len(where):
                # Consecutive positions in the order of this source alone.
                ordinals = repeats[where] * part.count + earlier[position[where]]
                start = int(ordinals[0])
                end = int(ordinals[-1]) + 1
                source_order = order_of(part.source)
                source_seed = seed_of(seed, owner + 1)
                indices[where] = source_order(start, end, source_seed, shuffle) + offset
            offset += len(part.source)
        return indices

    def fingerprint(self) -> Json:
        """Return the share and the fingerprint of each source."""
        shares = self.shares
        parts = {
            part.name: {
                "share": shares[part.name],
                "source": fingerprint_of(part.source),
            }
            for part in self._parts
        }
        return {"mix": parts}


def _empty_like(count: int, array: np.ndarray) -> np.ndarray:
    return np.empty((count, *array.shape[1:]), array.dtype)


@lru_cache(maxsize=16)
def _pattern(counts: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each position of the pattern, and how many earlier ones are the same."""
    length = sum(counts)
    shuffled = permute(np.arange(length), length, keys_of(seed, length))
    pattern = np.repeat(np.arange(len(counts)), counts)[shuffled]
    earlier = np.empty(length, np.int64)
    for owner, count in enumerate(counts):
        earlier[pattern == owner] = np.arange(count)
    return pattern, earlier


def apportion(weights: Mapping[str, float]) -> list[int]:
    """Return how many positions of the pattern each source gets.

    The result is exact if the shares are multiples of 1/n for some n up to 10,000. Otherwise
    10,000 positions are divided by the largest remainder.

    Raises:
        DataError: if a weight is not positive, or too small for one position.

    Example:
        >>> apportion({"code": 0.7, "prose": 0.3})
        [7, 3]
    """
    if not weights or not all(
        weight > 0 and np.isfinite(weight) for weight in weights.values()
    ):
        raise DataError(f"the weights of a mix must be positive: {dict(weights)}.")
    shares = np.array(list(weights.values()), np.float64) / sum(weights.values())
    lengths = np.arange(1, MAX_PATTERN + 1)[:, None]
    remainders = np.abs(shares * lengths - np.round(shares * lengths))
    exact = np.flatnonzero((remainders < 1e-9 * lengths).all(axis=1))
    if len(exact):
        return [int(count) for count in np.round(shares * (exact[0] + 1))]
    counts = np.floor(shares * MAX_PATTERN).astype(int)
    largest_remainders = np.argsort(counts - shares * MAX_PATTERN, kind="stable")
    counts[largest_remainders[: MAX_PATTERN - counts.sum()]] += 1
    if not counts.all():
        name = list(weights)[int(np.argmin(counts))]
        raise DataError(
            f"source '{name}' has {min(shares):.2g} of the weights of the mix; the minimum is"
            f" 1/{MAX_PATTERN}."
        )
    return [int(count) for count in counts]


def _check_same_structure(parts: Iterable[_MixPart]) -> None:
    """Refuse sources whose examples differ in names, shapes or dtypes; reads one of each."""
    structures = {}
    for part in parts:
        try:
            first = part.source.rows(np.array([0]))
        except BadRecord:
            # The run reports or skips it.
            continue
        structures[part.name] = {
            name: (array.shape[1:], str(array.dtype))
            for name, array in named_columns(first).items()
        }
    if len({repr(sorted(structure.items())) for structure in structures.values()}) > 1:
        lines = "".join(
            f"\n  {name}: {structure}" for name, structure in structures.items()
        )
        raise DataError(f"the sources of a mix must have the same arrays:{lines}")
