"""Trees of arrays in the format of Orbax: what they contain, and how some of them are read.

Nothing in these files can execute: the list of arrays is JSON (`_METADATA`, `array_metadatas`), and
the arrays are in a key-value store (OCDBT) that TensorStore reads.

JAX and Orbax are imported only by the functions that need them, so listing a directory is fast.
"""

import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from rich.filesize import decimal

from shardwise.errors import CheckpointError
from shardwise.files.alias import plain_alias
from shardwise.files.regular import error_reason, read_regular
from shardwise.text import Json

if TYPE_CHECKING:
    import jax
    import orbax.checkpoint as ocp

    from shardwise.tree import DType, KeyPath, PyTree

# The file in which Orbax lists the arrays of a tree.
TREE_FILE = "_METADATA"
# The root of the key-value store that holds the arrays.
STORE_FILE = "manifest.ocdbt"
# The largest JSON file that is read, in bytes. Descriptions are far smaller.
MAX_JSON = 2**26
# zstd, which Orbax compresses with, reaches at most this ratio.
MAX_COMPRESSION = 2**15
# Bytes of arrays that `SavedArrays.unreadable` restores.
SAMPLE_BYTES = 2**24
# The keys in which the zarr formats describe an array. Its other keys hold the content.
DESCRIPTIONS = (".zarray", "zarr.json")


