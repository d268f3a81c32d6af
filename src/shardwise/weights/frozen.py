"""Frozen weights: no checkpoint of the run that uses them contains them.

Frozen weights are a separate part of the state, `TrainState.frozen`. Gradients, optimizers,
averages and checkpoints handle only `params`, so they need no special case. `meta.json` of a
checkpoint records where the frozen weights came from, and a checksum of each that is the same on
every mesh. With that, a checkpoint of adapters can be merged with its base and read like a complete
model.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.checkpoint.init_from import Loaded
from shardwise.checkpoint.reader import ArrayLike, SavedStep, average_of, variable_parts
from shardwise.errors import CheckpointError
from shardwise.mesh import make_mesh
from shardwise.state import StateSpec
from shardwise.text import Json
from shardwise.tree import Params
from shardwise.weights.adapters import A, B, adapted_value, checksums
from shardwise.weights.sources import WeightSource, place_like

# How many frozen weights an error lists. The others are counted.
MAX_LISTED = 3

_merge = jax.jit(adapted_value, static_argnums=(3, 4))


@dataclass(frozen=True)
class FrozenLeaf:
    """A frozen weight, as `meta.json` describes it.

    Attributes:
        shape: the shape of the array.
        dtype: the dtype of the array.
        checksum: 16 hexadecimal digits; see `shardwise.weights.adapters.checksums`.
        name: its path in the source, or None if it was initialized from the seed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    checksum: str
    name: str | None


@dataclass(frozen=True)
class Adapter:
    """How the adapters of a weight are applied.

    Attributes:
        inputs: the number of input dims of the weight.
        scale: the factor of the product of both adapters.
    """

    inputs: int
    scale: float


@dataclass(frozen=True)
class FrozenWeights:
    """The frozen weights of a run, as `meta.json` of its checkpoints describes them.

    Attributes:
        leaves: the frozen weights, by path.
        adapters: the adapters, by the path of their weight.
        source: where the weights came from, or None if all were initialized from the seed.
        average: whether they are the averages that the source keeps.
        item: the tree in the source, if it is a checkpoint of plain Orbax with several.
    """

    leaves: Mapping[str, FrozenLeaf]
    adapters: Mapping[str, Adapter]
    source: str | None
    average: bool
    item: str | None = None

    @classmethod
    def from_metadata(cls, saved: SavedStep) -> "FrozenWeights | None":
        """Return the description in a saved step, or None if the step has the complete model.

        Raises:
            CheckpointError: if the description is invalid.
        """
        description = saved.metadata.get("frozen")
        if description is None:
            return None
        with _description_errors(saved.directory):
            leaves = {
                path: _parse_leaf(leaf) for path, leaf in description["leaves"].items()
            }
            adapters = {
                path: Adapter(int(adapter["inputs"]), float(adapter["scale"]))
                for path, adapter in description["adapters"].items()
            }
            without_base = [path for path in adapters if path not in leaves]
            if without_base:
                raise ValueError(f"'{without_base[0]}' has adapters, but is not listed")
            return cls(
                leaves,
                adapters,
                description["source"],
                description.get("average") is True,
                description.get("item"),
            )


def _parse_leaf(leaf: Json) -> FrozenLeaf:
    return FrozenLeaf(
        tuple(leaf["shape"]),
        jnp.dtype(leaf["dtype"]),
        str(leaf["checksum"]),
        leaf["from"],
    )


def describe_frozen(spec: StateSpec, frozen: Params, loaded: Loaded | None) -> Json:
    """Return the description of frozen weights for `meta.json`.

    Args:
        spec: the abstract state of the run.
        frozen: the frozen weights.
        loaded: how the weights were loaded, or None if they were initialized from the seed.
    """
    sums = checksums(frozen)
    names = {} if loaded is None else loaded.taken
    leaves = {
        path: {
            "shape": list(placement.shape),
            "dtype": str(placement.dtype),
            "checksum": sums[path],
            "from": names.get(path),
        }
        for path, placement in spec.frozen.items()
    }
    origin: Json = {"source": None}
    if loaded is not None:
        origin = {
            "source": str(Path(loaded.source).resolve()),
            "average": loaded.average,
        }
        if loaded.item is not None:
            origin["item"] = loaded.item
    return {**origin, "leaves": leaves, "adapters": dict(spec.definition.adapters)}


def check_frozen(metadata: Json, now: Json, place: Path) -> None:
    """Check that a run has the frozen weights that a checkpoint was trained with.

    Args:
        metadata: the content of `meta.json` of the checkpoint.
        now: the frozen weights of this run, as `describe_frozen` describes them.
        place: the directory of the checkpoint, for the message.

    Raises:
        CheckpointError: if any weight differs.
    """
    with _description_errors(place):
        description = metadata["frozen"]
        saved = {
            path: _identity(leaf) for path, leaf in dict(description["leaves"]).items()
        }
        source = description["source"]
    current = {path: _identity(leaf) for path, leaf in now["leaves"].items()}
    changed = [
        path for path in {**saved, **current} if saved.get(path) != current.get(path)
    ]
    if not changed:
        return
    listed = ", ".join(f"'{path}'" for path in changed[:MAX_LISTED])
    hidden = len(changed) - MAX_LISTED
    more = f" and {hidden} more" if hidden > 0 else ""
    unknown = "initialized from the seed"
    raise CheckpointError(
        f"checkpoint {place} was trained with other frozen weights: "
        f"{listed}{more} of {len(current)} differ.\n"
        f"  then: {source or unknown}\n  now:  {now['source'] or unknown}\n"
        "Nothing was trained. Use the init_from that the run started with, or another --out."
    )


