"""The order of examples: a permutation that is computed, not stored.

Grain's `index_shuffle` takes one index at a time, about 6 us each in Python, which is more than
reading an example takes. This one takes arrays: a Feistel network over the next power of two,
applied again to every index that falls outside the range ("cycle walking").
"""

from functools import lru_cache

import numpy as np

ROUNDS = 6
# Sources up to this size are sorted by random numbers, which makes all permutations equally likely.
SMALL = 2**12
# Positions permuted at once, so that small batches do not pay for many small array operations.
BLOCK = 2**16


def permute(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Apply a pseudorandom bijection of `range(size)` to an array of indices.

    Args:
        indices: integers in `range(size)`.
        size: the size of the range.
        keys: uint64 numbers that select the bijection, two per round.

    Returns:
        An int64 array of the shape of `indices`.
    """
    num_bits = max(2, (size - 1).bit_length())
    low_bits = num_bits // 2
    high_bits = num_bits - low_bits
    # Arithmetic on uint32 is a third faster.
    word: type[np.uint32] | type[np.uint64] = np.uint32 if num_bits <= 32 else np.uint64
    word_bits = 8 * np.dtype(word).itemsize
    addends = keys[0::2].astype(word)
    # Odd factors, because multiplication by them is a bijection.
    factors = (keys[1::2] | np.uint64(1)).astype(word)

    def apply_rounds(x: np.ndarray) -> np.ndarray:
        right = x & word(2**low_bits - 1)
        left = x >> word(low_bits)
        mixed = np.empty_like(x)
        for number, (addend, factor) in enumerate(zip(addends, factors, strict=True)):
            # In a Feistel round one half changes by a function of the other half alone, so each
            # round can be undone. The function takes the top bits of a multiplication.
            if number % 2:
                source, target, width = left, right, low_bits
            else:
                source, target, width = right, left, high_bits
            np.add(source, addend, out=mixed)
            np.multiply(mixed, factor, out=mixed)
            np.right_shift(mixed, word(word_bits - width), out=mixed)
            np.bitwise_xor(target, mixed, out=target)
        left <<= word(low_bits)
        left |= right
        return left

    values = apply_rounds(indices.astype(word))
    outside = np.flatnonzero(values >= size)
    # At most half are outside, and each pass halves them again.
    while len(outside):
        values[outside] = apply_rounds(values[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def keys_of(*numbers: int, count: int = 2 * ROUNDS) -> np.ndarray:
    """Return uint64 keys that depend on all `numbers`; the same in every NumPy release."""
    seeds = [number % 2**64 for number in numbers]
    return np.random.SeedSequence(seeds).generate_state(count, np.uint64)


def seed_of(*numbers: int) -> int:
    """Return a seed that depends on all `numbers`."""
    return int(keys_of(*numbers)[0])


def order(
    size: int, first: int, last: int, seed: int, shuffle: bool = True
) -> np.ndarray:
    """Return the examples at positions `first` to `last - 1` of an endless sequence of epochs.

    Args:
        size: the number of examples. Every epoch has each of them once, in a new order.
        first: the first position.
        last: the position after the last.
        seed: selects the order.
        shuffle: whether to shuffle; otherwise examples are in their natural order.

    Returns:
        An array of `last - first` indices.
    """
    if not shuffle or first >= last:
        return np.arange(first, last) % size
    parts: list[np.ndarray] = []
    while True:
        epoch, position = divmod(first, size)
        block, start = divmod(position, BLOCK)
        part = _block(size, seed, epoch, block)[start : start + last - first]
        first += len(part)
        if first == last:
            return np.concatenate([*parts, part]) if parts else part
        parts.append(part)


@lru_cache(maxsize=128)
def _block(size: int, seed: int, epoch: int, number: int) -> np.ndarray:
    """Return one block of `BLOCK` positions of an epoch."""
    if size <= SMALL:
        block = np.argsort(keys_of(seed, epoch, count=size), kind="stable")
    else:
        positions = np.arange(number * BLOCK, min((number + 1) * BLOCK, size))
        block = permute(positions, size, keys_of(seed, epoch))
    # The array is cached and shared.
    block.flags.writeable = False
    return block