class ArrayLike(Protocol):
    """Anything with a shape and a dtype: an array, or the description of one.

    Attributes:
        shape: the size of each dimension.
        dtype: the type of the elements.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> "DType": ...


@dataclass(frozen=True)
class SavedArrays:
    """A saved tree. Its arrays are read on demand.

    Attributes:
        directory: the directory that Orbax wrote.
        tree: the saved tree, with array metadata for leaves.
        leaves: shape and dtype of every array, by path such as `params/head/kernel`. Typed random
            keys have the dtype of keys, although Orbax stores their bits.
    """

    directory: Path
    tree: "PyTree"
    leaves: Mapping[str, ArrayLike]

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Read leaves into NumPy arrays. Typed random keys are read as their bits, uint32.

        Args:
            names: names of leaves, as in `leaves`.

        Returns:
            The arrays, by name.

        Raises:
            CheckpointError: if a shape is larger than these files or this machine can hold, or if
                Orbax cannot read the files.
        """
        import orbax.checkpoint as ocp

        wanted = set(names)
        self._check_size(wanted)
        return self._restore(wanted, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))

    def place(
        self, wanted: Mapping[str, "jax.ShapeDtypeStruct"]
    ) -> dict[str, "jax.Array"]:
        """Read leaves onto devices. Each process reads what its devices hold.

        Args:
            wanted: dtype and sharding of each leaf, by name. The shape must be the saved one.

        Returns:
            The arrays, by name.

        Raises:
            CheckpointError: if Orbax cannot read the files.
        """
        import orbax.checkpoint as ocp

        def restore_args(name: str) -> "ocp.RestoreArgs":
            leaf = wanted.get(name)
            if leaf is None:
                return ocp.RestoreArgs()
            return ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )

        return self._restore(set(wanted), restore_args)

    def _restore(
        self, names: set[str], restore_args: Callable[[str], "ocp.RestoreArgs"]
    ) -> "dict[str, PyTree]":
        import jax
        import orbax.checkpoint as ocp

        from shardwise.tree import leaf_name, named_leaves

        def keep_wanted(path: "KeyPath", leaf: ArrayLike) -> object:
            # Orbax does not read the leaves that have a placeholder.
            return leaf if leaf_name(path) in names else ocp.PLACEHOLDER

        args = ocp.args.PyTreeRestore(
            item=jax.tree_util.tree_map_with_path(keep_wanted, self.tree),
            restore_args=jax.tree_util.tree_map_with_path(
                lambda path, _: restore_args(leaf_name(path)), self.tree
            ),
        )
        with orbax_errors(self.directory), plain_alias(self.directory) as place:
            restored = _orbax_handler().restore(place, args=args)
        return {
            name: leaf for name, leaf in named_leaves(restored).items() if name in names
        }

    def unreadable(self, part: int = 0, parts: int = 1) -> list[str]:
        """Check that the content of all arrays is there and can be read.

        The smallest arrays, up to `SAMPLE_BYTES` together, are restored. Of the others a byte is
        read from the store, so the check takes little time for arrays of any size.

        Args:
            part: which share of the arrays this process looks up in the store, from 0.
            parts: the number of processes that share the work.

        Returns:
            One line per problem. An empty list means that none was found.
        """
        sizes = {name: leaf_bytes(leaf) for name, leaf in self.leaves.items()}
        sample: list[str] = []
        total = 0
        for name in sorted(sizes, key=lambda name: sizes[name]):
            total += sizes[name]
            if total <= SAMPLE_BYTES:
                sample.append(name)
        try:
            # An array without elements has no content.
            stored = [name for name in sorted(sizes) if sizes[name]]
            missing = self._missing_content(stored[part::parts])
            if not missing:
                self.read(sample)
            return missing
        except CheckpointError as error:
            return [str(error)]

    def _missing_content(self, names: list[str]) -> list[str]:
        """Return one line per array whose content is not in the store."""
        import tensorstore

        problems = []
        stored = _stored_names(self.tree)
        with orbax_errors(self.directory), plain_alias(self.directory) as place:
            base = {"driver": "file", "path": f"{place}/"}
            store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
            keys = sorted(key.decode() for key in store.list().result())
            for name in names:
                prefix = stored[name] + "/"
                key = _first_content(keys, prefix)
                # The last byte: the file may be shorter than the store says.
                byte = slice(-1, None)
                if key is None or not store.read(key, byte_range=byte).result().value:
                    problems.append(f"{self.directory} has no content of '{name}'")
        return problems

    def _check_size(self, names: set[str]) -> None:
        """Refuse arrays that do not fit in memory or cannot come from files of this size.

        A hostile file can claim any shape. Reading it would allocate that much.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = min(memory, MAX_COMPRESSION * directory_bytes(self.directory))
        for name in sorted(names):
            leaf = self.leaves[name]
            size = leaf_bytes(leaf)
            if size > limit:
                raise CheckpointError(
                    f"{self.directory}: '{name}' claims to be {show_leaf(leaf)}, {decimal(size)}. "
                    f"With these files on this machine at most {decimal(limit)} is possible. "
                    "Nothing was read."
                )


def open_arrays(directory: Path) -> SavedArrays:
    """Read the list of the arrays that Orbax wrote to a directory. No array is read.

    Args:
        directory: a directory with a file `_METADATA`.

    Raises:
        CheckpointError: if the files are not in the OCDBT format, or two arrays have the same name.
    """
    from shardwise.tree import named_leaves

    directory = directory.resolve()
    # In Orbax's other format the name of a leaf is a path on disk, which a hostile file could set
    # to any path. Old releases of Orbax do not write the entry.
    uses_ocdbt = read_json(directory / TREE_FILE).get("use_ocdbt")
    if uses_ocdbt is None:
        uses_ocdbt = (directory / STORE_FILE).is_file()
    if uses_ocdbt is not True:
        raise CheckpointError(
            f"{directory} is not in the OCDBT format, and is not read. Restore it with Orbax, and "
            "save it again with the default options (use_ocdbt=True)."
        )
    if not (directory / STORE_FILE).is_file():
        raise CheckpointError(
            f"{directory / STORE_FILE} is missing, and no array can be read without it. Use "
            "another step."
        )
    with orbax_errors(directory):
        tree = _read_tree(directory)
        same = find_same_name(tree)
        if same:
            raise ValueError(f"'{same[0]}' and '{same[1]}' have the same name")
        stored = {
            name: leaf for name, leaf in named_leaves(tree).items() if _is_array(leaf)
        }
        leaves = {**stored, **_key_leaves(directory, stored, _stored_names(tree))}
    return SavedArrays(directory, tree, leaves)


def _read_tree(directory: Path) -> "PyTree":
    try:
        with plain_alias(directory) as place:
            return _orbax_handler().metadata(place).tree
    except TypeError as error:
        raise CheckpointError(
            f"Orbax cannot restore {directory}: {error}. This happens if an nnx.Module with an "
            "nnx.List was saved. Save nnx.state(module) instead of the module."
        ) from error


def _is_array(leaf: object) -> bool:
    """Return whether a leaf is an array or a number. Orbax also saves texts."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def find_same_name(tree: "PyTree") -> tuple[str, str] | None:
    """Return two leaves that Orbax stores under the same name, or None.

    Orbax joins the keys of a path with dots. It would restore one of the leaves for both.
    """
    import jax

    from shardwise.tree import leaf_name

    seen: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        name = leaf_name(path)
        # Names of leaves join the keys with slashes, so these must differ too.
        joined = name.replace("/", ".")
        if joined in seen:
            return seen[joined], name
        seen[joined] = name
    return None


