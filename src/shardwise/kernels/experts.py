"""The experts of a mixture-of-experts layer: each token passes through a few MLPs of many.

`apply_experts` is dropless: every token reaches the experts that the router chose for it, so the
result is the same on every mesh. The choices of a token are called slots. Slots are sorted by
expert, so that each expert multiplies one block of rows (`grouped_matmul`).

On a mesh with an expert axis, each device holds some of the experts, and a part of the batch. The
tokens of these devices are gathered, each device computes its own experts for all of them, and a
reduce-scatter adds the results and returns each token to its device.

`apply_experts_with_capacity` has a fixed number of places per expert and sequence. It moves less
over the network, because tokens go to the devices of their experts only (all-to-all), and it drops
what finds no place.

Shapes: B sequences, T tokens, D width, E experts, F hidden width of an expert, k choices per token,
N = B * T, S = N * k slots, R sorted rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import all_gather, all_to_all, axis_index, psum, psum_scatter
from jax.sharding import PartitionSpec

from shardwise.errors import ConfigError
from shardwise.kernels.grouped import Tiling, grouped_matmul, tiling
from shardwise.kernels.platform import step_mesh
from shardwise.sharding import (
    MeshAxes,
    batch_axes,
    context_axes,
    has_explicit_axes,
    logical_axes,
    step_layout,
)

Array = jax.Array
Activation: TypeAlias = Callable[[Array], Array]
# The kernels of all experts: gate (E, D, F) or None, up (E, D, F) and down (E, F, D).
Kernels: TypeAlias = tuple[Array | None, Array, Array]


@dataclass(frozen=True)
class ExpertLayout:
    """How tokens and experts are distributed over the devices of a step.

    Attributes:
        batch: the mesh axes that shard the sequences.
        context: the mesh axes that shard the tokens of each sequence.
        experts: the mesh axes that shard the experts.
        mlp: the mesh axes that shard the hidden width of an expert.
        num_shards: the number of shards of the experts.
    """

    batch: MeshAxes
    context: MeshAxes
    experts: MeshAxes
    mlp: MeshAxes
    num_shards: int

    @property
    def gathered(self) -> MeshAxes:
        """The expert axes that also shard the sequences: their devices have different tokens."""
        return tuple(axis for axis in self.experts if axis in self.batch)

    @property
    def summed(self) -> MeshAxes:
        """The axes whose devices compute a part of the output of the same tokens."""
        others = tuple(axis for axis in self.experts if axis not in self.batch)
        return others + self.mlp

    @property
    def tokens(self) -> PartitionSpec:
        """The spec of arrays (B, T, ...)."""
        return PartitionSpec(self.batch or None, self.context or None)

    def kernels(self, kernels: Kernels) -> tuple[PartitionSpec | None, ...]:
        """Return the specs of the kernels of all experts."""
        experts, mlp = self.experts or None, self.mlp or None
        inner = PartitionSpec(experts, None, mlp)
        outer = PartitionSpec(experts, mlp, None)
        return (None if kernels[0] is None else inner, inner, outer)


def expert_layout(batch_size: int, length: int) -> ExpertLayout | None:
    """Return how tokens and experts are distributed in the step that is being traced.

    Args:
        batch_size: the number of sequences.
        length: the number of tokens in a sequence.

    Returns:
        None outside of a step, and in a step on one device.
    """
    layout = step_layout()
    if layout is None or step_mesh() is None or has_explicit_axes():
        return None
    mesh, rules = layout
    if mesh.size == 1:
        return None

    def num_shards(axes: MeshAxes) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    batch, context = batch_axes(mesh, rules), context_axes(mesh, rules)
    experts = logical_axes("experts", mesh, rules)
    if batch_size % num_shards(batch):
        # The last batch of an evaluation: every device has all of its sequences.
        batch = ()
    if length % num_shards(context):
        context = ()
    # An axis can shard one dim of a kernel only.
    mlp = tuple(
        axis for axis in logical_axes("mlp", mesh, rules) if axis not in experts
    )
    return ExpertLayout(batch, context, experts, mlp, num_shards(experts))


def apply_experts(
    x: Array,
    choice: Array,
    weight: Array,
    kernels: Kernels,
    activation: Activation = jax.nn.silu,
) -> Array:
    """Return the weighted sum of the outputs of the chosen experts, for each token.

    An expert with a gate computes `(activation(x @ gate) * (x @ up)) @ down`, another one
    `activation(x @ up) @ down`.

    Args:
        x: tokens, (B, T, D).
        choice: the experts of each token, (B, T, k), integers.
        weight: their weights, (B, T, k).
        kernels: gate (E, D, F) or None, up (E, D, F) and down (E, F, D).
        activation: an element-wise function.

    Returns:
        An array like `x`.
    """
    layout = expert_layout(*x.shape[:2])
    y: Array = _apply_experts(x, choice, weight, kernels, activation, layout)
    return y


# The analysis of the loss and the count of FLOPs know this function by its name: the slots of all
# examples are sorted together, but no example depends on another one.
@partial(jax.jit, static_argnames=("activation", "layout"))
def _apply_experts(
    x: Array,
    choice: Array,
    weight: Array,
    kernels: Kernels,
    activation: Activation,
    layout: ExpertLayout | None,
) -> Array:
    if layout is None:
        return _own_experts(x, choice, weight, kernels, 0, 1, activation)

    def compute(x: Array, choice: Array, weight: Array, kernels: Kernels) -> Array:
        for axis in reversed(layout.gathered):
            x, choice, weight = (
                all_gather(array, axis, axis=0, tiled=True)
                for array in (x, choice, weight)
            )
        first: int | Array = 0
        if layout.experts:
            first = axis_index(layout.experts) * kernels[1].shape[0]
        num_shards = layout.num_shards
        y = _own_experts(x, choice, weight, kernels, first, num_shards, activation)
        if layout.summed:
            y = psum(y, layout.summed)
        for axis in layout.gathered:
            y = psum_scatter(y, axis, scatter_dimension=0, tiled=True)
        return y

    sharded = jax.shard_map(
        compute,
        in_specs=(*(layout.tokens,) * 3, layout.kernels(kernels)),
        out_specs=layout.tokens,
        # The kernels below do not declare which axes their results vary over.
        check_vma=False,
    )
    return sharded(x, choice, weight, kernels)


def _own_experts(
    x: Array,
    choice: Array,
    weight: Array,
    kernels: Kernels,
    first: int | Array,
    num_shards: int,
    activation: Activation,
) -> Array:
    """Return the sum of the outputs of some experts; other choices contribute 0.

    Args:
        x: (B, T, D).
        choice: (B, T, k).
        weight: (B, T, k).
        kernels: the kernels of the experts from `first` on.
        first: the number of the first expert.
        num_shards: the number of devices among which all experts are divided.
        activation: an element-wise function.
    """
    gate, up, down = kernels
    num_choices = choice.shape[-1]
    tiles = tiling(choice.size, up.shape[0], num_shards)
    multiply = partial(grouped_matmul, tiles=tiles)
    rows = sort_slots(choice.reshape(-1) - first, up.shape[0], tiles)
    sorted_x = spread(x.reshape(-1, x.shape[-1]), rows, num_choices)
    hidden = checkpoint_name(multiply(sorted_x, up, rows.sizes), "up")
    if gate is None:
        hidden = activation(hidden)
    else:
        gates = checkpoint_name(multiply(sorted_x, gate, rows.sizes), "up")
        hidden = activation(gates) * hidden
    outputs = collect(multiply(hidden, down, rows.sizes), rows)
    outputs = outputs.reshape(*choice.shape, x.shape[-1])
    # In float32: the sum of a few numbers must not depend on which device adds them.
    total = jnp.einsum(
        "btkd,btk->btd", outputs, weight, preferred_element_type=jnp.float32
    )
    return total.astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SortedSlots:
    """Where each slot is among the rows that are sorted by expert.

    Each expert has complete blocks. The last rows in a block may have no slot.

    Attributes:
        row_of: the row of each slot, (S,); R for a slot of an expert that is not here.
        slot_of: the slot of each row, (R,); S for a row without one.
        sizes: the number of rows per expert, (E,), all multiples of the block size.
    """

    row_of: Array
    slot_of: Array
    sizes: Array


def sort_slots(expert: Array, num_experts: int, tiles: Tiling) -> SortedSlots:
    """Assign a row to each slot, sorted by expert.

    Args:
        expert: the expert of each slot, (S,). Slots whose expert is not 0 to E - 1 get no row.
        num_experts: the number E of experts.
        tiles: the layout of the rows.
    """
    num_slots = expert.shape[0]
    num_rows = tiles.num_rows
    is_here = (expert >= 0) & (expert < num_experts)
    key = jnp.where(is_here, expert, num_experts)
    # The sort is stable: slots of one expert stay in order.
    order = jnp.argsort(key)
    sorted_key = key[order]
    # The slots of expert e are order[starts[e] : starts[e + 1]].
    starts = jnp.searchsorted(sorted_key, jnp.arange(num_experts + 1))
    sizes = -(-jnp.diff(starts) // tiles.block) * tiles.block
    first_rows = jnp.cumulative_sum(sizes, include_initial=True)
    row = first_rows[sorted_key] + jnp.arange(num_slots) - starts[sorted_key]
    row = jnp.where(sorted_key < num_experts, row, num_rows)
    slot_of = jnp.full(num_rows, num_slots, order.dtype)
    slot_of = slot_of.at[row].set(order, mode="drop")
    row_of = jnp.zeros_like(row).at[order].set(row, unique_indices=True)
    return SortedSlots(row_of, slot_of, sizes.astype(jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x: Array, rows: SortedSlots, num_choices: int) -> Array:
    """Return the token of each row, (R, D); zeros for a row without a slot.

    Forward and backward pass only read: an addition to indexed rows is slow on all platforms, and
    its order varies on GPUs.

    Args:
        x: tokens, (N, D).
        rows: the row assigned to each slot.
        num_choices: the number k of slots per token.
    """
    return _read(x, rows.slot_of // num_choices)


def _spread_forward(
    x: Array, rows: SortedSlots, num_choices: int
) -> tuple[Array, SortedSlots]:
    return spread(x, rows, num_choices), rows


def _spread_backward(
    num_choices: int, rows: SortedSlots, grad: Array
) -> tuple[Array, None]:
    slots = _read(grad, rows.row_of)
    per_token = slots.reshape(-1, num_choices, grad.shape[-1])
    return per_token.sum(1, dtype=jnp.float32).astype(grad.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(y: Array, rows: SortedSlots) -> Array:
    """Return the row of each slot, (S, D); zeros for a slot whose expert is not here.

    Args:
        y: rows, (R, D).
        rows: the row assigned to each slot.
    """
    return _read(y, rows.row_of)


def _collect_forward(y: Array, rows: SortedSlots) -> tuple[Array, SortedSlots]:
    return collect(y, rows), rows


def _collect_backward(rows: SortedSlots, grad: Array) -> tuple[Array, None]:
    return _read(grad, rows.slot_of), None


collect.defvjp(_collect_forward, _collect_backward)


def _read(x: Array, index: Array) -> Array:
    """Return `x[index]`, with zeros for an index after the last row."""
    read: Array = x.at[index].get(mode="fill", fill_value=0)
    return read


def apply_experts_with_capacity(
    x: Array,
    choice: Array,
    weight: Array,
    kernels: Kernels,
    capacity: float,
    activation: Activation = jax.nn.silu,
) -> tuple[Array, Array]:
    """Return what `apply_experts` returns, but with a number of places per expert and sequence.

    The first tokens of a sequence get the places of an expert. A limit per device instead of per
    sequence would drop other choices on another mesh.

    Args:
        x: tokens, (B, T, D).
        choice: the experts of each token, (B, T, k), integers.
        weight: their weights, (B, T, k).
        kernels: gate (E, D, F) or None, up (E, D, F) and down (E, F, D).
        capacity: the number of places, where 1 is enough for an even distribution.
        activation: an element-wise function.

    Returns:
        An array like `x`, and the share of the choices of each sequence that were dropped, (B,).

    Raises:
        ConfigError: if an axis of the mesh shards the tokens of a sequence.
    """
    layout = expert_layout(*x.shape[:2])
    if layout is not None and layout.context:
        raise ConfigError(
            f"experts with capacity={capacity} count the tokens of a sequence, and the mesh axis "
            f"{layout.context} shards them. Use capacity=None, which drops nothing, or a mesh "
            "without this axis."
        )
    num_slots = choice.shape[1] * choice.shape[2]
    num_experts = kernels[1].shape[0]
    places = math.ceil(capacity * num_slots / num_experts)
    result: tuple[Array, Array] = _apply_experts_with_capacity(
        x, choice, weight, kernels, places, activation, layout
    )
    return result


@partial(jax.jit, static_argnames=("places", "activation", "layout"))
def _apply_experts_with_capacity(
    x: Array,
    choice: Array,
    weight: Array,
    kernels: Kernels,
    places: int,
    activation: Activation,
    layout: ExpertLayout | None,
) -> tuple[Array, Array]:
    num_experts = kernels[1].shape[0]

    def compute(
        x: Array, choice: Array, weight: Array, kernels: Kernels
    ) -> tuple[Array, Array]:
        batch_size, _, num_choices = choice.shape
        rows = jax.vmap(partial(_placed_slots, num_experts=num_experts, places=places))(
            choice.reshape(batch_size, -1)
        )
        placed = jax.vmap(partial(spread, num_choices=num_choices))(x, rows)
        placed = placed.reshape(batch_size, num_experts, places, -1)
        placed = _to_experts(placed, layout, num_experts)
        outputs = _dense_experts(placed, kernels, activation)
        outputs = _from_experts(outputs, layout, num_experts)
        outputs = outputs.reshape(batch_size, num_experts * places, -1)
        outputs = jax.vmap(collect)(outputs, rows).reshape(*choice.shape, -1)
        total = jnp.einsum(
            "btkd,btk->btd", outputs, weight, preferred_element_type=jnp.float32
        )
        y = total.astype(x.dtype)
        if layout is not None and layout.summed:
            y = psum(y, layout.summed)
        is_dropped = rows.row_of == num_experts * places
        return y, is_dropped.mean(1, dtype=jnp.float32)

    if layout is None:
        return compute(x, choice, weight, kernels)
    sharded = jax.shard_map(
        compute,
        in_specs=(*(layout.tokens,) * 3, layout.kernels(kernels)),
        out_specs=(layout.tokens, PartitionSpec(layout.batch or None)),
        check_vma=False,
    )
    return sharded(x, choice, weight, kernels)


def _placed_slots(expert: Array, num_experts: int, places: int) -> SortedSlots:
    """Assign a row to each slot of one sequence, with `places` rows per expert."""
    num_slots, num_rows = expert.shape[0], num_experts * places
    order = jnp.argsort(expert)
    sorted_expert = expert[order]
    starts = jnp.searchsorted(sorted_expert, jnp.arange(num_experts))
    place = jnp.arange(num_slots) - starts[sorted_expert]
    row = jnp.where(place < places, sorted_expert * places + place, num_rows)
    slot_of = jnp.full(num_rows, num_slots, order.dtype)
    slot_of = slot_of.at[row].set(order, mode="drop")
    row_of = jnp.zeros_like(row).at[order].set(row, unique_indices=True)
    return SortedSlots(row_of, slot_of, jnp.full(num_experts, places))


def _dense_experts(x: Array, kernels: Kernels, activation: Activation) -> Array:
    """Apply expert e to (B, e, places, D)."""
    gate, up, down = kernels
    hidden = checkpoint_name(jnp.einsum("becd,edf->becf", x, up), "up")
    if gate is None:
        hidden = activation(hidden)
    else:
        gates = checkpoint_name(jnp.einsum("becd,edf->becf", x, gate), "up")
        hidden = activation(gates) * hidden
    return jnp.einsum("becf,efd->becd", hidden, down)


def _to_experts(x: Array, layout: ExpertLayout | None, num_experts: int) -> Array:
    """Send (B, E, places, D) to the devices of the experts: (more B, fewer E, places, D)."""
    if layout is None or not layout.experts:
        return x
    own = num_experts // layout.num_shards
    moved: Array
    if layout.gathered:
        moved = all_to_all(x, layout.gathered, 1, 0, tiled=True)
    else:
        start = axis_index(layout.experts) * own
        moved = jax.lax.dynamic_slice_in_dim(x, start, own, 1)
    return moved


def _from_experts(y: Array, layout: ExpertLayout | None, num_experts: int) -> Array:
    """Undo `_to_experts`. Experts of other devices have zeros where tokens did not move."""
    if layout is None or not layout.experts:
        return y
    own = num_experts // layout.num_shards
    moved: Array
    if layout.gathered:
        moved = all_to_all(y, layout.gathered, 0, 1, tiled=True)
    else:
        zeros = jnp.zeros((y.shape[0], num_experts, *y.shape[2:]), y.dtype)
        start = axis_index(layout.experts) * own
        moved = jax.lax.dynamic_update_slice_in_dim(zeros, y, start, 1)
    return moved
