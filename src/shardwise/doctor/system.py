"""Memory, processors, disk, program cache and the like, against the limits of a container. Reads only."""

import locale
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.doctor.finding import Finding, State, others_can_write
from shardwise.files.cache import cache_folder
from shardwise.text import show_bytes

GIB = 2**30
LIMIT_OF_PROGRAMS = 8 * GIB  # as programs.py has it, which needs JAX
LEAST_DISK, FEW_DISK = 200 * 2**20, 5 * GIB
LEAST_MEMORY, FEW_MEMORY = 512 * 2**20, 2 * GIB
FEW_SHM = 256 * 2**20
SHM = "/dev/shm"  # noqa: S108 (looked at, not written)
CPU_NEEDS = {
    "avx": "problem",
    "avx2": "warning",
    "fma": "warning",
}  # jaxlib's wheels are built with the first; products need the others

# Memory and processors


def memory_findings() -> Iterator[Finding]:
    total, available = _memory()
    limit, used = cgroup_memory()
    size = min(total, limit) if limit else total
    left = min(available, limit - used) if limit else available
    text = f"{show_bytes(left)} of {show_bytes(size)} free"
    if limit and limit < total:
        text += f" in this container (the machine has {show_bytes(total)})"
    state: State = "problem" if left < LEAST_MEMORY else "warning" if left < FEW_MEMORY else "ok"
    remedy = (
        "End other programs, or raise the limit of the container: a start alone takes about 1 GiB."
        if state != "ok"
        else ""
    )
    yield Finding("system", "memory", state, text, remedy)
    seen, quota = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cgroup_cpus(),
    )
    if quota and quota < 0.9 * seen:
        text = f"{seen} are seen, and this container may use {quota:g}: XLA's threads are stopped again and again"
        yield Finding(
            "system",
            "processors",
            "warning",
            text,
            f"taskset -c 0-{max(int(quota) - 1, 0)} shardwise ..., or raise the limit.",
        )
    else:
        yield Finding(
            "system",
            "processors",
            "ok",
            f"{seen}" + (f" of {os.cpu_count()}" if os.cpu_count() != seen else ""),
        )


def _memory() -> tuple[int, int]:
    """(of the machine, free for new programs), in bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        found = re.search(
            r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE
        )
        return total, int(found[1]) * 1024 if found else total
    except OSError:
        return total, total


def _cgroup_files(version_2: str, version_1: str, controller: str) -> Iterator[Path]:
    """A file of this process's control groups, from the innermost outwards."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        root = (
            Path("/sys/fs/cgroup")
            if number == "0" and not controllers
            else Path("/sys/fs/cgroup") / controller
        )
        if number != "0" and controller not in controllers.split(","):
            continue
        name = version_2 if number == "0" and not controllers else version_1
        inner = root / path.lstrip("/")
        for folder in [inner, *inner.parents]:
            if folder == root.parent:
                break
            yield folder / name


def _numbers(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split() if word.lstrip("-").isdigit()]
    except OSError:
        return []


