"""The lock of a run directory: at most one process writes to it.

The lock is `flock` on the file `lock`, so the kernel releases it when its owner dies, however that
happens. The JSON in the file serves people and one other purpose: the kernel of this machine cannot
see a lock that a process on another machine holds, and the boot ID in the file tells them apart.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import DirectoryInUseError
from shardwise.files.regular import file_errors, open_regular
from shardwise.text import Json, printable

# The longest content of a lock file, in bytes.
MAX_LOCK = 4096


@contextmanager
def lock_directory(
    directory: Path, force: bool = False
) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run directory inside the `with` statement.

    Args:
        directory: the run directory. It must exist.
        force: take over a lock that a process on another machine did not release. This machine
            cannot see whether that process is still alive.

    Yields:
        A function that marks the lock as released, for code that ends the process without leaving
        the `with` statement.

    Raises:
        DirectoryInUseError: if another process holds the lock, or if a process on another machine
            did not release it and `force` is False.
        CheckpointError: if the lock is not a regular file, or cannot be written.
    """
    path = directory / "lock"
    with file_errors(path):
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(descriptor, directory, fcntl.LOCK_EX)
        # A scheduler sets this variable when it may restart a run on another machine. The previous
        # process of the same job has ended then.
        job = os.environ.get("SHARDWISE_JOB")
        _check_previous_owner(_read_owner(descriptor), directory, job, force)
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "started": time.time(),
            "job": job,
        }
        with file_errors(path):
            _write(descriptor, json.dumps(owner).encode())
        try:
            yield lambda: _write(descriptor, b"")
        finally:
            _write(descriptor, b"")
    finally:
        os.close(descriptor)


def check_unlocked(directory: Path) -> None:
    """Check that no process on this machine holds the lock of a run directory.

    Raises:
        DirectoryInUseError: if one does.
    """
    try:
        descriptor = open_regular(directory / "lock", os.O_RDWR)
    except OSError:
        return
    try:
        _acquire(descriptor, directory, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def boot_id() -> str:
    """Return an ID that is new after each boot of this machine, or its host name without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _acquire(descriptor: int, directory: Path, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _describe(_find_owner(descriptor))
        raise DirectoryInUseError(
            f"the run directory {directory} is in use by {owner}. "
            "Wait until it ends, or choose another directory with --out."
        ) from None


def _check_previous_owner(
    owner: Json, directory: Path, job: str | None, force: bool
) -> None:
    """Refuse a lock that a process on another machine wrote and did not release."""
    same_machine = owner.get("boot_id") == boot_id()
    same_job = job is not None and owner.get("job") == job
    if owner and not (same_machine or same_job or force):
        raise DirectoryInUseError(
            f"the run directory {directory} was locked and not released by {_describe(owner)}. "
            "If that process has ended, pass --force-unlock."
        )


def _describe(owner: Json) -> str:
    if not owner:
        return "another process that is just starting"
    text = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    if isinstance(owner.get("started"), float):
        text += f", started {time.time() - owner['started']:.0f} s ago"
    # The file may be a stranger's.
    return printable(text)


def _read_owner(descriptor: int) -> Json:
    """Return the JSON in a lock file, or an empty dictionary if there is none."""
    try:
        content = json.loads(os.pread(descriptor, MAX_LOCK, 0) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _find_owner(descriptor: int) -> Json:
    """Return what is known about the process that holds the lock.

    The kernel knows its ID, unless it is on another machine. The file may be empty or still have
    the previous owner, while a process starts or ends.
    """
    owner = _read_owner(descriptor)
    pid = _holder(os.fstat(descriptor))
    if pid is None or pid == owner.get("pid"):
        return owner
    return {"pid": pid, "host": socket.gethostname()}


def _holder(file: os.stat_result) -> int | None:
    """Return the ID of the process that holds a lock on a file, from /proc/locks."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4242 fe:01:131092 0 EOF
    for _, kind, _, _, pid, place, *_ in map(str.split, lines):
        # A process of another container has the ID 0.
        if kind == "FLOCK" and place == f"{device}:{file.st_ino}" and pid != "0":
            return int(pid)
    return None


def _write(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
