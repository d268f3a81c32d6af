"""Where every array lives: a `PartitionSpec` for each leaf of model, optimizer and batch, with a
reason.

For a parameter, the first of these decides:

1. The annotation on the variable (`nnx.with_partitioning` and similar), in mesh axes or logical
   names, if it names an axis of this mesh. `Rules.logical` maps logical names, unless Flax has
   rules for the variable (`sharding_rules=` or `nnx.logical_axis_rules`): then those do.
2. A rule by path in `Rules.paths`, which is taken literally.
3. Nothing: the parameter is replicated.

Unless a rule by path decided, automatic FSDP then shards the largest dim over the FSDP axes of the
mesh, if the leaf does not use these axes yet. Context and expert axes shard the same dim as well.
Stage axes shard the layers of a stack (`models.stack`), whatever decided about the other dims.
Leaves of the optimizer follow their parameter, by path and dim by dim, which covers factored,
masked and partitioned states without knowing any of them. Whatever cannot be done as requested is
an error with numbers, never silent replication.
"""

import difflib
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from shardwise.axes import BATCH, CONTEXT, FSDP, LOGICAL, STAGE
from shardwise.errors import ConfigError
from shardwise.text import did_you_mean
from shardwise.text import show_bytes as show_bytes
from shardwise.tree import DType, PyTree, leaf_name, matches, num_bytes, owner_of

# The axes of one dim, as users write them: a name, several names, or None for a replicated dim.
Axes: TypeAlias = str | tuple[str, ...] | None
# A pattern for parameter paths, and the axes of each dim.
PathRule: TypeAlias = tuple[str, tuple[Axes, ...]]
# Mesh axes of one dim; empty for a replicated dim.
MeshAxes: TypeAlias = tuple[str, ...]
Shape: TypeAlias = tuple[int, ...]
# Pairs of a logical name and its mesh axes, as Flax writes them.
FlaxRules: TypeAlias = tuple[tuple[str, Axes], ...]

# The metadata of a variable that holds the rules of `nnx.logical_axis_rules` at its creation.
CONTEXT_RULES = "logical_axis_rules"
# The metadata of a variable whose first dim counts the layers of a stack.
STACKED = "stacked"


@dataclass(frozen=True)
class Rules:
    """How names and paths map to mesh axes.

    Axes that a mesh does not have are ignored, so that one set of rules serves every mesh.

    Attributes:
        logical: mesh axes of each logical name that annotations use. Entries are added to
            `shardwise.axes.LOGICAL` (vocab, heads, mlp, embed, layers, tokens, experts) and
            override them.
        paths: patterns for parameter paths, each with the axes of its dims, as a mapping or as
            pairs. The first match decides. `{"head/*": ()}` replicates.
        batch: mesh axes that shard the examples of a batch.
        context: mesh axes that shard the tokens of each sequence, which are dim 1 of a batch.
        stage: mesh axes that divide the layers of a stack into the stages of a pipeline. They
            should be in `batch` too, so that they divide the work outside of the stack as well.
        fsdp: mesh axes over which parameters and optimizer state are stored sharded. On a mesh that
            has one, context and expert axes store them sharded as well.
        fsdp_min_size: automatic FSDP does not shard leaves with fewer elements.

    Example:
        >>> Rules(paths={"blocks/*/up/kernel": (None, "model"), "head/*": ()})
        >>> Rules(logical={"joined_kv": "model"})
    """

    logical: Mapping[str, Axes] = field(default_factory=dict)
    paths: Mapping[str, tuple[Axes, ...]] | tuple[PathRule, ...] = ()
    batch: tuple[str, ...] = BATCH
    context: tuple[str, ...] = CONTEXT
    stage: tuple[str, ...] = STAGE
    fsdp: tuple[str, ...] = FSDP
    fsdp_min_size: int = 2**12

    def __post_init__(self) -> None:
        # The dataclass is frozen, so plain assignment would raise.
        object.__setattr__(self, "logical", {**LOGICAL, **self.logical})
        object.__setattr__(self, "paths", self.path_rules)

    @property
    def path_rules(self) -> tuple[PathRule, ...]:
        """`paths` as pairs."""
        if isinstance(self.paths, Mapping):
            return tuple(self.paths.items())
        return tuple(self.paths)


@dataclass(frozen=True)
class Placement:
    """How one leaf is sharded, and why.

    Attributes:
        path: the name of the leaf.
        shape: the global shape.
        dtype: the dtype.
        spec: the partition spec.
        reason: the rule or annotation that decided, as text.
        bytes_per_device: bytes on each device.
        stays: the axes of experts that the model or a rule asked for. The leaf stays sharded over
            them where it is used.
    """

    path: str
    shape: Shape
    dtype: DType
    spec: PartitionSpec
    reason: str
    bytes_per_device: int
    stays: MeshAxes = ()


