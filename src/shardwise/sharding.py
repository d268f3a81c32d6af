"""Where every array lives: a PartitionSpec for each leaf of model, optimizer and batch, with the reason for it.

For a parameter, the first of these that says something:

1. the annotation on the variable (`nnx.with_partitioning` and its kin), in mesh axes or logical names, if it names an
   axis of this mesh;
2. a rule by path in `Rules.paths`, which is taken as it stands;
3. nothing.

Then, unless a rule by path decided, automatic FSDP cuts the largest dimension over the mesh's FSDP axes, if the leaf
does not use them yet. Optimizer leaves follow their parameter. What cannot be done as asked is an error with numbers, never
a silent replication.
"""

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from shardwise.axes import BATCH, FSDP, TENSOR
from shardwise.errors import ConfigError
from shardwise.text import did_you_mean
from shardwise.text import show_bytes as show_bytes
from shardwise.tree import PyTree, leaf_name, matches, num_bytes, owner_of

Axes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Rules:
    """How names become mesh axes. Axes that a mesh does not have are left out, so one set serves every mesh."""

    logical: Mapping[str, Axes] = field(
        default_factory=lambda: {
            "vocab": TENSOR,
            "heads": TENSOR,
            "mlp": TENSOR,
            "embed": FSDP,
            "layers": None,
        }
    )
    paths: tuple[
        tuple[str, tuple[Axes, ...]], ...
    ] = ()  # (pattern, axes for each dim); the first match wins
    batch: tuple[str, ...] = BATCH  # mesh axes that split the rows of a batch
    fsdp: tuple[str, ...] = FSDP  # mesh axes over which parameters are stored in pieces
    fsdp_min_size: int = 2**12  # elements; smaller leaves stay whole