def _identity(leaf: Json) -> tuple[list[int], str, str]:
    return list(leaf["shape"]), leaf["dtype"], leaf["checksum"]


@dataclass(frozen=True)
class MergedStep(SavedStep):
    """A saved step of adapters, read as the complete model: base weights plus adapters.

    Attributes:
        trained: the saved step with the adapters and all other trained variables.
        frozen: the description of the frozen weights.
        source: the frozen weights.
        parts: the leaves of `trained` that each of its variables is computed from, by path.
    """

    trained: SavedStep = field(kw_only=True)
    frozen: FrozenWeights = field(kw_only=True)
    source: WeightSource = field(kw_only=True)
    parts: Mapping[str, tuple[str, ...]] = field(kw_only=True)

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Read leaves into NumPy arrays, with adapters merged.

        Args:
            names: names of leaves, as in `leaves`.

        Raises:
            CheckpointError: if a frozen weight is not the one that the adapters were trained with.
        """
        paths = {name.partition("/")[2]: name for name in names}
        trained = self._read_trained(paths)
        values = trained | self._read_frozen(paths)
        for path in paths:
            adapter = self.frozen.adapters.get(path)
            if adapter is not None:
                a = trained[f"{path}/{A}"]
                b = trained[f"{path}/{B}"]
                values[path] = _merge(values[path], a, b, adapter.inputs, adapter.scale)
        return {name: np.asarray(values[path]) for path, name in paths.items()}

    def place(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Read leaves onto devices, with adapters merged.

        Args:
            wanted: dtype and sharding of each leaf, by name.
        """
        values = self.read(wanted)
        return {name: place_like(value, wanted[name]) for name, value in values.items()}

    def _read_trained(
        self, paths: Iterable[str]
    ) -> "dict[str, np.ndarray | jax.Array]":
        """Read the trained variables among these paths, and the adapters of frozen ones."""
        needed = []
        for path in paths:
            if path in self.frozen.adapters:
                needed += [f"{path}/{A}", f"{path}/{B}"]
            elif path not in self.frozen.leaves:
                needed.append(path)
        arrays = self.trained.read(
            {name for path in needed for name in self.parts[path]}
        )
        variables = self.trained.variables
        return {
            path: average_of(
                [arrays[name] for name in self.parts[path]],
                self.trained.leaves[variables[path]].dtype,
            )
            for path in needed
        }

    def _read_frozen(self, paths: Iterable[str]) -> dict[str, jax.Array]:
        """Read the frozen weights among these paths from the source, and compare checksums."""
        device = make_mesh("data=1", jax.local_devices()[:1])
        sharding = jax.sharding.NamedSharding(device, jax.sharding.PartitionSpec())
        leaves = {
            path: self.frozen.leaves[path]
            for path in paths
            if path in self.frozen.leaves
        }
        wanted = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for path, leaf in leaves.items()
        }
        names = {path: str(leaf.name) for path, leaf in leaves.items()}
        loaded = self.source.load({names[path]: wanted[path] for path in leaves})
        values = {
            path: place_like(loaded[names[path]], wanted[path]) for path in leaves
        }
        for path, checksum in checksums(values).items():
            if checksum != leaves[path].checksum:
                raise CheckpointError(
                    f"{self.source.title} is not the base that {self.directory} was trained with: "
                    f"'{path}' differs."
                )
        return values


def merge_step(
    saved: SavedStep, frozen: FrozenWeights, source: WeightSource, average: bool
) -> MergedStep:
    """Return a saved step of adapters as the complete model.

    Args:
        saved: the saved step.
        frozen: the description of its frozen weights.
        source: the frozen weights.
        average: use the averages of the adapters that the optimizer keeps.

    Raises:
        CheckpointError: if the source lacks a weight, or if `average` is True and the optimizer
            keeps no averages.
    """
    parts = variable_parts(saved, average=average)
    adapters = {f"{path}/{part}" for path in frozen.adapters for part in (A, B)}
    absent = [path for path, leaf in frozen.leaves.items() if not _is_in(source, leaf)]
    absent += [path for path in adapters if path not in parts]
    if absent:
        raise CheckpointError(
            f"{source.title} is not the base that {saved.directory} was trained with: "
            f"'{min(absent)}' is missing or has another shape."
        )
    leaves: dict[str, ArrayLike] = {
        f"params/{path}": leaf for path, leaf in frozen.leaves.items()
    }
    for path, name in saved.variables.items():
        if path not in adapters:
            leaves[name] = saved.leaves[name]
    return MergedStep(
        saved.directory,
        None,
        leaves,
        average,
        trained=saved,
        frozen=frozen,
        source=source,
        parts=parts,
    )


def _is_in(source: WeightSource, leaf: FrozenLeaf) -> bool:
    found = source.leaves.get(str(leaf.name))
    return found is not None and tuple(found.shape) == leaf.shape


@contextmanager
def _description_errors(place: Path) -> Iterator[None]:
    """Turn errors about an invalid description in `meta.json` into one line."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{place / 'meta.json'} does not describe frozen weights: {error}"
        ) from error
