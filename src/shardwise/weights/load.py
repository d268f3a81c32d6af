"""Load the initial weights of a run, from another run or from published files.

Variables can be renamed, skipped, or initialized from the seed, by patterns of their paths.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.checkpoint.init_from import InitFrom, Loaded
from shardwise.checkpoint.plain import find_trees, is_plain
from shardwise.checkpoint.reader import (
    ArrayLike,
    SavedStep,
    find_step,
    open_step,
    show_leaf,
)
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.paths import AnyPath
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.text import columns, did_you_mean
from shardwise.tree import (
    KeyPath,
    Params,
    PyTree,
    is_key,
    key_bits,
    leaf_name,
    named_leaves,
)
from shardwise.weights.adapters import A, B
from shardwise.weights.families import family_of_tensors
from shardwise.weights.families.base import Family, ModelConfig
from shardwise.weights.frozen import FrozenWeights, merge_step
from shardwise.weights.hf_config import config_from_shapes
from shardwise.weights.hub import locate, open_weights, weights_in
from shardwise.weights.sources import (
    WeightSource,
    place_like,
    source_of_published,
    source_of_step,
    source_of_tensors,
)
from shardwise.weights.trees import source_of_trees

# Returns the configuration of our model for the published weights of a family. The second argument
# is the title of the source, for messages.
ConfigLookup = Callable[[Family[Any], str], ModelConfig]


def load_initial(
    init: InitFrom, spec: StateSpec, seed: int
) -> tuple[TrainState, Loaded]:
    """Return the state of step 0 with weights from a source.

    All paths, shapes and dtypes are compared before anything is compiled. No array of another shape
    is ever read. The optimizer starts from the loaded weights.

    Args:
        init: where the weights come from, and which variables are renamed or initialized.
        spec: the abstract state of the run.
        seed: initializes the variables that are not loaded, as in a run without `init`.

    Returns:
        The state, and what became of every variable.

    Raises:
        CheckpointError: if the source cannot be read or does not match the model.
        ConfigError: if a pattern in `init.rename` has no effect.

    Example:
        >>> state, loaded = load_initial(InitFrom("runs/a"), spec, seed=0)  # doctest: +SKIP
    """
    params = named_leaves(spec.abstract.params)
    frozen = named_leaves(spec.abstract.frozen)
    other = named_leaves(spec.abstract.other)
    wanted = {**params, **frozen, **other}
    # A source need not have statistics, nor the adapters of this run.
    adapters = {
        f"{path}/{part}" for path in spec.definition.adapters for part in (A, B)
    }
    required = wanted.keys() - other.keys() - adapters
    names = [_name_in_source(path, init.rename)[1] for path in required]
    needed = [name for name in names if name is not None]
    source = open_source(init, partial(_config_in_model, spec), needed)
    loaded = _plan(init, source, wanted, required)

    values = _initialize(spec, seed, loaded.fresh)
    arrays = source.load({name: wanted[path] for path, name in loaded.taken.items()})
    for path, name in loaded.taken.items():
        values[path] = place_like(arrays[name], wanted[path])

    def fill(tree: PyTree) -> PyTree:
        def value_at(path: KeyPath, _: jax.ShapeDtypeStruct) -> jax.Array:
            return values[leaf_name(path)]

        return jax.tree_util.tree_map_with_path(value_at, tree)

    def create(params: Params, other: PyTree, frozen: Params) -> TrainState:
        # Buffers that Orbax allocated cannot be donated to the first step. Copies can.
        params, other, frozen = jax.tree.map(jnp.copy, (params, other, frozen))
        step = jnp.zeros((), jnp.int32)
        return TrainState(step, params, other, spec.optimizer.init(params), frozen)

    abstract = spec.abstract
    parts = [fill(tree) for tree in (abstract.params, abstract.other, abstract.frozen)]
    state = jax.jit(create, out_shardings=spec.shardings)(*parts)
    return state, loaded


def open_source(
    init: InitFrom, config_of: ConfigLookup, names: Collection[str]
) -> WeightSource:
    """Open the files that `init` names. Their headers are read, but no array.

    Args:
        init: where the weights are. `rename` and `cast` are ignored here.
        config_of: returns the configuration of our model, if the files are published weights.
        names: paths in the source that are needed. They find the tree with the weights in a
            checkpoint of plain Orbax.

    Raises:
        CheckpointError: if the files are missing, damaged, or do not match the configuration.
    """
    path = locate(init.path)
    files = weights_in(path)
    if not files and is_plain(plain := _steps_below(path)):
        return _open_plain(plain, init, names)
    if init.item is not None:
        raise ConfigError(
            f"init_from: {path} is not a checkpoint of plain Orbax, so it has no items. Drop "
            "`item`."
        )
    if not files:
        saved = open_step(find_step(path, init.step))
        complete = merged_step(saved, average=init.average)
        # The averages of adapters are merged already.
        return source_of_step(complete, init.average and complete is saved)
    if init.step is not None or init.average:
        raise ConfigError(
            f"init_from: {path} has neither steps nor averages. Drop `step` and `average`."
        )
    tensors = open_weights(files)
    title = str(files[0] if len(files) == 1 else path)
    family = family_of_tensors(tensors)
    if family is None:
        return source_of_tensors(title, tensors)
    return source_of_published(
        title, files[0].parent, tensors, config_of(family, title)
    )


def _steps_below(path: Path) -> Path:
    """Return the directory `checkpoints` in a directory, or the directory itself without one."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _open_plain(path: Path, init: InitFrom, names: Collection[str]) -> WeightSource:
    if init.step == "best" or init.average:
        raise ConfigError(
            f"init_from: {path} was written by plain Orbax, which records neither the best step "
            "nor averages. Choose a step by its number, and averages with `item`."
        )
    return source_of_trees(path, find_trees(path, init.step), init.item, names)