@dataclass(frozen=True)
class Placement:
    """One leaf: what it is, how it is cut, and why."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    reason: str
    bytes_per_device: int


@dataclass(frozen=True)
class ModelLeaf:
    """What the resolver needs to know of a parameter or other variable of the model."""

    shape: tuple[int, ...]
    dtype: Any
    annotation: tuple[Axes, ...] | None = None


def place_model(leaves: Mapping[str, ModelLeaf], mesh: Mesh, rules: Rules) -> dict[str, Placement]:
    """A placement for each variable of the model; all mistakes are reported at once."""
    problems = [
        f"rule '{pattern}' -> {axes} matches no parameter.{did_you_mean(pattern, leaves)}"
        for pattern, axes in rules.paths
        if not any(matches(pattern, path) for path in leaves)
    ]
    placements = {}
    for path, leaf in leaves.items():
        try:
            placements[path] = _place(path, leaf, mesh, rules)
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        used = {axis for p in placements.values() for axis in _axes_in(p.spec)}
        problems = [
            f"mesh axis '{axis}' (size {size}) cuts neither the batch nor any parameter: its devices would all do the same work. "
            f"Axes that split the batch are {', '.join(rules.batch)}; for another name, annotate the model, "
            f"map one of its logical names ({', '.join(rules.logical)}) to '{axis}', or add it to Rules.batch."
            for axis, size in mesh.shape.items()
            if size > 1 and axis not in used and axis not in rules.batch
        ]
    if problems:
        raise ConfigError("\n".join(problems))
    return placements


def _place(path: str, leaf: ModelLeaf, mesh: Mesh, rules: Rules) -> Placement:
    dims: list[tuple[str, ...]] = [()] * len(leaf.shape)
    reasons = []
    if leaf.annotation is not None:
        dims = _resolve(
            f"parameter '{path}'", leaf.shape, leaf.annotation, "annotation", mesh, rules
        )
        reasons.append(
            f"annotation {show_spec(leaf.annotation)}"
            + ("" if any(dims) else ": no such axis in this mesh")
        )
    rule = next(((pattern, axes) for pattern, axes in rules.paths if matches(pattern, path)), None)
    if rule is not None and not any(dims):
        dims = _resolve(
            f"parameter '{path}'", leaf.shape, rule[1], f"rule '{rule[0]}'", mesh, rules
        )
        return _placement(path, leaf.shape, leaf.dtype, dims, f"rule '{rule[0]}'", mesh)
    dims, reason = _add_fsdp(path, leaf.shape, dims, mesh, rules)
    if reason or not reasons:
        reasons.append(reason or "no rule")
    return _placement(path, leaf.shape, leaf.dtype, dims, ", ".join(reasons), mesh)


def _resolve(
    what: str, shape: tuple[int, ...], axes: Iterable[Axes], who: str, mesh: Mesh, rules: Rules
) -> list[tuple[str, ...]]:
    """Mesh axes for each dim, from names that are mesh axes or logical; checked against the shape."""
    entries = tuple(axes)
    if len(entries) > len(shape):
        raise ConfigError(
            f"{what} has shape {shape}; its {who} {show_spec(entries)} names {len(entries)} dims. Shorten it."
        )
    dims = [tuple(_mesh_axes(what, entry, who, mesh, rules)) for entry in entries]
    dims += [()] * (len(shape) - len(dims))
    seen: dict[str, int] = {}
    for dim, names in enumerate(dims):
        for name in names:
            if name in seen:
                raise ConfigError(
                    f"{what} has shape {shape}; its {who} {show_spec(entries)} puts mesh axis '{name}' on dim {seen[name]} "
                    f"and on dim {dim}. An axis can cut one dim only: give one of them another axis or None."
                )
            seen[name] = dim
        size = math.prod(mesh.shape[name] for name in names)
        if shape[dim] % size:
            raise ConfigError(
                f"{what} has shape {shape}; its {who} shards dim {dim} over mesh axis {' x '.join(map(repr, names))} "
                f"(size {size}), and {shape[dim]} is not divisible by {size}. Use {'*'.join(names)}={_choices(shape[dim], size)}, "
                f"or change the {who}."
            )
    return dims


def _mesh_axes(what: str, entry: Axes, who: str, mesh: Mesh, rules: Rules) -> Iterator[str]:
    known = (
        {axis for value in rules.logical.values() for axis in _as_tuple(value)}
        | set(rules.batch)
        | set(rules.fsdp)
    )
    for name in _as_tuple(entry):
        if name in rules.logical:
            yield from (axis for axis in _as_tuple(rules.logical[name]) if axis in mesh.shape)
        elif name in mesh.shape:
            yield name
        elif name not in known:
            raise ConfigError(
                f"{what}: its {who} names '{name}', which is neither an axis of the mesh ({', '.join(mesh.shape)}) "
                f"nor a logical name ({', '.join(rules.logical)}).{did_you_mean(name, {*mesh.shape, *rules.logical})}"
            )


def _add_fsdp(
    path: str, shape: tuple[int, ...], dims: list[tuple[str, ...]], mesh: Mesh, rules: Rules
) -> tuple[list[tuple[str, ...]], str]:
    """Cuts the largest dim that can be over the FSDP axes that the leaf does not use yet, a whole one for preference."""
    used = {axis for names in dims for axis in names}
    axes = tuple(axis for axis in rules.fsdp if mesh.shape.get(axis, 1) > 1 and axis not in used)
    if not axes:
        return dims, ""
    if math.prod(shape) < rules.fsdp_min_size:
        return dims, f"small: under {rules.fsdp_min_size} elements"
    size = math.prod(mesh.shape[axis] for axis in axes)
    fitting = [
        dim
        for dim, names in enumerate(dims)
        if shape[dim] % (size * math.prod(mesh.shape[name] for name in names)) == 0
    ]
    if not fitting and used:
        return dims, f"no dim left that {' x '.join(axes)} ({size}) divides"
    if not fitting and math.prod(shape) // size < rules.fsdp_min_size:
        return (
            dims,
            f"small: {size} pieces of under {rules.fsdp_min_size} elements, and no dim that {' x '.join(axes)} divides",
        )
    if not fitting:
        raise ConfigError(
            f"parameter '{path}' has shape {shape}, and no dim of it is divisible by mesh axis {' x '.join(axes)} (size {size}). "
            f"Use {axes[0]}={_choices(max(shape), size)}, or say Rules(paths=(('{path}', ()),)) to keep it whole on purpose."
        )
    best = max(fitting, key=lambda dim: (not dims[dim], shape[dim]))
    return [
        (*names, *axes) if dim == best else names for dim, names in enumerate(dims)
    ], f"automatic FSDP on dim {best}"


def place_optimizer(
    opt_state: PyTree, params: Mapping[str, Placement], mesh: Mesh, rules: Rules
) -> dict[str, Placement]:
    """Return a placement for each leaf of an optimizer state.

    A leaf follows the parameter whose path is the end of its own path. If both have the same
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
            dims, reason = _add_fsdp(path, leaf.shape, [()] * len(leaf.shape), mesh, rules)
            reason = reason or "belongs to no parameter"
        else:
            param = params[owner]
            field_name = path.removesuffix(owner).rstrip("/").rpartition("/")[2]
            followed = _followed_dims(field_name, leaf.shape, param.shape)
            dims = [() if dim is None else _as_tuple(_entry(param.spec, dim)) for dim in followed]
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

    None stands for a dim that is replicated, because it follows no dim of the parameter or because
    sizes alone do not tell which one: a leaf of shape (256,) may hold the rows or the columns
    of a parameter of shape (256, 256). `field_name` decides that for Adafactor.
    """
    rank = len(param_shape)
    if len(leaf_shape) == rank:
        sizes = enumerate(zip(leaf_shape, param_shape, strict=True))
        same = [dim if size == param_size else None for dim, (size, param_size) in sizes]
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


def at_use(spec: PartitionSpec, rules: Rules) -> PartitionSpec:
    """The layout in which the loss uses a parameter: whole over every axis that splits the batch.

    This is what keeps activations on the batch axes. A parameter that stayed cut over an axis that also cuts the
    batch would leave the partitioner to choose, and it often chooses to move activations, which are larger.
    """
    return PartitionSpec(
        *(_join(axis for axis in _as_tuple(entry) if axis not in rules.batch) for entry in spec)
    )


def constrain(x: jax.Array, *names: Axes) -> jax.Array:
    """An activation, laid out as the model says: for each dim "batch", a logical name, a mesh axis, or None for whole.

    Inside a step of shardwise; anywhere else `x` as it is, so a model that says more than its parameters do stays a plain model.
    Axes that split the batch belong to the dim named "batch", whatever else may be mapped to them.
    """
    layout = _LAYOUT.get()
    if layout is None:
        return x
    mesh, rules = layout
    entries = [None if name == "batch" else name for name in names]
    dims = _resolve("an activation", x.shape, entries, "constraint", mesh, rules)
    spec = at_use(PartitionSpec(*(_join(axes) for axes in dims)), rules)
    rows = batch_spec(mesh, rules)[0]
    spec = PartitionSpec(
        *(rows if name == "batch" else axes for name, axes in zip(names, spec, strict=False))
    )
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


@contextmanager
def activations_on(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """While a model is traced inside: what `constrain` is to make of names. JAX's own context is set too, since it is part
    of the key under which JAX keeps what it has traced: a jitted part of the model is traced again for another mesh."""
    token = _LAYOUT.set((mesh, rules))
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        _LAYOUT.reset(token)


_LAYOUT: ContextVar[tuple[Mesh, Rules] | None] = ContextVar("layout", default=None)


def batch_spec(mesh: Mesh, rules: Rules) -> PartitionSpec:
    """Rows cut over all batch axes of the mesh; every other dim whole."""
    return PartitionSpec(_join(axis for axis in mesh.axis_names if axis in rules.batch))


def num_batch_shards(mesh: Mesh, rules: Rules) -> int:
    return math.prod(size for axis, size in mesh.shape.items() if axis in rules.batch)


def put(values: Any, sharding: NamedSharding) -> Any:
    """Host arrays, the same in every process, as arrays on the mesh; each process moves what its devices hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), values
    )


