"""Weights to begin with, from another run's checkpoint or from a safetensors file: renamed, left out, or begun afresh by path."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

from shardwise.checkpoint.init_from import InitFrom
from shardwise.checkpoint.reader import (
    SavedStep,
    average_of,
    averages,
    find_step,
    open_step,
    read_json,
    show_leaf,
)
from shardwise.errors import CheckpointError, ConfigError
from shardwise.mesh import make_mesh
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.llama import Llama
from shardwise.sharding import put
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.text import columns, did_you_mean
from shardwise.tree import leaf_name, named_leaves
from shardwise.weights.adapters import A, B, adapted_value, checksums
from shardwise.weights.export import DTYPES
from shardwise.weights.hf import kind_of, params_from_hf
from shardwise.weights.hf_config import Config, config_from_hf, config_from_shapes, differences
from shardwise.weights.hub import Tensor, locate, open_weights, weights_in


@dataclass(frozen=True)
class Loaded:
    """What became of every variable."""

    source: str
    taken: Mapping[str, str]  # path in the model -> path in the source
    fresh: tuple[str, ...]  # begun afresh
    left_out: tuple[str, ...]  # in the source, and not used
    average: bool = False  # whether they are the averages that the source keeps

    def table(self) -> Table:
        renamed = [f"{path} from {name}" for path, name in self.taken.items() if path != name]
        same = [path for path, name in self.taken.items() if path == name]
        table = Table(
            "", "variables", "", title=f"weights from {self.source}", title_justify="left"
        )
        for what, names in {
            "loaded": same,
            "renamed": renamed,
            "begun afresh": self.fresh,
            "left out": self.left_out,
        }.items():
            if names:
                table.add_row(
                    what,
                    str(len(names)),
                    ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
                )
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
    source = _open(init, partial(_config_in, spec))
    wanted = {
        **named_leaves(spec.abstract.params),
        **named_leaves(spec.abstract.frozen),
        **named_leaves(spec.abstract.other),
    }
    new = {f"{path}/{name}" for path in spec.definition.adapters for name in (A, B)}
    loaded = _plan(init, source, wanted, {*wanted} - {*named_leaves(spec.abstract.other)} - new)
    fresh = _fresh(spec, seed, loaded.fresh)
    found = source.load({name: wanted[path] for path, name in loaded.taken.items()})
    values = {path: _like(found[name], wanted[path]) for path, name in loaded.taken.items()} | fresh

    def filled(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: values[leaf_name(path)], tree)

    def create(params: Any, other: Any, frozen: Any) -> TrainState:
        # Buffers that Orbax made cannot be donated to the first step.
        params, other, frozen = jax.tree.map(jnp.copy, (params, other, frozen))
        return TrainState(
            jnp.zeros((), jnp.int32), params, other, spec.optimizer.init(params), frozen
        )

    parts = [
        filled(tree) for tree in (spec.abstract.params, spec.abstract.other, spec.abstract.frozen)
    ]
    state = jax.jit(create, out_shardings=spec.shardings)(*parts)
    return state, loaded


def _plan(
    init: InitFrom, source: _Source, wanted: Mapping[str, Any], needed: Collection[str]
) -> Loaded:
    """Which variable takes what; all that does not fit, in one table. What is not `needed` begins afresh if it is not there."""
    taken: dict[str, str] = {}
    fresh: list[str] = []
    problems: list[tuple[str, str, str, str]] = []
    used: set[str] = set()
    for path, leaf in wanted.items():
        pattern, name = _name_in_source(path, init.rename)
        used |= {pattern} if pattern is not None else set()
        saved = source.leaves.get(name) if name is not None else None
        if name is None or (saved is None and pattern is None and path not in needed):
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
        raise ConfigError(
            "\n".join(
                [
                    "init_from: these patterns fit no variable that an earlier one has not taken:",
                    *hints,
                ]
            )
        )
    if problems:
        raise CheckpointError(_mismatch(source, problems))
    if not taken:
        raise CheckpointError(
            f"init_from: nothing would be taken from {source.title}; leave init_from out."
        )
    used_names = set(taken.values())
    return Loaded(
        source.title,
        taken,
        tuple(fresh),
        tuple(name for name in source.leaves if name not in used_names),
        init.average,
    )


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
    values = {
        **named_leaves(state.params),
        **named_leaves(state.frozen),
        **named_leaves(state.other),
    }
    return {path: values[path] for path in paths}


def _like(value: Any, leaf: jax.ShapeDtypeStruct) -> Any:
    value = value.astype(leaf.dtype)
    return (
        jax.device_put(value, leaf.sharding)
        if isinstance(value, jax.Array)
        else put(value, leaf.sharding)
    )


# Sources


def _open(init: InitFrom, config_of: Callable[[type[Config], str], Config]) -> _Source:
    path = locate(init.path)
    if not (files := weights_in(path)):
        saved = open_step(find_step(path, init.step))
        whole = merged_step(saved, average=init.average)
        return _open_step(whole, init.average and whole is saved)
    if init.step is not None or init.average:
        raise ConfigError(
            f"init_from: {path} has neither steps nor averages; leave `step` and `average` out."
        )
    tensors = open_weights(files)
    title = str(files[0] if len(files) == 1 else path)
    kind = kind_of(tensors)
    return (
        _open_safetensors(title, tensors)
        if kind is None
        else _open_published(title, files[0].parent, tensors, config_of(kind, title))
    )


def _open_step(saved: SavedStep, average: bool) -> _Source:
    variables = saved.variables
    leaves = {path: saved.leaves[name] for path, name in variables.items()}
    found = averages(saved) if average else {}
    if average and not found:
        raise CheckpointError(
            f"the optimizer of {saved.directory} keeps no average of the weights; leave average=True out."
        )

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        sources = {path: found.get(path, (variables[path],)) for path in wanted}
        parts: dict[str, jax.ShapeDtypeStruct] = {}
        for path, names in sources.items():
            for name in names:
                saved_leaf, sharding = saved.leaves[name], wanted[path].sharding
                whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
                parts[name] = jax.ShapeDtypeStruct(
                    saved_leaf.shape,
                    saved_leaf.dtype,
                    sharding=sharding if saved_leaf.shape else whole,
                )
        arrays = saved.place(parts)
        return {
            path: average_of([arrays[name] for name in names], leaves[path].dtype)
            for path, names in sources.items()
        }

    return _Source(str(saved.directory), leaves, load)


def _open_safetensors(title: str, tensors: Mapping[str, Tensor]) -> _Source:
    known = {code: jnp.dtype(dtype) for dtype, code in DTYPES.items()}
    if unknown := [
        f"'{name}' ({tensor.dtype})"
        for name, tensor in tensors.items()
        if tensor.dtype not in known
    ]:
        raise CheckpointError(f"{title} has dtypes that are not known here: {', '.join(unknown)}.")
    by_path = {name.replace(".", "/"): tensor for name, tensor in tensors.items()}
    leaves = {
        path: jax.ShapeDtypeStruct(tensor.shape, known[tensor.dtype])
        for path, tensor in by_path.items()
    }

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        return {path: _like(np.asarray(by_path[path]), leaf) for path, leaf in wanted.items()}

    return _Source(title, leaves, load)


def _config_in(spec: StateSpec, kind: type[Config], title: str) -> Config:
    """The configuration of the one GPT or Llama in a model."""
    modules = (
        module
        for _, module in nnx.iter_modules(spec.module(spec.abstract))
        if isinstance(module, GPT | Llama)
    )
    configs = {module.config for module in modules if isinstance(module.config, kind)}
    if len(configs) != 1:
        what, model = ("a GPT-2", "gpt.GPT") if kind is GPTConfig else ("a Llama", "llama.Llama")
        raise CheckpointError(
            f"{title} holds {what}, and this model has {len(configs)} kinds of shardwise.models.{model} in it."
        )
    return configs.pop()


def _open_published(
    title: str, folder: Path, tensors: Mapping[str, Tensor], config: Config
) -> _Source:
    """Names of `transformers`; the GPT or Llama of this model says how they are laid out, config.json that they mean the same."""
    try:
        if problems := differences(config, config_from_hf(read_json(folder / "config.json"))):
            raise ValueError("; ".join(problems))
        leaves = named_leaves(params_from_hf(tensors, config))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"init_from: {title} does not fit this model: {error}") from error

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        return {path: _like(leaves[path], leaf) for path, leaf in wanted.items()}

    return _Source(title, leaves, load)


# Frozen weights, which are in no checkpoint of the run that has them


def describe_frozen(spec: StateSpec, frozen: Any, loaded: Loaded | None) -> dict[str, Any]:
    """For `meta.json`: where the frozen weights came from, by what they are known again, and how adapters belong to them."""
    sums, names = checksums(frozen), loaded.taken if loaded is not None else {}
    leaves = {
        path: {
            "shape": list(p.shape),
            "dtype": str(p.dtype),
            "checksum": sums[path],
            "from": names.get(path),
        }
        for path, p in spec.frozen.items()
    }
    source = (
        {"source": str(Path(loaded.source).resolve()), "average": loaded.average}
        if loaded is not None
        else {"source": None}
    )
    return {**source, "leaves": leaves, "adapters": dict(spec.definition.adapters)}


def check_frozen(metadata: Mapping[str, Any], now: Mapping[str, Any], place: Path) -> None:
    """Refuses frozen weights that are not those that a checkpoint was trained beside."""
    with _described(place):
        saved = metadata["frozen"]
        leaves, mine, source = dict(saved["leaves"]), now["leaves"], saved["source"]
        known = {
            path: (list(leaf["shape"]), leaf["dtype"], leaf["checksum"])
            for path, leaf in leaves.items()
        }
    own = {path: (leaf["shape"], leaf["dtype"], leaf["checksum"]) for path, leaf in mine.items()}
    if other := [path for path in {**known, **own} if known.get(path) != own.get(path)]:
        first, rest = (
            ", ".join(f"'{path}'" for path in other[:3]),
            f" and {len(other) - 3} more" if len(other) > 3 else "",
        )
        raise CheckpointError(
            f"checkpoint {place} was trained beside other frozen weights than those of now: {first}{rest} of {len(own)} differ.\n"
            f"  then: {source or 'begun afresh from the seed'}\n  now:  {now['source'] or 'begun afresh from the seed'}\n"
            "Nothing was trained. Give the init_from that the run began with, or another --out."
        )


@dataclass(frozen=True)
class MergedStep(SavedStep):
    """A saved step of adapters, read as the whole model that they make of the frozen weights beside which they were trained."""

    get: Callable[[set[str]], dict[str, np.ndarray]] = field(kw_only=True)

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        return self.get(set(names))

    def place(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _like(value, wanted[name]) for name, value in self.get(set(wanted)).items()}


def merged_step(
    saved: SavedStep, base: Path | str | None = None, *, average: bool = False
) -> SavedStep:
    """The step itself if all of its model is in it; otherwise with the frozen weights from `base`, or from where its run had them."""
    about = saved.metadata.get("frozen")
    if about is None:
        if base is not None:
            raise ConfigError(f"{saved.directory} holds the whole model; leave the base out.")
        return saved
    with _described(saved.directory):
        leaves = {
            path: jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
            for path, leaf in about["leaves"].items()
        }
        sums = {path: str(leaf["checksum"]) for path, leaf in about["leaves"].items()}
        names = {path: leaf["from"] for path, leaf in about["leaves"].items()}
        adapters = {
            path: (int(known["inputs"]), float(known["scale"]))
            for path, known in about["adapters"].items()
        }
        place, averaged = base or about["source"], base is None and about.get("average") is True
    if place is None or None in names.values():
        which = next((path for path, name in names.items() if name is None), "")
        raise CheckpointError(
            f"{saved.directory}: '{which}' is frozen and was begun afresh by its run, so no file holds it to merge with."
        )
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    source = _open(
        InitFrom(place, average=averaged),
        lambda _kind, _title: config_from_shapes(shapes, saved.metadata.get("model")),
    )
    found = averages(saved) if average else {}
    if average and not found:
        raise CheckpointError(
            f"the optimizer of {saved.directory} keeps no average of the weights; leave the average out."
        )
    own = {path: found.get(path, (name,)) for path, name in saved.variables.items()}
    new = {f"{path}/{part}" for path in adapters for part in (A, B)}
    whole = {f"params/{path}": leaf for path, leaf in leaves.items()}
    whole |= {name: saved.leaves[name] for path, name in saved.variables.items() if path not in new}
    fitting = {
        path
        for path, name in names.items()
        if name in source.leaves and tuple(source.leaves[name].shape) == shapes[path]
    }
    if lacking := sorted({*names} - fitting | new - {*own}):
        raise CheckpointError(
            f"{source.title} is not what {saved.directory} was trained beside: '{lacking[0]}' is missing or of another shape."
        )
    device = jax.sharding.NamedSharding(
        make_mesh("data=1", jax.local_devices()[:1]), jax.sharding.PartitionSpec()
    )

    def get(wanted: set[str]) -> dict[str, np.ndarray]:
        paths = {name.partition("/")[2]: name for name in wanted}
        frozen = [path for path in paths if path in leaves]
        read = {
            part
            for path in paths
            for part in (
                (f"{path}/{A}", f"{path}/{B}")
                if path in adapters
                else ()
                if path in leaves
                else (path,)
            )
        }
        arrays = saved.read({name for path in read for name in own[path]})
        trained = {
            path: average_of(
                [arrays[name] for name in own[path]], saved.leaves[saved.variables[path]].dtype
            )
            for path in read
        }
        bases = source.load(
            {
                names[p]: jax.ShapeDtypeStruct(leaves[p].shape, leaves[p].dtype, sharding=device)
                for p in frozen
            }
        )
        values = {
            path: _like(
                bases[names[path]],
                jax.ShapeDtypeStruct(shapes[path], leaves[path].dtype, sharding=device),
            )
            for path in frozen
        }
        if other := [path for path, text in checksums(values).items() if text != sums[path]]:
            raise CheckpointError(
                f"{source.title} is not what {saved.directory} was trained beside: '{other[0]}' differs."
            )
        for path in frozen:
            if path in adapters:
                values[path] = _merged(
                    values[path], trained[f"{path}/{A}"], trained[f"{path}/{B}"], *adapters[path]
                )
        return {
            name: np.asarray(values[path] if path in leaves else trained[path])
            for path, name in paths.items()
        }

    return MergedStep(saved.directory, None, whole, average, get=get)


_merged = jax.jit(adapted_value, static_argnums=(3, 4))


@contextmanager
def _described(place: Path) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{place / 'meta.json'} does not describe frozen weights: {error}"
        ) from error
