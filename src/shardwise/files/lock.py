"""The lock of a run directory."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import DirectoryInUseError


@contextmanager
def lock_directory(directory: Path, force: bool = False) -> Iterator[Callable[[], None]]:
    """Only one process at a time gets past this for a directory; the lock dies with its owner, however that ends.

    Gives the function that leaves it in order, for those who end without leaving the `with` statement.
    `force` takes over the lock of another machine, where nobody can see from here whether its owner lives.
    """
    path = directory / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(
                directory, _owner(descriptor), "is used by", "Wait for it, or choose another --out."
            ) from None
        owner = _owner(descriptor)
        job = os.environ.get(
            "SHARDWISE_JOB"
        )  # set by a scheduler that starts a run again, perhaps elsewhere, when it has ended
        if (
            owner
            and owner.get("boot_id") != boot_id()
            and not force
            and not (job and owner.get("job") == job)
        ):
            raise _in_use(
                directory,
                owner,
                "was last used, and not left in order, by",
                "If that has ended, say --force-unlock.",
            )
        mine = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "started": time.time(),
            "job": job,
        }
        _write(descriptor, json.dumps(mine).encode())
        try:
            yield lambda: _write(descriptor, b"")
        finally:
            _write(descriptor, b"")
    finally:
        os.close(descriptor)


def check_unlocked(directory: Path) -> None:
    """Raises if a process of this machine holds the lock of the directory now."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(
            directory, _owner(descriptor), "is used by", "Wait for it, or choose another --out."
        ) from None
    finally:
        os.close(descriptor)


def _in_use(directory: Path, owner: dict[str, Any], fact: str, remedy: str) -> DirectoryInUseError:
    age = (
        f" since {time.time() - owner['started']:.0f} s"
        if isinstance(owner.get("started"), float)
        else ""
    )
    who = (
        f"process {owner.get('pid', '?')} on {owner.get('host', '?')}{age}"
        if owner
        else "another process that is just starting"
    )
    return DirectoryInUseError(f"the run directory {directory} {fact} {who}. {remedy}")


def _owner(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