def annotation_of(metadata: Mapping[str, Any]) -> tuple[Axes, ...] | None:
    """The annotation that NNX keeps with a variable, in any of the forms it allows."""
    value = metadata.get("out_sharding")
    if isinstance(value, NamedSharding):
        value = value.spec
    return None if value is None else tuple(value)


def placement_table(placements: Iterable[Placement], title: str) -> Table:
    """For people: each leaf, its layout, the reason, and its bytes on one device."""
    placements = list(placements)
    whole = sum(num_bytes(p.shape, p.dtype) for p in placements)
    one = sum(p.bytes_per_device for p in placements)
    table = Table(
        title=title,
        caption=f"{show_bytes(one)} on each device, of {show_bytes(whole)} in all",
        title_justify="left",
    )
    for column, justify in (
        ("path", "left"),
        ("shape", "left"),
        ("dtype", "left"),
        ("layout", "left"),
        ("why", "left"),
        ("per device", "right"),
    ):
        no_wrap = column in ("path", "shape", "layout")
        table.add_column(column, justify=justify, overflow="fold", no_wrap=no_wrap)  # type: ignore[arg-type]
    for p in placements:
        shape = " x ".join(map(str, p.shape)) or "scalar"
        table.add_row(
            p.path, shape, str(p.dtype), show_spec(p.spec), p.reason, show_bytes(p.bytes_per_device)
        )
    return table


def _placement(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    dims: list[tuple[str, ...]],
    reason: str,
    mesh: Mesh,
) -> Placement:
    pieces = math.prod(mesh.shape[axis] for names in dims for axis in names)
    spec = PartitionSpec(*(_join(names) for names in dims)) if any(dims) else PartitionSpec()
    return Placement(path, shape, dtype, spec, reason, num_bytes(shape, dtype) // pieces)


def _as_tuple(entry: Axes) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _join(axes: Iterable[str]) -> Axes:
    names = tuple(axes)
    return None if not names else names[0] if len(names) == 1 else names


def _entry(spec: PartitionSpec, dim: int) -> Axes:
    return spec[dim] if dim < len(spec) else None


def _axes_in(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        yield from _as_tuple(entry)


def show_spec(spec: Iterable[Axes]) -> str:
    """ "(fsdp, -)", or "whole" where nothing is cut."""
    entries = ["-" if entry is None else "*".join(_as_tuple(entry)) for entry in spec]
    return f"({', '.join(entries)})" if any(entry != "-" for entry in entries) else "whole"


def _choices(dim: int, size: int) -> str:
    """The divisors of a dim that are nearest to the size that does not fit."""
    divisors = sorted((d for d in range(1, dim + 1) if dim % d == 0), key=lambda d: abs(d - size))[
        :5
    ]
    *head, last = map(str, sorted(divisors))
    return f"{', '.join(head)} or {last}" if head else last
