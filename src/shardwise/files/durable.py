"""Files that survive a crash: atomic writes, flushes, digests, checks before a write."""

import os
import shutil
from pathlib import Path

from blake3 import blake3

from shardwise.errors import CheckpointError
from shardwise.files.regular import error_reason, open_regular


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file, and return when the new content is on disk.

    After a crash at any moment the file has either its old or its new content. This takes four
    operations in this order: write a temporary file, flush it, rename it, flush the directory.

    Args:
        path: the file. It may not exist yet; its directory must exist.
        text: the new content.

    Raises:
        OSError: if the file cannot be written, or the temporary file is not a regular file.
    """
    temporary = path.with_name(path.name + ".tmp")
    descriptor = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a directory with everything in it, or a file. Links are not followed.

    Raises:
        OSError: if it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def file_digest(path: Path) -> str:
    """Return the BLAKE3 digest of a file as 64 hexadecimal digits. All cores share the work."""
    hasher = blake3(max_threads=blake3.AUTO)
    # An empty file cannot be mapped into memory.
    if path.stat().st_size:
        hasher.update_mmap(path)
    return hasher.hexdigest()


def text_digest(text: str) -> str:
    """Return the BLAKE3 digest of a text as 64 hexadecimal digits."""
    return blake3(text.encode()).hexdigest()


def check_writable(directory: Path) -> None:
    """Check that a run directory can be written, by writing a small file.

    Args:
        directory: the run directory. If it does not exist yet, the file is written to the first of
            its parents that does.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    existing = directory
    try:
        while not existing.exists() and not existing.is_symlink():
            existing = existing.parent
        probe = existing / f".write-test-{os.getpid()}"
        with probe.open("xb") as file:
            file.write(b"0")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"the run directory {directory} cannot be written: {error_reason(error)} ({existing}). "
            "Choose another with --out."
        ) from error


def check_links(directory: Path) -> None:
    """Check that a run directory has no symbolic links in the places that a run writes to.

    A run directory may come from somebody else. A link in it could redirect a write to any file
    that this user can change.

    Raises:
        CheckpointError: if there is a link.
    """
    for pattern in (
        "*",
        "checkpoints/*",
        "tensorboard/*",
        "bad/*",
        "audit/*",
        "profile/**/*",
    ):
        for path in directory.glob(pattern):
            if path.is_symlink():
                raise CheckpointError(
                    f"{path} is a link. A run directory must not contain links, which could "
                    "redirect writes. Remove it, or choose another directory with --out."
                )
