"""Save and restore training states: one directory per step, complete or absent.

`shardwise.checkpoint.reader` documents the files of a step.

How a step is saved, in this order:

1. Check that the step does not exist and that it fits on the disk, and create `<step>.tmp`.
2. Every process writes the position of its data iterator, if it has one, to `<step>.tmp/data`.
   Orbax writes the arrays to `<step>.tmp/state`. Every process writes its own shards. Where the
   devices have room for a copy of the state, they copy it, and the copy moves to the host while
   training continues. Otherwise `save` returns when the arrays are on the host.
3. Every process computes digests of a share of the files and flushes them to disk.
4. The first process writes `meta.json`, then `MANIFEST` with all digests, and flushes both and all
   directories.
5. The first process renames `<step>.tmp` to `<step>` and flushes the parent directory.
6. Only then it deletes the old steps that `Keep` does not protect.

A directory with a plain number as its name was therefore complete once, and its digests show
whether it still is. A crash at any moment leaves a `.tmp` directory at worst, which the next start
removes.

Orbax's own `CheckpointManager` is not used, for three reasons that `docs/faults.md` measures. It
has no digests, so most flipped bits restore silently. It keeps a list of steps in memory, which
does not follow the directory. It deletes old steps before it knows that the new one is good.
"""

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.checkpoint.arrays import find_same_name
from shardwise.checkpoint.plain import check_not_plain
from shardwise.checkpoint.reader import (
    ArrayLike,
    SavedStep,
    check_content,
    read_json,
    read_metric,
    read_step,
    saved_steps,
    show_leaf,
    wrong_number,
)
from shardwise.cluster.group import ProcessGroup, current_group, wait_for
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.alias import plain_alias
from shardwise.files.durable import file_digest, remove, sync
from shardwise.files.failpoints import fail_point
from shardwise.files.manifest import (
    read_manifest,
    write_digests,
    write_manifest,
    wrong_files,
)
from shardwise.files.paths import AnyPath, local_path
from shardwise.files.regular import file_errors
from shardwise.state import StateSpec, TrainState
from shardwise.text import Json, columns, show_bytes
from shardwise.tree import KeyPath, PyTree, leaf_name, named_leaves, nest, num_bytes

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

# How many mismatched leaves an error lists. The others are counted.
MAX_LISTED = 24
# Seconds that a background save waits before it starts. The training loop, whose devices are idle
# at that moment, gets the interpreter first.
HEAD_START = 0.05
# The names of the arrays in the user's tree begin with this.
EXTRA = "extra/"
# Numbers the `Checkpoints` objects of a process. All processes create them in the same order.
_OBJECTS = itertools.count()


