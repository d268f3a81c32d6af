"""How a run stands: who uses its directory, what its checkpoints are worth, its last errors, and what to do next. Reads only."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.checkpoint.reader import directory_bytes, saved_steps
from shardwise.doctor.finding import Finding
from shardwise.doctor.system import disk_finding
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.manifest import verify_manifest
from shardwise.files.lock import boot_id
from shardwise.rundir.files import RunFiles, RunRecord
from shardwise.text import show_bytes, show_seconds

OLD = 600.0  # seconds without a sign of life after which a run that holds its lock may be stuck
AHEAD = 120.0  # seconds that a file may be from the future


def run_findings(path: Path, tell: Callable[[str], None]) -> Iterator[Finding]:
    if not path.is_dir():
        raise ConfigError(f"there is no run directory {path}.")
    if not any(
        (path / name).exists() for name in ("run.json", "metrics.jsonl", "lock", "checkpoints")
    ):
        raise ConfigError(
            f"{path} is no run directory: it has neither run.json nor metrics.jsonl nor checkpoints."
        )
    try:
        record = RunFiles(path).read()
    except OSError as error:
        raise ConfigError(f"the run directory {path} cannot be read: {error.strerror}.") from error
    for note in record.notes:
        yield Finding(
            "run",
            "files",
            "warning",
            note,
            "If it was damaged, resume: what is lost of the log is not lost of the state.",
        )
    lock = _lock(path, record)
    yield lock
    steps = record.num_steps
    of = f" of {steps}" if steps else ""
    age = time.time() - record.written if record.written else None
    yield Finding(
        "run",
        "progress",
        "ok",
        f"step {record.last_step}{of}"
        + (f", last written {show_seconds(max(age, 0))} ago" if age else ""),
    )
    newest, checkpoints = _checkpoints(path, record, tell)
    yield from checkpoints
    yield from _errors(path, record)
    yield from _room(path, record)
    if age is not None and age < -AHEAD:
        text = f"metrics.jsonl was written {show_seconds(-age)} in the future"
        yield Finding(
            "run",
            "clock",
            "warning",
            text,
            "The clocks of this machine and of the file server differ: set both by NTP.",
        )
    yield Finding(
        "run",
        "next",
        "ok",
        _next(path, record, newest, lock.state == "ok" and "in use" in lock.text),
    )


def _lock(path: Path, record: RunRecord) -> Finding:
    held = _is_held(path / "lock")
    owner = record.owner
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}" if owner else "a process"
    if held:
        quiet = time.time() - record.written if record.written else 0.0
        if quiet > OLD:
            text = f"in use by {who}, and nothing was logged for {show_seconds(quiet)}"
            remedy = f"If it is stuck: py-spy dump --pid {owner.get('pid', 'PID')}; kill -TERM saves and ends it."
            return Finding("run", "lock", "warning", text, remedy)
        return Finding("run", "lock", "ok", f"in use by {who}")
    if owner and owner.get("boot_id") != boot_id():
        text = f"{who} has not left it in order; whether that lives cannot be seen from here"
        return Finding(
            "run", "lock", "warning", text, "If it has ended: shardwise train ... --force-unlock"
        )
    return Finding("run", "lock", "ok", "free")


def _is_held(path: Path) -> bool:
    """Whether a process of this machine holds it, asked without waiting."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
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


def _checkpoints(
    path: Path, record: RunRecord, tell: Callable[[str], None]
) -> tuple[int | None, list[Finding]]:
    """(newest whole step, findings). Looks at older ones only while the newer are damaged."""
    directory = path / "checkpoints"
    if not directory.is_dir() or directory.is_symlink():
        return None, [Finding("run", "checkpoints", "ok", "none yet")]
    found: list[Finding] = []
    steps = saved_steps(directory)
    aside = sorted(inner.name for inner in directory.iterdir() if not inner.name.isdecimal())
    if bad := [name for name in aside if ".bad" in name]:
        text = f"{', '.join(bad[:5])}: damaged, and kept aside"
        found.append(
            Finding(
                "run",
                "checkpoints",
                "warning",
                text,
                "Look at the disk; remove them when nobody needs them.",
            )
        )
    if left := [name for name in aside if name.endswith(".tmp")]:
        found.append(
            Finding(
                "run",
                "checkpoints",
                "ok",
                f"{', '.join(left[:5])}: of a save that is not finished; the next start removes it",
            )
        )
    for step in reversed(steps):
        tell(f"verifying step {step}")
        began = time.monotonic()
        problems = _verified(directory / str(step), tell, step)
        if not problems:
            seconds = show_seconds(time.monotonic() - began)
            text = f"step {step} is the newest of {len(steps)}, and whole (all digests, {seconds})"
            if step != steps[-1]:
                text = f"step {step} is whole, and is where the run would resume"
            return step, [*found, Finding("run", "checkpoints", "ok", text)]
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        text = f"step {step}: {problems[0]}{more}"
        if step == steps[0]:
            remedy = (
                "No whole step is left: copy one from a backup, or begin anew with another --out."
            )
            found.append(Finding("run", "checkpoints", "problem", text, remedy))
        else:
            remedy = "`shardwise train` sets it aside and takes the one before. Ask why the disk damages files."
            found.append(Finding("run", "checkpoints", "warning", text, remedy))
    if not steps:
        found.append(Finding("run", "checkpoints", "ok", "none yet"))
    return None, found


