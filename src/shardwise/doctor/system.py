"""Memory, processors, disk and the cache of compiled programs, within the limits of a container."""

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.doctor.check import (
    Check,
    CheckResult,
    check_private,
    ok,
    problem,
    warning,
)
from shardwise.files.cache import cache_folder
from shardwise.runtime import MAX_CACHE_BYTES
from shardwise.text import show_bytes

GIB = 2**30
# Bytes below which there is a problem, or a warning.
MIN_DISK, LOW_DISK = 200 * 2**20, 5 * GIB
MIN_MEMORY, LOW_MEMORY = 512 * 2**20, 2 * GIB
LOW_SHM = 256 * 2**20
MIN_FREE_FILES = 200
SHM = "/dev/shm"  # noqa: S108 (read, not written)


def check_memory() -> Iterator[CheckResult]:
    """Check the free memory of the machine or of its container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(
        r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE
    )
    size = total
    free = int(found[1]) * 1024 if found else total
    limit, used = cgroup_memory()
    if limit:
        size, free = min(total, limit), min(free, limit - used)
    text = f"{show_bytes(free)} of {show_bytes(size)} free"
    if size < total:
        text += f" in this container (the machine has {show_bytes(total)})"
    if free >= LOW_MEMORY:
        yield ok("memory", text)
        return
    report = problem if free < MIN_MEMORY else warning
    remedy = "End other programs, or raise the limit of the container: a start needs about 1 GiB."
    yield report("memory", text, remedy)


def check_processors() -> Iterator[CheckResult]:
    """Check whether a container may use all processors that programs see."""
    total = os.cpu_count() or 1
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = cgroup_cpus()
    if quota and quota < 0.9 * seen:
        text = f"{seen} visible, but this container may use {quota:g}: it throttles XLA's threads"
        cores = f"0-{max(int(quota) - 1, 0)}"
        yield warning(
            "processors", text, f"taskset -c {cores} shardwise ..., or raise the limit."
        )
        return
    model = re.search(
        r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE
    )
    name = model[1] if model else platform.machine()
    yield ok(
        "processors",
        f"{seen} ({name})" if seen == total else f"{seen} of {total} ({name})",
    )


def check_shared_memory() -> Iterator[CheckResult]:
    """Check /dev/shm, through which GPUs and data processes communicate."""
    if not Path(SHM).is_dir():
        if sys.platform == "linux":
            text = "missing; GPUs and data processes communicate through it"
            yield warning(SHM, text, f"mount -t tmpfs tmpfs {SHM}")
        return
    usage = shutil.disk_usage(SHM)
    if usage.free < LOW_SHM:
        text = (
            f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free; several GPUs or data "
            "processes need more"
        )
        yield warning(
            SHM, text, "docker run --shm-size=8g ..., or remove files from it."
        )
    else:
        yield ok(SHM, f"{show_bytes(usage.free)} free")


def check_loopback() -> Iterator[CheckResult]:
    """Check that the loopback interface is up.

    Connecting to a port where nobody listens is refused if it is. No port is opened.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            probe.connect(("127.0.0.1", 1))
    except ConnectionRefusedError:
        pass
    except OSError as error:
        text = f"127.0.0.1 cannot be reached: {error.strerror or error}"
        remedy = "ip link set lo up; `shardwise launch` and `report --watch` need it."
        yield warning("loopback", text, remedy)
        return
    yield ok("loopback", "127.0.0.1 answers")


def check_disk() -> Iterator[CheckResult]:
    """Check the file systems on which runs are written."""
    yield disk_result("disk", Path.cwd(), "runs")
    runs = Path("runs")
    if runs.is_dir() and runs.stat().st_dev != Path.cwd().stat().st_dev:
        yield disk_result("disk of runs/", runs, "runs")