@dataclass(frozen=True)
class Keep:
    """Which steps survive the next save. The newest step always does.

    Attributes:
        last: keep this many of the newest steps. At least 1.
        every: keep every step that is a multiple of this number. 0 keeps none for this reason.
        best: keep this many steps with the best value of `metric`.
        metric: the metric that ranks steps.
        largest: whether a larger value of `metric` is better.

    Example:
        >>> keep = Keep(last=1, every=100, best=1)
        >>> sorted(keep.chosen({90: 2.0, 95: 1.0, 100: 3.0, 110: 2.5}))
        [95, 100, 110]
    """

    last: int = 3
    every: int = 0
    best: int = 0
    metric: str = "eval_loss"
    largest: bool = False

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0 or self.best < 0:
            raise ConfigError(
                f"{self}: `last` must be at least 1; `every` and `best` must be at least 0."
            )

    def chosen(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Return the steps to keep.

        Args:
            metrics: the value of `metric` for every saved step, or None where it was not measured.
        """
        steps = sorted(metrics)
        measured = [
            (value, step) for step, value in metrics.items() if value is not None
        ]
        measured.sort(reverse=self.largest)
        newest = set(steps[-self.last :])
        periodic = {step for step in steps if self.every and step % self.every == 0}
        best = {step for _, step in measured[: self.best]}
        return newest | periodic | best


@dataclass
class _Save:
    """A save in progress.

    Attributes:
        name: the name of this save among the processes.
        step: the step.
        metadata: the content of `meta.json`, without the step.
        position: the position of the data iterator of this process, if it has one.
        copies: the copy of the arrays on the devices, or nothing if Orbax has the arrays already.
            It is a list so that the only reference to the copy can be removed.
        problem: what went wrong so far.
    """

    name: str
    step: int
    metadata: Json
    position: str | None
    copies: list[PyTree]
    problem: str | None


class Checkpoints:
    """The checkpoints in one directory. Saves run in the background.

    The directory is the only list of steps. Nothing is remembered that a crash or another program
    could make wrong. In a run with several processes, all of them call the same methods in the same
    order.

    Attributes:
        directory: the directory that holds the steps.
        keep: which steps survive the next save.
        group: the processes of the run.

    Example:
        >>> with Checkpoints("runs/a/checkpoints") as checkpoints:  # doctest: +SKIP
        ...     checkpoints.save(state, {"metrics": {"eval_loss": 1.0}})
        ...     checkpoints.wait()
        ...     state = checkpoints.restore(spec, checkpoints.latest())
    """

    def __init__(
        self,
        directory: AnyPath,
        keep: Keep | None = None,
        group: ProcessGroup | None = None,
    ):
        self.directory = local_path(directory).resolve()
        self.keep = keep or Keep()
        self.group = (group or current_group()).within(f"checkpoints{next(_OBJECTS)}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-save")
        self._pending: Future[None] | None = None
        # The number of operations so far that all processes carry out together.
        self._rounds = 0
        # The name of the save in progress.
        self._saving = ""
        # What `close` releases.
        self._stack = ExitStack()

    @cached_property
    def _orbax(self) -> "ocp.AsyncCheckpointer":
        """The Orbax checkpointer, made at the first save or restore: importing Orbax is slow."""
        import orbax.checkpoint as ocp

        options = ocp.options.AsyncOptions(barrier_sync_fn=self._barrier)
        return ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(), async_options=options
        )

    @cached_property
    def _orbax_directory(self) -> Path:
        """The directory, which must exist, under a path that Orbax can use."""
        return self._stack.enter_context(plain_alias(self.directory))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, step: int) -> Path:
        """Return the directory of a step. It may not exist."""
        return self.directory / str(step)

    def steps(self) -> list[int]:
        """Return all steps in the directory, oldest first."""
        return saved_steps(self.directory) if self.directory.is_dir() else []

    def latest(self) -> int | None:
        """Return the newest step in the directory, or None."""
        return max(self.steps(), default=None)

    def is_newest(self, step: int) -> bool:
        """Return whether this is the newest step on disk, as the first process sees it."""
        return bool(self.group.share(self._next_round(), self.latest() == step))

    def clean(self) -> None:
        """Remove the temporary directories that a crash left. The caller must hold the lock."""
        if self.group.is_first:
            for path in self.directory.glob("*.tmp"):
                with file_errors(path):
                    remove(path)

    def _next_round(self) -> str:
        """Return a name for the next operation that all processes carry out together."""
        self._rounds += 1
        return str(self._rounds)

    # Saving

    def save(
        self,
        state: TrainState,
        metadata: Mapping[str, object] | None = None,
        extra: Mapping[str, PyTree] | None = None,
        position: str | None = None,
    ) -> None:
        """Start to save a state. It may be donated as soon as this returns.

        Waits for the previous save if that is still running. An error of the background part is
        raised by the next call of `check`, `wait`, `save` or `close`.

        Args:
            state: the state to save, under the number of its step.
            metadata: the content of `meta.json`, without the step.
            extra: a dictionary with a further tree of NumPy or JAX arrays, which `restore_extra`
                reads.
            position: where the data iterator of this process is after this step, as JSON; None
                if the data is a function of the step.

        Raises:
            ConfigError: if `extra` is not a dictionary of arrays, or two arrays have the same name.
            CheckpointError: if the step exists already, does not fit on the disk, or cannot be
                written.
        """
        self.wait()
        step = int(state.step)
        tree = _saved_tree(state) | _extra_tree(extra)
        same = find_same_name(tree)
        if same:
            raise ConfigError(
                f"'{same[0]}' and '{same[1]}' would have the same name in a checkpoint, because "
                "Orbax joins keys with dots. Rename one of them."
            )
        self._saving = self._next_round()
        temporary = self._temporary(step)
        size = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
        problem = self._prepare(step, size) if self.group.is_first else None
        problem = self.group.share(f"{self._saving}/begin", problem)
        if problem:
            raise CheckpointError(problem)
        copies: list[PyTree] = []
        if all(self.group.union(f"{self._saving}/room", _has_room(tree))):
            # The copy can fail although there is room, if the free memory is fragmented.
            with suppress(jax.errors.JaxRuntimeError):
                copies = [_copy_on_devices(tree)]
        if not copies:
            problem = self._start_orbax(step, tree)
            if problem is not None and self.group.count == 1:
                shutil.rmtree(temporary, ignore_errors=True)
                raise CheckpointError(
                    f"{self.path(step)} could not be saved: {problem}"
                )
        save = _Save(
            self._saving, step, dict(metadata or {}), position, copies, problem
        )
        self._pending = self._thread.submit(self._commit, save)

    def _temporary(self, step: int) -> Path:
        return self.path(step).with_suffix(".tmp")

    def _prepare(self, step: int, size: int) -> str | None:
        """Create the temporary directory of a save. Return why that is not possible, or None."""
        temporary = self._temporary(step)
        try:
            # Old steps are deleted after a save.
            check_not_plain(self.directory)
            if self.path(step).exists():
                return f"{self.path(step)} already exists. A checkpoint is never overwritten."
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_space(size)
            if temporary.exists():
                remove(temporary)
            temporary.mkdir(mode=0o700)
            fail_point("checkpoint.temporary")
        except CheckpointError as error:
            return str(error)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            return f"{self.path(step)} could not be saved: {_cause(error)}"
        return None

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        # Two percent and 64 KiB for metadata, on top of the arrays.
        if free < needed * 1.02 + 2**16:
            raise CheckpointError(
                f"a checkpoint of {show_bytes(needed)} does not fit on the disk: "
                f"{show_bytes(free)} free in {self.directory}. Free some space or keep fewer steps."
            )

    def _start_orbax(self, step: int, tree: PyTree) -> str | None:
        """Return when Orbax has all arrays on the host: what went wrong, or None."""
        import orbax.checkpoint as ocp

        try:
            place = self._orbax_directory / self._temporary(step).name
            self._orbax.save(place / "state", args=ocp.args.StandardSave(tree))
        except Exception as error:
            return self._report(self._saving, error)
        return None

    def _report(self, save: str, error: Exception) -> str:
        """Describe an error, and let the other processes stop waiting for this one in Orbax."""
        problem = self._describe(error)
        self.group.put(f"{save}/failed/{self.group.index}", problem)
        return problem

    def check(self) -> bool:
        """Return whether a save has finished since the last call. Does not wait.

        Raises:
            CheckpointError: if that save failed.
        """
        done = self._pending is not None and self._pending.done()
        if done:
            self.wait()
        return done

    def wait(self) -> None:
        """Wait until the save in the background is on disk.

        Raises:
            CheckpointError: if it failed.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the save in the background, and release the thread and Orbax."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if "_orbax" in vars(self):
                self._orbax.close()
            self._stack.close()

    def _commit(self, save: _Save) -> None:
        """Turn a temporary directory into a checkpoint. Runs in the background in every process.

        The processes agree after each part, so that all of them see the same outcome.
        """
        temporary = self._temporary(save.step)
        digests: dict[str, str] = {}
        problem = self._finish_arrays(save)
        if problem is None:
            digests, problem = self._flush_arrays(save)
        if problem is None and self.group.is_first:
            problem = self._publish(save, digests)
        # Every process that got here knows the outcome of the save before the previous one.
        if int(save.name) > 2:
            self.group.drop(str(int(save.name) - 2))
        problem = self.group.share(f"{save.name}/outcome", problem)
        if problem:
            if self.group.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"{self.path(save.step)} could not be saved: {problem}"
            )
        try:
            fail_point("checkpoint.renamed")
            if self.group.is_first:
                self._delete_old()
        except OSError as error:
            raise CheckpointError(
                f"step {save.step} is saved, but an older step could not be deleted: "
                f"{_cause(error)}"
            ) from error

    def _finish_arrays(self, save: _Save) -> str | None:
        """Wait until the arrays of all processes are written. Return the first problem, or None."""
        problem = save.problem
        if save.copies:
            time.sleep(HEAD_START)
            # Removing the last reference here frees the device memory as soon as Orbax has copied
            # it.
            problem = self._start_orbax(save.step, save.copies.pop())
        failure = self.group.share(f"{save.name}/started", problem)
        if failure is not None and not self.group.is_first:
            # Orbax waits here for directories that the first process creates, until its timeout.
            # The next save makes another checkpointer.
            vars(self).pop("_orbax", None)
            problem = failure
        try:
            if save.position is not None:
                self._write_position(save.step, save.position)
            fail_point("checkpoint.arrays")
            if problem is None:
                self._orbax.wait_until_finished()
                fail_point("checkpoint.written")
        except Exception as error:
            problem = self._report(save.name, error)
        return _first_problem(self.group.union(f"{save.name}/arrays", problem))

    def _write_position(self, step: int, position: str) -> None:
        path = position_path(self._temporary(step), self.group.index, self.group.count)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(position + "\n")

    def _flush_arrays(self, save: _Save) -> tuple[dict[str, str], str | None]:
        """Flush the files to disk. Return digests of all of them, and the first problem or None."""
        digests: dict[str, str] = {}
        problem = None
        try:
            temporary = self._temporary(save.step)
            digests = write_digests(temporary, self.group.index, self.group.count)
        except OSError as error:
            problem = self._describe(error)
        shares = self.group.union(f"{save.name}/digests", [digests, problem])
        merged = {name: digest for share, _ in shares for name, digest in share.items()}
        return merged, _first_problem([share_problem for _, share_problem in shares])

    def _publish(self, save: _Save, digests: dict[str, str]) -> str | None:
        """Write `meta.json` and MANIFEST, flush everything, and rename the temporary directory."""
        temporary = self._temporary(save.step)
        try:
            meta = temporary / "meta.json"
            # The step comes first, and no entry of the caller replaces it.
            step = {"step": save.step}
            description = step | save.metadata | step
            meta.write_text(json.dumps(description, indent=2, default=_as_json) + "\n")
            sync(meta)
            write_manifest(temporary, {**digests, meta.name: file_digest(meta)})
            fail_point("checkpoint.rename")
            os.rename(temporary, self.path(save.step))
            sync(self.directory)
        except Exception as error:
            return self._describe(error)
        return None

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes inside Orbax, but not for one that has failed already."""
        folder = f"{self._saving}/{key.split('.')[0]}"
        self.group.put(f"{folder}/{self.group.index}", 1)
        failures: dict[str, str] = {}

        def is_over() -> bool:
            failures.update(self.group.read(f"{self._saving}/failed"))
            return bool(failures) or len(self.group.read(folder)) == self.group.count

        seconds = timeout_ms / 1000
        in_time = wait_for(is_over, seconds)
        if failures:
            raise CheckpointError(next(iter(failures.values())))
        if not in_time:
            raise RuntimeError(
                f"the other processes did not arrive within {seconds:.0f} s"
            )

    def _describe(self, error: Exception) -> str:
        """Return an exception in one line, with the name of this process if there are several."""
        if isinstance(error, CheckpointError):
            return str(error)
        if self.group.count == 1:
            return _cause(error)
        return f"{self.group.name(self.group.index)}: {_cause(error)}"

    def _delete_old(self) -> None:
        """Delete the steps that `keep` does not protect.

        A step is renamed before it is deleted. An interrupted deletion therefore never leaves a
        partial directory under the name of a step.
        """
        # An earlier deletion may have been interrupted.
        for path in self.directory.glob("*.deleted.tmp"):
            remove(path)
        metrics = self.metrics() if self.keep.best else dict.fromkeys(self.steps())
        for step in set(metrics) - self.keep.chosen(metrics):
            deleted = self.path(step).with_suffix(".deleted.tmp")
            os.rename(self.path(step), deleted)
            fail_point("checkpoint.delete")
            shutil.rmtree(deleted)

    def metrics(self) -> dict[int, float | None]:
        """Return `keep.metric` of every step, or None where it was not measured."""
        return {
            step: read_metric(self.path(step), self.keep.metric)
            for step in self.steps()
        }

    # Reading

    def verify(self, step: int, state: TrainState | None = None) -> list[str]:
        """Check that a step is intact, and that its arrays can be read back.

        The files must match their digests, and `meta.json` must be of this step. Then every array
        is opened, and a part of its content is read. The processes share the work.

        Args:
            step: the step.
            state: the state that was saved. Its paths, shapes and dtypes are compared.

        Returns:
            One line per problem. An empty list means that none was found.
        """
        problems = self._find_damage(step)
        if problems:
            return problems
        name = self._next_round()
        path, group = self.path(step), self.group
        problems = check_content(path, group.index, group.count)
        if not problems and state is not None:
            differences = _differences(
                _state_leaves(read_step(path)), named_leaves(_saved_tree(state))
            )
            problems = [f"{path} has other arrays:\n{differences}"] * bool(differences)
        shares = group.union(f"{name}/arrays", problems)
        return sorted({problem for share in shares for problem in share})

    def _find_damage(self, step: int) -> list[str]:
        """Compare the files of a step with their digests, and its number with its name.

        This finds what happened to the files, and not that another release of Orbax cannot read
        them: a run sets such steps aside.
        """
        name = self._next_round()
        group = self.group
        manifest = read_manifest(self.path(step)) if group.is_first else None
        digests, problems = group.share(f"{name}/manifest", manifest)
        damaged = wrong_files(self.path(step), digests, group.index, group.count)
        shares = group.union(f"{name}/files", damaged)
        found = [*problems, *sorted(problem for share in shares for problem in share)]
        if found:
            return found
        number = wrong_number(self.path(step)) if group.is_first else []
        return list(group.share(f"{name}/number", number))

    def newest_good(self, warn: Callable[[str], None]) -> int | None:
        """Return the newest intact step. Damaged newer steps are renamed to `<step>.bad`.

        Args:
            warn: called with a message if there were damaged steps.

        Returns:
            The step, or None if the directory has no steps at all.

        Raises:
            CheckpointError: if all steps are damaged. A fresh start would silently lose the run.
                Also if the directory has steps that Orbax wrote without shardwise.
        """
        damaged: list[str] = []
        # Without digests they would look damaged.
        check_not_plain(self.directory)
        had_damaged = any(self.directory.glob("*.bad*"))
        steps, had_damaged = self.group.share(
            self._next_round(), [self.steps(), had_damaged]
        )
        for step in reversed(steps):
            problems = self._find_damage(step)
            if not problems:
                if damaged:
                    fallback = (
                        f"going back to step {step}, the newest intact checkpoint."
                    )
                    warn("\n".join([*damaged, fallback]))
                return int(step)
            aside = _unused_path(self.directory, f"{step}.bad")
            if self.group.is_first:
                os.rename(self.path(step), aside)
            damaged.append(
                f"checkpoint {step} is damaged and was renamed to {aside}: {_summarize(problems)}"
            )
        if not damaged and had_damaged:
            damaged = [
                f"all checkpoints in {self.directory} are damaged and were renamed to *.bad"
            ]
        if damaged:
            remedy = (
                "No intact checkpoint is left. To start over, choose another --out."
            )
            raise CheckpointError("\n".join([*damaged, remedy]))
        return None

    def metadata(self, step: int) -> Json:
        """Return the content of `meta.json` of a step."""
        return read_json(self.path(step) / "meta.json")

    def position(self, step: int, index: int, count: int) -> str | None:
        """Return the position of the data iterator that one of `count` processes has saved.

        Returns:
            The position as JSON, or None if there is no such file.
        """
        path = position_path(self.path(step), index, count)
        return json.dumps(read_json(path)) if path.is_file() else None

    def num_positions(self, step: int) -> int:
        """Return how many processes have saved the position of a data iterator."""
        return len(list((self.path(step) / "data").glob("process_*.json")))

    def restore(self, spec: StateSpec, step: int) -> TrainState:
        """Read the state of a step in the layout of `spec`, whatever mesh it was written on.

        Args:
            spec: the abstract state of this run.
            step: the step. Its files are not verified here; call `verify` before.

        Raises:
            CheckpointError: if the step does not match `spec` or cannot be read.
        """
        self.wait()
        fail_point("restore")
        saved = self._open_fitting(spec, step)
        wanted = _saved_tree(spec.abstract)
        restored = _fill(wanted, saved.place(named_leaves(wanted)))
        if int(restored["step"]) != step:
            raise CheckpointError(
                f"{self.path(step)} holds the state of step {int(restored['step'])}. Remove this "
                "checkpoint to resume from an earlier one."
            )
        # Buffers that Orbax allocates cannot be donated. Copies can, so the first step does not
        # need memory for a second state.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        copy = jax.jit(
            lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings
        )
        return TrainState(**copy(restored))

    def restore_extra(self, step: int, like: PyTree = None) -> PyTree:
        """Read the tree that was passed to `save` as `extra`.

        Args:
            step: the step. Its files are not verified here; call `verify` before.
            like: a tree with the same paths, shapes and dtypes. Leaves with a sharding, such as
                `jax.Array` or `jax.ShapeDtypeStruct`, are read onto its devices, others into NumPy.
                None reads everything into NumPy, as nested dictionaries.

        Raises:
            CheckpointError: if the step has another tree than `like`, or cannot be read.
        """
        self.wait()
        saved = read_step(self.path(step))
        names = [name for name in saved.leaves if name.startswith(EXTRA)]
        if like is None:
            arrays = saved.read(names)
            return nest({tuple(name.split("/")[1:]): arrays[name] for name in names})
        wanted = {"extra": like}
        leaves = named_leaves(wanted)
        differences = _differences({name: saved.leaves[name] for name in names}, leaves)
        if differences:
            raise CheckpointError(
                f"the extra tree of checkpoint {self.path(step)} differs from `like`:\n"
                f"{differences}\nNothing was loaded. Pass None to read it as it is."
            )
        placed = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in leaves.items()
            if getattr(leaf, "sharding", None) is not None
        }
        read = saved.read(leaves.keys() - placed.keys())
        return _fill(wanted, {**read, **saved.place(placed)})["extra"]

    def check_fits(self, spec: StateSpec, step: int) -> None:
        """Compare paths, shapes and dtypes of a step with those of `spec`. No array is read.

        Args:
            spec: the abstract state of this run.
            step: the step.

        Raises:
            CheckpointError: if they differ. The message lists the differences.
        """
        self._open_fitting(spec, step)

    def _open_fitting(self, spec: StateSpec, step: int) -> SavedStep:
        saved = read_step(self.path(step))
        wanted = named_leaves(_saved_tree(spec.abstract))
        differences = _differences(_state_leaves(saved), wanted)
        if differences:
            raise CheckpointError(
                f"checkpoint {self.path(step)} does not match this run:\n{differences}\n"
                "Nothing was loaded. Use the arguments of the run that wrote it, or start from its "
                "weights with init_from and another --out."
            )
        return saved


def _state_leaves(saved: SavedStep) -> dict[str, ArrayLike]:
    """Return the leaves of a saved state, without the user's tree."""
    return {
        name: leaf for name, leaf in saved.leaves.items() if not name.startswith(EXTRA)
    }


