"""The state of a run: first its abstract description, then its arrays, created sharded.

One abstract description serves creation, planning and restoring. Another mesh is another
description, and nothing else changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from shardwise.data.layout import num_rows
from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.kernels.platform import is_analyzed
from shardwise.mesh import make_mesh
from shardwise.module import (
    AccessHook,
    Filter,
    ModelFactory,
    ModuleDef,
    Pure,
    build_module,
    describe_model,
    path_name,
    split_module,
)
from shardwise.sharding import (
    Pipeline,
    Placement,
    Rules,
    activations_on,
    at_use,
    axes_of_entry,
    batch_spec,
    current_pipeline,
    num_batch_shards,
    place_model,
    place_optimizer,
    stage_axes,
)
from shardwise.text import Json
from shardwise.tree import (
    Batch,
    KeyPath,
    Leaf,
    OptState,
    Params,
    PyTree,
    abstract_key,
    leaf_name,
)

Result = TypeVar("Result")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run keeps from step to step.

    Attributes:
        step: the number of batches consumed, as an int32 scalar. It is also the position in the
            data, because a step that is skipped consumes its batch too.
        params: trainable parameters.
        other: batch statistics, and any other variable that is neither a parameter nor a random
            stream.
        opt_state: the state of the Optax optimizer.
        frozen: parameters that are not trained. Gradients, optimizer and averages see `params`
            only, so they need no rule about them. No checkpoint contains them; each start loads
            them again.
    """

    step: jax.Array
    params: Pure
    other: Pure
    opt_state: OptState
    frozen: Pure = field(default_factory=dict)


