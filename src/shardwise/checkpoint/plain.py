"""Find the trees in checkpoints that Orbax wrote without shardwise.

Layouts::

    directory/                    of a `CheckpointManager`
        100/                      a step; `ckpt_000100` with a prefix and a fixed length
            default/              an item: a tree of arrays, listed in `_METADATA`
            optimizer/            further items of `args.Composite`
            extra/                an item without arrays, such as JSON
            _CHECKPOINT_METADATA
        200.orbax-checkpoint-tmp/ an unfinished save
    directory/                    of a `StandardCheckpointer` or `PyTreeCheckpointer`: one tree
        _METADATA

Orbax stores no digests, so damage that does not prevent reading cannot be found.
"""

import re
from pathlib import Path

from shardwise.checkpoint.arrays import TREE_FILE
from shardwise.errors import CheckpointError
from shardwise.files.manifest import MANIFEST

# The file in which Orbax describes a step.
STEP_FILE = "_CHECKPOINT_METADATA"
STEP_NAME = re.compile(r"(?:.*_)?([0-9]+)")


def is_plain(path: Path) -> bool:
    """Return whether Orbax wrote a directory without shardwise: a tree, a step, or several steps.

    Args:
        path: any path. It may not exist.
    """
    if not path.is_dir():
        return False
    if _is_tree(path) or _is_step(path):
        return True
    has_run = any((step / MANIFEST).is_file() for step in path.iterdir())
    return not has_run and bool(plain_steps(path))


def plain_steps(directory: Path) -> dict[int, Path]:
    """Return the steps that Orbax wrote to a directory without shardwise, oldest first.

    Args:
        directory: an existing directory.

    Raises:
        CheckpointError: if a step is there twice, under different names.
    """
    steps: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        match = STEP_NAME.fullmatch(path.name)
        if match is None or not path.is_dir() or not _is_step(path):
            continue
        step = int(match[1])
        if step in steps:
            raise CheckpointError(
                f"{directory} has step {step} twice: {steps[step].name} and {path.name}. Pass the "
                "directory of one of them."
            )
        steps[step] = path
    return dict(sorted(steps.items()))


def check_not_plain(directory: Path) -> None:
    """Check that a directory of a run has no steps that Orbax wrote without shardwise.

    Args:
        directory: the directory that holds the steps. It may not exist.

    Raises:
        CheckpointError: if there are some.
    """
    if directory.is_dir() and (is_plain(directory) or plain_steps(directory)):
        raise CheckpointError(
            f"{directory} has checkpoints that Orbax wrote without shardwise. They are only read "
            f"to start a run: Run(init_from=InitFrom('{directory}')) with another `out`."
        )


def find_trees(path: Path, step: int | None = None) -> dict[str, Path]:
    """Return the trees of a step that Orbax wrote without shardwise.

    Args:
        path: a directory for which `is_plain` is true.
        step: the number of the step, or None for the newest.

    Returns:
        The directory of each item that has arrays, by name. The name of a tree that was saved
        alone is empty.

    Raises:
        CheckpointError: if the step does not exist, no item has arrays, or there are links.
    """
    if _is_tree(path):
        _check_alone(path, step)
        trees = {"": path}
    else:
        place = path if _is_step(path) else _choose_step(path, step)
        trees = _trees(place)
        if place == path:
            _check_number(path, step)
        if not trees:
            raise CheckpointError(f"{place} has no item with arrays.")
    for tree in trees.values():
        _check_links(path, tree)
    return trees


def _is_tree(path: Path) -> bool:
    return (path / TREE_FILE).is_file()


def _trees(path: Path) -> dict[str, Path]:
    return {item.name: item for item in sorted(path.iterdir()) if _is_tree(item)}


def _is_step(path: Path) -> bool:
    """Return whether a directory is a step of plain Orbax. A run has items named `state` too."""
    if any((path / name).exists() for name in (MANIFEST, "meta.json")):
        return False
    if (path / STEP_FILE).is_file():
        return not _is_tree(path)
    # Old releases of Orbax do not write the file. Without it, `state` is from a damaged run.
    return bool(_trees(path)) and not (path / "state").is_dir()


def _choose_step(directory: Path, step: int | None) -> Path:
    steps = plain_steps(directory)
    if step is None:
        return steps[max(steps)]
    if step not in steps:
        listed = ", ".join(map(str, steps))
        raise CheckpointError(f"{directory} has no step {step}. Saved steps: {listed}.")
    return steps[step]


def _check_alone(tree: Path, step: int | None) -> None:
    """Raise if a tree belongs to a checkpoint of a run, whose files have digests."""
    if (tree.parent / MANIFEST).exists():
        raise CheckpointError(
            f"{tree} is a part of the checkpoint {tree.parent}. Pass {tree.parent}."
        )
    _check_number(tree, step)


def _check_number(path: Path, step: int | None) -> None:
    match = STEP_NAME.fullmatch(path.name)
    if step is not None and (match is None or int(match[1]) != step):
        raise CheckpointError(f"{path} is not step {step}. Drop `step`.")


def _check_links(root: Path, tree: Path) -> None:
    """Raise if there is a link on the way from `root` to a tree, or in the tree.

    A checkpoint may come from somebody else. A link could make it read any file.
    """
    between = [path for path in (tree, *tree.parents) if root in path.parents]
    for path in (*between, *tree.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link, and is not followed. Copy its target there."
            )
