"""One saved step, read without the run that wrote it: where it is, what is in it, its arrays wherever they are wanted.

Only what touches arrays imports JAX and Orbax, so that a directory can be listed at once.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.filesize import decimal

from shardwise.errors import CheckpointError
from shardwise.files.durable import MANIFEST, text_digest, verify_manifest

MAX_JSON = 2**26  # bytes; a description is never so long


@dataclass(frozen=True)
class SavedStep:
    """A step whose files are what was written. `leaves` has shape and dtype of every array, by path: "params/head/kernel"."""

    directory: Path
    tree: Any
    leaves: Mapping[str, Any]
    averaged: bool = False  # whether its parameters are averages already

    @property
    def variables(self) -> dict[str, str]:
        """Where the model's variables are among the leaves, by the path that the model gives them: "head/kernel"."""
        return {
            name.partition("/")[2]: name
            for name in self.leaves
            if name.startswith(("params/", "other/"))
        }

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What the run said of itself when it saved."""
        return read_json(self.directory / "meta.json")

    @cached_property
    def digest(self) -> str:
        """Of the whole step: that of the list of all digests."""
        return text_digest((self.directory / MANIFEST).read_text())

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """These leaves as NumPy arrays."""
        import orbax.checkpoint as ocp

        names = set(names)
        self._check_size(names)
        return self._restore(names, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))

    def place(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """These leaves with the dtype and the sharding of each `jax.ShapeDtypeStruct`, whose shape must be the saved one."""
        import orbax.checkpoint as ocp

        def args(name: str) -> Any:
            if (leaf := wanted.get(name)) is None:
                return ocp.RestoreArgs()
            return ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )

        return self._restore(set(wanted), args)

    def _restore(self, names: set[str], args: Any) -> dict[str, Any]:
        import jax
        import orbax.checkpoint as ocp

        from shardwise.tree import leaf_name, named_leaves

        each = jax.tree_util.tree_map_with_path
        item = each(
            lambda path, leaf: leaf if leaf_name(path) in names else ocp.PLACEHOLDER, self.tree
        )
        restore_args = each(lambda path, _: args(leaf_name(path)), self.tree)
        with refused(self.directory):
            restored = _handler().restore(
                self.directory / "state",
                args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args),
            )
        return {name: leaf for name, leaf in named_leaves(restored).items() if name in names}

    def _check_size(self, names: set[str]) -> None:
        """Refuses arrays that this machine, or these files, cannot hold: zstd makes nothing smaller than one part in 2**15."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = min(memory, 2**15 * directory_bytes(self.directory))
        for name in sorted(names):
            if (size := leaf_bytes(self.leaves[name])) > limit:
                raise CheckpointError(
                    f"{self.directory}: '{name}' is said to be {show_leaf(self.leaves[name])}, {decimal(size)}; "
                    f"with these files on this machine it can be {decimal(limit)} at most. Nothing was read."
                )


def find_checkpoints(target: Path) -> Path:
    """The directory with the steps of a run: `target` itself, or the one called "checkpoints" in it."""
    for directory in (target / "checkpoints", target):
        if directory.is_dir() and (directory != target or saved_steps(target)):
            return directory
    what = (
        "has no checkpoints"
        if target.is_dir()
        else "is not there"
        if not target.exists()
        else "is no directory"
    )
    raise CheckpointError(
        f"{target} {what}; give a run directory, its 'checkpoints', or one step in it."
    )


def saved_steps(directory: Path) -> list[int]:
    """All steps below a directory, from the oldest to the newest."""
    numbers = (
        path
        for path in directory.iterdir()
        if path.name.isdecimal() and path.name == str(int(path.name))
    )
    return sorted(int(path.name) for path in numbers if path.is_dir())


def is_step(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path / "state").is_dir()


def find_step(target: Path, step: int | Literal["best"] | None = None) -> Path:
    """The directory of one step: `target` itself if it is one, else this step, or the best, or the newest, of the run there."""
    if step == "best":
        directory = find_checkpoints(target)
        if (best := best_step(directory)) is None:
            metric, _ = what_is_best(directory)
            raise CheckpointError(
                f"{directory} has no step with '{metric}'; its steps were not evaluated. Name one with --step."
            )
        return directory / str(best)
    if is_step(target):
        if step is not None and target.name != str(step):
            raise CheckpointError(
                f"{target} is one step already, and not step {step}; leave one of the two out."
            )
        return target
    directory = find_checkpoints(target)
    steps = saved_steps(directory)
    if not steps or (step is not None and step not in steps):
        there = f"there are {', '.join(map(str, steps))}" if steps else "there are none yet"
        raise CheckpointError(
            f"{directory} has no {'checkpoint' if step is None else f'step {step}'}; {there}."
        )
    return directory / str(steps[-1] if step is None else step)