@dataclass(frozen=True)
class StateSpec:
    """A state without arrays: shapes, dtypes and shardings, and what is needed to create it.

    Attributes:
        create: the function from a random key to the state. `abstract_state` has traced it; JAX
            keeps the trace as long as the function, so `init_state` does not trace it again.
        optimizer: the Optax optimizer.
        mesh: the devices.
        rules: the rules that decided the shardings.
        definition: the static part of the model.
        abstract: the state as `jax.ShapeDtypeStruct` with shardings.
        params: the placement of each trainable parameter, by name.
        other: the placement of each variable in `TrainState.other`, by name.
        opt_state: the placement of each leaf of the optimizer state, by name.
        frozen: the placement of each frozen parameter, by name.
        is_explicit: whether the model computes with mesh axes of type Explicit, because it names
            shardings of activations itself: `layer(x, out_sharding=P("data"))`,
            `jax.sharding.reshard`. Everything outside of the model has axes of type Auto.
        pipeline: how a pipeline divides its work; None without a stage axis.
    """

    create: Callable[[jax.Array], TrainState]
    optimizer: optax.GradientTransformation
    mesh: Mesh
    rules: Rules
    definition: ModuleDef
    abstract: TrainState
    params: Mapping[str, Placement]
    other: Mapping[str, Placement]
    opt_state: Mapping[str, Placement]
    frozen: Mapping[str, Placement] = field(default_factory=dict)
    is_explicit: bool = False
    pipeline: Pipeline | None = None

    @property
    def shardings(self) -> TrainState:
        """The sharding of each leaf, as a `TrainState` of `NamedSharding`."""
        shardings: TrainState = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        return shardings

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding for a partition spec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def at_use(self, path: str) -> NamedSharding:
        """Return the sharding of a parameter where the loss uses it, see `sharding.at_use`."""
        placement = self.frozen[path] if path in self.frozen else self.params[path]
        return self.sharding(at_use(placement, self.rules))

    def computing_in(self, dtype: DTypeLike | None) -> "StateSpec":
        """Return the description of a state whose model computes in `dtype`.

        Args:
            dtype: the dtype of layers and of parameters where the model reads them. The state keeps
                its dtypes. None leaves both to the model.
        """
        return replace(self, definition=self.definition.computing_in(dtype))

    def module(self, state: TrainState, key: jax.Array | None = None) -> nnx.Module:
        """Return the model with the arrays of `state`.

        Args:
            state: arrays, or the abstract state while tracing.
            key: the root key of the model's random streams; `jax.random.key(0)` if None.
        """
        if key is None:
            key = jax.random.key(0)
        return self.definition.merge(
            state.params, state.other, key, frozen=state.frozen
        )

    def call(
        self,
        function: Callable[..., Result],
        arrays: tuple[Params, Params, Pure],
        batch: Batch,
        key: jax.Array,
        step: jax.Array,
        *,
        hooks: Mapping[str, AccessHook] | None = None,
        is_compiled: bool = True,
    ) -> Result:
        """Build the model and call a function of it in the mesh context of a step, while tracing.

        Args:
            function: `function(model, other, batch, key, step)`. It uses no other traced arrays.
            arrays: `params`, `frozen` and `other` of a state.
            batch: the batch.
            key: the root key of the random streams.
            step: the number of steps before this one.
            hooks: functions that parameters pass through, see `ModuleDef.merge`.
            is_compiled: whether the trace is compiled for the devices, or only analyzed.
        """

        def on_model(
            params: Params,
            frozen: Params,
            other: Pure,
            batch: Batch,
            key: jax.Array,
            step: jax.Array,
        ) -> Result:
            model = self.definition.merge(params, other, key, hooks, frozen)
            return function(model, other, batch, key, step)

        args = (*arrays, batch, key, step)
        with (
            is_analyzed(not is_compiled),
            current_pipeline(self.pipeline),
            activations_on(self.mesh, self.rules),
        ):
            if not self.is_explicit:
                return on_model(*args)

            def arrays_of(*args: PyTree) -> Result:
                result: Result = jax.tree.map(jnp.asarray, on_model(*args))
                return result

            # Without hooks, which gather parameters, they must be gathered already.
            of_arrays = self.specs(at_use=hooks is None)
            rest = (self.batch_specs(batch), PartitionSpec(), PartitionSpec())
            explicit = jax.sharding.explicit_axes(
                arrays_of, in_sharding=(*of_arrays, *rest)
            )
            result: Result = explicit(*args)
            return result

    def specs(self, *, at_use: bool = False) -> tuple[PyTree, PyTree, PyTree]:
        """Return the partition specs of `params`, `frozen` and `other`, as trees.

        Args:
            at_use: return those of parameters where the loss uses them, instead of as stored.
        """

        def spec_of(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
            if at_use and leaf_name(path) not in self.other:
                return self.at_use(leaf_name(path)).spec
            sharding: NamedSharding = leaf.sharding
            return sharding.spec

        parts = (self.abstract.params, self.abstract.frozen, self.abstract.other)
        params, frozen, other = (
            jax.tree_util.tree_map_with_path(spec_of, part) for part in parts
        )
        return params, frozen, other

    def batch_specs(self, batch: Batch) -> PyTree:
        """Return the specs of a batch; replicated if the mesh does not divide its rows.

        Axes of size 1 are omitted: a model with explicit shardings may not name them.
        """
        entry = batch_spec(self.mesh, self.rules)[0]
        used = tuple(axis for axis in axes_of_entry(entry) if self.mesh.shape[axis] > 1)
        is_divisible = num_rows(batch) % num_batch_shards(self.mesh, self.rules) == 0
        spec = PartitionSpec(used) if used and is_divisible else PartitionSpec()
        return jax.tree.map(lambda x: spec if np.ndim(x) else PartitionSpec(), batch)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the state on each device."""
        parts = (self.params, self.frozen, self.other, self.opt_state)
        return sum(leaf.bytes_per_device for part in parts for leaf in part.values())

    @property
    def num_params(self) -> int:
        """The number of trainable parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract.params))

    @property
    def num_frozen(self) -> int:
        """The number of frozen parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract.frozen))


def abstract_state(
    model: ModelFactory,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | str,
    rules: Rules | None = None,
    wrt: Filter = nnx.Param,
) -> StateSpec:
    """Describe the state of a model and an optimizer on a mesh. Nothing is allocated or compiled.

    Args:
        model: a function from `nnx.Rngs` to the model.
        optimizer: any Optax optimizer.
        mesh: a mesh, or a text for `make_mesh`.
        rules: how arrays are sharded; `Rules()` if None.
        wrt: the variables that are trained, as an NNX filter. All others are part of the state, and
            change only if the loss assigns to them.

    Raises:
        ConfigError: if the model cannot be built, or if a rule or an annotation does not fit the
            mesh.

    Example:
        >>> spec = abstract_state(lambda rngs: nnx.Linear(512, 512, rngs=rngs), optax.adam(1e-3),
        "fsdp=8") >>> spec.bytes_per_device
    """
    if isinstance(model, nnx.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__} already. Pass the function that builds it, "
            "for example lambda rngs: Model(rngs=rngs)."
        )
    rules = Rules() if rules is None else rules
    mesh = make_mesh(mesh)
    # `create` stores the definition here while it is traced: it is not an array.
    definitions: list[ModuleDef] = []

    def create(key: jax.Array) -> TrainState:
        definition, state = _create(model, optimizer, key, wrt)
        definitions.append(definition)
        return state

    shapes = jax.eval_shape(create, abstract_key())
    definition = definitions[-1]

    parts = (definition.params, definition.other, definition.frozen)
    leaves = {path_name(path): leaf for part in parts for path, leaf in part.items()}
    if stage_axes(mesh, rules) and not any(leaf.is_stacked for leaf in leaves.values()):
        raise _no_stack_error(definition, shapes, mesh, rules)
    placements = place_model(leaves, mesh, rules)
    params, other, frozen = (
        {path_name(path): placements[path_name(path)] for path in part}
        for part in parts
    )
    opt_state = place_optimizer(shapes.opt_state, params, mesh, rules)
    abstract = TrainState(
        jax.ShapeDtypeStruct(
            (), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())
        ),  # type: ignore[arg-type]
        _with_shardings(shapes.params, params, mesh),
        _with_shardings(shapes.other, other, mesh),
        _with_shardings(shapes.opt_state, opt_state, mesh),
        _with_shardings(shapes.frozen, frozen, mesh),
    )
    return StateSpec(
        create,
        optimizer,
        mesh,
        rules,
        definition,
        abstract,
        params,
        other,
        opt_state,
        frozen,
    )


def _no_stack_error(
    definition: ModuleDef, shapes: TrainState, mesh: Mesh, rules: Rules
) -> ConfigError:
    """Return the error for a mesh with stages and a model without a stack of layers.

    Args:
        definition: the static part of the model.
        shapes: the abstract state.
        mesh: the mesh.
        rules: the rules with the names of stage axes.
    """
    description: Json = {}

    def describe(state: TrainState, key: jax.Array) -> None:
        arrays = (state.params, state.other, key)
        module = definition.merge(*arrays, frozen=state.frozen)
        description.update(describe_model(module))

    jax.eval_shape(describe, shapes, abstract_key())
    axis = stage_axes(mesh, rules)[0]
    fact = (
        f"mesh axis '{axis}' (size {mesh.shape[axis]}) divides a stack of layers, and "
        f"{description['class']} has none."
    )
    if "scan_layers" in description.get("config", {}):
        return ConfigError(f"{fact} Use scan_layers=True, or a mesh without '{axis}'.")
    return ConfigError(
        f"{fact} Change three lines of it, or use a mesh without '{axis}':\n"
        "  from shardwise import Stack\n"
        "  self.layers = Stack(Layer, num_layers, rngs)  # instead of a list of Layer(rngs)\n"
        "  x = self.layers(x)  # instead of a loop over the list"
    )


def _with_shardings(
    tree: PyTree, placements: Mapping[str, Placement], mesh: Mesh
) -> PyTree:
    """Return the abstract `tree` with the sharding that `placements` gives to each leaf."""

    def with_sharding(path: KeyPath, leaf: Leaf) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, placements[leaf_name(path)].spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, tree)


def init_state(spec: StateSpec, seed: int) -> TrainState:
    """Create model and optimizer state in one compiled function, already sharded.

    No device ever holds a complete copy of a leaf that is sharded. The same seed gives the same
    bits on every mesh.

    Args:
        spec: the description of the state, from `abstract_state`.
        seed: the seed of the initial weights.

    Example:
        >>> state = init_state(abstract_state(model, optax.adamw(1e-3), "data=4,fsdp=2"), seed=0)
    """
    # On CPUs, XLA vectorizes a shard that is narrower than a vector register in another way than
    # the complete array, and rounds normal draws differently (jax 0.12.0). Level 1 does not
    # vectorize.
    on_cpu = spec.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 1} if on_cpu else None
    jitted = jax.jit(
        spec.create, out_shardings=spec.shardings, compiler_options=options
    )
    state: TrainState = jitted(jax.random.key(seed))
    return state


def _create(
    factory: ModelFactory,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    wrt: Filter,
) -> tuple[ModuleDef, TrainState]:
    """Build model and optimizer state, while tracing."""
    try:
        module = build_module(factory, key)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"the model cannot be built: {where(error)}") from error
    definition, params, other = split_module(module, wrt)
    try:
        opt_state = optimizer.init(params)
    except ConfigError as error:
        raise ConfigError(f"{error}{_tied(definition)}") from error
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        other=other,
        opt_state=opt_state,
        frozen=definition.read_frozen(module),
    )
    return definition, state


def _tied(definition: ModuleDef) -> str:
    """Return a sentence about tied parameters, for a message about an unknown name."""
    tied = [
        f"'{other}' is '{path_name(path)}'"
        for path, leaf in definition.params.items()
        for other in leaf.other_paths
    ]
    if not tied:
        return ""
    return f"\nIn an optimizer, tied parameters have one name: {', '.join(tied[:4])}."
