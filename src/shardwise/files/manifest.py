"""The MANIFEST of a checkpoint: a digest of every other file, in the format of `b3sum`.

    <64 hexadecimal digits><two spaces><path relative to the checkpoint>

There is one line per file, sorted by path, so `b3sum --check MANIFEST` can verify a checkpoint too.
"""

import os
from pathlib import Path

from shardwise.files.durable import file_digest, sync
from shardwise.files.failpoints import fail_point
from shardwise.files.regular import error_reason, read_regular

MANIFEST = "MANIFEST"
# The largest manifest that is read, in bytes: enough for half a million files.
MAX_MANIFEST = 2**26


def write_digests(directory: Path, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Flush the files below a directory to disk and return their digests.

    Args:
        directory: the directory. Its own MANIFEST is excluded.
        part: which share of the files this process handles, from 0.
        parts: the number of processes that share the work.

    Returns:
        The digests of this share, by path relative to `directory`.
    """
    digests = {}
    for path in _list_files(directory)[part::parts]:
        digests[path.relative_to(directory).as_posix()] = file_digest(path)
        sync(path)
    return digests


def write_manifest(directory: Path, digests: dict[str, str] | None = None) -> None:
    """Write the MANIFEST of a directory and flush it and all directories to disk.

    Args:
        directory: the directory of a checkpoint.
        digests: the digests of all files, which are on disk already. None computes them.
    """
    if digests is None:
        digests = write_digests(directory)
    for parent in sorted({(directory / name).parent for name in digests}):
        sync(parent)
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    middle = len(lines) // 2
    with (directory / MANIFEST).open("w") as file:
        file.writelines(lines[:middle])
        file.flush()
        # A test can stop the process here, with half of the manifest written.
        fail_point("checkpoint.manifest")
        file.writelines(lines[middle:])
        file.flush()
        os.fsync(file.fileno())
    sync(directory)


def verify_manifest(directory: Path) -> list[str]:
    """Compare the files below a directory with its MANIFEST.

    No file outside the directory is opened, whatever the MANIFEST contains, and no link is
    followed.

    Returns:
        One line per missing, unexpected or damaged file. An empty list means that all are intact.
    """
    digests, problems = read_manifest(directory)
    return problems + wrong_files(directory, digests)


def wrong_files(
    directory: Path, expected: dict[str, str], part: int = 0, parts: int = 1
) -> list[str]:
    """Return one line per file whose content does not match its digest.

    Args:
        directory: the directory of a checkpoint.
        expected: the digests by path, as `read_manifest` returns them.
        part: which share of the files this process reads, from 0.
        parts: the number of processes that share the work.
    """
    return [
        f"{directory / name} is damaged: its digest does not match {MANIFEST}"
        for name in sorted(expected)[part::parts]
        if not _has_digest(directory / name, expected[name])
    ]


def read_manifest(directory: Path) -> tuple[dict[str, str], list[str]]:
    """Read the MANIFEST of a directory and compare its names with the files that exist.

    Returns:
        The digests of the files that exist, by path; and one line per problem found so far.
    """
    manifest = directory / MANIFEST
    try:
        files = {
            path.relative_to(directory).as_posix(): path
            for path in _list_files(directory)
        }
        text = read_regular(manifest, MAX_MANIFEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        return {}, [f"{manifest} cannot be read: {error_reason(error)}"]
    # A complete manifest ends with a line break, so the last part is empty.
    lines = [line.split("  ", 1) for line in text.split("\n")]
    if lines.pop() != [""] or any(len(line) != 2 for line in lines):
        return {}, [f"{manifest} is not a list of digests"]
    digests = {name: digest for digest, name in lines}
    problems = [
        f"{directory / name} is missing" for name in digests if name not in files
    ]
    problems += [
        f"{path} is not listed in {MANIFEST}"
        for name, path in files.items()
        if name not in digests
    ]
    return {name: digest for name, digest in digests.items() if name in files}, problems


def _has_digest(path: Path, digest: str) -> bool:
    try:
        return file_digest(path) == digest
    except OSError:
        return False


def _list_files(directory: Path) -> list[Path]:
    """Return all files below a directory except its MANIFEST, sorted.

    Raises:
        OSError: if there is anything other than files and directories, such as a link.
    """
    files = []
    for folder, directories, names in os.walk(directory):
        for name in [*directories, *names]:
            path = Path(folder, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise OSError(f"{path} is neither a file nor a directory")
        files += [Path(folder, name) for name in names]
    return sorted(path for path in files if path != directory / MANIFEST)