@dataclass(frozen=True)
class ModelLeaf:
    """A variable of the model, before it is placed.

    Attributes:
        shape: the global shape.
        dtype: the dtype.
        annotation: the axes of each dim that the model annotates, or None without annotation.
        has_flax_rules: whether Flax has rules for the variable. They are applied to `annotation`
            already, so that its names are mesh axes.
        other_paths: the other paths of a variable that the model uses in several places.
        is_stacked: whether its first dim counts the layers of a stack.
    """

    shape: Shape
    dtype: DType
    annotation: tuple[Axes, ...] | None = None
    has_flax_rules: bool = False
    other_paths: tuple[str, ...] = ()
    is_stacked: bool = False


def place_model(
    leaves: Mapping[str, ModelLeaf], mesh: Mesh, rules: Rules
) -> dict[str, Placement]:
    """Return a placement for each variable of the model, by path.

    Raises:
        ConfigError: with all problems at once: rules that match nothing, axes that do not exist,
            dims that are not divisible, and mesh axes that shard nothing.
    """
    paths = {
        path for name, leaf in leaves.items() for path in (name, *leaf.other_paths)
    }
    problems = [
        f"rule '{pattern}' -> {axes} matches no parameter.{did_you_mean(pattern, paths)}"
        for pattern, axes in rules.path_rules
        if not any(matches(pattern, path) for path in paths)
    ]
    placements = {}
    for path, leaf in leaves.items():
        try:
            placements[path] = _place(path, leaf, mesh, rules)
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        problems = _idle_axes(placements, mesh, rules)
    if problems:
        raise ConfigError("\n".join(problems))
    return placements


def _idle_axes(
    placements: Mapping[str, Placement], mesh: Mesh, rules: Rules
) -> list[str]:
    """Return a message for each mesh axis that shards neither the batch nor a parameter."""
    used = {
        axis for placement in placements.values() for axis in _axes_in(placement.spec)
    }
    return [
        f"mesh axis '{axis}' (size {size}) shards neither the batch nor any parameter: its devices "
        f"would all do the same work. Axes that shard the batch are {', '.join(rules.batch)}. "
        f"For another name, annotate the model, map one of its logical names "
        f"({', '.join(rules.logical)}) to '{axis}', or add it to Rules.batch."
        for axis, size in mesh.shape.items()
        if size > 1
        and axis not in used
        and axis not in rules.batch
        and axis not in rules.context
    ]


def _place(path: str, leaf: ModelLeaf, mesh: Mesh, rules: Rules) -> Placement:
    what = f"parameter '{path}'"
    dims: list[MeshAxes] = [()] * len(leaf.shape)
    reasons = []
    if leaf.annotation is not None:
        by_flax = leaf.has_flax_rules
        dims = _resolve(
            what, leaf.shape, leaf.annotation, "annotation", mesh, rules, by_flax
        )
        is_missing = any(leaf.annotation) and not any(dims)
        reasons.append(
            f"annotation {show_spec(leaf.annotation)}"
            + (" by Flax's rules" if by_flax else "")
            + (": no such axis in this mesh" if is_missing else "")
        )
    if not any(dims):
        for pattern, axes in rules.path_rules:
            if any(matches(pattern, name) for name in (path, *leaf.other_paths)):
                rule = f"rule '{pattern}'"
                dims = _resolve(what, leaf.shape, axes, rule, mesh, rules)
                stays = _expert_axes(dims, mesh, rules)
                dims = _add_stage(path, leaf, dims, mesh, rules)
                placed = _placement(path, leaf.shape, leaf.dtype, dims, rule, mesh)
                return replace(placed, stays=stays)
    stays = _expert_axes(dims, mesh, rules)
    is_staged = leaf.is_stacked and bool(stage_axes(mesh, rules))
    if is_staged:
        dims = _add_stage(path, leaf, dims, mesh, rules)
        reasons.append("layers by stage")
    dims, reason = _add_fsdp(path, leaf.shape, dims, mesh, rules)
    dims = _add_replicas(leaf.shape, dims, mesh, rules)
    if reason or not reasons:
        reasons.append(reason or "no rule")
    why = ", ".join(reasons)
    placed = _placement(path, leaf.shape, leaf.dtype, dims, why, mesh)
    return replace(placed, stays=stays)


def _expert_axes(dims: Iterable[MeshAxes], mesh: Mesh, rules: Rules) -> MeshAxes:
    """Return the axes of experts among those of some dims."""
    experts = logical_axes("experts", mesh, rules)
    return tuple(axis for names in dims for axis in names if axis in experts)


