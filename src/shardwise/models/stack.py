"""A stack of equal layers: a scan over layers, or a pipeline on a mesh with a stage axis.

The parameters of all layers are arrays with a leading layer dimension. A stage axis shards this
dimension, so that each of its devices, a stage, holds some consecutive layers. The batch is divided
into microbatches. In every tick of the pipeline all stages work at the same time, each on another
microbatch, and pass their results on to the next stage.

It is written for the arrays of all stages, without `shard_map`. A `vmap` over stages, whose
dimension is sharded, lets each device compute its own stage. Passing the results on rotates that
dimension, which XLA compiles to a collective-permute.

With several rounds, the layers form R groups, each stage holds a part of every group, and a
microbatch passes through all stages R times. S microbatches circulate at a time: the last stage
passes them on to the first one, until their last round is over. A stage then waits for 1/R of the
time that it would wait otherwise.

Shapes: S stages, R rounds, M microbatches, D shards of the batch, b examples of a microbatch in a
shard, L layers, B = M * D * b examples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwise.errors import ConfigError
from shardwise.kernels.platform import step_mesh
from shardwise.models.example_keys import (
    Draws,
    example_key,
    find_draws,
    folds_numbers,
    is_positional,
)
from shardwise.sharding import (
    STACKED,
    MeshAxes,
    Pipeline,
    batch_axes,
    current_pipeline,
    has_explicit_axes,
    mapped_axes,
    mapped_over,
    num_stages,
    spec_of_dims,
    stage_axes,
    step_layout,
)
from shardwise.tree import PyTree

Array = jax.Array
Block = TypeVar("Block", bound=nnx.Module)
# From a layer, its input (b, ...) and other arrays of the same examples to its output (b, ...).
ApplyLayer: TypeAlias = Callable[..., PyTree]

# Without an option, a pipeline has at most this many microbatches per stage. The share of time in
# which a stage has nothing to do is then 1/5 at most, and smaller matmuls would be less efficient.
MICROBATCHES_PER_STAGE = 4


class Stack(nnx.Module):
    """Layers of the same kind, one after the other.

    On a mesh with a stage axis, the layers are the stages of a pipeline. On any other mesh, a scan
    compiles one layer for all of them. The parameters are the same arrays in both cases.

    Example:
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.layers = Stack(lambda rngs: Layer(rngs), 12, rngs)
        ...
        ...     def __call__(self, x, segment_ids):
        ...         return self.layers(x, segment_ids)
    """

    def __init__(
        self, layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs
    ):
        """Create the parameters of all layers.

        Args:
            layer: a function from random number generators to a layer. The output of a layer has
                the shape and the dtype of its first argument.
            num_layers: the number of layers.
            rngs: random number generators.
        """
        self.layers = stack_layers(layer, num_layers, rngs)

    def __call__(self, x: Array, *examples: PyTree, **shared: PyTree) -> Array:
        """Apply all layers: each is called as `layer(x, *examples, **shared)`.

        Args:
            x: the input of the first layer. Its first dimension counts examples.
            *examples: other arrays with one entry per example, such as segment ids, or None.
            **shared: values that are the same for all examples, such as a table of positions.
        """

        def apply(layer: nnx.Module, x: PyTree, *examples: PyTree) -> PyTree:
            call = cast(Callable[..., Array], layer)
            return call(x, *examples, **shared)

        output: Array = run_layers(self.layers, apply, x, *examples)
        return output


def stack_layers(
    layer: Callable[[nnx.Rngs], Block], num_layers: int, rngs: nnx.Rngs
) -> Block:
    """Return a layer whose variables have a leading layer dimension.

    Args:
        layer: a function from random number generators to a layer.
        num_layers: the number L of layers.
        rngs: random number generators.
    """
    build = nnx.vmap(
        layer, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None}
    )
    stack = nnx.split_rngs(splits=num_layers)(build)(rngs)
    for _, node in nnx.iter_graph(stack):
        if isinstance(node, nnx.Variable):
            node.set_metadata(STACKED, True)
    return stack


def run_layers(
    stack: nnx.Module, apply: ApplyLayer, x: PyTree, *examples: PyTree
) -> PyTree:
    """Apply the layers of a stack, one after the other.

    Args:
        stack: the layers, from `stack_layers`.
        apply: `apply(layer, x, *examples)` returns the output of one layer.
        x: the input of the first layer, an array (B, ...) or several of them.
        *examples: other arrays (B, ...), such as segment ids.

    Raises:
        ConfigError: if a pipeline cannot run these layers.
    """
    _check_rows(x, examples)
    if is_pipelined():
        return _run_pipeline(stack, apply, x, *examples)

    def apply_layer(layer: nnx.Module, x: PyTree) -> PyTree:
        return apply(layer, x, *examples)

    scan = nnx.scan(apply_layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return scan(stack, x)


def _check_rows(x: PyTree, examples: PyTree) -> None:
    """Raise if an array that should have an entry per example has another number of entries.

    Only a pipeline would need them, but a model should not depend on the mesh.
    """
    rows = jnp.shape(jax.tree.leaves(x)[0])[:1]
    for number, argument in enumerate(examples, start=2):
        for leaf in jax.tree.leaves(argument):
            shape = jnp.shape(leaf)
            if shape[:1] != rows:
                raise ConfigError(
                    f"argument {number} of a stack of layers has shape {list(shape)}, but "
                    f"positional arguments need an entry for each of the {rows[0]} examples: a "
                    "pipeline divides them. Pass values that all examples share by name, as in "
                    "`layers(x, table=table)`."
                )


def is_pipelined() -> bool:
    """Return whether the step that is being traced runs a stack as a pipeline.

    A trace that is only analyzed does not depend on the mesh.
    """
    layout = step_layout()
    return layout is not None and step_mesh() is not None and any(stage_axes(*layout))


def default_microbatches(stages: int, rows: int) -> int:
    """Return the number of microbatches if nothing else is asked for.

    Args:
        stages: the number S of stages.
        rows: the number of examples that pass through a pipeline, divided by its batch axes. If it
            is a multiple of S, so is the result.
    """
    unit = stages if rows % stages == 0 else 1
    counts = range(unit, MICROBATCHES_PER_STAGE * stages + 1, unit)
    return max(count for count in counts if rows % count == 0)


def bubble(stages: int, pipeline: Pipeline) -> float:
    """Return the share of time in which a stage waits for its first or after its last microbatch.

    Args:
        stages: the number S of stages.
        pipeline: the numbers of microbatches and rounds.
    """
    return (stages - 1) / (pipeline.rounds * pipeline.microbatches + stages - 1)


@dataclass(frozen=True)
class _Schedule:
    """How a pipeline divides a batch.

    Attributes:
        sizes: the sizes of the mesh axes that shard the examples outside of the pipeline, in the
            order of the mesh.
        order: the positions of stage axes, and then of all others, in `sizes`.
        stage: the stage axes of the mesh.
        shards: the other axes that shard examples; empty if they cannot be divided.
        num_stages: the number S of stages.
        num_shards: the number D of shards.
        microbatches: the number M of microbatches.
        rounds: the number R of rounds. With several rounds, M is a multiple of S.
        batch_size: the number B of examples.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    stage: MeshAxes
    shards: MeshAxes
    num_stages: int
    num_shards: int
    microbatches: int
    rounds: int
    batch_size: int

    @property
    def num_ticks(self) -> int:
        """The number of ticks until the last microbatch has left the last stage."""
        return self.microbatches * self.rounds + self.num_stages - 1

    def laps(self, x: Array) -> Array:
        """Return microbatches (M, ...) by the tick in which they enter the first stage.

        Stages without a microbatch of their own work on some examples too. Their results are not
        used, but zeros could give non-finite values, which gradients of 0 do not hide.
        """
        idle = jax.lax.stop_gradient(x)
        repeats = -(-(self.num_stages - 1) // self.microbatches)
        after = jnp.concatenate([idle] * repeats)[: self.num_stages - 1]
        if self.rounds > 1:
            groups, others = (
                part.reshape(-1, self.num_stages, *x.shape[1:]) for part in (x, idle)
            )
            x = jnp.concatenate([groups, *[others] * (self.rounds - 1)], axis=1)
            x = x.reshape(-1, *x.shape[2:])
        return jnp.concatenate([x, after])

    def last_round(self, x: Array) -> Array:
        """Return the microbatches (M, ...) that have left the last stage, from all ticks."""
        rest = x.shape[1:]
        x = x[self.num_stages - 1 :]
        if self.rounds == 1:
            return x
        x = x.reshape(-1, self.rounds, self.num_stages, *rest)
        return x[:, -1].reshape(-1, *rest)

    def split(self, x: Array) -> Array:
        """Return (B, ...) as microbatches, (M, D, b, ...). No example leaves its device.

        Examples that a stage holds outside of the pipeline form M / S microbatches.
        """
        rest = x.shape[1:]
        x = x.reshape(*self.sizes, -1, *rest)
        count = len(self.sizes)
        x = x.transpose(*self.order, *range(count, x.ndim))
        held = self.microbatches // self._stage_parts
        # (stage, shard, b, microbatch of the stage, ...)
        x = x.reshape(self._stage_parts, self.num_shards, -1, held, *rest)
        x = jnp.moveaxis(x, 3, 1)
        x = x.reshape(self.microbatches, self.num_shards, -1, *rest)
        return constrained(x, self._microbatch_axes, self.shards)

    def join(self, x: Array) -> Array:
        """Undo `split`."""
        rest = x.shape[3:]
        x = constrained(x, self._microbatch_axes, self.shards)
        x = x.reshape(self._stage_parts, -1, self.num_shards, x.shape[2], *rest)
        x = jnp.moveaxis(x, 1, 3)
        ordered = tuple(self.sizes[i] for i in self.order)
        x = x.reshape(*ordered, -1, *rest)
        back = sorted(range(len(ordered)), key=lambda i: self.order[i])
        x = x.transpose(*back, *range(len(ordered), x.ndim))
        return x.reshape(self.batch_size, *rest)

    @property
    def _stage_parts(self) -> int:
        """The number of parts into which stage axes divide the examples."""
        return self.num_stages if self._microbatch_axes else 1

    @property
    def _microbatch_axes(self) -> MeshAxes:
        is_divided = len(self.sizes) > len(self.shards)
        return self.stage if is_divided else ()

    def spread(self, x: Array) -> Array:
        """Return (L, ...) as a copy for each shard of the batch: (S, D, R, L / (R * S), ...).

        With one copy per shard, the loop adds up gradients of each shard on its own. They are
        reduced over the shards after the loop, once per step. With several rounds, layers change
        their devices: the parameters are stored as without rounds, and move once per step.
        """
        x = x.reshape(self.rounds, self.num_stages, -1, *x.shape[1:])
        x = jnp.moveaxis(x, 1, 0)[:, None]
        shape = (self.num_stages, self.num_shards, *x.shape[2:])
        return constrained(jnp.broadcast_to(x, shape), self.stage, self.shards)

    def per_stage(self, x: Array) -> Array:
        """Return microbatches (M, D, b, ...) as a copy for each stage: (M, S, D, b, ...)."""
        count, *rest = x.shape
        x = jnp.broadcast_to(x[:, None], (count, self.num_stages, *rest))
        return constrained(x, (), self.stage, self.shards)


def constrained(x: Array, *axes: MeshAxes) -> Array:
    """Constrain the first dimensions of `x`; the sharding of all others is left to XLA.

    Args:
        x: an array.
        *axes: the mesh axes of each of the first dimensions.
    """
    free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(axes))
    spec = PartitionSpec(*spec_of_dims(axes), *free)
    result: Array = jax.lax.with_sharding_constraint(x, spec)
    return result


