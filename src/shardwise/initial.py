"""Weights to begin with, from another run's checkpoint or from a safetensors file: renamed, left out, or begun afresh by path."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table
from safetensors import SafetensorError, safe_open

from shardwise.errors import CheckpointError, ConfigError, columns, did_you_mean
from shardwise.export import DTYPES
from shardwise.models.gpt import GPT
from shardwise.models.hf import config_from_hf, is_hf, params_from_hf
from shardwise.saved import SavedStep, average_of, averages, find_step, open_step, read_json, show_leaf
from shardwise.sharding import put
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.tree import leaf_name, named_leaves


@dataclass(frozen=True)
class InitFrom:
    """Where the first weights of a run come from.

    `rename` maps patterns of this model's paths, the first that fits, to the path in the checkpoint, where each `*` stands
    for what it stood for in the pattern, or to None: such a variable is begun afresh. What no pattern fits has the same path.
    """

    path: Path | str  # a run, one step of it, a safetensors file, or a directory with model.safetensors
    rename: Mapping[str, str | None] = field(default_factory=dict)
    step: int | None = None  # of a run; None: the newest
    average: bool = False  # the averaged weights of a run whose optimizer keeps them
    cast: bool = False  # whether another dtype is converted rather than refused

    def __post_init__(self) -> None:
        for pattern, target in self.rename.items():
            if target is not None and target.count("*") > pattern.count("*"):
                raise ConfigError(f"init_from: '{target}' has more * than the pattern '{pattern}' that it shall be filled from.")


@dataclass(frozen=True)
class Loaded:
    """What became of every variable."""

    source: str
    taken: Mapping[str, str]  # path in the model -> path in the source
    fresh: tuple[str, ...]  # begun afresh
    left_out: tuple[str, ...]  # in the source, and not used

    def table(self) -> Table:
        renamed = [f"{path} from {name}" for path, name in self.taken.items() if path != name]
        same = [path for path, name in self.taken.items() if path == name]
        table = Table("", "variables", "", title=f"weights from {self.source}", title_justify="left")
        for what, names in {"loaded": same, "renamed": renamed, "begun afresh": self.fresh, "left out": self.left_out}.items():
            if names:
                table.add_row(what, str(len(names)), ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""))
        return table


@dataclass(frozen=True)
class _Source:
    """Named arrays: what they are, and the way to get some of them, each with the dtype and sharding that is asked for."""

    title: str
    leaves: Mapping[str, Any]
    load: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Any]]


def load_initial(init: InitFrom, spec: StateSpec, seed: int) -> tuple[TrainState, Loaded]:
    """The state of step 0: weights of the source, what is to be begun afresh from `seed`, an optimizer that begins with these.

    Everything is compared before anything is compiled, and nothing of another shape is ever read.
    """
    source = _open(init, spec)
    wanted = {**named_leaves(spec.abstract.params), **named_leaves(spec.abstract.other)}
    loaded = _plan(init, source, wanted, named_leaves(spec.abstract.params))
    fresh = _fresh(spec, seed, loaded.fresh)
    found = source.load({name: wanted[path] for path, name in loaded.taken.items()})
    values = {path: _like(found[name], wanted[path]) for path, name in loaded.taken.items()} | fresh

    def filled(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: values[leaf_name(path)], tree)

    def create(params: Any, other: Any) -> TrainState:
        params, other = jax.tree.map(jnp.copy, (params, other))  # buffers that Orbax made cannot be donated to the first step
        return TrainState(jnp.zeros((), jnp.int32), params, other, spec.optimizer.init(params))

    state = jax.jit(create, out_shardings=spec.shardings)(filled(spec.abstract.params), filled(spec.abstract.other))
    return state, loaded


def _plan(init: InitFrom, source: _Source, wanted: Mapping[str, Any], params: Mapping[str, Any]) -> Loaded:
    """Which variable takes what; all that does not fit, in one table."""
    taken: dict[str, str] = {}
    fresh: list[str] = []
    problems: list[tuple[str, str, str, str]] = []
    used: set[str] = set()
    for path, leaf in wanted.items():
        pattern, name = _name_in_source(path, init.rename)
        used |= {pattern} if pattern is not None else set()
        saved = source.leaves.get(name) if name is not None else None
        if name is None or (saved is None and pattern is None and path not in params):
            fresh.append(path)
        elif saved is None:
            problems.append((path, "-", show_leaf(leaf), did_you_mean(name, source.leaves).strip()))
        elif tuple(saved.shape) != leaf.shape:
            problems.append((path, show_leaf(saved), show_leaf(leaf), ""))
        elif saved.dtype != leaf.dtype and not init.cast:
            problems.append((path, show_leaf(saved), show_leaf(leaf), "cast=True would convert it"))
        else:
            taken[path] = name
    if idle := [pattern for pattern in init.rename if pattern not in used]:
        hints = [f"  '{pattern}'{did_you_mean(pattern, wanted)}" for pattern in idle]
        raise ConfigError("\n".join(["init_from: these patterns fit no variable that an earlier one has not taken:", *hints]))
    if problems:
        raise CheckpointError(_mismatch(source, problems))
    if not taken:
        raise CheckpointError(f"init_from: nothing would be taken from {source.title}; leave init_from out.")
    used_names = set(taken.values())
    return Loaded(source.title, taken, tuple(fresh), tuple(name for name in source.leaves if name not in used_names))


def _name_in_source(path: str, rename: Mapping[str, str | None]) -> tuple[str | None, str | None]:
    """(the pattern that decides, the path in the source or None)"""
    for pattern, target in rename.items():
        if match := re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), path):
            stars = iter(match.groups())
            return pattern, None if target is None else re.sub(r"\*", lambda _: next(stars), target)  # noqa: B023
    return None, path


def _mismatch(source: _Source, problems: list[tuple[str, str, str, str]]) -> str:
    first = problems[0][0]
    group = first.rpartition("/")[0] + "/*" if "/" in first else first
    remedy = f'Begin such variables afresh with rename={{"{group}": None}}, or name the saved ones with rename={{"{first}": "..."}}.'
    return "\n".join(
        [
            f"init_from: {source.title} does not fit this model:",
            columns([("variable", "saved", "wanted", ""), *problems]),
            f"Nothing was loaded. {remedy}",
        ]
    )


def _fresh(spec: StateSpec, seed: int, paths: tuple[str, ...]) -> dict[str, jax.Array]:
    """These variables as a run without init_from has them at its start."""
    if not paths:
        return {}
    state = init_state(spec, seed)
    values = {**named_leaves(state.params), **named_leaves(state.other)}
    return {path: values[path] for path in paths}


def _like(value: Any, leaf: jax.ShapeDtypeStruct) -> Any:
    value = value.astype(leaf.dtype)
    return jax.device_put(value, leaf.sharding) if isinstance(value, jax.Array) else put(value, leaf.sharding)


# Sources


def _open(init: InitFrom, spec: StateSpec) -> _Source:
    path = Path(init.path)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        return _open_step(open_step(find_step(path, init.step)), init.average)
    if init.step is not None or init.average:
        raise ConfigError(f"init_from: {file} has neither steps nor averages; leave `step` and `average` out.")
    return _open_safetensors(file, spec)


def _open_step(saved: SavedStep, average: bool) -> _Source:
    variables = saved.variables
    leaves = {path: saved.leaves[name] for path, name in variables.items()}
    found = averages(saved) if average else {}
    if average and not found:
        raise CheckpointError(f"the optimizer of {saved.directory} keeps no average of the weights; leave average=True out.")

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        sources = {path: found.get(path, (variables[path],)) for path in wanted}
        parts: dict[str, jax.ShapeDtypeStruct] = {}
        for path, names in sources.items():
            for name in names:
                saved_leaf, sharding = saved.leaves[name], wanted[path].sharding
                whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
                parts[name] = jax.ShapeDtypeStruct(saved_leaf.shape, saved_leaf.dtype, sharding=sharding if saved_leaf.shape else whole)
        arrays = saved.place(parts)
        return {path: average_of([arrays[name] for name in names], leaves[path].dtype) for path, names in sources.items()}

    return _Source(str(saved.directory), leaves, load)


def _open_safetensors(file: Path, spec: StateSpec) -> _Source:
    try:
        tensors = safe_open(file, framework="np")
        names = list(tensors.keys())
        if is_hf(names):
            return _open_gpt2(file, {name: tensors.get_tensor(name) for name in names}, spec)
        slices = {name: tensors.get_slice(name) for name in names}
    except (SafetensorError, OSError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    known = {code: jnp.dtype(dtype) for dtype, code in DTYPES.items()}
    if unknown := [f"'{name}' ({piece.get_dtype()})" for name, piece in slices.items() if piece.get_dtype() not in known]:
        raise CheckpointError(f"{file} has dtypes that are not known here: {', '.join(unknown)}.")
    originals = {name.replace(".", "/"): name for name in names}
    pieces = {path: slices[name] for path, name in originals.items()}
    leaves = {path: jax.ShapeDtypeStruct(tuple(piece.get_shape()), known[piece.get_dtype()]) for path, piece in pieces.items()}

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        return {path: _like(tensors.get_tensor(originals[path]), leaf) for path, leaf in wanted.items()}

    return _Source(str(file), leaves, load)


def _open_gpt2(file: Path, tensors: Mapping[str, np.ndarray], spec: StateSpec) -> _Source:
    """Names of `transformers`; the GPT in this model says how they are laid out, config.json that they mean the same."""
    configs = {module.config for _, module in nnx.iter_modules(spec.module(spec.abstract)) if isinstance(module, GPT)}
    if len(configs) != 1:
        raise CheckpointError(f"{file} holds a GPT-2, and this model has {len(configs)} kinds of shardwise.models.gpt.GPT in it.")
    config = configs.pop()
    try:
        theirs = config_from_hf(read_json(file.with_name("config.json")))
        if theirs.num_heads != config.num_heads:
            raise ValueError(f"it has {theirs.num_heads} heads, this model {config.num_heads}")
        leaves = named_leaves(params_from_hf(tensors, config))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"init_from: {file} does not fit this model: {error}") from error

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        return {path: _like(leaves[path], leaf) for path, leaf in wanted.items()}

    return _Source(str(file), leaves, load)
