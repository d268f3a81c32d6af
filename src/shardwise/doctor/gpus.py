"""GPUs as the NVIDIA driver sees them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from shardwise.doctor import packages
from shardwise.doctor.check import CheckResult, has_gpu, ok, problem, warning

# The oldest driver that runs programs of each CUDA version.
MIN_DRIVERS = {"cuda12": 525, "cuda13": 580}
GPU_QUERY = (
    "--query-gpu=index,name,driver_version,memory.total,memory.used,utilization.gpu"
)
PROCESS_QUERY = "--query-compute-apps=pid,process_name,used_memory"


def check_gpus(timeout: float = 10.0) -> Iterator[CheckResult]:
    """Check the driver, the memory of each GPU, and which processes use it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if has_gpu():
            text = "not found, although there is a GPU"
            yield warning(
                "nvidia-smi", text, "Install NVIDIA's utilities (nvidia-utils)."
            )
        return
    try:
        gpus = _query(tool, GPU_QUERY, timeout)
        processes = _query(tool, PROCESS_QUERY, timeout)
    except subprocess.TimeoutExpired:
        text = f"nvidia-smi has not answered for {timeout:.0f} s: the driver hangs"
        remedy = (
            "Look for Xid errors in `dmesg`; reset the GPU, or restart the machine."
        )
        yield problem("NVIDIA driver", text, remedy)
        return
    except (OSError, subprocess.CalledProcessError) as error:
        output = str(getattr(error, "output", "") or error).strip()
        report = problem if has_gpu() else warning
        remedy = "Install or restart the driver; start containers with --gpus all."
        yield report(
            "NVIDIA driver", f"nvidia-smi fails: {output.splitlines()[0]}", remedy
        )
        return
    for driver in sorted({gpu[2] for gpu in gpus}):
        yield _driver_result(driver)
    for index, name, _, total, used, busy in gpus:
        text = f"{name}, {used} of {total} MiB in use, {busy} % busy"
        if used.isdigit() and total.isdigit() and int(used) > 0.1 * int(total):
            remedy = "Others use it: wait, end them, or select another with CUDA_VISIBLE_DEVICES."
            yield warning(f"GPU {index}", text, remedy)
        else:
            yield ok(f"GPU {index}", text)
    for pid, name, used in processes:
        mine = " (this user's)" if _owner_of(pid) == os.getuid() else ""
        yield ok(f"process {pid}", f"{Path(name).name}{mine} holds {used} MiB of a GPU")


def _query(tool: str, query: str, timeout: float) -> list[list[str]]:
    """Return the table that nvidia-smi prints; lines without all columns are skipped."""
    done = subprocess.run(
        [tool, query, "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=True,
    )
    rows = [
        [part.strip() for part in line.split(",")] for line in done.stdout.splitlines()
    ]
    return [row for row in rows if len(row) == query.count(",") + 1]


def _driver_result(driver: str) -> CheckResult:
    """Compare a driver with the CUDA versions of the installed plugins."""
    first = driver.split(".")[0]
    major = int(first) if first.isdigit() else 0
    plugins = packages.installed_plugins()
    for cuda, minimum in MIN_DRIVERS.items():
        if f"jax-{cuda}-plugin" in plugins and major < minimum:
            text = f"{driver} is too old for {cuda}, which needs {minimum} or newer"
            remedy = "Update the driver."
            if cuda == "cuda13" and major >= MIN_DRIVERS["cuda12"]:
                remedy = (
                    'Update the driver, or pip install "jax[cuda12]" instead of cuda13.'
                )
            return problem("NVIDIA driver", text, remedy)
    return ok("NVIDIA driver", driver)


def _owner_of(pid: str) -> int | None:
    """Return the user id of a process, if it is visible from here."""
    try:
        return os.stat(f"/proc/{int(pid)}").st_uid
    except (OSError, ValueError):
        return None