def _resolve(
    what: str,
    shape: Shape,
    axes: Iterable[Axes],
    source: str,
    mesh: Mesh | AbstractMesh,
    rules: Rules,
    by_flax: bool = False,
) -> list[MeshAxes]:
    """Return the mesh axes of each dim, from names that are mesh axes or logical names.

    Args:
        what: the array, for messages.
        shape: its shape.
        axes: names for each dim; missing dims are replicated.
        source: where the names come from, for messages.
        mesh: the mesh.
        rules: the mapping of logical names.
        by_flax: whether Flax's rules have mapped the names, which then are mesh axes.

    Raises:
        ConfigError: if a name is unknown, an axis is used twice, or a dim is not divisible.
    """
    entries = tuple(axes)
    if len(entries) > len(shape):
        raise ConfigError(
            f"{what} has shape {shape}; its {source} {show_spec(entries)} names {len(entries)} "
            "dims. Shorten it."
        )
    dims = [
        tuple(_mesh_axes(what, entry, source, mesh, rules, by_flax))
        for entry in entries
    ]
    dims += [()] * (len(shape) - len(dims))
    dim_of: dict[str, int] = {}
    for dim, names in enumerate(dims):
        for name in names:
            if name in dim_of:
                raise ConfigError(
                    f"{what} has shape {shape}; its {source} {show_spec(entries)} puts mesh axis "
                    f"'{name}' on dim {dim_of[name]} and on dim {dim}. An axis can shard one dim "
                    "only: give one of them another axis or None."
                )
            dim_of[name] = dim
        size = math.prod(mesh.shape[name] for name in names)
        if shape[dim] % size:
            axis_names = " x ".join(map(repr, names))
            raise ConfigError(
                f"{what} has shape {shape}; its {source} shards dim {dim} over mesh axis "
                f"{axis_names} (size {size}), and {shape[dim]} is not divisible by {size}. "
                f"Use {'*'.join(names)}={_choices(shape[dim], size)}, or change the {source}."
            )
    return dims


def _mesh_axes(
    what: str,
    entry: Axes,
    source: str,
    mesh: Mesh | AbstractMesh,
    rules: Rules,
    by_flax: bool,
) -> Iterator[str]:
    """Yield the mesh axes for the names of one dim; known axes that this mesh lacks are skipped."""
    known = {axis for value in rules.logical.values() for axis in axes_of_entry(value)}
    known |= {*rules.batch, *rules.context, *rules.stage, *rules.fsdp}
    for name in axes_of_entry(entry):
        if name in rules.logical and not by_flax:
            yield from (
                axis
                for axis in axes_of_entry(rules.logical[name])
                if axis in mesh.shape
            )
        elif name in mesh.shape:
            yield name
        elif name not in known and by_flax:
            raise ConfigError(
                f"{what}: its {source} names '{name}' after Flax's rules "
                "(`sharding_rules=` or nnx.logical_axis_rules) are applied, and that is no axis of "
                f"the mesh ({', '.join(mesh.shape)}).{did_you_mean(name, mesh.shape)} "
                "Flax reads a name without a rule, and each name inside a tuple, as a mesh axis. "
                f"Add a rule such as ('{name}', None), or correct the one that leads to '{name}'."
            )
        elif name not in known:
            raise ConfigError(
                f"{what}: its {source} names '{name}', which is neither an axis of the mesh "
                f"({', '.join(mesh.shape)}) nor a logical name ({', '.join(rules.logical)})."
                f"{did_you_mean(name, {*mesh.shape, *rules.logical})} To add a logical name, map "
                f"it to a mesh axis or to None: Rules(logical={{'{name}': None}})."
            )


