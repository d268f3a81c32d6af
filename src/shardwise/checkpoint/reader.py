"""Read one saved step without the run that wrote it.

Layout of the checkpoints of a run::

    checkpoints/
        200/                 step 200, complete: it got this name after all of it was on disk
            state/           the arrays, as Orbax writes them (OCDBT format, with `_METADATA`):
                             {"step", "params", "other", "opt_state"}, and "extra" if a loop saved
                             a further tree; plain Orbax can read it
            meta.json        a description of the run: step, recipe, arguments, model, data,
                             learning rates, optimizer, mesh, versions, metrics; with frozen
                             weights also `frozen`: their source, shapes and checksums
            data/            the position of the data iterator of each process, as JSON, in
                             `process_0-of-2.json` and so on; absent for data that is a function
                             of the step
            MANIFEST         a BLAKE3 digest of every other file (see `shardwise.files.manifest`)
        300.tmp/             a save in progress, or one that a crash interrupted
        100.deleted.tmp/     a deletion in progress
        250.bad/             a damaged step that a resumed run moved out of the way

The directory is the only list of steps. An array is named by its path in the tree, for example
`params/head/kernel` or `opt_state/0/mu/head/kernel`.

JAX and Orbax are imported only by the functions that need them, so listing a directory is fast.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from shardwise.checkpoint.arrays import MAX_JSON as MAX_JSON
from shardwise.checkpoint.arrays import ArrayLike as ArrayLike
from shardwise.checkpoint.arrays import SavedArrays, open_arrays
from shardwise.checkpoint.arrays import directory_bytes as directory_bytes
from shardwise.checkpoint.arrays import leaf_bytes as leaf_bytes
from shardwise.checkpoint.arrays import read_json as read_json
from shardwise.checkpoint.arrays import show_leaf as show_leaf
from shardwise.checkpoint.plain import check_not_plain, is_plain
from shardwise.errors import CheckpointError
from shardwise.files.durable import text_digest
from shardwise.files.manifest import MANIFEST, verify_manifest
from shardwise.text import Json

if TYPE_CHECKING:
    import jax

    from shardwise.tree import DType, PyTree

Array = TypeVar("Array", np.ndarray, "jax.Array")


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
        """Read leaves into NumPy arrays, see `SavedArrays.read`."""
        return self.arrays.read(names)

    def place(
        self, wanted: Mapping[str, "jax.ShapeDtypeStruct"]
    ) -> dict[str, "jax.Array"]:
        """Read leaves onto devices, see `SavedArrays.place`."""
        return self.arrays.place(wanted)

    @property
    def arrays(self) -> SavedArrays:
        """The arrays, as Orbax saved them."""
        return SavedArrays(self.directory / "state", self.tree, self.leaves)


def find_checkpoints(target: Path) -> Path:
    """Return the directory that holds the steps of a run.

    Args:
        target: a run directory, or the directory `checkpoints` in it.

    Raises:
        CheckpointError: if there is none.
    """
    directory = target / "checkpoints"
    if not directory.is_dir():
        directory = target
    check_not_plain(directory)
    if directory != target or (target.is_dir() and saved_steps(target)):
        return directory
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
    if is_step(target) and not is_plain(target):
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


def find_damage(directory: Path) -> list[str]:
    """Compare the files of a step with their digests, and its number with its name.

    A step under another number, as after a wrong copy, would resume at the wrong place. A
    directory whose name is not a number, such as a copy named `best`, may hold any step.

    Args:
        directory: the directory of the step.

    Returns:
        One line per problem. An empty list means that the step is intact.
    """
    return verify_manifest(directory) or wrong_number(directory)


def wrong_number(directory: Path) -> list[str]:
    """Return a line if `meta.json` names another step than the directory of a step does."""
    name = directory.resolve().name
    if not name.isdecimal():
        return []
    try:
        step = read_json(directory / "meta.json").get("step")
    except CheckpointError as error:
        return [str(error)]
    if type(step) is int and str(step) == name:
        return []
    shown = step if type(step) is int else "no step"
    return [f"{directory} holds another step: its meta.json names {shown}"]


def verify_step(directory: Path) -> list[str]:
    """Check that a step is intact, and that its arrays can be read back.

    Args:
        directory: the directory of the step.

    Returns:
        One line per problem. An empty list means that none was found.
    """
    return find_damage(directory) or check_content(directory)


def check_content(directory: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Open all arrays of a step, and read a part of their content.

    Digests show that the files are those that were written, not that a state can be read from
    them.

    Args:
        directory: the directory of the step.
        part: which share of the arrays this process looks up, from 0.
        parts: the number of processes that share the work.

    Returns:
        One line per problem. An empty list means that none was found.
    """
    try:
        saved = read_step(directory)
        problems = saved.arrays.unreadable(part, parts)
        expected = saved.metadata.get("step")
        if not problems and "step" in saved.leaves:
            step = saved.read(["step"])["step"].item()
            if step != expected:
                problems = [f"{directory}: the saved state belongs to step {step}"]
    except CheckpointError as error:
        return [str(error)]
    return problems


def open_step(directory: Path) -> SavedStep:
    """Verify every file of a step against its digest, then read the list of its arrays.

    Args:
        directory: the directory of the step.

    Raises:
        CheckpointError: if a file is damaged, missing or unexpected.
    """
    problems = find_damage(directory)
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
    arrays = open_arrays(directory / "state")
    return SavedStep(directory.resolve(), arrays.tree, arrays.leaves)


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
        # NumPy has no dtype for random keys, which are never averaged.
        return parts[0].astype(dtype) if isinstance(dtype, np.dtype) else parts[0]
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