def _stored_names(tree: "PyTree") -> dict[str, str]:
    """Return the name under which Orbax stores each leaf, by the name of the leaf.

    Orbax joins the keys of a path with dots. A key may contain a slash, as the label `head/*` of a
    parameter group does.
    """
    import jax

    from shardwise.tree import leaf_name

    return {
        leaf_name(path): jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def _first_content(keys: list[str], prefix: str) -> str | None:
    """Return the first of the sorted keys with a prefix that holds content of an array, or None."""
    for key in keys[bisect_left(keys, prefix) :]:
        if not key.startswith(prefix):
            break
        if not key.endswith(DESCRIPTIONS):
            return key
    return None


def _key_leaves(
    directory: Path, stored: Mapping[str, ArrayLike], names: Mapping[str, str]
) -> "dict[str, jax.ShapeDtypeStruct]":
    """Return the leaves that are typed random keys. Orbax lists them as arrays of uint32.

    Args:
        directory: the directory that Orbax wrote.
        stored: all leaves.
        names: the names under which Orbax stores them.
    """
    import jax

    from shardwise.tree import key_bits

    # Every process writes the same list.
    first = min((directory / "array_metadatas").glob("process_*"), default=None)
    if first is None:
        return {}
    entries = [entry["array_metadata"] for entry in read_json(first)["array_metadatas"]]
    implementations = {
        entry["param_name"]: entry["ext_metadata"].get("random_key_impl")
        for entry in entries
        if entry.get("ext_metadata")
    }
    keys = {}
    for name, leaf in stored.items():
        implementation = implementations.get(names[name])
        if implementation is None:
            continue
        key = jax.eval_shape(partial(jax.random.key, impl=implementation), 0)
        outer = tuple(leaf.shape)[: -key_bits((), key.dtype).ndim]
        if tuple(leaf.shape) != key_bits(outer, key.dtype).shape:
            raise ValueError(f"'{name}' does not hold keys of {implementation}")
        keys[name] = jax.ShapeDtypeStruct(outer, key.dtype)
    return keys


def read_json(path: Path) -> Json:
    """Read a JSON object from a file of at most `MAX_JSON` bytes.

    Raises:
        CheckpointError: if the file cannot be read, is too large, or holds anything else.
    """
    try:
        # Published models in the cache of the Hub are links.
        content = json.loads(read_regular(path, MAX_JSON, follow_links=True))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dictionary")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error_reason(error)}"
        ) from error
    return content


def leaf_bytes(leaf: ArrayLike) -> int:
    """Return the size of an array in bytes."""
    return math.prod(leaf.shape) * int(leaf.dtype.itemsize)


def directory_bytes(directory: Path) -> int:
    """Return the total size of all files below a directory in bytes."""
    return sum(
        path.lstat().st_size for path in directory.rglob("*") if not path.is_dir()
    )


def show_leaf(leaf: ArrayLike) -> str:
    """Return dtype and shape of an array, such as `float32[16, 8]`."""
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _orbax_handler() -> "ocp.PyTreeCheckpointHandler":
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler()


@contextmanager
def orbax_errors(directory: Path) -> Iterator[None]:
    """Turn anything that Orbax raises about the files of a directory into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(
            f"{directory} cannot be read: {text or type(error).__name__}"
        ) from error