def _differences(
    saved: Mapping[str, ArrayLike], wanted: Mapping[str, ArrayLike]
) -> str:
    """Return a table of the leaves that differ; empty if there are none."""
    mismatched = _mismatched_leaves(saved, wanted)
    if not mismatched:
        return ""
    # Parameters first: they explain most differences in the optimizer state.
    mismatched.sort(key=lambda leaf: not leaf[0].startswith("params/"))
    table = columns([("path", "saved", "wanted"), *mismatched[:MAX_LISTED]])
    hidden = len(mismatched) - MAX_LISTED
    return f"{table}\n  and {hidden} more" if hidden > 0 else table


def position_path(directory: Path, index: int, count: int) -> Path:
    """Return the file with the position of a process, named as Grain names such files."""
    return directory / "data" / f"process_{index}-of-{count}.json"


def _mismatched_leaves(
    saved: Mapping[str, ArrayLike], wanted: Mapping[str, ArrayLike]
) -> list[tuple[str, str, str]]:
    """Return (path, saved, wanted) of leaves that are missing, unexpected, or differ.

    Orbax names no path when shapes differ, and casts another dtype without a warning.
    """

    def show(leaf: ArrayLike | None) -> str:
        return "-" if leaf is None else show_leaf(leaf)

    pairs = [
        (path, show(saved.get(path)), show(wanted.get(path)))
        for path in sorted(saved.keys() | wanted.keys())
    ]
    return [(path, before, after) for path, before, after in pairs if before != after]


