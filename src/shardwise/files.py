"""Files that are whole or not there: digests, writing that survives a crash, and the lock of a run directory."""

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from shardwise.errors import CheckpointError, DirectoryInUseError

MANIFEST = "MANIFEST"
MAX_MANIFEST = 2**26  # bytes; more than half a million files


def write_whole(path: Path, text: str) -> None:
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


def wrong_files(directory: Path, expected: dict[str, str], part: int = 0, parts: int = 1) -> list[str]:
    """Those that are not what was written. Several processes can each look at a part."""
    names = sorted(expected)[part::parts]
    return [f"{directory / n} is not what was written: it has another digest" for n in names if not _has_digest(directory / n, expected[n])]


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
    problems += [f"{path} does not belong to it" for name, path in found.items() if name not in expected]
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
            raise CheckpointError(f"{path} is a link; a run directory holds none. Remove it, or choose another with --out.")


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
            raise _in_use(directory, _owner(descriptor), "is used by", "Wait for it, or choose another --out.") from None
        owner = _owner(descriptor)
        job = os.environ.get("SHARDWISE_JOB")  # set by a scheduler that starts a run again, perhaps elsewhere, when it has ended
        if owner and owner.get("boot_id") != boot_id() and not force and not (job and owner.get("job") == job):
            raise _in_use(directory, owner, "was last used, and not left in order, by", "If that has ended, say --force-unlock.")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id(), "started": time.time(), "job": job}
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
        raise _in_use(directory, _owner(descriptor), "is used by", "Wait for it, or choose another --out.") from None
    finally:
        os.close(descriptor)


def _in_use(directory: Path, owner: dict[str, Any], fact: str, remedy: str) -> DirectoryInUseError:
    age = f" since {time.time() - owner['started']:.0f} s" if isinstance(owner.get("started"), float) else ""
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}{age}" if owner else "another process that is just starting"
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


_REACHED: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Does nothing, unless SHARDWISE_FAILPOINT=name:count:action names it; then the count-th visit fails, for tests of faults."""
    point, _, rest = os.environ.get("SHARDWISE_FAILPOINT", "").partition(":")
    if point != name:
        return
    _REACHED[name] = _REACHED.get(name, 0) + 1
    count, _, action = rest.partition(":")
    first, _, last = count.partition("-")
    if not int(first) <= _REACHED[name] <= int(last or first):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        while True:
            time.sleep(1)
    else:
        number = {"enospc": errno.ENOSPC, "eio": errno.EIO}[action]
        raise OSError(number, f"{os.strerror(number)} (fail point {name})")


def cache_folder(name: str) -> Path | None:
    """Where this user keeps what can be made again; None for a user without a home. It need not exist."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise" / name
    except RuntimeError:
        return None
