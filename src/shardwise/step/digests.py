"""Digests of trees of arrays: one number per array that changes if any bit of it changes.

A digest is the sum of the hashed words of an array, modulo 2**32. The hash depends on the position
of the word, and maps different words at the same position to different numbers. A changed word
therefore always shows, and other damage escapes with a probability of 2**-32 per array.

Sums of integers do not depend on their order. So the digest of an array is the same on every
device, on every mesh, and with every sharding.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from blake3 import blake3
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise.sharding import axes_of_entry
from shardwise.tree import PyTree

# One digest for each leaf, uint32, in the order of `jax.tree.leaves`.
Digests: TypeAlias = np.ndarray

# Odd constants with bits in no pattern, as hash functions use them.
POSITION, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
# Hexadecimal digits of the digest of all leaves.
ALL_DIGITS = 16


def tree_digests(tree: PyTree) -> jax.Array:
    """Return the digest of each leaf, uint32, in the order of `jax.tree.leaves`.

    Nothing waits for the devices. Only sums are exchanged between them.
    """
    digests: jax.Array = _tree_digests(tree)
    return digests


@jax.jit
def _tree_digests(tree: PyTree) -> jax.Array:
    return jnp.stack([_digest(_words(leaf)) for leaf in jax.tree.leaves(tree)])


def device_digests(tree: PyTree) -> np.ndarray:
    """Return the digests of the shards that each device holds, uint32.

    Devices that hold the same shard of an array must have the same digest for it. All processes of
    a run must call this together.

    Args:
        tree: arrays on one mesh, with `NamedSharding`.

    Returns:
        An array with a dim for each axis of the mesh, and a last one for the leaves.
    """
    leaves = jax.tree.leaves(tree)
    shardings = tuple(leaf.sharding for leaf in leaves)
    compute = _device_digests(
        shardings[0].mesh, tuple(sharding.spec for sharding in shardings)
    )
    return np.asarray(compute(leaves))


@lru_cache(maxsize=16)
def _device_digests(
    mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    def of_shards(shards: Sequence[jax.Array]) -> jax.Array:
        digests = jnp.stack([_digest(shard) for shard in shards])
        return digests.reshape(*(1 for _ in mesh.axis_names), -1)

    of_devices = jax.shard_map(
        of_shards,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=PartitionSpec(*mesh.axis_names),
        # A device must read its own copy of a replicated array, which may differ from the others.
        check_vma=False,
    )
    return jax.jit(
        lambda leaves: of_devices([_words(leaf) for leaf in leaves]),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32. Some dtypes need one more dim."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_ or "int4" in x.dtype.name or "int2" in x.dtype.name:
        x = x.astype(jnp.int32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _digest(words: jax.Array) -> jax.Array:
    # Not flattened, because that would gather a sharded array.
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        position = position * jnp.uint32(size) + index
    hashed = words ^ (position * jnp.uint32(POSITION))
    hashed = hashed * jnp.uint32(FIRST)
    hashed = hashed ^ (hashed >> 15)
    hashed = hashed * jnp.uint32(SECOND)
    return jnp.sum(hashed, dtype=jnp.uint32)


def combine(digests: Digests) -> str:
    """Return one digest for all leaves, as 16 hexadecimal digits."""
    return blake3(digests.astype("<u4").tobytes()).hexdigest()[:ALL_DIGITS]


def as_text(digests: Digests) -> str:
    """Return the digests of all leaves as hexadecimal digits, 8 for each."""
    return digests.astype(">u4").tobytes().hex()


def from_text(text: str) -> Digests:
    """Return the digests in a text of `as_text`.

    Raises:
        ValueError: if it is no such text.
    """
    return np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)


def disagreeing(
    digests: np.ndarray, mesh: Mesh, specs: Sequence[PartitionSpec]
) -> list[tuple[int, list[jax.Device]]]:
    """Return the leaves whose copies differ between devices, and the devices that differ.

    Args:
        digests: the result of `device_digests`.
        mesh: its mesh.
        specs: the partition spec of each leaf.

    Returns:
        `(leaf, devices)` for each such leaf. If most copies are equal, the devices are those that
        hold another one. Otherwise they are all that hold a copy.
    """
    found = []
    for leaf, spec in enumerate(specs):
        wrong = _minority(digests[..., leaf], mesh, spec)
        if wrong.any():
            found.append((leaf, list(mesh.devices[wrong])))
    return found


def _minority(values: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> np.ndarray:
    """Return which devices hold another copy than most devices with the same shard."""
    named = {axis for entry in spec for axis in axes_of_entry(entry)}
    copies = tuple(i for i, axis in enumerate(mesh.axis_names) if axis not in named)
    shards = tuple(i for i in range(values.ndim) if i not in copies)
    # One row for each shard, and one column for each copy of it.
    order = (*shards, *copies)
    rows = values.transpose(order).reshape(
        int(np.prod([values.shape[i] for i in shards])), -1
    )
    wrong = np.zeros_like(rows, bool)
    for row, marks in zip(rows, wrong, strict=True):
        kinds, counts = np.unique(row, return_counts=True)
        if len(kinds) > 1:
            has_majority = 2 * counts.max() > len(row)
            marks[:] = row != kinds[counts.argmax()] if has_majority else True
    shape = tuple(values.shape[i] for i in order)
    return wrong.reshape(shape).transpose(np.argsort(order))