def _add_fsdp(
    path: str, shape: Shape, dims: list[MeshAxes], mesh: Mesh, rules: Rules
) -> tuple[list[MeshAxes], str]:
    """Shard the largest divisible dim over the FSDP axes that the leaf does not use yet.

    A dim that is not sharded yet is preferred.

    Returns:
        The mesh axes of each dim, and the reason as text; "" if the mesh has no FSDP axis to add.
    """
    used = {axis for names in dims for axis in names}
    axes = tuple(
        axis for axis in rules.fsdp if mesh.shape.get(axis, 1) > 1 and axis not in used
    )
    if not axes:
        return dims, ""
    num_elements = math.prod(shape)
    if num_elements < rules.fsdp_min_size:
        return dims, f"small: under {rules.fsdp_min_size} elements"
    size = math.prod(mesh.shape[axis] for axis in axes)
    divisible = []
    for dim, names in enumerate(dims):
        shards = size * math.prod(mesh.shape[name] for name in names)
        if shape[dim] % shards == 0:
            divisible.append(dim)
    axis_names = " x ".join(axes)
    if not divisible and used:
        return dims, f"no dim left that is divisible by {axis_names} ({size})"
    if not divisible and num_elements // size < rules.fsdp_min_size:
        return dims, (
            f"small: {size} shards of under {rules.fsdp_min_size} elements, "
            f"and no dim is divisible by {axis_names}"
        )
    if not divisible:
        raise ConfigError(
            f"parameter '{path}' has shape {shape}, and none of its dims is divisible by mesh axis "
            f"{axis_names} (size {size}). Use {axes[0]}={_choices(max(shape), size)}, or set "
            f"Rules(paths=(('{path}', ()),)) to replicate it on purpose."
        )
    best = max(divisible, key=lambda dim: (not dims[dim], shape[dim]))
    sharded = [*dims]
    sharded[best] = (*dims[best], *axes)
    return sharded, f"automatic FSDP on dim {best}"


def _add_replicas(
    shape: Shape, dims: list[MeshAxes], mesh: Mesh, rules: Rules
) -> list[MeshAxes]:
    """Shard the dim that FSDP axes shard over context and expert axes too, if they divide it.

    All devices of such an axis use the same parameters, except the experts, so each can store a
    part of them.
    """
    used = {axis for names in dims for axis in names}
    replicas = (*context_axes(mesh, rules), *logical_axes("experts", mesh, rules))
    unused = tuple(axis for axis in dict.fromkeys(replicas) if axis not in used)
    sharded = []
    for size, names in zip(shape, dims, strict=True):
        axes = (*names, *unused)
        is_fsdp = any(mesh.shape[name] > 1 for name in names if name in rules.fsdp)
        is_divisible = size % math.prod(mesh.shape[axis] for axis in axes) == 0
        sharded.append(axes if is_fsdp and is_divisible else names)
    return sharded


def _add_stage(
    path: str, leaf: ModelLeaf, dims: list[MeshAxes], mesh: Mesh, rules: Rules
) -> list[MeshAxes]:
    """Shard the layers of a stack over the stage axes.

    Raises:
        ConfigError: if the axes do not divide the layers.
    """
    stage = stage_axes(mesh, rules)
    used = {axis for names in dims for axis in names}
    if not leaf.is_stacked or not stage or used & {*stage}:
        return dims
    first = (*stage, *dims[0])
    size = math.prod(mesh.shape[axis] for axis in first)
    if leaf.shape[0] % size:
        axis_names = " x ".join(map(repr, first))
        raise ConfigError(
            f"parameter '{path}' belongs to a stack of {leaf.shape[0]} layers, which is not "
            f"divisible by mesh axis {axis_names} (size {size}). Use "
            f"{'*'.join(first)}={_choices(leaf.shape[0], size)}, or another number of layers."
        )
    return [first, *dims[1:]]


def place_optimizer(
    opt_state: PyTree, params: Mapping[str, Placement], mesh: Mesh, rules: Rules
) -> dict[str, Placement]:
    """Return a placement for each leaf of an optimizer state.

    A leaf follows the parameter whose path is the end of the leaf's path. If both have the same
    shape, both have the same sharding. Otherwise each dim of the leaf is sharded like the dim of
    the parameter that it keeps, see `_followed_dims`. Leaves that belong to no parameter, such as
    step counts, are sharded by automatic FSDP if they are large.

    Args:
        opt_state: the optimizer state; may be abstract.
        params: the placements of the parameters, by path.
        mesh: the device mesh.
        rules: the sharding rules.

    Returns:
        A placement for each leaf of `opt_state`, by path.
    """
    placements = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        path = leaf_name(key_path)
        owner = owner_of(path, params)
        if owner is None:
            dims, reason = _add_fsdp(
                path, leaf.shape, [()] * len(leaf.shape), mesh, rules
            )
            reason = reason or "belongs to no parameter"
        else:
            param = params[owner]
            field_name = path.removesuffix(owner).rstrip("/").rpartition("/")[2]
            followed = _followed_dims(field_name, leaf.shape, param.shape)
            dims = [
                () if dim is None else axes_of_entry(_entry(param.spec, dim))
                for dim in followed
            ]
            reason = f"dims shared with its parameter {param.shape}"
            if leaf.shape == param.shape:
                reason = "as its parameter"
        placements[path] = _placement(path, leaf.shape, leaf.dtype, dims, reason, mesh)
    return placements


# Fields of `optax.FactoredState` (Adafactor), and the position of the dim that each of them
# averages over in the order of `np.argsort(param.shape)`.
_FACTORED_DIM = {"v_row": -1, "v_col": -2}