def merged_step(
    saved: SavedStep, base: AnyPath | None = None, *, average: bool = False
) -> SavedStep:
    """Return a saved step with the complete model.

    Args:
        saved: the saved step. It is returned unchanged if it has the complete model.
        base: the frozen weights that its adapters belong to. By default they are read from where
            the run read them.
        average: use the averages of the adapters that the optimizer keeps.

    Raises:
        ConfigError: if `base` is passed for a step with the complete model.
        CheckpointError: if the frozen weights cannot be read, or are not those of the run.
    """
    frozen = FrozenWeights.from_metadata(saved)
    if frozen is None:
        if base is not None:
            raise ConfigError(
                f"{saved.directory} holds the complete model. Drop the base."
            )
        return saved
    place = base or frozen.source
    not_saved = [path for path, leaf in frozen.leaves.items() if leaf.name is None]
    if place is None or not_saved:
        path = not_saved[0] if not_saved else ""
        raise CheckpointError(
            f"{saved.directory}: '{path}' is frozen and its run initialized it from the seed, so "
            "there is no file to merge with."
        )
    shapes = {path: leaf.shape for path, leaf in frozen.leaves.items()}
    # Another base is searched for its weights again.
    same = base is None
    source = open_source(
        InitFrom(
            place,
            average=same and frozen.average,
            item=frozen.item if same else None,
        ),
        lambda _family, _title: config_from_shapes(shapes, saved.metadata.get("model")),
        [str(leaf.name) for leaf in frozen.leaves.values()],
    )
    return merge_step(saved, frozen, source, average)


def _config_in_model(spec: StateSpec, family: Family[Any], title: str) -> ModelConfig:
    """Return the configuration of the one module of this family in the model of a run."""
    modules = (module for _, module in nnx.iter_modules(spec.module(spec.abstract)))
    configs = {
        module.config for module in modules if isinstance(module, family.model_class)
    }
    if len(configs) != 1:
        model = f"{family.model_class.__module__}.{family.name}"
        raise CheckpointError(
            f"{title} holds a {family.title} model, but this model contains {len(configs)} "
            f"configurations of {model}. It must contain exactly one."
        )
    config: ModelConfig = configs.pop()
    return config