def _make_schedule(batch_size: int) -> _Schedule:
    """Return the schedule of a pipeline in the step that is being traced."""
    layout = step_layout()
    assert layout is not None
    mesh, rules = layout
    stage = stage_axes(mesh, rules)
    stages = num_stages(mesh, rules)
    axes = batch_axes(mesh, rules)
    if batch_size % _size(mesh, axes):
        # The last batch of an evaluation: every device has all of its examples.
        axes = ()
    shards = tuple(axis for axis in axes if axis not in stage)
    order = [i for i, axis in enumerate(axes) if axis in stage]
    order += [i for i, axis in enumerate(axes) if axis not in stage]
    rows = batch_size // _size(mesh, axes)
    held_by = stages if set(stage) <= set(axes) else 1
    pipeline: Pipeline = current_pipeline.value or Pipeline(0)
    per_stage, rest = divmod(pipeline.microbatches, held_by)
    if not per_stage or rest or rows % per_stage:
        # An evaluation with batches of another size, or no number was chosen.
        per_stage = default_microbatches(stages, rows * held_by) // held_by
    microbatches = per_stage * held_by
    return _Schedule(
        sizes=tuple(mesh.shape[axis] for axis in axes),
        order=tuple(order),
        stage=stage,
        shards=shards,
        num_stages=stages,
        num_shards=_size(mesh, shards),
        microbatches=microbatches,
        rounds=pipeline.rounds if microbatches % stages == 0 else 1,
        batch_size=batch_size,
    )


