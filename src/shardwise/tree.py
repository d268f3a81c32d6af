"""Names and sizes for the leaves of a pytree: "blocks/0/attn/qkv/kernel"."""

import fnmatch
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.text import any_layer as any_layer


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf from its JAX key path: dictionary keys, indices and field names joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """All leaves of `tree` by name, in the order of `jax.tree.leaves`."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested dictionaries from a flat one whose keys are paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def lookup(tree: Any, path: tuple[str, ...]) -> Any:
    """The value that `nest` put at `path`."""
    for part in path:
        tree = tree[part]
    return tree


def owner_of(path: str, params: Collection[str]) -> str | None:
    """The parameter to which a leaf of an optimizer's state belongs: the one whose path ends the leaf's own."""
    parts = path.split("/")
    return next((name for i in range(len(parts)) if (name := "/".join(parts[i:])) in params), None)


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array, those of typed random keys included."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        key_bits = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return math.prod(shape) * key_bits.size * key_bits.dtype.itemsize
    return math.prod(shape) * dtype.itemsize


def matches(pattern: str, name: str) -> bool:
    """Whether a leaf's name fits a pattern such as "blocks/*/kernel"; `*` also spans slashes."""
    return fnmatch.fnmatchcase(name, pattern)