def _verified(directory: Path, tell: Callable[[str], None], step: int) -> list[str]:
    try:
        return verify_manifest(directory)
    except (OSError, CheckpointError) as error:
        return [str(error)]
    finally:
        tell(f"verifying step {step}")


def _errors(path: Path, record: RunRecord) -> Iterator[Finding]:
    """What stuck processes and bad steps have left."""
    for file in sorted(_plain_files(path / "stacks"), key=lambda file: file.lstat().st_mtime)[-4:]:
        first = _first_line(file)
        remedy = f"It was stuck there; the stacks of its threads are in {file}. The same command resumes."
        yield Finding("run", "stacks", "warning", f"{file.name}: {first}", remedy)
    bad = sorted((inner.name for inner in _listed(path / "bad") if inner.name.isdigit()), key=int)
    if bad:
        text = f"step {', '.join(bad[:5])} had a loss or a gradient that was not finite, and was not applied"
        yield Finding(
            "run", "bad steps", "warning", text, f"Look at {path / 'bad' / bad[0] / 'report.txt'}"
        )
    skipped = record.column("skipped")
    if len(skipped) and (count := int(skipped.values.sum())) and not bad:
        yield Finding(
            "run",
            "bad steps",
            "warning",
            f"{count} steps were skipped",
            "A lower learning rate, or look at their batches.",
        )


def _listed(path: Path) -> list[Path]:
    try:
        return [] if path.is_symlink() else list(path.iterdir())
    except OSError:
        return []


def _plain_files(path: Path) -> list[Path]:
    return [file for file in _listed(path) if file.is_file() and not file.is_symlink()]


def _first_line(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return str(error.strerror)
    with os.fdopen(descriptor, errors="replace") as file:
        return file.readline(200).strip()


def _room(path: Path, record: RunRecord) -> Iterator[Finding]:
    """What the directory takes, what the next checkpoint will, and whether there is room for it."""
    size = _size(path)
    steps = [inner for inner in _listed(path / "checkpoints") if inner.name.isdecimal()]
    newest = max(steps, key=lambda inner: int(inner.name), default=None)
    each = _size(newest) if newest is not None else 0
    disk = disk_finding("disk", path, "the run")
    text = f"the run takes {show_bytes(size)}" + (
        f", a checkpoint of it {show_bytes(each)}" if each else ""
    )
    span = _span(record)
    if span and record.last_step:
        text += f"; logs grow by {show_bytes(_logs(path) / record.last_step * 1000)} in 1,000 steps"
    try:
        free = os.statvfs(path)
        left = free.f_bavail * free.f_frsize
    except OSError:
        left = 0
    if each and left < 1.5 * each:
        text += f"; {show_bytes(left)} are free"
        yield Finding(
            "run",
            "size",
            "problem",
            text,
            "The next save will not fit: free some space, or keep fewer (Run.keep).",
        )
    else:
        yield Finding("run", "size", "ok", text)
    yield Finding("run", disk.name, disk.state, disk.text, disk.remedy)


def _size(path: Path) -> int:
    try:
        return directory_bytes(path)
    except OSError:  # something of it is just being removed
        return 0


def _logs(path: Path) -> int:
    return sum(file.lstat().st_size for file in _plain_files(path) if file.suffix == ".jsonl")


def _span(record: RunRecord) -> float:
    times = record.column("time")
    return float(times.values[-1] - times.values[0]) if len(times) > 1 else 0.0


def _next(path: Path, record: RunRecord, newest: int | None, is_running: bool) -> str:
    steps, about = record.num_steps, record.about
    if is_running:
        return f"it goes on: shardwise report {path} --watch"
    if steps is not None and newest is not None and newest >= steps:
        return f"it has finished: shardwise report {path}, or shardwise sample {path}"
    command = f"shardwise train {_recipe(about)} ... --out {path}"
    where = (
        f"resumes at step {newest}" if newest is not None else "begins it again: nothing is saved"
    )
    return f"not finished; the same command {where} ({command})"


def _recipe(about: dict[str, Any]) -> str:
    recipe = about.get("recipe")
    return recipe if isinstance(recipe, str) and len(recipe) < 200 else "RECIPE"
