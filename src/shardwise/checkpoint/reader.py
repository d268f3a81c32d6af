"""Read one saved step without the run that wrote it.

Layout of the checkpoints of a run::

    checkpoints/
        200/                 step 200, complete: it got this name after all of it was on disk
            state/           the arrays, as Orbax writes them (OCDBT format, with `_METADATA`):
                             {"step", "params", "other", "opt_state"}; plain Orbax can read it
            meta.json        a description of the run: step, recipe, arguments, model, data,
                             learning rates, optimizer, mesh, versions, metrics; with frozen
                             weights also `frozen`: their source, shapes and checksums
            MANIFEST         a BLAKE3 digest of every other file (see `shardwise.files.manifest`)
        300.tmp/             a save in progress, or one that a crash interrupted
        100.deleted.tmp/     a deletion in progress
        250.bad/             a damaged step that a resumed run moved out of the way

The directory is the only list of steps. An array is named by its path in the tree, for example
`params/head/kernel` or `opt_state/0/mu/head/kernel`.

JAX and Orbax are imported only by the functions that need them, so listing a directory is fast.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from rich.filesize import decimal

from shardwise.errors import CheckpointError
from shardwise.files.durable import error_reason, text_digest
from shardwise.files.manifest import MANIFEST, verify_manifest
from shardwise.text import Json

if TYPE_CHECKING:
    import jax
    import orbax.checkpoint as ocp

    from shardwise.tree import DType, KeyPath, PyTree

# The largest JSON file that is read, in bytes. Descriptions are far smaller.
MAX_JSON = 2**26
# zstd, which Orbax compresses with, reaches at most this ratio.
MAX_COMPRESSION = 2**15

Array = TypeVar("Array", np.ndarray, "jax.Array")


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
class SavedStep:
    """A saved step whose files were verified. Arrays are read on demand.

    Attributes:
        directory: the directory of the step.
        tree: the saved tree, with array metadata for leaves.
        leaves: shape and dtype of every array, by path such as `params/head/kernel`.
        averaged: whether the parameters are averages already.
    """

    directory: Path
    tree: "PyTree"
    leaves: Mapping[str, ArrayLike]
    averaged: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The leaf name of every model variable, by its path in the model such as `head/kernel`."""
        return {
            name.partition("/")[2]: name
            for name in self.leaves
            if name.startswith(("params/", "other/"))
        }

    @cached_property
    def metadata(self) -> Json:
        """The content of `meta.json`."""
        return read_json(self.directory / "meta.json")

    @cached_property
    def digest(self) -> str:
        """A digest of the complete step: the digest of its MANIFEST."""
        return text_digest((self.directory / MANIFEST).read_text())

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Read leaves into NumPy arrays.

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
        """Read leaves onto devices.

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
        with orbax_errors(self.directory):
            restored = _orbax_handler().restore(self.directory / "state", args=args)
        return {
            name: leaf for name, leaf in named_leaves(restored).items() if name in names
        }

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


def find_checkpoints(target: Path) -> Path:
    """Return the directory that holds the steps of a run.

    Args:
        target: a run directory, or the directory `checkpoints` in it.

    Raises:
        CheckpointError: if there is none.
    """
    if (target / "checkpoints").is_dir():
        return target / "checkpoints"
    if target.is_dir() and saved_steps(target):
        return target
    if target.is_dir():
        fact = "has no checkpoints"
    elif target.exists():
        fact = "is not a directory"
    else:
        fact = "does not exist"
    raise CheckpointError(
        f"{target} {fact}. Pass a run directory, its 'checkpoints' directory, or one step in it."
    )


def saved_steps(directory: Path) -> list[int]:
    """Return the steps in a directory, oldest first. Only names such as `200` count as steps."""
    steps = []
    for path in directory.iterdir():
        # `int` also accepts "040" and digits of other scripts, which are not names of steps.
        is_number = path.name.isdecimal() and path.name == str(int(path.name))
        if is_number and path.is_dir():
            steps.append(int(path.name))
    return sorted(steps)


def is_step(path: Path) -> bool:
    """Return whether a path looks like the directory of one step."""
    return (path / MANIFEST).is_file() or (path / "state").is_dir()


def find_step(target: Path, step: int | Literal["best"] | None = None) -> Path:
    """Return the directory of one step.

    Args:
        target: a run directory, its `checkpoints` directory, or the directory of one step.
        step: the number of the step, `"best"` for the step with the best metric, or None for the
            newest.

    Raises:
        CheckpointError: if the step does not exist.
    """
    if step == "best":
        return _find_best(target)
    if is_step(target):
        if step is not None and target.name != str(step):
            raise CheckpointError(
                f"{target} is a single step, and not step {step}. Pass the run directory with a "
                "step, or the directory of the step alone."
            )
        return target
    directory = find_checkpoints(target)
    steps = saved_steps(directory)
    if not steps:
        raise CheckpointError(f"{directory} has no checkpoint yet.")
    if step is None:
        return directory / str(steps[-1])
    if step not in steps:
        listed = ", ".join(map(str, steps))
        raise CheckpointError(f"{directory} has no step {step}. Saved steps: {listed}.")
    return directory / str(step)


def _find_best(target: Path) -> Path:
    directory = find_checkpoints(target)
    best = best_step(directory)
    if best is None:
        metric, _ = what_is_best(directory)
        raise CheckpointError(
            f"{directory} has no step with the metric '{metric}', because no saved step was "
            "evaluated. Choose a step with --step."
        )
    return directory / str(best)


def step_name(text: str) -> int | Literal["best"]:
    """Parse the value of `--step`: a number, or `best`."""
    return "best" if text == "best" else int(text)


def best_step(directory: Path) -> int | None:
    """Return the step with the best metric, or None if no saved step has the metric.

    Args:
        directory: the directory that holds the steps. `what_is_best` names the metric. The oldest
            of equally good steps wins.
    """
    metric, largest = what_is_best(directory)
    sign = -1 if largest else 1
    ranked = []
    for step in saved_steps(directory):
        value = read_metric(directory / str(step), metric)
        if value is not None:
            ranked.append((sign * value, step))
    return min(ranked)[1] if ranked else None


def what_is_best(directory: Path) -> tuple[str, bool]:
    """Return the metric that ranks the steps of a run, and whether a larger value is better.

    Args:
        directory: the directory that holds the steps. `run.json` next to it names the metric; the
            validation loss is the default.
    """
    try:
        keep = read_json(directory.parent / "run.json")["keep"]
        return str(keep["metric"]), keep["largest"] is True
    except (CheckpointError, LookupError, TypeError):
        return "eval_loss", False


def read_metric(step: Path, name: str) -> float | None:
    """Return a metric that was saved with a step.

    Args:
        step: the directory of the step.
        name: the name of the metric.

    Returns:
        The value, or None if it was not measured, is not a finite number, or cannot be read.
    """
    try:
        value = read_json(step / "meta.json")["metrics"][name]
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except (CheckpointError, LookupError, TypeError, OverflowError):
        pass
    return None


def open_step(directory: Path) -> SavedStep:
    """Verify every file of a step against its digest, then read the list of its arrays.

    Args:
        directory: the directory of the step.

    Raises:
        CheckpointError: if a file is damaged, missing or unexpected.
    """
    problems = verify_manifest(directory)
    if problems:
        lines = [f"  {problem}" for problem in problems]
        raise CheckpointError(
            "\n".join([f"checkpoint {directory} is damaged:", *lines])
        )
    return read_step(directory)


def read_step(directory: Path) -> SavedStep:
    """Read the list of arrays of a step. No array is read, and no digest is checked.

    Args:
        directory: the directory of the step. Call `open_step` unless its files were verified.

    Raises:
        CheckpointError: if the files are not in the format that shardwise writes.
    """
    from shardwise.tree import named_leaves

    state = directory.resolve() / "state"
    # In Orbax's other format the name of a leaf is a path on disk, which a hostile file could set
    # to any path.
    if read_json(state / "_METADATA").get("use_ocdbt") is not True:
        raise CheckpointError(
            f"{state} is not in the OCDBT format that shardwise writes, and is not read."
        )
    with orbax_errors(directory):
        tree = _orbax_handler().metadata(state).tree
        leaves = named_leaves(tree)
        if not all(
            hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            for leaf in leaves.values()
        ):
            raise ValueError("it contains leaves that are not arrays")
    return SavedStep(directory.resolve(), tree, leaves)


def averages(saved: SavedStep) -> dict[str, tuple[str, ...]]:
    """Return where the optimizer keeps averaged weights.

    Two kinds are known by the names of their leaves: `keep_average` stores the average itself, and
    schedule-free optimizers store `z` and the interpolation `b1`.

    Returns:
        For each parameter with an average, by path: the names of the leaves that `average_of`
        combines. Empty if the optimizer keeps no averages.
    """
    from shardwise.tree import owner_of

    params = {
        path: name
        for path, name in saved.variables.items()
        if name.startswith("params/")
    }
    sources: dict[str, tuple[str, ...]] = {}
    for name in saved.leaves:
        path = owner_of(name, params) if name.startswith("opt_state/") else None
        if path is None or saved.leaves[name].shape != saved.leaves[params[path]].shape:
            continue
        prefix = name.removesuffix(f"/{path}")
        b1 = prefix.removesuffix("z") + "b1"
        if prefix.endswith("/average"):
            sources[path] = (name,)
        elif prefix.endswith("/z") and b1 in saved.leaves:
            sources[path] = (params[path], name, b1)
    return sources


def variable_parts(
    saved: SavedStep, *, average: bool = False
) -> dict[str, tuple[str, ...]]:
    """Return the leaves that each model variable is computed from.

    Args:
        saved: the saved step.
        average: use the averaged weights that the optimizer keeps.

    Returns:
        For each variable, by path: the names of leaves to pass to `average_of`. Without an average
        that is the variable alone.

    Raises:
        CheckpointError: if `average` is True and the optimizer keeps no averages.
    """
    averaged = averages(saved) if average else {}
    if average and not averaged:
        raise CheckpointError(
            f"the optimizer of {saved.directory} keeps no average of the weights. "
            "Only runs with ema=... or a schedule-free optimizer have one."
        )
    return {path: averaged.get(path, (name,)) for path, name in saved.variables.items()}


def average_of(parts: Sequence[Array], dtype: "DType") -> Array:
    """Return an averaged parameter from the leaves that `averages` names.

    The result is the same as that of `shardwise.optim.parts.evaluation_params`.

    Args:
        parts: the average alone, or the parameter, `z` and `b1` of a schedule-free optimizer.
        dtype: the dtype of the result.
    """
    if len(parts) == 1:
        return parts[0].astype(dtype)
    params, z, b1 = parts
    average: Array = ((params - (1 - b1) * z) / b1).astype(dtype)
    return average


def in_groups(sizes: Mapping[str, int], budget: int = 2**26) -> Iterator[list[str]]:
    """Split names into consecutive groups of limited size, to read large checkpoints in parts.

    Args:
        sizes: the size of each name in bytes.
        budget: the largest total size of a group in bytes. A larger name gets its own group.

    Example:
        >>> list(in_groups({"a": 3, "b": 4, "c": 100}, budget=10))
        [['a', 'b'], ['c']]
    """
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > budget:
            yield group
            group = []
            total = 0
        group.append(name)
        total += size
    if group:
        yield group


def read_json(path: Path) -> Json:
    """Read a JSON object from a file of at most `MAX_JSON` bytes.

    Raises:
        CheckpointError: if the file cannot be read, is too large, or holds anything else.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ValueError(f"it has {size:,} bytes, more than {MAX_JSON:,}")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dictionary")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error_reason(error)}"
        ) from error
    return content


def leaf_bytes(leaf: ArrayLike) -> int:
    """Return the size of an array in bytes."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


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
    """Turn anything that Orbax raises about the files of a step into one line.

    The files match their digests at this point, so they are what somebody wrote, but Orbax cannot
    read them.
    """
    try:
        yield
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(
            f"{directory} cannot be read: {text or type(error).__name__}"
        ) from error