def disk_result(name: str, place: Path, purpose: str) -> CheckResult:
    """Check free space, free inodes and write permission of a directory."""
    try:
        usage, inodes = shutil.disk_usage(place), os.statvfs(place)
    except OSError as error:
        return problem(name, f"{place}: {error.strerror}", "Use another directory.")
    if not os.access(place, os.W_OK):
        text = f"{place} is not writable for this user"
        return warning(name, text, "Use another directory, or --out elsewhere.")
    text = f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free at {place} ({purpose})"
    is_out_of_inodes = inodes.f_files and inodes.f_favail < MIN_FREE_FILES
    if is_out_of_inodes:
        text = f"only {inodes.f_favail} more files can be created at {place}"
    if is_out_of_inodes or usage.free < MIN_DISK:
        return problem(name, text, "Free some space, or write elsewhere with --out.")
    if usage.free < LOW_DISK:
        remedy = "A checkpoint takes about 12 bytes per parameter: make room for a few."
        return warning(name, text, remedy)
    return ok(name, text)


def check_program_cache() -> Iterator[CheckResult]:
    """Check the cache of compiled programs: permissions, size and free space."""
    name = "program cache"
    folder = cache_folder("programs")
    if folder is None:
        text = "there is no home directory for compiled programs, so every start compiles again"
        yield warning(name, text, "export XDG_CACHE_HOME=...")
        return
    # The folder or, before the first run, the directory in which it will be created.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{folder} is not writable, so every start compiles again"
        yield warning(
            name, text, "Correct its permissions, or export XDG_CACHE_HOME=..."
        )
        return
    if existing == folder:
        insecure = [
            result for result in check_private(name, folder) if result.state != "ok"
        ]
        if insecure:
            yield from insecure
            return
        sizes = [path.lstat().st_size for path in folder.iterdir()]
        used, limit = show_bytes(sum(sizes)), show_bytes(MAX_CACHE_BYTES)
        yield ok(name, f"{len(sizes)} files, {used} of at most {limit} in {folder}")
    else:
        yield ok(name, f"{folder} does not exist yet and can be created")
    disk = disk_result("disk of the cache", existing, "compiled programs")
    if disk.state != "ok":
        yield warning(
            disk.name, disk.text, "Empty the cache, or export XDG_CACHE_HOME=..."
        )


SYSTEM_CHECKS: tuple[Check, ...] = (
    check_memory,
    check_processors,
    check_shared_memory,
    check_loopback,
)
DISK_CHECKS: tuple[Check, ...] = (check_disk, check_program_cache)


def cgroup_memory() -> tuple[int, int]:
    """Return the memory limit of this container and the bytes in use; (0, 0) without a limit."""
    limits = []
    for path in _cgroup_files("memory.max", "memory.limit_in_bytes", "memory"):
        is_v2 = path.name == "memory.max"
        limit = next(iter(_numbers(path)), 2**60)
        if limit >= 2**60:
            continue
        usage = path.with_name("memory.current" if is_v2 else "memory.usage_in_bytes")
        used = next(iter(_numbers(usage)), 0)
        # Pages of files are released when memory is needed.
        counters = _text(path.with_name("memory.stat"))
        cached = re.search(r"^(?:total_)?inactive_file (\d+)$", counters, re.MULTILINE)
        limits.append((limit, max(used - int(cached[1] if cached else 0), 0)))
    return min(limits, default=(0, 0))


def cgroup_cpus() -> float:
    """Return how many processors this container may use; 0 without a limit."""
    quotas = []
    for path in _cgroup_files("cpu.max", "cpu.cfs_quota_us", "cpu"):
        numbers = _numbers(path)
        if path.name != "cpu.max":
            numbers += _numbers(path.with_name("cpu.cfs_period_us"))
        # Without a limit version 2 has the word "max", and version 1 has -1.
        if len(numbers) == 2 and numbers[0] > 0:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=0.0)


def _cgroup_files(v2_name: str, v1_name: str, controller: str) -> Iterator[Path]:
    """Yield a file of each control group of this process, from the innermost outwards."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup")
        if number == "0" and not controllers:
            name = v2_name
        elif controller in controllers.split(","):
            root, name = root / controller, v1_name
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == root.parent:
                break
            yield folder / name


def _numbers(path: Path) -> list[int]:
    return [int(word) for word in _text(path).split() if word.lstrip("-").isdigit()]


def _text(path: Path) -> str:
    """Return the content of a file, or "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
