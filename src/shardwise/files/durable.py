"""Files that are whole or not there: digests, writing that survives a crash, and the lock of a run directory."""

import os
from pathlib import Path

from blake3 import blake3

from shardwise.errors import CheckpointError
from shardwise.files.failpoints import fail_point

MANIFEST = "MANIFEST"
MAX_MANIFEST = 2**26  # bytes; more than half a million files


def write_atomically(path: Path, text: str) -> None:
    """Either all of the text is in the file afterwards, on the disk, or the file is as it was."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sees to it that a file, or the list of names in a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_digests(directory: Path, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Puts the files below `directory` on the disk; their digests by name. Several processes can each do a part."""
    digests = {}
    for path in _files(directory)[part::parts]:
        digests[path.relative_to(directory).as_posix()] = file_digest(path)
        sync(path)
    return digests


def write_manifest(directory: Path, digests: dict[str, str] | None = None) -> None:
    """Puts everything below `directory` on the disk, and a digest of every file into MANIFEST: `b3sum -c` can check it too."""
    digests = write_digests(directory) if digests is None else digests
    for path in sorted({(directory / name).parent for name in digests}):
        sync(path)
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    with (directory / MANIFEST).open("w") as file:
        file.writelines(lines[: len(lines) // 2])
        file.flush()
        fail_point("checkpoint.manifest")
        file.writelines(lines[len(lines) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    sync(directory)


def verify_manifest(directory: Path) -> list[str]:
    """What is wrong with the files below `directory`; nothing is opened but what is found there, and no link is followed."""
    expected, problems = read_manifest(directory)
    return problems + wrong_files(directory, expected)


def wrong_files(
    directory: Path, expected: dict[str, str], part: int = 0, parts: int = 1
) -> list[str]:
    """Those that are not what was written. Several processes can each look at a part."""
    names = sorted(expected)[part::parts]
    return [
        f"{directory / n} is not what was written: it has another digest"
        for n in names
        if not _has_digest(directory / n, expected[n])
    ]


def read_manifest(directory: Path) -> tuple[dict[str, str], list[str]]:
    """(digests of the files that are there, by name; what is wrong before any file is read)"""
    try:
        found = {path.relative_to(directory).as_posix(): path for path in _files(directory)}
        if (directory / MANIFEST).stat().st_size > MAX_MANIFEST:
            raise OSError(f"it has {(directory / MANIFEST).stat().st_size:,} bytes")
        text = (directory / MANIFEST).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return {}, [f"{directory / MANIFEST} cannot be read: {_reason(error)}"]
    lines = [line.split("  ", 1) for line in text.split("\n")]
    if lines.pop() != [""] or any(len(line) != 2 for line in lines):
        return {}, [f"{directory / MANIFEST} is not a list of digests"]
    expected = {name: digest for digest, name in lines}
    problems = [f"{directory / name} is missing" for name in expected if name not in found]
    problems += [
        f"{path} does not belong to it" for name, path in found.items() if name not in expected
    ]
    return {name: digest for name, digest in expected.items() if name in found}, problems


def _has_digest(path: Path, digest: str) -> bool:
    try:
        return file_digest(path) == digest
    except OSError:
        return False


def _files(directory: Path) -> list[Path]:
    """Every file below a directory but its manifest, in order. Anything else than files and directories is refused."""
    found = []
    for folder, directories, names in os.walk(directory):
        for name in [*directories, *names]:
            path = Path(folder, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise OSError(f"{path} is neither a file nor a directory")
        found += [Path(folder, name) for name in names]
    return sorted(path for path in found if path != directory / MANIFEST)


def file_digest(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    if path.stat().st_size:
        hasher.update_mmap(path)
    return hasher.hexdigest()


def text_digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def check_writable(directory: Path) -> None:
    """Writes a file to the directory, or to the one that it will be made in, to see that it can."""
    place = directory
    try:
        while not place.exists() and not place.is_symlink():
            place = place.parent
        probe = place / f".write-test-{os.getpid()}"
        with probe.open("xb") as file:
            file.write(b"0")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"the run directory {directory} cannot be written: {_reason(error)} ({place}). Choose another with --out."
        ) from error


def check_links(directory: Path) -> None:
    """Refuses links in a run directory: what is written there, by a name that may come from a stranger, must stay there."""
    places = ("*", "checkpoints/*", "tensorboard/*", "bad/*", "profile/**/*")
    for path in (found for place in places for found in directory.glob(place)):
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link; a run directory holds none. Remove it, or choose another with --out."
            )