def cgroup_memory() -> tuple[int, int]:
    """(limit, in use) in bytes; (0, 0) without a limit."""
    limits = []
    for path in _cgroup_files("memory.max", "memory.limit_in_bytes", "memory"):
        usage = path.with_name(
            "memory.current" if path.name == "memory.max" else "memory.usage_in_bytes"
        )
        if (found := _numbers(path)) and found[0] < 2**60:
            used = (_numbers(usage) or [0])[0]
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)$",
                _text(path.with_name("memory.stat")),
                re.MULTILINE,
            )
            limits.append((found[0], max(used - (int(cached[1]) if cached else 0), 0)))
    return min(limits, default=(0, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def cgroup_cpus() -> float:
    """How many processors' time this process may use; 0 without a limit."""
    found = []
    for path in _cgroup_files("cpu.max", "cpu.cfs_quota_us", "cpu"):
        numbers = _numbers(path)
        if path.name == "cpu.max" and len(numbers) == 2:
            found.append(numbers[0] / numbers[1])
        elif path.name != "cpu.max" and numbers and numbers[0] > 0:
            found.append(
                numbers[0] / (_numbers(path.with_name("cpu.cfs_period_us")) or [100000])[0]
            )
    return min(found, default=0.0)


# Disk and cache


def disk_findings() -> Iterator[Finding]:
    yield disk_finding("disk", Path.cwd(), "where runs are written")
    runs = Path("runs")
    if runs.is_dir() and runs.stat().st_dev != Path.cwd().stat().st_dev:
        yield disk_finding("disk of runs/", runs, "where runs are written")
    yield from _cache()


def disk_finding(name: str, place: Path, what: str) -> Finding:
    """Free space and free names of the file system of a directory, and whether this user can write there."""
    try:
        usage, names = shutil.disk_usage(place), os.statvfs(place)
    except OSError as error:
        return Finding(
            "disk", name, "problem", f"{place}: {error.strerror}", "Choose another directory."
        )
    text = f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free at {place} ({what})"
    if not os.access(place, os.W_OK):
        return Finding(
            "disk",
            name,
            "warning",
            f"{place} cannot be written by this user",
            "Choose another directory, or --out elsewhere.",
        )
    if usage.free < LEAST_DISK or (names.f_files and names.f_favail < 200):
        what = (
            text
            if usage.free < LEAST_DISK
            else f"{names.f_favail} files can still be made at {place}"
        )
        return Finding(
            "disk", name, "problem", what, "Free some space, or write elsewhere with --out."
        )
    if usage.free < FEW_DISK:
        return Finding(
            "disk",
            name,
            "warning",
            text,
            "A checkpoint takes about 12 bytes a parameter: see that there is room for a few.",
        )
    return Finding("disk", name, "ok", text)


def _cache() -> Iterator[Finding]:
    folder = cache_folder("programs")
    if folder is None:
        yield Finding(
            "disk",
            "program cache",
            "warning",
            "there is no home directory to keep compiled programs in",
            "export XDG_CACHE_HOME=...",
        )
        return
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        text = f"{folder} cannot be written: every start compiles anew"
        yield Finding(
            "disk",
            "program cache",
            "warning",
            text,
            "Mend its permissions, or export XDG_CACHE_HOME=...",
        )
        return
    if place == folder:
        bad = list(others_can_write("program cache", folder))
        if any(finding.state != "ok" for finding in bad):
            yield from bad
            return
        files = [path.lstat().st_size for path in folder.iterdir()]
        text = f"{len(files)} files, {show_bytes(sum(files))} of at most {show_bytes(LIMIT_OF_PROGRAMS)} in {folder}"
    else:
        text = f"{folder} is not there yet, and can be made"
    yield Finding("disk", "program cache", "ok", text)
    free = disk_finding("disk of the cache", place, "compiled programs")
    if free.state != "ok":
        yield Finding(
            "disk", free.name, "warning", free.text, "Empty the cache, or export XDG_CACHE_HOME=..."
        )


# System


def system_findings() -> Iterator[Finding]:
    yield _processor()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        yield Finding(
            "system",
            "open files",
            "warning",
            f"at most {soft}; data of many files, and processes, need more",
            "ulimit -n 4096",
        )
    else:
        yield Finding(
            "system",
            "open files",
            "ok",
            "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}",
        )
    yield from _shared_memory()
    encoding = locale.getpreferredencoding(False)
    if (
        encoding.lower().replace("-", "") != "utf8"
        or sys.getfilesystemencoding().lower() != "utf-8"
    ):
        text = f"{encoding}: names and texts beyond ASCII cannot be written"
        yield Finding("system", "text", "warning", text, "export LC_ALL=C.UTF-8")
    else:
        yield Finding("system", "text", "ok", encoding)
    yield _clock()
    yield _loopback()


def _processor() -> Finding:
    text = _text(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1] if model else platform.processor() or platform.machine()
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    if platform.machine() != "x86_64" or not flags:
        return Finding("system", "processor", "ok", f"{name} ({platform.machine()})")
    there = set(flags[1].split())
    lacking = [feature for feature in CPU_NEEDS if feature not in there]
    if lacking:
        state: State = (
            "problem" if any(CPU_NEEDS[feature] == "problem" for feature in lacking) else "warning"
        )
        text = f"{name} lacks {', '.join(lacking)}" + (
            ", and jaxlib is built with it" if state == "problem" else ": products are slow"
        )
        return Finding(
            "system",
            "processor",
            state,
            text,
            "Use a machine, or a setting of the virtual machine (cpu: host), that has them.",
        )
    more = [
        feature for feature in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if feature in there
    ]
    return Finding("system", "processor", "ok", f"{name} ({', '.join(more)})")


def _shared_memory() -> Iterator[Finding]:
    place = Path(SHM)
    if not place.is_dir():
        if sys.platform == "linux":
            yield Finding(
                "system",
                SHM,
                "warning",
                "not there; GPUs and data processes exchange through it",
                "mount -t tmpfs tmpfs /dev/shm",
            )
        return
    usage = shutil.disk_usage(place)
    if usage.free < FEW_SHM:
        text = f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free; several GPUs, or data processes, need more"
        yield Finding(
            "system",
            SHM,
            "warning",
            text,
            "docker run --shm-size=8g ..., or remove what is in there.",
        )
    else:
        yield Finding("system", SHM, "ok", f"{show_bytes(usage.free)} free")


def _clock() -> Finding:
    now, installed = time.time(), Path(__file__).stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed - 86400:
        text = f"{shown}, which is before shardwise was installed"
        return Finding(
            "system",
            "clock",
            "warning",
            text,
            "Set the clock (timedatectl set-ntp true): times in runs would be wrong.",
        )
    return Finding("system", "clock", "ok", shown)


def _loopback() -> Finding:
    """A port that nobody listens on answers with a refusal, if the loopback interface is up. None is opened for that."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            probe.connect(("127.0.0.1", 1))
    except ConnectionRefusedError:
        pass
    except OSError as error:
        text = f"127.0.0.1 cannot be reached: {error.strerror or error}"
        return Finding(
            "system",
            "loopback",
            "warning",
            text,
            "ip link set lo up; `shardwise launch` and `report --watch` need it.",
        )
    return Finding("system", "loopback", "ok", "127.0.0.1 answers")