def _followed_dims(
    field_name: str, leaf_shape: tuple[int, ...], param_shape: tuple[int, ...]
) -> list[int | None]:
    """Return, for each dim of an optimizer leaf, the dim of its parameter that it follows.

    None means that the dim is replicated, because it follows no dim of the parameter or because
    sizes alone do not tell which one: a leaf of shape (256,) may hold the rows or the columns
    of a parameter of shape (256, 256). `field_name` decides that for Adafactor.
    """
    rank = len(param_shape)
    if len(leaf_shape) == rank:
        sizes = enumerate(zip(leaf_shape, param_shape, strict=True))
        same = [
            dim if size == param_size else None for dim, (size, param_size) in sizes
        ]
        if leaf_shape == param_shape or same != [None] * rank:
            return same

    if len(leaf_shape) < rank:
        kept_dims = [
            dims
            for dims in itertools.combinations(range(rank), len(leaf_shape))
            if tuple(param_shape[dim] for dim in dims) == leaf_shape
        ]
        if field_name in _FACTORED_DIM:
            # The same call as in Optax, so that ties between dims of one size break the same way.
            averaged = int(np.argsort(param_shape)[_FACTORED_DIM[field_name]])
            by_name = tuple(dim for dim in range(rank) if dim != averaged)
            kept_dims = [by_name] if by_name in kept_dims else kept_dims
        if kept_dims:
            choices = [set(dims) for dims in zip(*kept_dims, strict=True)]
            return [dims.pop() if len(dims) == 1 else None for dims in choices]

    # A history of gradients has leading dims in addition to those of the parameter.
    extra = len(leaf_shape) - rank
    if extra > 0 and leaf_shape[extra:] == param_shape:
        return [*[None] * extra, *range(rank)]

    # Otherwise, follow the dims that both shapes have, in order.
    followed: list[int | None] = [None] * len(leaf_shape)
    matcher = difflib.SequenceMatcher(None, leaf_shape, param_shape, autojunk=False)
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            followed[block.a + i] = block.b + i
    return followed


def at_use(placement: Placement, rules: Rules) -> PartitionSpec:
    """Return the spec with which the loss uses a parameter: replicated over the axes of the batch.

    This keeps activations sharded over batch and context axes. If a parameter stayed sharded over
    an axis that also shards the batch, the partitioner would have to choose, and it often moves the
    activations, which are larger. Only the experts of a layer stay where they are: their tokens
    come to them, see `kernels.experts`.
    """
    gathered = {*rules.batch, *rules.context} - set(placement.stays)
    return without(placement.spec, tuple(gathered))


def without(spec: PartitionSpec, axes: MeshAxes) -> PartitionSpec:
    """Return the spec without some axes.

    Args:
        spec: a partition spec.
        axes: the mesh axes to remove.
    """
    return PartitionSpec(
        *(
            _join(axis for axis in axes_of_entry(entry) if axis not in axes)
            for entry in spec
        )
    )


def constrain(x: jax.Array, *names: Axes) -> jax.Array:
    """Constrain the sharding of an activation inside a shardwise step.

    Outside a step, `x` is returned unchanged, so that a model that calls this stays a plain model.
    Batch axes belong to the dim named "batch", whatever else maps to them.

    Args:
        x: the activation.
        *names: for each dim "batch", a logical name, a mesh axis, or None to replicate it.

    Raises:
        ConfigError: if a name is unknown or a dim is not divisible.

    Example:
        >>> hidden = constrain(hidden, "batch", None, "mlp")
    """
    layout = _LAYOUT.get()
    if layout is None:
        return x
    mesh, rules = layout
    entries = [None if name == "batch" else name for name in names]
    dims = _resolve("an activation", x.shape, entries, "constraint", mesh, rules)
    spec = without(spec_of_dims(dims), rules.batch)
    examples = batch_spec(mesh, rules)[0]
    if has_explicit_axes() and x.shape[0] % num_batch_shards(mesh, rules):
        # Explicit axes shard evenly. Such a batch is only traced, and padded before it is used.
        examples = None
    spec = PartitionSpec(
        *(
            examples if name == "batch" else axes
            for name, axes in zip(names, spec, strict=False)
        )
    )
    return reshard(x, NamedSharding(mesh, spec))


