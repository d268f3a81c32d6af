"""The order of rows: a permutation that is computed, not stored.

Grain's `index_shuffle` takes one index at a time, some 6 µs each in Python, more than reading the row. This one takes
arrays: a Feistel network over the next power of two, walked until it falls back into the range.
"""

from functools import lru_cache
from typing import Any

import numpy as np

ROUNDS = 6
SMALL = (
    2**12
)  # rows; so few are sorted by random numbers, which of all permutations makes each as likely
BLOCK = (
    2**16
)  # positions permuted at once, so that a small batch does not pay for many small array operations


def permute(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where a bijection of range(size) sends each of `indices`; `keys` (two uint64 a round) choose the bijection."""
    bits = max(2, (size - 1).bit_length())
    low, high = bits // 2, bits - bits // 2
    word: Any = np.uint32 if bits <= 32 else np.uint64  # the former is a third faster
    word_bits = 8 * np.dtype(word).itemsize
    addends, factors = keys[0::2].astype(word), keys[1::2].astype(word) | word(1)

    def once(x: np.ndarray) -> np.ndarray:
        right, left = x & word(2**low - 1), x >> word(low)
        mixed = np.empty_like(x)
        for number, (addend, factor) in enumerate(zip(addends, factors, strict=True)):
            # Each half in turn is changed by the other alone, so that it can be undone: by the top bits of a product.
            source, target, width = (left, right, low) if number % 2 else (right, left, high)
            np.add(source, addend, out=mixed)
            np.multiply(mixed, factor, out=mixed)
            np.right_shift(mixed, word(word_bits - width), out=mixed)
            np.bitwise_xor(target, mixed, out=target)
        left <<= word(low)
        left |= right
        return left

    values = once(indices.astype(word))
    outside = np.flatnonzero(values >= size)
    while len(outside):  # fewer than half at first, and each walk halves them again
        values[outside] = once(values[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def keys_of(*numbers: int, count: int = 2 * ROUNDS) -> np.ndarray:
    """Random uint64 from a seed and whatever else tells two orders apart; the same with every release of NumPy."""
    return np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(
        count, np.uint64
    )


def seed_of(*numbers: int) -> int:
    """A seed that depends on all the numbers."""
    return int(keys_of(*numbers)[0])


def order(size: int, first: int, last: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """The rows at positions `first` to `last` of epoch after epoch of `size` rows, each epoch in its own order."""
    if not shuffle or first >= last:
        return np.arange(first, last) % size
    parts: list[np.ndarray] = []
    while True:
        epoch, within = divmod(first, size)
        number, start = divmod(within, BLOCK)
        part = _block(size, seed, epoch, number)[start : start + last - first]
        first += len(part)
        if first == last:
            return np.concatenate([*parts, part]) if parts else part
        parts.append(part)


@lru_cache(maxsize=128)
def _block(size: int, seed: int, epoch: int, number: int) -> np.ndarray:
    if size <= SMALL:
        block = np.argsort(keys_of(seed, epoch, count=size), kind="stable")
    else:
        block = permute(
            np.arange(number * BLOCK, min((number + 1) * BLOCK, size)), size, keys_of(seed, epoch)
        )
    block.flags.writeable = False
    return block
