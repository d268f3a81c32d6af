"""Sources made of sources: a part of one, a filtered one, several mixed by weights. All of them are read at random."""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from shardwise.data.batches import fingerprint_of, order_of
from shardwise.data.files import BadRecord
from shardwise.data.shuffle import keys_of, permute, seed_of
from shardwise.data.sources import as_source
from shardwise.errors import ConfigError, DataError

PATTERN = 10_000  # at most so many positions before the pattern of a mix repeats
Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subset:
    """The rows of a source with these indices, in this order."""

    source: Any
    indices: np.ndarray

    def __post_init__(self) -> None:
        if hasattr(self.source, "order"):
            raise ConfigError(
                "a mix has an order of its own, which a part of it would lose. Split or filter the sources, then mix them."
            )

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, indices: np.ndarray) -> Row:
        return self.source.rows(self.indices[indices])

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.blake2b(self.indices.astype("<i8").tobytes(), digest_size=16).hexdigest()
        return {"rows": len(self), "indices": digest, "of": fingerprint_of(self.source)}


def split(
    source: Any, held_out: float = 0.01, seed: int = 0, *, block: int = 1
) -> tuple[Subset, Subset]:
    """(training, held-out) rows, drawn at random, none of them in both; `held_out` is a share of the rows.

    Windows next to each other often come from one document; `block` neighbours stay together.
    """
    source = as_source(source)
    blocks = -(-len(source) // block)
    count = round(blocks * held_out)
    if not 0 < held_out < 1 or not 0 < count < blocks:
        raise DataError(
            f"held_out={held_out} of {blocks} blocks of {block} rows leaves {count} held out; each side needs at least one."
        )
    is_held_out = np.zeros(blocks, bool)
    is_held_out[permute(np.arange(count), blocks, keys_of(seed))] = True
    is_held_out = np.repeat(is_held_out, block)[: len(source)]
    return Subset(source, np.flatnonzero(~is_held_out)), Subset(source, np.flatnonzero(is_held_out))


def keep(source: Any, predicate: Callable[[Row], Any], *, chunk: int = 256) -> Subset:
    """The rows for which `predicate(row)` is true. Reads every row once, now; a bar shows the way when it takes longer than 2 s."""
    source = as_source(source)
    size = len(source)
    kept = np.zeros(size, bool)
    for first in _progress(range(0, size, chunk), -(-size // chunk), "filtering"):
        indices = np.arange(first, min(first + chunk, size))
        rows = source.rows(indices)
        kept[indices] = [
            bool(predicate({name: array[i] for name, array in rows.items()}))
            for i in range(len(indices))
        ]
    if not kept.any():
        raise DataError(f"the filter kept 0 of {size} rows.")
    return Subset(source, np.flatnonzero(kept))


def _progress(items: Iterable[int], total: int, title: str) -> Iterable[int]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    start, progress = time.monotonic(), Progress(console=console, transient=console.is_terminal)
    task = progress.add_task(title, total=total)
    try:
        for item in items:
            yield item
            progress.advance(task)
            if not progress.live.is_started and time.monotonic() - start > 2:
                progress.start()
    finally:
        if progress.live.is_started:
            progress.stop()


@dataclass(frozen=True)
class Mix:
    """Several sources, each with its share of the rows: `Mix({"code": (code, 0.7), "prose": (prose, 0.3)})` or a list of pairs.

    The rows are those of the sources, one source after the other. Their order in a run is a pattern that repeats, in
    which each source has exactly its share, to a ten-thousandth; each source is shuffled by itself, in epochs of its own.
    """

    sources: Any  # a mapping of names, or a sequence, of (source, weight)
    _parts: tuple[tuple[str, Any, int], ...] = field(
        init=False, repr=False, compare=False
    )  # name, source, positions in the pattern

    def __post_init__(self) -> None:
        named = (
            self.sources
            if isinstance(self.sources, Mapping)
            else {str(i): pair for i, pair in enumerate(self.sources)}
        )
        sources = [as_source(source) for source, _ in named.values()]
        counts = apportion({name: weight for name, (_, weight) in named.items()})
        object.__setattr__(self, "_parts", tuple(zip(named, sources, counts, strict=True)))
        for name, source, _ in self._parts:
            if not len(source):
                raise DataError(f"source '{name}' of the mix has no rows.")
        _check_alike({name: source for name, source, _ in self._parts})

    def __len__(self) -> int:
        return sum(len(source) for _, source, _ in self._parts)

    @property
    def shares(self) -> dict[str, float]:
        """What each source has of the rows of a run."""
        total = sum(count for _, _, count in self._parts)
        return {name: count / total for name, _, count in self._parts}

    def rows(self, indices: np.ndarray) -> Row:
        ends = np.cumsum([len(source) for _, source, _ in self._parts])
        places = np.searchsorted(ends, indices, side="right")
        found: Row = {}
        for place in np.unique(places) if len(indices) else [0]:
            where = np.flatnonzero(places == place)
            source = self._parts[place][1]
            for name, array in source.rows(indices[where] - (ends[place] - len(source))).items():
                found.setdefault(name, np.empty((len(indices), *array.shape[1:]), array.dtype))[
                    where
                ] = array
        return found

    def order(self, first: int, last: int, seed: int, shuffle: bool) -> np.ndarray:
        pattern, before = _pattern(tuple(count for _, _, count in self._parts), seed)
        repeats, at = np.divmod(np.arange(first, last), len(pattern))
        chosen = pattern[at]
        indices = np.empty(last - first, np.int64)
        offset = 0
        for place, (_, source, count) in enumerate(self._parts):
            where = np.flatnonzero(chosen == place)
            if len(where):
                ordinals = repeats[where] * count + before[at[where]]  # consecutive numbers
                part = order_of(source)(
                    int(ordinals[0]), int(ordinals[-1]) + 1, seed_of(seed, place + 1), shuffle
                )
                indices[where] = part + offset
            offset += len(source)
        return indices

    def fingerprint(self) -> dict[str, Any]:
        return {
            "mix": {
                name: {"share": self.shares[name], "source": fingerprint_of(source)}
                for name, source, _ in self._parts
            }
        }


@lru_cache(maxsize=16)
def _pattern(counts: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which source each position of the pattern is for, and how many earlier positions are for the same one."""
    length = sum(counts)
    pattern = np.repeat(np.arange(len(counts)), counts)[
        permute(np.arange(length), length, keys_of(seed, length))
    ]
    before = np.empty(length, np.int64)
    for place, count in enumerate(counts):
        before[pattern == place] = np.arange(count)
    return pattern, before


def apportion(weights: Mapping[str, float]) -> list[int]:
    """How many positions of the pattern each source gets: exact for shares in whole ten-thousandths, else by largest remainder."""
    total = sum(weights.values())
    if not weights or not all(weight > 0 and np.isfinite(weight) for weight in weights.values()):
        raise DataError(f"the weights of a mix must be positive: {dict(weights)}.")
    shares = np.array(list(weights.values()), np.float64) / total
    lengths = np.arange(1, PATTERN + 1)[:, None]
    exact = np.flatnonzero(
        (np.abs(shares * lengths - np.round(shares * lengths)) < 1e-9 * lengths).all(axis=1)
    )
    if len(exact):
        return [int(count) for count in np.round(shares * (exact[0] + 1))]
    counts = np.floor(shares * PATTERN).astype(int)
    rest = np.argsort(counts - shares * PATTERN, kind="stable")[: PATTERN - counts.sum()]
    counts[rest] += 1
    if not counts.all():
        name = list(weights)[int(np.argmin(counts))]
        raise DataError(
            f"source '{name}' has {min(shares):.2g} of the weights of the mix; 1/{PATTERN} is the least there can be."
        )
    return [int(count) for count in counts]


def _check_alike(sources: Mapping[str, Any]) -> None:
    """All sources must give rows of the same names, shapes and dtypes; looked at in one row of each."""
    seen = {}
    for name, source in sources.items():
        try:
            seen[name] = {
                key: (array.shape[1:], str(array.dtype))
                for key, array in source.rows(np.array([0])).items()
            }
        except BadRecord:  # the run will meet it, or skip it
            continue
    if len({repr(sorted(rows.items())) for rows in seen.values()}) > 1:
        raise DataError(
            "the sources of a mix must give rows alike:"
            + "".join(f"\n  {name}: {rows}" for name, rows in seen.items())
        )