def reshard(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return `x` with this sharding, for mesh axes of type Auto or Explicit.

    Args:
        x: an array, while tracing.
        sharding: its sharding.
    """
    resharded: jax.Array
    if has_explicit_axes():
        resharded = jax.sharding.reshard(x, sharding.spec)
    else:
        resharded = jax.lax.with_sharding_constraint(x, sharding)
    return resharded


def has_explicit_axes() -> bool:
    """Return whether the current trace has mesh axes of type Explicit."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Explicit in types


# The mesh and the rules of the step that is being traced.
_LAYOUT: ContextVar[tuple[Mesh | AbstractMesh, Rules] | None] = ContextVar(
    "layout", default=None
)


@contextmanager
def activations_on(mesh: Mesh | AbstractMesh, rules: Rules) -> Iterator[None]:
    """Set mesh and rules for `constrain` while a model is traced.

    JAX's own mesh context is set too. JAX caches traces of jitted functions by this context, so a
    jitted part of the model is traced again for another mesh. Kernels read the platform from it.
    """
    token = _LAYOUT.set((mesh, rules))
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        _LAYOUT.reset(token)


# Mesh axes that a `vmap` around the current trace distributes. JAX's caches of traces depend on it.
_MAPPED = jax.make_user_context(default_value=())


@contextmanager
def mapped_over(axes: MeshAxes) -> Iterator[None]:
    """Set the mesh axes that a `vmap` with `spmd_axis_name` distributes, while it is traced.

    Arrays inside of the `vmap` are the parts of single devices along these axes, so no constraint
    may name them.
    """
    layout = _LAYOUT.get()
    assert layout is not None, "only a step has a mesh"
    mesh, rules = layout

    def others(names: Axes) -> MeshAxes:
        return tuple(axis for axis in axes_of_entry(names) if axis not in axes)

    inner = replace(
        rules,
        logical={name: others(names) for name, names in rules.logical.items()},
        batch=others(rules.batch),
        context=others(rules.context),
        stage=others(rules.stage),
        fsdp=others(rules.fsdp),
    )
    token = _LAYOUT.set((mesh, inner))
    try:
        with _MAPPED(axes):
            yield
    finally:
        _LAYOUT.reset(token)


def mapped_axes() -> MeshAxes:
    """Return the mesh axes that a `vmap` around the current trace distributes."""
    axes: MeshAxes = _MAPPED.value
    return axes


@dataclass(frozen=True)
class Pipeline:
    """How the pipelines of a step divide their work.

    Attributes:
        microbatches: the number of parts of a batch.
        rounds: how often each of them passes through all stages.
    """

    microbatches: int
    rounds: int = 1


# The `Pipeline` of the step that is being traced, or None.
current_pipeline = jax.make_user_context(default_value=None)


def expert_axis(rules: Rules) -> str | None:
    """Return the axis for the experts of a model, if the rules have one that shards the batch."""
    axes = axes_of_entry(rules.logical["experts"])
    return next((axis for axis in axes if axis in rules.batch), None)


def logical_axes(name: str, mesh: Mesh | AbstractMesh, rules: Rules) -> MeshAxes:
    """Return the axes of the mesh, of more than one device, that a logical name maps to."""
    axes = axes_of_entry(rules.logical[name])
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def step_layout() -> tuple[Mesh | AbstractMesh, Rules] | None:
    """Return mesh and rules of the step that is being traced, or None outside of a step."""
    return _LAYOUT.get()


def batch_spec(mesh: Mesh | AbstractMesh, rules: Rules) -> PartitionSpec:
    """Return the spec of a batch: examples sharded over all batch axes of the mesh."""
    return PartitionSpec(_join(axis for axis in mesh.axis_names if axis in rules.batch))


def num_batch_shards(mesh: Mesh | AbstractMesh, rules: Rules) -> int:
    """Return the number of shards of a batch."""
    return math.prod(size for axis, size in mesh.shape.items() if axis in rules.batch)


def batch_axes(mesh: Mesh | AbstractMesh, rules: Rules) -> MeshAxes:
    """Return the axes of the mesh, of more than one device, that shard the examples of a batch."""
    return tuple(
        axis for axis, size in mesh.shape.items() if axis in rules.batch and size > 1
    )


def context_axes(mesh: Mesh | AbstractMesh, rules: Rules) -> MeshAxes:
    """Return the axes of the mesh that shard the tokens of each sequence."""
    return tuple(
        axis for axis, size in mesh.shape.items() if axis in rules.context and size > 1
    )


def stage_axes(mesh: Mesh | AbstractMesh, rules: Rules) -> MeshAxes:
    """Return the axes of the mesh that divide the layers of a stack into stages."""
    return tuple(
        axis for axis, size in mesh.shape.items() if axis in rules.stage and size > 1
    )


def num_stages(mesh: Mesh | AbstractMesh, rules: Rules) -> int:
    """Return the number of stages of a pipeline; 1 without a stage axis."""
    return math.prod(mesh.shape[axis] for axis in stage_axes(mesh, rules))


def put(values: PyTree, shardings: PyTree, *, copy: bool = False) -> PyTree:
    """Return host arrays as arrays on the mesh.

    Args:
        values: arrays that are the same in every process. Each process transfers what its devices
            hold. Arrays that are on the devices of several processes already are resharded.
        shardings: the `NamedSharding` of each of them, as a tree like `values`, or one for all.
        copy: whether to copy NumPy arrays first. JAX reads them later, or shares their memory if
            the devices are CPUs, so without a copy they must not change.
    """

    def own(x: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        return np.array(x) if copy and isinstance(x, np.ndarray) else x

    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(shardings)):
        return jax.device_put(jax.tree.map(own, values), shardings)

    def put_leaf(x: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            resharded: jax.Array = jax.device_put(x, sharding)
            return resharded
        return jax.make_array_from_callback(
            # Indexing a NumPy array without dims would not return an array.
            x.shape,
            sharding,
            lambda index: own(x[index] if x.ndim else x),
        )

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: put_leaf(x, shardings), values)
    return jax.tree.map(put_leaf, values, shardings)


def annotation_of(metadata: Mapping[str, object]) -> tuple[Axes, ...] | None:
    """Return the sharding annotation of an NNX variable, in any of the forms that NNX allows.

    Args:
        metadata: the metadata of the variable.

    Raises:
        ConfigError: if the annotation is not one entry per dim.
    """
    value = metadata.get("out_sharding")
    if isinstance(value, Format):
        value = value.sharding
    if isinstance(value, NamedSharding):
        value = value.spec
    if value is None:
        return None
    is_sequence = isinstance(value, Iterable) and not isinstance(value, str)
    entries = tuple(cast(Iterable[Axes], value)) if is_sequence else (value,)
    if not is_sequence or not all(
        isinstance(e, str | tuple | list | None) for e in entries
    ):
        raise ConfigError(
            f"its annotation is {value!r}. Use a tuple with one entry per dim: a name, a tuple of "
            "names, or None, such as (None, 'model')."
        )
    return cast(tuple[Axes, ...], entries)


def model_leaf(
    path: str, shape: Shape, dtype: DType, metadata: Mapping[str, object]
) -> ModelLeaf:
    """Return the description of an NNX variable, with Flax's rules applied to its annotation.

    Flax maps a name by the rules in `sharding_rules` of the variable and by those of
    `nnx.logical_axis_rules` when the variable was created. Of two rules for one name in one place,
    the last applies. A name without a rule is a mesh axis.

    Args:
        path: the name of the variable, for messages.
        shape: its global shape.
        dtype: its dtype.
        metadata: its metadata.

    Raises:
        ConfigError: if the annotation or the rules cannot be read, or if rules contradict.
    """
    try:
        names = annotation_of(metadata)
        own = _flax_rules(metadata.get("sharding_rules"))
        context = _flax_rules(metadata.get(CONTEXT_RULES))
        mapping = _combine(own, context)
    except ConfigError as error:
        raise ConfigError(f"variable '{path}': {error}") from error
    is_stacked = bool(metadata.get(STACKED))
    if names is None or not mapping:
        return ModelLeaf(shape, dtype, names, is_stacked=is_stacked)
    # Flax maps whole entries, so a tuple of names stays as it is.
    mapped = tuple(mapping.get(cast(str, name), name) for name in names)
    return ModelLeaf(shape, dtype, mapped, has_flax_rules=True, is_stacked=is_stacked)


def _flax_rules(value: object) -> FlaxRules:
    """Return rules of Flax as pairs. Lists become tuples, since metadata must be hashable.

    Raises:
        ConfigError: if they are not pairs of a name and mesh axes.
    """
    if not value:
        return ()
    rules = []
    for pair in value if isinstance(value, tuple | list) else (value,):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                f"the sharding rules {value!r} are not pairs of a logical name and mesh axes. "
                "Write (('mlp', 'model'), ('embed', None))."
            )
        name, axes = pair
        rules.append((name, tuple(axes) if isinstance(axes, list) else axes))
    return tuple(rules)


