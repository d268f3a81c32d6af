"""Checkpoints of a state: plain Orbax, one directory for each step, whole or not there, and verified before they are used.

    checkpoints/200/state/      what Orbax wrote: {step, params, other, opt_state}, readable without shardwise
    checkpoints/200/meta.json   what the run was: data, mesh, versions, arguments, metrics
    checkpoints/200/MANIFEST    a digest of every other file

A step is written under the name `200.tmp` and renamed when all of it is on the disk.
"""

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.checkpoint.reader import (
    read_json,
    read_metric,
    read_step,
    refused,
    saved_steps,
    show_leaf,
)
from shardwise.cluster.group import ProcessGroup, current_group, wait_for
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.durable import (
    file_digest,
    read_manifest,
    sync,
    write_digests,
    write_manifest,
    wrong_files,
)
from shardwise.files.failpoints import fail_point
from shardwise.state import StateSpec, TrainState
from shardwise.text import columns, show_bytes
from shardwise.tree import named_leaves, num_bytes

SHOWN = 24  # leaves that do not fit; the others are counted
HEAD_START = (
    0.05  # seconds that the loop gets, whose devices wait, before a save wants the interpreter too
)
NUMBERS = itertools.count()  # of the objects of this process that save; the same in all


@dataclass(frozen=True)
class Keep:
    """Which steps outlive the next save. The newest always does."""

    last: int = 3
    every: int = 0  # steps; 0: none for that reason
    best: int = 0  # so many with the best `metric`
    metric: str = "eval_loss"
    largest: bool = False  # whether more is better

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0 or self.best < 0:
            raise ConfigError(f"{self}: `last` must be at least 1, `every` and `best` at least 0.")

    def chosen(self, metrics: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, of those for which metrics are given."""
        steps = sorted(metrics)
        valued = sorted(
            ((value, step) for step, value in metrics.items() if value is not None),
            reverse=self.largest,
        )
        return (
            set(steps[-self.last :])
            | {step for step in steps if self.every and step % self.every == 0}
            | {step for _, step in valued[: self.best]}
        )


class Checkpoints:
    """The checkpoints below a directory. Saving goes on in the background; `check` tells of a save that failed, `close` waits.

    The directory itself is the only record of what there is: nothing is remembered that a crash or another program could
    make untrue.
    """

    def __init__(
        self, directory: Path, keep: Keep | None = None, group: ProcessGroup | None = None
    ):
        self.directory = directory.resolve()
        self.keep = keep or Keep()
        self.group = (group or current_group()).within(f"checkpoints{next(NUMBERS)}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-save")
        self._pending: Future[None] | None = None
        self._rounds = 0  # of everything that all processes do together
        self._saving = ""  # the name of the save that goes on

    @cached_property
    def _orbax(self) -> Any:
        """Imported when the first state is saved or restored: a run that begins need not wait for it."""
        import orbax.checkpoint as ocp

        options = ocp.options.AsyncOptions(barrier_sync_fn=self._meet)
        return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), async_options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def steps(self) -> list[int]:
        """All steps that are there, from the oldest to the newest."""
        return saved_steps(self.directory) if self.directory.is_dir() else []

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def is_newest(self, step: int) -> bool:
        """Whether this is the newest step on the disk, as the first process sees it."""
        return bool(self.group.share(self._round(), self.latest() == step))

    def clean(self) -> None:
        """Removes what a crash has left half done. Only for the run that holds the lock of the directory."""
        if self.group.is_first:
            for path in self.directory.glob("*.tmp"):
                shutil.rmtree(path)

    def _round(self) -> str:
        """A name for what all processes are about to do together."""
        self._rounds += 1
        return str(self._rounds)

    # Saving

    def save(self, state: TrainState, metadata: Mapping[str, Any]) -> None:
        """Starts to save; the state may be donated as soon as this returns. Waits for the save before, if it still goes on.

        Where the devices have room for it, they copy the state, and the copy goes to the host while training goes on.
        """
        self.wait()
        step, tree = int(state.step), _tree(state)
        self._saving = self._round()
        temporary = self.path(step).with_suffix(".tmp")
        size = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
        problem = self._begin(step, temporary, size) if self.group.is_first else None
        if problem := self.group.share(f"{self._saving}/begin", problem):
            raise CheckpointError(problem)
        copies: list[Any] = []
        if all(self.group.union(f"{self._saving}/room", _has_room(tree))):
            with suppress(jax.errors.JaxRuntimeError):  # room that is not in one piece
                copies = [_copied(tree)]
        if not copies:
            problem = self._hand_over(step, tree)
            if problem is not None and self.group.count == 1:
                shutil.rmtree(temporary, ignore_errors=True)
                raise CheckpointError(f"{self.path(step)} could not be saved: {problem}")
        self._pending = self._thread.submit(
            self._commit, self._saving, step, dict(metadata), copies, problem
        )

    def _hand_over(self, step: int, tree: Any) -> str | None:
        """Returns when Orbax has all arrays on the host, with what went wrong."""
        import orbax.checkpoint as ocp

        try:
            self._orbax.save(
                self.path(step).with_suffix(".tmp") / "state", args=ocp.args.StandardSave(tree)
            )
        except Exception as error:
            return self._told(error)
        return None

    def _begin(self, step: int, temporary: Path, size: int) -> str | None:
        """Makes room for a save; why that is not possible, or None."""
        try:
            if self.path(step).exists():
                return f"{self.path(step)} is there already; a checkpoint is never overwritten."
            self.directory.mkdir(mode=0o700, exist_ok=True)
            self._check_space(size)
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(mode=0o700)
            fail_point("checkpoint.temporary")
        except CheckpointError as error:
            return str(error)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            return f"{self.path(step)} could not be saved: {_cause(error)}"
        return None

    def check(self) -> bool:
        """Whether a save has been finished since the last look; raises if it failed. Does not wait."""
        done = self._pending is not None and self._pending.done()
        if done:
            self.wait()
        return done

    def wait(self) -> None:
        """Until the save in the background is on the disk, or raises why it is not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if "_orbax" in vars(self):
                self._orbax.close()

    def _commit(
        self, name: str, step: int, metadata: dict[str, Any], copies: list[Any], problem: str | None
    ) -> None:
        """In the background: everything that makes a temporary directory a checkpoint. The first process does it, when all are ready."""
        temporary = self.path(step).with_suffix(".tmp")
        digests: dict[str, str] = {}
        if copies:
            time.sleep(HEAD_START)
            problem = self._hand_over(step, copies.pop())  # which frees the memory of the devices
        try:
            fail_point("checkpoint.arrays")
            if problem is None:
                self._orbax.wait_until_finished()
                fail_point("checkpoint.written")
        except Exception as error:
            problem = self._told(error)
            self.group.put(f"{name}/failed/{self.group.index}", problem)
        problem = next(filter(None, self.group.union(f"{name}/arrays", problem)), None)
        if problem is None:
            try:
                digests = write_digests(temporary / "state", self.group.index, self.group.count)
            except OSError as error:
                problem = self._told(error)
            parts = self.group.union(f"{name}/digests", [digests, problem])
            digests = {
                f"state/{file}": digest for part, _ in parts for file, digest in part.items()
            }
            problem = next((told for _, told in parts if told), None)
        if problem is None and self.group.is_first:
            try:
                meta = temporary / "meta.json"
                meta.write_text(
                    json.dumps({"step": step, **metadata}, indent=2, default=str) + "\n"
                )
                sync(meta)
                write_manifest(temporary, {**digests, meta.name: file_digest(meta)})
                fail_point("checkpoint.rename")
                os.rename(temporary, self.path(step))
                sync(self.directory)
            except Exception as error:
                problem = self._told(error)
        if int(name) > 2:  # the outcome before that is known to all who have come here
            self.group.drop(str(int(name) - 2))
        if problem := self.group.share(f"{name}/outcome", problem):
            if self.group.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"{self.path(step)} could not be saved: {problem}")
        try:
            fail_point("checkpoint.renamed")
            if self.group.is_first:
                self._delete_old()
        except OSError as error:
            raise CheckpointError(
                f"step {step} is saved, but an older one could not be deleted: {_cause(error)}"
            ) from error

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """How the processes wait for each other within Orbax: not for one that has failed."""
        place = f"{self._saving}/{key.split('.')[0]}"
        self.group.put(f"{place}/{self.group.index}", 1)
        failed: dict[str, str] = {}

        def is_over() -> bool:
            failed.update(self.group.read(f"{self._saving}/failed"))
            return bool(failed) or len(self.group.read(place)) == self.group.count

        if not wait_for(is_over, timeout_ms / 1000) or failed:
            raise RuntimeError(
                next(
                    iter(failed.values()),
                    f"the others did not come within {timeout_ms / 1000:.0f} s",
                )
            )

    def _told(self, error: Exception) -> str:
        where = "" if self.group.count == 1 else f"{self.group.name(self.group.index)}: "
        return str(error) if isinstance(error, CheckpointError) else f"{where}{_cause(error)}"

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < needed * 1.02 + 2**16:
            raise CheckpointError(
                f"a checkpoint of {show_bytes(needed)} does not fit: {show_bytes(free)} are free for {self.directory}."
            )

    def _delete_old(self) -> None:
        for path in self.directory.glob("*.deleted.tmp"):  # what an earlier deletion has left
            shutil.rmtree(path)
        metrics = self.metrics() if self.keep.best else dict.fromkeys(self.steps())
        for step in set(metrics) - self.keep.chosen(metrics):
            doomed = self.path(step).with_suffix(
                ".deleted.tmp"
            )  # a deletion that is cut short leaves no half checkpoint
            os.rename(self.path(step), doomed)
            fail_point("checkpoint.delete")
            shutil.rmtree(doomed)

    def metrics(self) -> dict[int, float | None]:
        """What `keep.metric` was at each step; None where it was not measured, or is no number."""
        return {step: read_metric(self.path(step), self.keep.metric) for step in self.steps()}

    # Reading

    def verify(self, step: int) -> list[str]:
        """What is wrong with the files of a step; an empty list when they are as they were written."""
        name, group = self._round(), self.group
        expected, problems = group.share(
            f"{name}/manifest", read_manifest(self.path(step)) if group.is_first else None
        )
        found = group.union(
            f"{name}/files", wrong_files(self.path(step), expected, group.index, group.count)
        )
        return [*problems, *sorted(problem for part in found for problem in part)]

    def newest_good(self, warn: Callable[[str], None]) -> int | None:
        """The newest step that passes `verify`. Damaged ones are put aside as `<step>.bad`; None if there are none at all."""
        damaged: list[str] = []
        steps, were_bad = self.group.share(
            self._round(), [self.steps(), any(self.directory.glob("*.bad*"))]
        )
        for step in reversed(steps):
            problems = self.verify(step)
            if not problems:
                if damaged:
                    warn(
                        "\n".join(
                            [*damaged, f"going back to step {step}, the newest that is whole."]
                        )
                    )
                return int(step)
            aside = _unused(self.directory, f"{step}.bad")
            if self.group.is_first:
                os.rename(self.path(step), aside)
            damaged.append(
                f"checkpoint {step} is damaged and kept aside as {aside}: {_some(problems)}"
            )
        if damaged or were_bad:
            found = damaged or [
                f"there is no checkpoint in {self.directory} but damaged ones, kept aside as *.bad"
            ]
            raise CheckpointError(
                "\n".join(found)
                + "\nNo whole checkpoint is left. To start anew, choose another --out."
            )
        return None

    def metadata(self, step: int) -> dict[str, Any]:
        """The JSON that was saved beside a state."""
        return read_json(self.path(step) / "meta.json")

    def restore(self, spec: StateSpec, step: int) -> TrainState:
        """The state of a step in the layout of `spec`, whatever mesh it was written on."""
        import orbax.checkpoint as ocp

        self.wait()
        fail_point("restore")
        self.check_fits(spec, step)
        wanted = _tree(spec.abstract)
        with refused(self.path(step)):
            restored = self._orbax.restore(
                self.path(step) / "state", args=ocp.args.StandardRestore(wanted)
            )
        # Buffers that Orbax made cannot be donated; copies can, and the first step then needs no second state.
        copy = jax.jit(
            lambda tree: jax.tree.map(jnp.copy, tree),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, wanted),
        )
        return TrainState(**copy(restored))

    def check_fits(self, spec: StateSpec, step: int) -> None:
        """Compares the paths, shapes and dtypes of a step with those of `spec`, before anything is loaded."""
        if problems := differences(
            read_step(self.path(step)).leaves, named_leaves(_tree(spec.abstract))
        ):
            first = sorted(problems, key=lambda row: not row[0].startswith("params/"))[:SHOWN]
            more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise CheckpointError(
                f"checkpoint {self.path(step)} does not fit this run:\n"
                + columns([("path", "saved", "wanted"), *first])
                + f"{more}\nNothing was loaded. Give the arguments the run had, or start from its weights with init_from in another --out."
            )


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(path, saved, wanted) of leaves that are missing, too many, or of another shape or dtype.

    Orbax names no path when shapes differ, and casts another dtype without a word.
    """

    def show(leaf: Any) -> str:
        return "-" if leaf is None else show_leaf(leaf)

    rows = [
        (path, show(saved.get(path)), show(wanted.get(path)))
        for path in sorted(saved.keys() | wanted.keys())
    ]
    return [row for row in rows if row[1] != row[2]]


def _has_room(tree: Any) -> bool:
    """Whether a copy of the arrays fits beside the most that the devices of this process ever held. CPUs do not tell."""
    needed: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            needed[shard.device] = needed.get(shard.device, 0) + shard.data.nbytes
    for device, size in needed.items():
        stats = device.memory_stats() or {}
        if stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0) < size:
            return False
    return True


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _tree(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "params": state.params,
        "other": state.other,
        "opt_state": state.opt_state,
    }


def _cause(error: Exception) -> str:
    """In a line: TensorStore says much, and the fact last."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text


def _unused(directory: Path, name: str) -> Path:
    names = [name, *(f"{name}.{number}" for number in range(1, 1000))]
    return next(
        directory / candidate for candidate in names if not (directory / candidate).exists()
    )


def _some(problems: list[str], count: int = 3) -> str:
    rest = f" and {len(problems) - count} more" if len(problems) > count else ""
    return "; ".join(problems[:count]) + rest
