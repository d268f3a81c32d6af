"""Checks of a run directory: who uses it, its checkpoints, its errors, and what to do next."""

import fcntl
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardwise.checkpoint.reader import directory_bytes, find_damage, saved_steps
from shardwise.doctor.check import CheckResult, ok, problem, run_check, warning
from shardwise.doctor.system import disk_result
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.lock import boot_id
from shardwise.files.regular import open_regular
from shardwise.rundir.files import RunFiles, RunRecord
from shardwise.text import show_bytes, show_seconds

# A run that holds its lock may be stuck after this many seconds without a log entry.
MAX_SILENCE = 600.0
# Seconds that the clocks of this machine and of the file server may differ.
MAX_SKEW = 120.0
FILES = ("run.json", "metrics.jsonl", "lock", "checkpoints")


def check_run(path: Path, report: Callable[[str], object]) -> list[CheckResult]:
    """Check a run directory. Nothing is written.

    Args:
        path: the run directory.
        report: receives the name of what is being checked.

    Raises:
        ConfigError: if the path is not a run directory or cannot be read.
    """
    if not path.is_dir():
        raise ConfigError(f"run directory {path} does not exist.")
    if not any((path / name).exists() for name in FILES):
        raise ConfigError(
            f"{path} is not a run directory: it has no run.json, metrics.jsonl or checkpoints."
        )
    try:
        record = RunFiles(path).read()
    except OSError as error:
        raise ConfigError(
            f"the run directory {path} cannot be read: {error.strerror}."
        ) from error
    run = _RunChecks(path, record, report)
    checks = (
        run.check_files,
        run.check_lock,
        run.check_progress,
        run.check_checkpoints,
        run.check_stacks,
        run.check_bad_steps,
        run.check_space,
        run.check_next,
    )
    return [result for check in checks for result in run_check("run", check)]