def _combine(own: FlaxRules, context: FlaxRules) -> dict[str, Axes]:
    """Return the axes of each name as `flax.core.spmd.composite_rules` combines both sources.

    Raises:
        ConfigError: if the rules of the variable contradict those of the context.
    """
    mapping = dict(context)
    for name, axes in own:
        if context and name in mapping and mapping[name] != axes:
            raise ConfigError(
                f"Flax's sharding rules map '{name}' to {axes!r} in `sharding_rules` of the "
                f"variable, and to {mapping[name]!r} in nnx.logical_axis_rules or in another rule. "
                "Remove one of them."
            )
        mapping[name] = axes
    return mapping


# Only one thread at a time can replace the constructor of variables.
_RECORDING = threading.RLock()


@contextmanager
def recorded_axis_rules() -> Iterator[None]:
    """Record the rules of `nnx.logical_axis_rules` in the variables that are created under them.

    The context may end inside the model factory, and a variable does not keep its rules: Flax
    reads them when it creates a variable on a mesh, which shardwise does not let it do. Therefore
    the constructor of variables is replaced while the factory runs.
    """
    with _RECORDING:
        construct = nnx.Variable.__init__

        def record(
            variable: nnx.Variable[object], *args: object, **kwargs: object
        ) -> None:
            construct(variable, *args, **kwargs)  # type: ignore[arg-type]
            rules = _flax_rules(get_logical_axis_rules())
            if rules:
                variable.set_metadata(CONTEXT_RULES, rules)

        nnx.Variable.__init__ = record  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nnx.Variable.__init__ = construct  # type: ignore[method-assign]


