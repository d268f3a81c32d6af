"""Open files of a run directory: regular files only, never through a link, without waiting.

A run directory may be damaged, or come from somebody else. Opening a named pipe waits for another
process, opening a device may do anything, and a link could redirect a write to any file that this
user can change.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.files.paths import AnyPath

# The files that a run writes to its directory.
RUN_FILES = (
    "run.json",
    "metrics.jsonl",
    "samples.jsonl",
    "digests.jsonl",
    "starts.jsonl",
    "starting.jsonl",
    "phases.jsonl",
    "plan.json",
    "trackers.json",
    "loss.png",
    "lock",
)
# What people call other things than regular files.
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def error_reason(error: Exception) -> str:
    """Return the reason in an exception: `No such file`, not `[Errno 2] No such file`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def open_regular(
    path: AnyPath,
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    dir_fd: int | None = None,
    follow_links: bool = False,
) -> int:
    """Open a regular file.

    Args:
        path: the file.
        flags: as for `os.open`.
        mode: permissions of a file that is created, before the umask.
        dir_fd: the open directory that a relative path starts from.
        follow_links: whether the file may be a link to a regular file.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file.
    """
    # Before it is opened, because opening a device may have an effect.
    with suppress(FileNotFoundError):
        _check_kind(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_links))
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        # Again, because another process may have replaced it.
        _check_kind(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link, and links are not followed")
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def read_regular(
    path: AnyPath,
    limit: int | None = None,
    *,
    dir_fd: int | None = None,
    follow_links: bool = False,
) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file.
        limit: the largest size that is read, in bytes.
        dir_fd: the open directory that a relative path starts from.
        follow_links: whether the file may be a link to a regular file.

    Raises:
        OSError: if the file cannot be read, is larger, or is not a regular file.
    """
    descriptor = open_regular(path, dir_fd=dir_fd, follow_links=follow_links)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if limit is not None and size > limit:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, more than the limit of {limit:,}"
            )
        return file.read()


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about a file of a run directory into a message with a remedy.

    Raises:
        CheckpointError: if the code in this context raises an OSError.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if is_full else "Move it away"
        raise CheckpointError(
            f"{path} cannot be used: {error_reason(error)}. {remedy}, or choose another directory "
            "with --out."
        ) from error


def check_run_files(directory: Path) -> None:
    """Check that the files of a run that exist are files and can be read, before it starts.

    Args:
        directory: the run directory.

    Raises:
        CheckpointError: if one is not a regular file, or may not be read.
    """
    folder = directory / "checkpoints"
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a directory. Move it away, or choose another directory with --out."
        )
    for name in RUN_FILES:
        # Files are written to a temporary file that replaces them.
        for path in (directory / name, directory / f"{name}.tmp"):
            with file_errors(path), suppress(FileNotFoundError):
                os.close(open_regular(path))