def _plan(
    init: InitFrom,
    source: WeightSource,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    required: Collection[str],
) -> Loaded:
    """Decide which array each variable gets. Report everything that does not match in one table.

    Args:
        init: the patterns.
        source: the arrays.
        wanted: shape and dtype of all variables of the model, by path.
        required: the variables that must be in the source, unless a pattern says otherwise.
    """
    taken: dict[str, str] = {}
    fresh: list[str] = []
    problems: list[tuple[str, str, str, str]] = []
    effective = set()
    for path, leaf in wanted.items():
        pattern, name = _name_in_source(path, init.rename)
        effective.add(pattern)
        is_optional = pattern is None and path not in required
        if name is None or (is_optional and name not in source.leaves):
            fresh.append(path)
            continue
        problem = _mismatch(name, leaf, source, init.cast)
        if problem is None:
            taken[path] = name
        else:
            problems.append((path, *problem))
    _check_patterns(
        [pattern for pattern in init.rename if pattern not in effective], wanted
    )
    if problems:
        raise CheckpointError(_mismatch_message(source, problems))
    if not taken:
        raise CheckpointError(
            f"init_from: no variable would be loaded from {source.title}. Drop init_from."
        )
    used = set(taken.values())
    unused = tuple(name for name in source.leaves if name not in used)
    return Loaded(source.title, taken, tuple(fresh), unused, init.average, source.item)


def _name_in_source(
    path: str, rename: Mapping[str, str | None]
) -> tuple[str | None, str | None]:
    """Return the pattern that matches a path, and the path in the source.

    Without a match the pattern is None and the path is the same. A pattern with the target None
    returns None for the path.
    """
    for pattern, target in rename.items():
        expression = "(.*)".join(map(re.escape, pattern.split("*")))
        match = re.fullmatch(expression, path)
        if match is None:
            continue
        if target is None:
            return pattern, None
        name, *rest = target.split("*")
        for star, part in zip(match.groups(), rest, strict=False):
            name += star + part
        return pattern, name
    return None, path


def _mismatch(
    name: str, leaf: jax.ShapeDtypeStruct, source: WeightSource, cast: bool
) -> tuple[str, str, str] | None:
    """Return (saved, wanted, hint) if an array of the source does not match a variable."""
    saved: ArrayLike | None = source.leaves.get(name)
    if saved is None:
        return "-", show_leaf(leaf), did_you_mean(name, source.leaves).strip()
    may_cast = not is_key(leaf.dtype) and not is_key(saved.dtype)
    if is_key(leaf.dtype) and not is_key(saved.dtype):
        # A file that has no dtype for random keys has their bits.
        leaf = key_bits(leaf.shape, leaf.dtype)
    if tuple(saved.shape) != leaf.shape:
        return show_leaf(saved), show_leaf(leaf), ""
    if saved.dtype != leaf.dtype and not (cast and may_cast):
        hint = "cast=True would convert it" if may_cast else ""
        return show_leaf(saved), show_leaf(leaf), hint
    return None


def _check_patterns(unused: list[str], wanted: Collection[str]) -> None:
    if unused:
        hints = [f"  '{pattern}'{did_you_mean(pattern, wanted)}" for pattern in unused]
        fact = (
            "init_from: these patterns have no effect, because they match no variable or an "
            "earlier pattern matches it:"
        )
        raise ConfigError("\n".join([fact, *hints]))


def _mismatch_message(
    source: WeightSource, problems: list[tuple[str, str, str, str]]
) -> str:
    path = problems[0][0]
    siblings = path.rpartition("/")[0] + "/*" if "/" in path else path
    return "\n".join(
        [
            f"init_from: {source.title} does not match this model:",
            columns([("variable", "saved", "wanted", ""), *problems]),
            f'Nothing was loaded. Initialize variables from the seed with rename={{"{siblings}": '
            f'None}}, or map them to saved ones with rename={{"{path}": "..."}}.',
        ]
    )


def _initialize(
    spec: StateSpec, seed: int, paths: tuple[str, ...]
) -> dict[str, jax.Array]:
    """Return variables as a run without `init_from` has them at its start."""
    if not paths:
        return {}
    state = init_state(spec, seed)
    values = {
        **named_leaves(state.params),
        **named_leaves(state.frozen),
        **named_leaves(state.other),
    }
    return {path: values[path] for path in paths}