def placement_table(placements: Iterable[Placement], title: str) -> Table:
    """Return a table with the sharding, its reason and the bytes per device of each leaf.

    Args:
        placements: the leaves, such as `abstract_state(...).params.values()`.
        title: the title of the table.
    """
    placements = list(placements)
    total = sum(num_bytes(placement.shape, placement.dtype) for placement in placements)
    per_device = sum(placement.bytes_per_device for placement in placements)
    caption = f"{show_bytes(per_device)} per device, {show_bytes(total)} in total"
    table = Table(title=title, caption=caption, title_justify="left")
    for column in ("path", "shape", "dtype", "layout", "why"):
        no_wrap = column in ("path", "shape", "layout")
        table.add_column(column, overflow="fold", no_wrap=no_wrap)
    table.add_column("per device", overflow="fold", justify="right")
    for placement in placements:
        table.add_row(
            placement.path,
            " x ".join(map(str, placement.shape)) or "scalar",
            str(placement.dtype),
            show_spec(placement.spec),
            placement.reason,
            show_bytes(placement.bytes_per_device),
        )
    return table


def show_spec(spec: Iterable[Axes]) -> str:
    """Return a spec as text: `(fsdp, -)`, or `replicated` if no dim is sharded."""
    entries = [
        "-" if entry is None else "*".join(axes_of_entry(entry)) for entry in spec
    ]
    if all(entry == "-" for entry in entries):
        return "replicated"
    return f"({', '.join(entries)})"


def _placement(
    path: str, shape: Shape, dtype: DType, dims: list[MeshAxes], reason: str, mesh: Mesh
) -> Placement:
    num_shards = math.prod(mesh.shape[axis] for names in dims for axis in names)
    spec = spec_of_dims(dims) if any(dims) else PartitionSpec()
    return Placement(
        path, shape, dtype, spec, reason, num_bytes(shape, dtype) // num_shards
    )


def axes_of_entry(entry: Axes) -> MeshAxes:
    """Return the mesh axes of one entry of a `PartitionSpec`.

    Example:
        >>> [axes_of_entry(entry) for entry in PartitionSpec("data", ("fsdp", "model"), None)]
        [('data',), ('fsdp', 'model'), ()]
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of_dims(sharding: NamedSharding, ndim: int) -> tuple[MeshAxes, ...]:
    """Return the mesh axes of each dim of an array, without axes of one device.

    Args:
        sharding: the sharding of the array.
        ndim: its number of dims.
    """
    sizes = sharding.mesh.shape
    dims = [axes_of_entry(_entry(sharding.spec, dim)) for dim in range(ndim)]
    return tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in dims)


def spec_of_dims(dims: Iterable[MeshAxes]) -> PartitionSpec:
    """Return the `PartitionSpec` of an array whose dims have these mesh axes."""
    return PartitionSpec(*map(_join, dims))


def _join(axes: Iterable[str]) -> Axes:
    names = tuple(axes)
    if len(names) > 1:
        return names
    return names[0] if names else None


def _entry(spec: PartitionSpec, dim: int) -> Axes:
    entry: Axes = spec[dim] if dim < len(spec) else None
    return entry


def _axes_in(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        yield from axes_of_entry(entry)


def _choices(dim: int, size: int) -> str:
    """Return the five divisors of `dim` that are closest to `size`, as text."""
    divisors = [divisor for divisor in range(1, dim + 1) if dim % divisor == 0]
    closest = sorted(divisors, key=lambda divisor: abs(divisor - size))[:5]
    *head, last = map(str, sorted(closest))
    return f"{', '.join(head)} or {last}" if head else last
