"""The tokens of all sequences as one matrix, and back.

Between the attention layers of a transformer no token depends on another one, so the order of its
rows does not matter. On a mesh with a context axis, a device holds a part of each of its sequences,
and in natural order these tokens are not adjacent rows. There the rows are ordered by device first,
so that every token stays where it is.

Shapes: B sequences, T tokens, N = B * T.
"""

import math
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from shardwise.kernels.platform import step_mesh
from shardwise.sharding import (
    MeshAxes,
    batch_axes,
    context_axes,
    has_explicit_axes,
    step_layout,
)

Array = jax.Array


@dataclass(frozen=True)
class TokenTiles:
    """How the tokens of a batch are distributed over the devices.

    Attributes:
        batch: the mesh axes that shard the sequences.
        context: the mesh axes that shard the tokens of each sequence.
        num_batch: the number of shards of the sequences.
        num_context: the number of shards of each sequence.
    """

    batch: MeshAxes
    context: MeshAxes
    num_batch: int
    num_context: int


def token_tiles(batch_size: int, length: int) -> TokenTiles | None:
    """Return how tokens are distributed in the step that is being traced.

    Args:
        batch_size: the number of sequences.
        length: the number of tokens in a sequence.

    Returns:
        None if no axis of the mesh shards tokens, also outside of a step.
    """
    layout = step_layout()
    if layout is None or step_mesh() is None or has_explicit_axes():
        return None
    mesh, rules = layout
    context = context_axes(mesh, rules)
    num_context = math.prod(mesh.shape[axis] for axis in context)
    if not context or length % num_context:
        return None
    batch = batch_axes(mesh, rules)
    num_batch = math.prod(mesh.shape[axis] for axis in batch)
    if batch_size % num_batch:
        # The last batch of an evaluation: every device has all of its sequences.
        batch, num_batch = (), 1
    return TokenTiles(batch, context, num_batch, num_context)


def merge_tokens(x: Array) -> Array:
    """Return the tokens of all sequences as rows: (B, T, ...) becomes (N, ...)."""
    batch_size, length, *rest = x.shape
    tiles = token_tiles(batch_size, length)
    if tiles is not None:
        # (batch shard, sequence, context shard, token, ...), then both shards first.
        sizes = _tile_sizes(tiles, batch_size, length)
        x = _on_tiles(x.reshape(*sizes, *rest).swapaxes(1, 2), tiles)
    return x.reshape(batch_size * length, *rest)


def split_tokens(x: Array, batch_size: int, length: int) -> Array:
    """Undo `merge_tokens`: (N, ...) becomes (B, T, ...).

    Args:
        x: the tokens of all sequences as rows.
        batch_size: the number B of sequences.
        length: the number T of tokens in a sequence.
    """
    rest = x.shape[1:]
    tiles = token_tiles(batch_size, length)
    if tiles is not None:
        batch, sequences, context, tokens = _tile_sizes(tiles, batch_size, length)
        x = x.reshape(batch, context, sequences, tokens, *rest)
        x = _on_tiles(x, tiles).swapaxes(1, 2)
    return x.reshape(batch_size, length, *rest)


def _tile_sizes(
    tiles: TokenTiles, batch_size: int, length: int
) -> tuple[int, int, int, int]:
    return (
        tiles.num_batch,
        batch_size // tiles.num_batch,
        tiles.num_context,
        length // tiles.num_context,
    )


def _on_tiles(x: Array, tiles: TokenTiles) -> Array:
    """Constrain (batch shard, context shard, sequence, token, ...) to one tile per device."""
    free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 4)
    spec = PartitionSpec(tiles.batch or None, tiles.context, None, None, *free)
    constrained: Array = jax.lax.with_sharding_constraint(x, spec)
    return constrained
