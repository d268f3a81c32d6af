"""Gradients of a batch that is split into micro-batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec

from shardwise.data.layout import BatchLayout
from shardwise.metrics import Mask
from shardwise.module import Pure, path_name
from shardwise.state import StateSpec
from shardwise.tracing.assertions import Failure, first_failure
from shardwise.tree import Batch, DType, Params, PyTree, leaf_name


def accumulated(
    gradient: Callable[..., PyTree],
    spec: StateSpec,
    layout: BatchLayout,
    count: int,
    is_separate: bool,
) -> Callable[..., PyTree]:
    """Return `gradient` summed over micro-batches, which a scan computes one after the other.

    Example i goes to micro-batch `i % count`, so that no example moves to another device. Each
    micro-batch has its own random streams, and starts from the batch statistics that the one before
    it has left, except `BatchMean` variables, which are averaged.

    Args:
        gradient: the gradient of the total of a micro-batch, or of its mean if `is_separate`.
        spec: the abstract state.
        layout: the layout of the complete batch.
        count: the number of micro-batches.
        is_separate: whether each micro-batch counts as a batch, see `Run.coupled_examples`.
    """

    def split(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return jnp.broadcast_to(x, (count,))
        sharding = spec.sharding(PartitionSpec(None, *layout.sharding_of(x).spec))
        x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        x = with_sharding_constraint(x, sharding)
        return x

    averaged = {path_name(path) for path in spec.definition.averaged}
    is_averaged = jax.tree_util.tree_map_with_path(
        lambda path, _: leaf_name(path) in averaged, spec.abstract.other
    )

    def compute(
        params: Params,
        frozen: Params,
        other: Pure,
        batch: Batch,
        mask: Mask | None,
        key: jax.Array,
        step: jax.Array,
    ) -> PyTree:
        def add_micro_batch(
            carry: PyTree, micro_batch: PyTree
        ) -> tuple[PyTree, Failure | None]:
            sums, variables = carry
            index, (batch, mask) = micro_batch
            micro_key = jax.random.fold_in(key, index)
            read = jax.tree.map(
                lambda averaged, start, now: start if averaged else now,
                is_averaged,
                other,
                variables,
            )
            grads, ((means, new), failure) = gradient(
                params, frozen, read, batch, mask, micro_key, step
            )
            variables = jax.tree.map(
                lambda averaged, old, new: old + new / count if averaged else new,
                is_averaged,
                variables,
                new,
            )
            # Sums of 16 bits would be rounded in every micro-batch, and overflow.
            grads = jax.tree.map(lambda g: g.astype(_sum_dtype(g)), grads)
            if is_separate:
                weight = means["loss"].weight
                grads = jax.tree.map(lambda g: g * weight.astype(g.dtype), grads)
            return (jax.tree.map(jnp.add, sums, (grads, means)), variables), failure

        micro_batches = (jnp.arange(count), jax.tree.map(split, (batch, mask)))
        first = jax.tree.map(lambda x: x[0], micro_batches[1])
        grads, ((means, _), _) = jax.eval_shape(
            gradient, params, frozen, other, *first, key, step
        )
        zero_grads, zero_means = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, _sum_dtype(leaf)), (grads, means)
        )
        zero_grads = with_sharding_constraint(zero_grads, spec.shardings.params)
        start = jax.tree.map(
            lambda averaged, x: jnp.zeros_like(x) if averaged else x,
            is_averaged,
            other,
        )
        ((sums, means), variables), failures = jax.lax.scan(
            add_micro_batch,
            ((zero_grads, zero_means), start),
            micro_batches,
        )
        weight = means["loss"].weight
        grads = jax.tree.map(
            lambda total, g: (total / weight.astype(total.dtype)).astype(g.dtype),
            sums,
            grads,
        )
        failure = None if failures is None else first_failure(failures)
        return grads, ((means, variables), failure)

    return compute


def _sum_dtype(leaf: jax.Array | jax.ShapeDtypeStruct) -> DType:
    """Return the dtype in which values of micro-batches are added: at least 32 bits."""
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else leaf.dtype
