"""Matmuls of groups of rows, each with its own kernel: the work of the experts of a layer."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardwise.kernels.partitioning import Residuals
from shardwise.kernels.platform import platform

Array = jax.Array

# Rows per block on a CPU: few enough to stay in its cache.
CPU_BLOCK = 64
# The limits for the number of rows per block on a GPU.
GPU_BLOCKS = (128, 2048)
# The blocks that a GPU multiplies at once, if most rows may be empty.
GPU_CHUNK = 16


@dataclass(frozen=True)
class Tiling:
    """The layout of rows for `grouped_matmul`.

    Attributes:
        block: the number of rows per group must be a multiple of this.
        chunk: the number of blocks that are multiplied at once. A loop stops after the last chunk
            that is not empty.
        num_rows: the number of rows, enough for any distribution over the groups.
        num_shards: the number of devices among which all groups are divided. If groups are used
            evenly, 1 / `num_shards` of the rows are in use.
        num_groups: the number of groups of this device.
    """

    block: int
    chunk: int
    num_rows: int
    num_shards: int = 1
    num_groups: int = 1

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return self.num_rows // self.block

    @property
    def expected_chunks(self) -> int:
        """The number of chunks that are not empty if groups are used evenly, for `plan`."""
        # Each group ends with a block that is not full, on average half of it.
        empty = self.num_groups * self.block
        used = (self.num_rows - empty) / self.num_shards + empty / 2
        return max(1, math.ceil(used / (self.block * self.chunk)))


def tiling(num_rows: int, num_groups: int, num_shards: int = 1) -> Tiling:
    """Return the layout of rows for the platform of the current trace.

    On a GPU, each block reads a copy of its kernel, which costs as much as multiplying about 290
    rows with it (H200, bfloat16). On average half of the last block of a group is empty. The size
    of a block makes the sum of both costs small.

    Args:
        num_rows: the largest number of rows in all groups together.
        num_groups: the number of groups.
        num_shards: the number of devices among which all groups are divided.
    """
    if platform() == "tpu":
        return Tiling(1, 1, num_rows, num_shards, num_groups)
    if platform() == "cpu":
        block, chunk = CPU_BLOCK, 1
    else:
        best = math.sqrt(2 * 290 * num_rows / num_groups)
        smallest, largest = GPU_BLOCKS
        block = min(max(2 ** round(math.log2(best)), smallest), largest)
        chunk = GPU_CHUNK if num_shards > 1 else num_rows // block + num_groups
    num_chunks = -(-(num_rows // block + num_groups) // chunk)
    return Tiling(block, chunk, num_chunks * chunk * block, num_shards, num_groups)


def grouped_matmul(x: Array, kernels: Array, sizes: Array, tiles: Tiling) -> Array:
    """Return `x[i] @ kernels[g]` for each row i, where g is the group of the row.

    XLA for CPUs and GPUs computes `jax.lax.ragged_dot` with all kernels for each row. On an H200,
    that takes 8 times as long as a dense matmul with 8 groups, and 70 times with 64. There the
    rows are multiplied block by block instead.

    Args:
        x: rows sorted by group, (R, D), where R is `tiles.num_rows`.
        kernels: the kernel of each group, (E, D, F).
        sizes: the number of rows per group, (E,), int32, multiples of `tiles.block`.
        tiles: the layout of the rows.

    Returns:
        An array (R, F). Rows after the last group are zeros or arbitrary numbers.
    """
    if tiles.block == 1:
        # `plan` reads from the name which share of the rows is in use.
        with jax.named_scope(f"one_of_{tiles.num_shards}"):
            return jax.lax.ragged_dot(x, kernels, sizes)
    return _in_blocks(x, kernels, sizes, tiles)


def _in_blocks(x: Array, kernels: Array, sizes: Array, tiles: Tiling) -> Array:
    @jax.custom_vjp
    def multiply(x: Array, kernels: Array, sizes: Array) -> Array:
        return _multiply_blocks(x, kernels, sizes, tiles)

    def forward(x: Array, kernels: Array, sizes: Array) -> tuple[Array, Residuals]:
        return multiply(x, kernels, sizes), (x, kernels, sizes)

    def backward(residuals: Residuals, grad: Array) -> tuple[Array, Array, None]:
        x, kernels, sizes = residuals
        grad_x = _multiply_blocks(grad, kernels.swapaxes(1, 2), sizes, tiles)
        grad_kernels = _kernel_gradients(x, grad, sizes, tiles)
        return grad_x, grad_kernels.astype(kernels.dtype), None

    multiply.defvjp(forward, backward)
    return multiply(x, kernels, sizes)


def _multiply_blocks(x: Array, kernels: Array, sizes: Array, tiles: Tiling) -> Array:
    blocks = x.reshape(tiles.num_blocks, tiles.block, -1)
    groups = _groups(sizes, tiles)

    def multiply(blocks: Array, groups: Array) -> Array:
        return jnp.einsum("cbd,cdf->cbf", blocks, kernels[groups])

    def multiply_chunk(number: Array, products: Array) -> Array:
        product = multiply(*_chunk(number, tiles, blocks, groups))
        start = number * tiles.chunk
        updated: Array = jax.lax.dynamic_update_slice_in_dim(
            products, product, start, axis=0
        )
        return updated

    if tiles.chunk == tiles.num_blocks:
        return multiply(blocks, groups).reshape(len(x), -1)
    zeros = jnp.zeros((*blocks.shape[:2], kernels.shape[2]), x.dtype)
    num_chunks = _num_chunks(sizes, tiles)
    with _expected_trips(tiles):
        products: Array = jax.lax.fori_loop(0, num_chunks, multiply_chunk, zeros)
    return products.reshape(len(x), -1)


def _kernel_gradients(x: Array, grad: Array, sizes: Array, tiles: Tiling) -> Array:
    """Return the gradients of the kernels, (E, D, F), in float32.

    Blocks are not added at their indices, because the order of such additions varies on GPUs.
    """
    blocks = x.reshape(tiles.num_blocks, tiles.block, -1)
    grads = grad.reshape(tiles.num_blocks, tiles.block, -1)
    groups = _groups(sizes, tiles)

    def multiply(blocks: Array, grads: Array) -> Array:
        return jnp.einsum(
            "cbd,cbf->cdf", blocks, grads, preferred_element_type=jnp.float32
        )

    def add_chunk(number: Array, total: Array) -> Array:
        chunk, chunk_grads, chunk_groups = _chunk(number, tiles, blocks, grads, groups)
        products = multiply(chunk, chunk_grads)
        for index in range(tiles.chunk):
            total = total.at[chunk_groups[index]].add(products[index], mode="drop")
        return total

    if tiles.chunk == tiles.num_blocks:
        is_of_group = (groups[:, None] == jnp.arange(len(sizes))).astype(jnp.float32)
        # Other precisions would round the gradients.
        return jnp.einsum(
            "ce,cdf->edf",
            is_of_group,
            multiply(blocks, grads),
            precision=jax.lax.Precision.HIGHEST,
        )
    zeros = jnp.zeros((len(sizes), x.shape[1], grad.shape[1]), jnp.float32)
    num_chunks = _num_chunks(sizes, tiles)
    with _expected_trips(tiles):
        total: Array = jax.lax.fori_loop(0, num_chunks, add_chunk, zeros)
    return total


def _expected_trips(tiles: Tiling) -> AbstractContextManager[None]:
    """Return a scope whose name tells `plan` how often a loop over chunks usually runs."""
    return jax.named_scope(f"trips_{tiles.expected_chunks}")


def _groups(sizes: Array, tiles: Tiling) -> Array:
    """Return the group of each block; E for a block after the last group."""
    ends = jnp.cumsum(sizes) // tiles.block
    return jnp.searchsorted(ends, jnp.arange(tiles.num_blocks), side="right")


def _num_chunks(sizes: Array, tiles: Tiling) -> Array:
    """Return the number of chunks that are not empty. It is known when the step runs."""
    num_chunks: Array = -(-jnp.sum(sizes) // (tiles.block * tiles.chunk))
    return num_chunks


def _chunk(number: Array, tiles: Tiling, *arrays: Array) -> list[Array]:
    """Return the part of arrays of blocks that belongs to a chunk."""
    start = number * tiles.chunk
    return [jax.lax.dynamic_slice_in_dim(array, start, tiles.chunk) for array in arrays]