def _size(mesh: Mesh | AbstractMesh, axes: MeshAxes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


@dataclass(frozen=True)
class _Layers:
    """The layers of a stack as arrays.

    Attributes:
        graphdef: the structure of a layer.
        weights: all variables but random streams, (L, ...).
        keys: the words of the keys of random streams, (L, 2).
        counts: the counters of random streams, (L,).
        key_types: the keys as they were, for their types.
    """

    graphdef: nnx.GraphDef[nnx.Module]
    weights: PyTree
    keys: PyTree
    counts: PyTree
    key_types: PyTree


def _split_stack(stack: nnx.Module) -> _Layers:
    """Return the layers of a stack as arrays.

    Raises:
        ConfigError: if a variable is neither a parameter nor a random stream. Each microbatch
            would change it, and the result would depend on their number.
    """
    graphdef, *states = nnx.split(stack, nnx.RngKey, nnx.RngCount, ...)
    keys, counts, weights = states
    for path, variable in nnx.to_flat_state(weights):
        if not isinstance(variable, nnx.Param):
            name = "/".join(map(str, path))
            raise ConfigError(
                f"the layers of a stack have the variable '{name}' of type "
                f"{type(variable).__name__}. On a mesh with a stage axis, layers may have "
                "parameters and random streams only: statistics of a batch cannot be computed "
                "from microbatches. Use a mesh without a stage axis, or layers without it."
            )
    words = jax.tree.map(jax.random.key_data, keys)
    return _Layers(graphdef, weights, words, counts, keys)


def _run_pipeline(
    stack: nnx.Module, apply: ApplyLayer, x: PyTree, *examples: PyTree
) -> PyTree:
    """Apply the layers of a stack as a pipeline, and advance the counters of random streams."""
    if has_explicit_axes():
        raise ConfigError(
            "the model names shardings of activations itself (out_sharding, reshard), and the mesh "
            "has a stage axis. Remove them, or use a mesh without a stage axis."
        )
    assert not mapped_axes(), "a stack inside of a stack is scanned"
    schedule = _make_schedule(len(jax.tree.leaves(x)[0]))
    layers = _split_stack(stack)
    with mapped_over((*schedule.stage, *schedule.shards)):
        draws = _draws(layers, apply, x, examples)

        def run_stage(
            weights: PyTree,
            keys: PyTree,
            counts: PyTree,
            x: PyTree,
            examples: PyTree,
            positions: Array,
        ) -> tuple[PyTree, PyTree]:
            """Apply the layers of one stage to the examples of one shard."""

            def run_layer(x: PyTree, arrays: PyTree) -> tuple[PyTree, PyTree]:
                weights, keys, counts = arrays

                def key_of(words: Array, key: Array) -> Array:
                    if is_positional(key):
                        return example_key(words, positions, schedule.batch_size, draws)
                    # The bits of other generators depend on the shape of a draw anyway.
                    plain = jax.random.wrap_key_data(
                        words, impl=jax.random.key_impl(key)
                    )
                    return jax.random.fold_in(plain, positions[0])

                own = jax.tree.map(key_of, keys, layers.key_types)
                layer = nnx.merge(layers.graphdef, own, counts, weights)
                x = apply(layer, x, *examples)
                return x, nnx.state(layer, nnx.RngCount)

            return jax.lax.scan(run_layer, x, (weights, keys, counts))

        x, counts = _ticks(schedule, run_stage, layers, x, examples)
    nnx.update(stack, counts)
    return x


def _draws(layers: _Layers, apply: ApplyLayer, x: PyTree, examples: PyTree) -> Draws:
    """Return the random numbers and keys that a layer draws for the complete batch."""
    if not jax.tree.leaves(layers.key_types):
        return Draws()

    def run_layer(arrays: PyTree, x: PyTree, examples: PyTree) -> PyTree:
        weights, keys, counts = jax.tree.map(lambda leaf: leaf[0], arrays)
        return apply(nnx.merge(layers.graphdef, keys, counts, weights), x, *examples)

    args = (layers.weights, layers.key_types, layers.counts), x, examples
    closed = jax.make_jaxpr(run_layer)(*args)
    is_example = [
        number > 0 for number, arg in enumerate(args) for _ in jax.tree.leaves(arg)
    ]
    if folds_numbers(closed, is_example, len(jax.tree.leaves(x)[0])):
        raise ConfigError(
            "a layer derives random keys from the numbers of the examples, and each microbatch of "
            "a pipeline would count its examples from 0. Use jax.random.split(key, len(x)), whose "
            "keys are those of the complete batch."
        )
    return find_draws(closed.jaxpr)


def _ticks(
    schedule: _Schedule,
    run_stage: Callable[..., tuple[PyTree, PyTree]],
    layers: _Layers,
    x: PyTree,
    examples: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return the output of the last stage for all examples, and the new counters (L,)."""
    stages = schedule.num_stages
    parts = (layers.weights, layers.keys, layers.counts)
    spread = jax.tree.map(schedule.spread, parts)
    positions = jnp.arange(schedule.batch_size, dtype=jnp.uint32)
    # Segment ids and positions travel with the examples that they belong to.
    travelers = jax.tree.map(
        lambda leaf: schedule.per_stage(schedule.split(leaf)), (x, examples, positions)
    )
    incoming = jax.tree.map(schedule.laps, travelers)
    start = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), travelers)
    every_shard = jax.vmap(
        _with_round(run_stage, schedule.rounds),
        in_axes=(None, *(0,) * 4),
        spmd_axis_name=schedule.shards or None,
    )
    every_stage = jax.vmap(every_shard, spmd_axis_name=schedule.stage)

    def tick(state: PyTree, now: tuple[Array, PyTree]) -> tuple[PyTree, PyTree]:
        number, new = now
        # The tick of each stage since the first microbatch reached it.
        own = number - jnp.arange(stages)
        lap = schedule.rounds * stages

        def move(old: Array, new: Array) -> Array:
            if schedule.rounds > 1:
                # The last stage passes on to the first one, except when a group enters.
                returned = _pass_on(old, 1 - stages)
                new = jnp.where(number % lap < stages, new, returned)
            moved = jnp.where(_is_stage(0, old.ndim, stages), new, _pass_on(old, 1))
            return constrained(moved, schedule.stage, schedule.shards)

        x, examples, positions = jax.tree.map(move, state, new)
        rounds = (own % lap) // stages
        x, drawn = every_stage(rounds, spread, x, examples, positions)
        x = jax.tree.map(
            lambda leaf: constrained(leaf, schedule.stage, schedule.shards), x
        )
        return (x, examples, positions), (x, drawn)

    ticks = jnp.arange(schedule.num_ticks)
    _, (outputs, drawn) = jax.lax.scan(tick, start, (ticks, incoming))

    # A sum instead of outputs[:, -1], for which XLA would gather the outputs of all stages.
    def last_stage(outputs: Array) -> Array:
        outputs = schedule.last_round(outputs)
        is_last = _is_stage(stages - 1, outputs.ndim - 1, stages)
        return schedule.join(jnp.where(is_last, outputs, 0).sum(axis=1))

    # All layers draw equally often.
    counts = jax.tree.map(
        lambda count, drawn: count + drawn[-1, 0, 0, 0], layers.counts, drawn
    )
    return jax.tree.map(last_stage, outputs), counts


def _with_round(
    run_stage: Callable[..., tuple[PyTree, PyTree]], rounds: int
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return `run_stage` as a function of a round and of the layers of all rounds.

    It also returns how often each layer has drawn random numbers.
    """

    def run(
        number: Array, layers: PyTree, x: PyTree, examples: PyTree, positions: Array
    ) -> tuple[PyTree, PyTree]:
        weights, keys, counts = jax.tree.map(
            lambda leaf: leaf[0 if rounds == 1 else number], layers
        )
        x, after = run_stage(weights, keys, counts, x, examples, positions)
        return x, jax.tree.map(jnp.subtract, after, counts)

    if rounds == 1:
        return run

    def is_saved(operation: Primitive, *_: object, **__: object) -> bool:
        # The layers of a round would be saved for each tick. They are read again instead.
        return operation.name not in ("gather", "dynamic_slice")

    # Inside of a scan, XLA does not undo it.
    return jax.checkpoint(run, policy=is_saved, prevent_cse=False)


def _pass_on(x: Array, by: int) -> Array:
    """Return `x` shifted by some stages. XLA compiles this form to a collective-permute."""
    shift = [(by, -by, 0), *[(0, 0, 0)] * (x.ndim - 1)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), shift)


def _is_stage(index: int, ndim: int, stages: int) -> Array:
    """Return a mask of one stage, for arrays whose first dimension counts stages."""
    mask: Array = jnp.arange(stages) == index
    return mask.reshape(-1, *(1,) * (ndim - 1))
