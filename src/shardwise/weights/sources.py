"""Named arrays in files, whatever their format: saved steps, safetensors, published models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.checkpoint.reader import (
    ArrayLike,
    SavedStep,
    average_of,
    read_json,
    variable_parts,
)
from shardwise.errors import CheckpointError
from shardwise.sharding import put
from shardwise.tree import is_key, named_leaves
from shardwise.weights.export import DTYPES
from shardwise.weights.families.base import ModelConfig
from shardwise.weights.hf import params_from_hf
from shardwise.weights.hf_config import config_from_hf, differences
from shardwise.weights.hub import Tensor


@dataclass(frozen=True)
class WeightSource:
    """Named arrays, and a function that reads some of them.

    Attributes:
        title: where the arrays are, for messages.
        leaves: shape and dtype of all arrays, by path such as `head/kernel`.
        load: reads the arrays of the given paths, each with the sharding of its value. The result
            may have the dtype of the source instead of the wanted one.
        item: the tree that has the arrays, if the source has several.
    """

    title: str
    leaves: Mapping[str, ArrayLike]
    load: Callable[[Mapping[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
    item: str | None = None


def source_of_step(saved: SavedStep, average: bool) -> WeightSource:
    """Return the model variables of a saved step.

    Args:
        saved: the saved step.
        average: use the averaged weights that the optimizer keeps.

    Raises:
        CheckpointError: if `average` is True and the optimizer keeps no averages.
    """
    parts = variable_parts(saved, average=average)
    leaves = {path: saved.leaves[name] for path, name in saved.variables.items()}

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        abstract = {}
        for path, leaf in wanted.items():
            for name in parts[path]:
                abstract[name] = with_sharding_of(leaf, saved.leaves[name])
        arrays = saved.place(abstract)
        return {
            path: average_of([arrays[name] for name in parts[path]], leaves[path].dtype)
            for path in wanted
        }

    return WeightSource(str(saved.directory), leaves, load)


def with_sharding_of(
    leaf: jax.ShapeDtypeStruct, saved: ArrayLike
) -> jax.ShapeDtypeStruct:
    """Describe a saved leaf with the sharding of a parameter. Scalars are replicated."""
    sharding = leaf.sharding
    if not saved.shape:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)


def source_of_tensors(title: str, tensors: Mapping[str, Tensor]) -> WeightSource:
    """Return the tensors of a safetensors file that `shardwise checkpoint export` wrote.

    Args:
        title: where the tensors are, for messages.
        tensors: the tensors by name. `head.kernel` is the variable `head/kernel`.

    Raises:
        CheckpointError: if a tensor has a dtype that is not known.
    """
    known = {code: jnp.dtype(dtype) for dtype, code in DTYPES.items()}
    unknown = [
        f"'{name}' ({tensor.dtype})"
        for name, tensor in tensors.items()
        if tensor.dtype not in known
    ]
    if unknown:
        raise CheckpointError(
            f"{title} has tensors of unknown dtypes: {', '.join(unknown)}."
        )
    by_path = {name.replace(".", "/"): tensor for name, tensor in tensors.items()}
    leaves = {
        path: jax.ShapeDtypeStruct(tensor.shape, known[tensor.dtype])
        for path, tensor in by_path.items()
    }

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        return {
            path: place_like(np.asarray(by_path[path]), leaf)
            for path, leaf in wanted.items()
        }

    return WeightSource(title, leaves, load)


def source_of_published(
    title: str, folder: Path, tensors: Mapping[str, Tensor], config: ModelConfig
) -> WeightSource:
    """Return the parameters of a published model, under the paths of our model.

    Args:
        title: where the tensors are, for messages.
        folder: the directory with `config.json`. It must agree with `config`, because tensors of
            the same shape can belong to a model that computes something else.
        tensors: the tensors by the names of `transformers`.
        config: the configuration of our model.

    Raises:
        CheckpointError: if the published model does not match `config`.
    """
    try:
        problems = differences(
            config, config_from_hf(read_json(folder / "config.json"))
        )
        if problems:
            raise ValueError("; ".join(problems))
        leaves = named_leaves(params_from_hf(tensors, config))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"init_from: {title} does not match this model: {error}"
        ) from error

    def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        return {path: place_like(leaves[path], leaf) for path, leaf in wanted.items()}

    return WeightSource(title, leaves, load)


def place_like(value: jax.Array | np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array with the dtype and the sharding of `leaf`.

    Args:
        value: the array. Random keys may be their bits.
        leaf: shape, dtype and sharding.
    """
    if is_key(leaf.dtype) and not is_key(value.dtype):
        return _place_key_bits(value, leaf)
    if value.dtype != leaf.dtype:
        value = value.astype(leaf.dtype)
    move = jax.device_put if isinstance(value, jax.Array) else put
    placed: jax.Array = move(value, leaf.sharding)
    return placed


def _place_key_bits(
    bits: jax.Array | np.ndarray, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    implementation = jax.random.key_impl(jnp.empty((), leaf.dtype))
    wrap = partial(jax.random.wrap_key_data, impl=implementation)
    replicated = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    keys: jax.Array = jax.jit(wrap, out_shardings=leaf.sharding)(put(bits, replicated))
    return keys
