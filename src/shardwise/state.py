"""The state of a run: its abstract description first, then the arrays, created where they will live.

One description serves creation, planning and restoring. Another mesh is another description, nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.mesh import make_mesh
from shardwise.module import ModelFactory, ModuleDef, Pure, build_module, path_name, split_module
from shardwise.sharding import Placement, Rules, at_use, place_model, place_optimizer
from shardwise.tree import leaf_name


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run must keep. `step` counts the batches consumed, so it is the data position too."""

    step: Any
    params: Pure
    other: Pure  # batch statistics and any other variable that is no parameter and no random stream
    opt_state: Any
    frozen: Pure = field(
        default_factory=dict
    )  # parameters that are not trained: in no checkpoint, loaded at each start


@dataclass(frozen=True)
class StateSpec:
    """A state without arrays: shapes, dtypes and shardings, and what it takes to create it."""

    factory: ModelFactory
    optimizer: optax.GradientTransformation
    mesh: Mesh
    rules: Rules
    definition: ModuleDef
    abstract: TrainState  # of jax.ShapeDtypeStruct with sharding
    params: Mapping[str, Placement]
    other: Mapping[str, Placement]
    opt_state: Mapping[str, Placement]
    frozen: Mapping[str, Placement] = field(default_factory=dict)

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def at_use(self, path: str) -> NamedSharding:
        """The layout of a parameter where the loss uses it."""
        return self.sharding(at_use({**self.params, **self.frozen}[path].spec, self.rules))

    def module(self, state: TrainState, key: jax.Array | None = None) -> nnx.Module:
        """The model with the arrays of `state`; `key` feeds its random streams, if it has any."""
        return self.definition.merge(
            state.params,
            state.other,
            jax.random.key(0) if key is None else key,
            frozen=state.frozen,
        )

    @property
    def bytes_per_device(self) -> int:
        return sum(
            p.bytes_per_device
            for part in (self.params, self.frozen, self.other, self.opt_state)
            for p in part.values()
        )

    @property
    def num_params(self) -> int:
        """Those that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract.params))

    @property
    def num_frozen(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract.frozen))


def abstract_state(
    model: ModelFactory,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | str,
    rules: Rules | None = None,
) -> StateSpec:
    """Describes the state of `model` and `optimizer` on `mesh`; allocates nothing and compiles nothing."""
    if isinstance(model, nnx.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__} already; give the function that makes it, such as lambda rngs: Model(rngs=rngs)."
        )
    rules = Rules() if rules is None else rules
    mesh = make_mesh(mesh)
    found: list[ModuleDef] = []

    def create() -> TrainState:
        definition, state = _create(model, optimizer, jax.random.key(0))
        found.append(definition)
        return state

    shapes = jax.eval_shape(create)
    definition = found[-1]
    parts = (definition.params, definition.other, definition.frozen)
    placed = place_model(
        {path_name(path): leaf for part in parts for path, leaf in part.items()}, mesh, rules
    )
    params, other, frozen = (
        {path_name(path): placed[path_name(path)] for path in part} for part in parts
    )
    opt_state = place_optimizer(shapes.opt_state, params, mesh, rules)

    def abstract(placements: Mapping[str, Placement], tree: Any) -> Any:
        def one(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, placements[leaf_name(path)].spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    state = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
        abstract(params, shapes.params),
        abstract(other, shapes.other),
        abstract(opt_state, shapes.opt_state),
        abstract(frozen, shapes.frozen),
    )
    return StateSpec(
        model, optimizer, mesh, rules, definition, state, params, other, opt_state, frozen
    )


def init_state(spec: StateSpec, seed: int) -> TrainState:
    """Model and optimizer, made inside one compiled function: no device ever holds a whole leaf that is cut.

    The same seed gives the same bits on every mesh.
    """

    def create(key: jax.Array) -> TrainState:
        return _create(spec.factory, spec.optimizer, key)[1]

    # On the CPU, XLA vectorizes a piece that is narrower than a vector unlike the whole, and rounds its normal draws unlike
    # it too (jax 0.12.0). Level 1 vectorizes neither.
    on_cpu = spec.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 1} if on_cpu else None
    return jax.jit(create, out_shardings=spec.shardings, compiler_options=options)(
        jax.random.key(seed)
    )


def _create(
    factory: ModelFactory, optimizer: optax.GradientTransformation, key: jax.Array
) -> tuple[ModuleDef, TrainState]:
    """The one way a state comes to be, traced for its shapes and compiled for its arrays."""
    try:
        module = build_module(factory, key)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"the model cannot be made: {where(error)}") from error
    definition, params, other = split_module(module)
    return definition, TrainState(
        jnp.zeros((), jnp.int32),
        params,
        other,
        optimizer.init(params),
        definition.read_frozen(module),
    )
