"""Find the weights of a model in a checkpoint that Orbax wrote without shardwise.

Such a checkpoint has one tree or several named ones, and a tree may hold more than the weights. The
weights are where the names are those of the model. Two layouts of names are known: that of
`nnx.to_pure_dict`, and that of `nnx.State`, in which the path of every variable ends with `value`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from shardwise.checkpoint.arrays import SavedArrays, open_arrays
from shardwise.errors import CheckpointError
from shardwise.text import columns
from shardwise.weights.sources import WeightSource, with_sharding_of

# How many trees an error lists. The others are counted.
MAX_LISTED = 24


@dataclass(frozen=True)
class Subtree:
    """A part of a tree that may hold the weights.

    Attributes:
        arrays: the complete tree.
        prefix: the path of the part; empty for all of it.
        names: the name of each leaf in the tree, by its path in the model.
    """

    arrays: SavedArrays
    prefix: str
    names: Mapping[str, str]

    def score(self, wanted: set[str]) -> int:
        """Return how many of these paths it has."""
        return len(self.names.keys() & wanted)

    def source(self) -> WeightSource:
        """Return the arrays of this part."""
        saved = self.arrays.leaves
        leaves = {path: saved[name] for path, name in self.names.items()}

        def load(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
            abstract = {
                self.names[path]: with_sharding_of(leaf, leaves[path])
                for path, leaf in wanted.items()
            }
            arrays = self.arrays.place(abstract)
            return {path: arrays[self.names[path]] for path in wanted}

        title = str(self.arrays.directory)
        return WeightSource(title, leaves, load, self.prefix or None)


def source_of_trees(
    path: Path, trees: Mapping[str, Path], item: str | None, names: Collection[str]
) -> WeightSource:
    """Return the weights in a checkpoint of plain Orbax.

    Args:
        path: the checkpoint, for messages.
        trees: the directory of each item, by name.
        item: the item, the path of a subtree in the only item, or both. None chooses the item, or
            the entry of an item, that has the most of `names`. The state of an optimizer, which has
            the same names, is never chosen.
        names: paths of variables in the model.

    Raises:
        CheckpointError: if `item` does not exist, or if several trees fit equally well.
    """
    wanted = set(names)
    if item is not None:
        return _chosen(path, trees, item, wanted).source()
    candidates = [
        subtree
        for name, place in trees.items()
        if not _is_optimizer(name)
        for subtree in _candidates(open_arrays(place), wanted)
    ]
    most = max((subtree.score(wanted) for subtree in candidates), default=0)
    best = [subtree for subtree in candidates if subtree.score(wanted) == most]
    if not most and len({id(subtree.arrays) for subtree in candidates}) == 1:
        # The only tree is compared with the model, so that the error shows its names.
        best = candidates[:1]
    if len(best) != 1:
        fact = "several trees match" if most else "no tree matches"
        raise CheckpointError(
            f"init_from: {fact} this model in {path}. Choose one with `item`:\n"
            f"{_list_trees(trees)}"
        )
    return best[0].source()


def _is_optimizer(name: str) -> bool:
    return name.startswith("opt")


def _candidates(arrays: SavedArrays, wanted: set[str]) -> list[Subtree]:
    """Return the tree and each of its entries. Moments of an optimizer are deeper."""
    entries = dict.fromkeys(name.partition("/")[0] for name in arrays.leaves)
    prefixes = ["", *(entry for entry in entries if not _is_optimizer(entry))]
    found = [_subtree(arrays, prefix, wanted) for prefix in prefixes]
    return [subtree for subtree in found if subtree.names]


def _subtree(arrays: SavedArrays, prefix: str, wanted: set[str]) -> Subtree:
    """Return the part of a tree below a path, in the layout that has more of the names."""
    start = f"{prefix}/" if prefix else ""
    names = {
        name.removeprefix(start): name
        for name in arrays.leaves
        if name.startswith(start)
    }
    pure = Subtree(arrays, prefix, names)
    # An array outside of a variable has no `value`.
    variables = {path.removesuffix("/value"): name for path, name in names.items()}
    state = Subtree(arrays, prefix, variables)
    is_state = state.score(wanted) > pure.score(wanted) or not pure.score(wanted)
    return state if is_state and len(variables) == len(names) else pure


def _chosen(
    path: Path, trees: Mapping[str, Path], item: str, wanted: set[str]
) -> Subtree:
    name, _, prefix = item.strip("/").partition("/")
    if name not in trees and len(trees) == 1:
        name, prefix = next(iter(trees)), item.strip("/")
    if name in trees:
        subtree = _subtree(open_arrays(trees[name]), prefix, wanted)
        if subtree.names:
            return subtree
    raise CheckpointError(
        f"init_from: {path} has no arrays in '{item}'. It has:\n{_list_trees(trees)}"
    )


def _list_trees(trees: Mapping[str, Path]) -> str:
    """Return a table of all items and their entries, as `InitFrom.item` names them."""
    lines = [("item", "arrays")]
    for name, place in trees.items():
        leaves = open_arrays(place).leaves
        if name:
            lines.append((name, str(len(leaves))))
        counts = Counter(leaf.partition("/")[0] for leaf in leaves)
        lines += [
            (f"{name}/{entry}".strip("/"), str(count))
            for entry, count in counts.items()
        ]
    hidden = len(lines) - MAX_LISTED
    more = f"\n  and {hidden} more" if hidden > 0 else ""
    return columns(lines[:MAX_LISTED]) + more