def step_name(text: str) -> int | Literal["best"]:
    """The value of --step: a number, or "best"."""
    return "best" if text == "best" else int(text)


def best_step(directory: Path) -> int | None:
    """Of the steps below a directory, the one that its run thinks best; None if none was evaluated."""
    metric, largest = what_is_best(directory)
    found = {
        step: value
        for step in saved_steps(directory)
        if (value := read_metric(directory / str(step), metric)) is not None
    }
    return min(
        found, key=lambda step: (-found[step] if largest else found[step], step), default=None
    )


def what_is_best(directory: Path) -> tuple[str, bool]:
    """The metric that tells the best of these checkpoints, and whether more is better, as their run says; else the held-out loss."""
    try:
        keep = read_json(directory.parent / "run.json")["keep"]
        return str(keep["metric"]), keep["largest"] is True
    except (CheckpointError, LookupError, TypeError):
        return "eval_loss", False


def read_metric(step: Path, name: str) -> float | None:
    """A metric of a step as it was saved; None where it was not measured, is no number, or cannot be read."""
    try:
        value = read_json(step / "meta.json")["metrics"][name]
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except (CheckpointError, LookupError, TypeError, OverflowError):
        return None


def open_step(directory: Path) -> SavedStep:
    """Checks every file of a step against its digest, then reads what arrays there are, and none of them."""
    if problems := verify_manifest(directory):
        raise CheckpointError(
            "\n".join(
                [f"checkpoint {directory} is damaged:", *(f"  {problem}" for problem in problems)]
            )
        )
    return read_step(directory)


def read_step(directory: Path) -> SavedStep:
    """What arrays there are in a step whose files have been verified."""
    from shardwise.tree import named_leaves

    state = directory.resolve() / "state"
    if (
        read_json(state / "_METADATA").get("use_ocdbt") is not True
    ):  # in the other format, a name is a path on the disk
        raise CheckpointError(f"{state} is not in the format (OCDBT) that shardwise writes.")
    with refused(directory):
        tree = _handler().metadata(state).tree
        leaves = named_leaves(tree)
        if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves.values()):
            raise ValueError("it holds something else than arrays")
    return SavedStep(directory.resolve(), tree, leaves)


def averages(saved: SavedStep) -> dict[str, tuple[str, ...]]:
    """By the path of a parameter, the leaves that `average_of` needs; empty where the optimizer keeps no average of the weights."""
    from shardwise.tree import owner_of

    params = {path: name for path, name in saved.variables.items() if name.startswith("params/")}
    found: dict[str, tuple[str, ...]] = {}
    for name in saved.leaves:
        path = owner_of(name, params) if name.startswith("opt_state/") else None
        if path is None or saved.leaves[name].shape != saved.leaves[params[path]].shape:
            continue
        kind = name.removesuffix(f"/{path}")
        if kind.endswith("/average"):  # of keep_average
            found[path] = (name,)
        elif (
            kind.endswith("/z") and (mixed := kind.removesuffix("z") + "b1") in saved.leaves
        ):  # of schedule-free
            found[path] = (params[path], name, mixed)
    return found


def average_of(parts: list[Any], dtype: Any) -> Any:
    """The average from the leaves that `averages` names; the same as `optim.parts.evaluation_params` makes of them."""
    if len(parts) == 1:
        return parts[0].astype(dtype)
    params, z, b1 = parts
    return ((params - (1 - b1) * z) / b1).astype(dtype)


def in_groups(sizes: Mapping[str, int], budget: int = 2**26) -> Iterator[list[str]]:
    """Names in order, as many at a time as are no larger than `budget` bytes together, but at least one."""
    group: list[str] = []
    held = 0
    for name, size in sizes.items():
        if group and held + size > budget:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def read_json(path: Path) -> dict[str, Any]:
    """A dictionary from a file of reasonable size."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dictionary")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    return content


def leaf_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def directory_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_dir())


def show_leaf(leaf: Any) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _handler() -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler()


@contextmanager
def refused(directory: Path) -> Iterator[None]:
    """Says in one line what Orbax raises about files that are as they were written, but not what it can read."""
    try:
        yield
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(
            f"{directory} cannot be read: {text or type(error).__name__}"
        ) from error
