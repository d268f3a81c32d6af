"""Pytrees: what they hold, and names and sizes for their leaves.

A leaf is named by its path, for example `blocks/0/attn/qkv/kernel`.
"""

import fnmatch
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np

from shardwise.text import any_layer as any_layer

# JAX has no type for "a nested structure of arrays". These aliases say which one is meant.
PyTree: TypeAlias = Any
# Trainable parameters of a model: nested dictionaries of arrays with string keys.
Params: TypeAlias = PyTree
# State of an Optax transformation.
OptState: TypeAlias = PyTree
# A pytree of arrays whose first dimension counts the examples.
Batch: TypeAlias = PyTree
# One leaf: an array, or the shape and dtype of one.
Leaf: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct
DType: TypeAlias = np.dtype | jnp.dtype
KeyPath: TypeAlias = tuple[Any, ...]


def leaf_name(path: KeyPath) -> str:
    """Return the name of a leaf from its JAX key path.

    Args:
        path: a key path as `jax.tree_util.tree_leaves_with_path` yields it.

    Returns:
        Dictionary keys, indices and field names joined by slashes.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return all leaves of `tree` by name, in the order of `jax.tree.leaves`.

    Example:
        >>> named_leaves({"dense": {"kernel": 1, "bias": 2}})
        {'dense/bias': 2, 'dense/kernel': 1}
    """
    return {
        leaf_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def nest(flat: Mapping[tuple[str, ...], PyTree]) -> dict[str, PyTree]:
    """Return nested dictionaries for a flat one whose keys are paths.

    Example:
        >>> nest({("dense", "kernel"): 1, ("dense", "bias"): 2})
        {'dense': {'kernel': 1, 'bias': 2}}
    """
    tree: dict[str, PyTree] = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def lookup(tree: PyTree, path: tuple[str, ...]) -> PyTree:
    """Return the value that `nest` stores at `path`."""
    for part in path:
        tree = tree[part]
    return tree


def owner_of(path: str, params: Collection[str]) -> str | None:
    """Return the parameter that a leaf of an optimizer state belongs to.

    A leaf belongs to the parameter whose path is the end of the leaf's own path. The longest such
    parameter path wins.

    Example:
        >>> owner_of("0/mu/dense/kernel", {"dense/kernel"})
        'dense/kernel'
    """
    parts = path.split("/")
    candidates = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((name for name in candidates if name in params), None)


def num_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    """Return the size of an array in bytes. Typed random keys count with their key data."""
    return math.prod(shape) * int(dtype.itemsize)


def is_key(dtype: DType) -> bool:
    """Return whether a dtype is that of typed random keys, such as `jax.random.key(0)`."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def abstract_key() -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a random key, for functions that are traced and not run."""
    key: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key, 0)
    return key


def key_bits(shape: tuple[int, ...], dtype: DType) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the bits of typed random keys, such as `uint32[2]`."""
    keys = jax.ShapeDtypeStruct(shape, dtype)
    bits: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, keys)
    return bits


def matches(pattern: str, name: str) -> bool:
    """Return whether a leaf name matches a pattern such as `blocks/*/kernel`.

    `*` also matches slashes, so `*kernel` matches every kernel.
    """
    return fnmatch.fnmatchcase(name, pattern)