@dataclass(frozen=True)
class _RunChecks:
    """The checks of one run directory."""

    path: Path
    record: RunRecord
    report: Callable[[str], object]

    @cached_property
    def is_running(self) -> bool:
        """Whether a process of this machine holds the lock, asked without waiting."""
        try:
            descriptor = open_regular(self.path / "lock")
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    @property
    def age(self) -> float | None:
        """Seconds since something was logged, if known; negative if clocks differ."""
        return time.time() - self.record.written if self.record.written else None

    @cached_property
    def damaged(self) -> dict[int, list[str]]:
        """What is wrong with the newest steps: those that are damaged, and the first that is not.

        Older steps are not read.
        """
        verified: dict[int, list[str]] = {}
        for step in reversed(self.steps):
            self.report(f"verifying step {step}")
            try:
                verified[step] = find_damage(self.path / "checkpoints" / str(step))
            except (OSError, CheckpointError) as error:
                verified[step] = [str(error)]
            if not verified[step]:
                break
        return verified

    @cached_property
    def steps(self) -> list[int]:
        """The steps that are saved, oldest first."""
        folder = self.path / "checkpoints"
        return (
            saved_steps(folder) if folder.is_dir() and not folder.is_symlink() else []
        )

    @property
    def newest(self) -> int | None:
        """The newest step that is complete and undamaged."""
        return next(
            (step for step, problems in self.damaged.items() if not problems), None
        )

    def check_files(self) -> Iterator[CheckResult]:
        """Report files that are missing or damaged."""
        for note in self.record.notes:
            yield warning(
                "files", note, "Resume the run: logs may be lost, the state is not."
            )

    def check_lock(self) -> Iterator[CheckResult]:
        """Report which process uses the directory."""
        owner = self.record.owner
        pid = owner.get("pid", "?")
        who = f"process {pid} on {owner.get('host', '?')}" if owner else "a process"
        silence = self.age or 0.0
        if self.is_running and silence > MAX_SILENCE:
            text = (
                f"in use by {who}, but nothing was logged for {show_seconds(silence)}"
            )
            remedy = f"If it is stuck: py-spy dump --pid {pid}; kill -TERM {pid} saves and ends it."
            yield warning("lock", text, remedy)
        elif self.is_running:
            yield ok("lock", f"in use by {who}")
        elif owner and owner.get("boot_id") != boot_id():
            text = f"{who} did not release it, and cannot be seen from this machine"
            yield warning(
                "lock", text, "If it has ended: shardwise train ... --force-unlock"
            )
        else:
            yield ok("lock", "free")

    def check_progress(self) -> Iterator[CheckResult]:
        """Report the last step and its age."""
        text = f"step {self.record.last_step}"
        if self.record.num_steps:
            text += f" of {self.record.num_steps}"
        age = self.age
        if age is not None:
            text += f", last written {show_seconds(max(age, 0))} ago"
        yield ok("progress", text)
        if age is not None and age < -MAX_SKEW:
            text = f"metrics.jsonl was written {show_seconds(-age)} in the future"
            remedy = "Synchronize the clocks of this machine and of the file server with NTP."
            yield warning("clock", text, remedy)

    def check_checkpoints(self) -> Iterator[CheckResult]:
        """Verify the newest checkpoint, and older ones while the newer are damaged."""
        name = "checkpoints"
        others = sorted(path.name for path in _entries(self.path / name))
        if bad := [other for other in others if ".bad" in other]:
            text = f"{', '.join(bad[:5])}: damaged and set aside"
            yield warning(
                name, text, "Check the disk; remove them when nobody needs them."
            )
        if partial := [other for other in others if other.endswith(".tmp")]:
            text = f"{', '.join(partial[:5])}: an unfinished save; the next start removes it"
            yield ok(name, text)
        for step, problems in self.damaged.items():
            if not problems:
                break
            text = f"step {step}: {problems[0]}"
            if len(problems) > 1:
                text += f", and {len(problems) - 1} more"
            if step == self.steps[0]:
                remedy = "No complete step is left: restore a backup, or start with another --out."
                yield problem(name, text, remedy)
            else:
                remedy = (
                    "`shardwise train` sets it aside and uses the previous one. "
                    "Check the disk."
                )
                yield warning(name, text, remedy)
        if not self.steps:
            yield ok(name, "none yet")
        elif self.newest == self.steps[-1]:
            count = len(self.steps)
            yield ok(
                name, f"step {self.newest} is the newest of {count}, and undamaged"
            )
        elif self.newest is not None:
            yield ok(
                name, f"step {self.newest} is undamaged; the run would resume from it"
            )

    def check_stacks(self) -> Iterator[CheckResult]:
        """Report where stuck processes were."""
        files = [path for path in _entries(self.path / "stacks") if path.is_file()]
        for file in sorted(files, key=lambda file: file.stat().st_mtime)[-4:]:
            with file.open(errors="replace") as lines:
                first = lines.readline(200).strip()
            remedy = (
                f"It was stuck there; {file} has its stacks. The same command resumes."
            )
            yield warning("stacks", f"{file.name}: {first}", remedy)

    def check_bad_steps(self) -> Iterator[CheckResult]:
        """Report steps with a non-finite loss or gradient."""
        names = [path.name for path in _entries(self.path / "bad")]
        steps = sorted((name for name in names if name.isdigit()), key=int)
        skipped = self.record.column("skipped")
        count = int(skipped.values.sum()) if len(skipped) else 0
        if steps:
            text = f"step {', '.join(steps[:5])} had a non-finite loss or gradient; not applied"
            place = self.path / "bad" / steps[0] / "report.txt"
            yield warning("bad steps", text, f"See {place}.")
        elif count:
            remedy = "Lower the learning rate, or inspect their batches."
            yield warning("bad steps", f"{count} steps were skipped", remedy)

    def check_space(self) -> Iterator[CheckResult]:
        """Check whether the next checkpoint fits on the disk."""
        text = f"the run takes {show_bytes(_size(self.path))}"
        each = (
            _size(self.path / "checkpoints" / str(self.steps[-1])) if self.steps else 0
        )
        if each:
            text += f", each checkpoint {show_bytes(each)}"
        file_system = os.statvfs(self.path)
        free = file_system.f_bavail * file_system.f_frsize
        if each and free < 1.5 * each:
            remedy = (
                "The next save will not fit: free some space, or keep fewer (Run.keep)."
            )
            yield problem("size", f"{text}; {show_bytes(free)} free", remedy)
        else:
            yield ok("size", text)
        yield disk_result("disk", self.path, "the run")

    def check_next(self) -> Iterator[CheckResult]:
        """Say what to do next."""
        steps, newest = self.record.num_steps, self.newest
        recipe = self.record.about.get("recipe")
        if not isinstance(recipe, str) or len(recipe) >= 200:
            recipe = "RECIPE"
        run = shlex.quote(str(self.path))
        if self.is_running:
            text = f"running: shardwise report {run} --watch"
        elif steps is not None and newest is not None and newest >= steps:
            text = f"finished: shardwise report {run}, or shardwise sample {run}"
        else:
            place = "starts again, because nothing is saved"
            if newest is not None:
                place = f"resumes at step {newest}"
            command = f"shardwise train {shlex.quote(recipe)} ... --out {run}"
            text = f"not finished; the same command {place} ({command})"
        yield ok("next", text)


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder; links are neither followed nor returned."""
    try:
        if folder.is_symlink():
            return []
        return [path for path in folder.iterdir() if not path.is_symlink()]
    except OSError:
        return []


def _size(path: Path) -> int:
    """Return the bytes below a directory; 0 if something in it is just being removed."""
    try:
        return directory_bytes(path)
    except OSError:
        return 0