def _has_room(tree: PyTree) -> bool:
    """Return whether a copy of the arrays fits on the devices of this process.

    A copy fits if it is not larger than the memory that was never in use so far. CPUs report no
    memory statistics, so the answer is False there.
    """
    needed: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in getattr(leaf, "addressable_shards", ()):
            needed[shard.device] = needed.get(shard.device, 0) + shard.data.nbytes
    for device, size in needed.items():
        stats = device.memory_stats() or {}
        if stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0) < size:
            return False
    return True


def _copy_on_devices(tree: PyTree) -> PyTree:
    """Return a copy of the arrays on the devices. NumPy arrays are copies already."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = {
        index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)
    }
    copied = {**dict(enumerate(leaves)), **_copy(arrays)}
    return jax.tree.unflatten(structure, [copied[i] for i in range(len(leaves))])


@jax.jit
def _copy(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    return {index: jnp.copy(array) for index, array in arrays.items()}


def _extra_tree(extra: Mapping[str, PyTree] | None) -> dict[str, PyTree]:
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigError(
            f"extra is a {type(extra).__name__}. Pass a dictionary of arrays."
        )
    # Orbax does not save empty trees.
    if not jax.tree.leaves(extra):
        return {}
    return {"extra": jax.tree_util.tree_map_with_path(_own_extra, extra)}


def _own_extra(path: KeyPath, leaf: object) -> np.ndarray | jax.Array:
    """Return a leaf of the user's tree. NumPy arrays are copied, because they may change."""
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    raise ConfigError(
        f"extra['{leaf_name(path)}'] is a {type(leaf).__name__}, not a NumPy or JAX array. Put "
        "numbers and texts into `metadata`, which is JSON."
    )


def _fill(tree: PyTree, values: Mapping[str, np.ndarray | jax.Array]) -> PyTree:
    """Return a tree with other leaves, by name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: values[leaf_name(path)], tree
    )


def _as_json(value: object) -> object:
    """Return numbers of NumPy and JAX as numbers, and anything else as text."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        return value.item()
    return str(value)


def _saved_tree(state: TrainState) -> dict[str, PyTree]:
    """Return the tree that Orbax saves. Frozen weights are not part of it."""
    return {
        "step": state.step,
        "params": state.params,
        "other": state.other,
        "opt_state": state.opt_state,
    }


def _first_problem(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem), None)


def _cause(error: Exception) -> str:
    """Return the reason for an exception in one line: TensorStore writes long messages."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text


def _unused_path(directory: Path, name: str) -> Path:
    names = [name, *(f"{name}.{number}" for number in range(1, 1000))]
    return next(
        directory / candidate
        for candidate in names
        if not (directory / candidate).exists()
    )


def _summarize(problems: list[str], count: int = 3) -> str:
    text = "; ".join(problems[:count])
    hidden = len(problems) - count
    return f"{text} and {hidden} more" if hidden > 0 else text
