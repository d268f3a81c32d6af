"""Records of measurements, with hardware, versions and source."""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
PACKAGES = (
    "shardwise",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "torch",
    "transformers",
)


def describe(kind: str, torch: str | None = None) -> dict[str, Any]:
    """Return date, hardware, versions and source of a measurement.

    Args:
        kind: "gpu" or "cpu".
        torch: a Python interpreter with PyTorch, if this one has none.
    """
    versions = _versions()
    if torch is not None:
        words = [torch, "-c", "import torch; print(torch.__version__)"]
        versions["torch"] = subprocess.run(
            words, capture_output=True, text=True, check=True
        ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": _hardware(kind),
        "versions": versions,
        "source": _source(),
    }


def save(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Add or replace one entry of a record."""
    record = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, name: entry}, indent=1) + "\n")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _hardware(kind: str) -> str:
    if kind == "gpu":
        words = [
            "nvidia-smi",
            "--query-gpu=name,power.limit,driver_version",
            "--format=csv,noheader",
        ]
        return subprocess.run(
            words, capture_output=True, text=True, check=True
        ).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpuinfo.exists()
        else []
    )
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def _source() -> str:
    """Return `SHARDWISE_SOURCE` if it is set, otherwise the commit."""
    if given := os.environ.get("SHARDWISE_SOURCE"):
        return given
    words = ["git", "describe", "--always", "--dirty"]
    return (
        subprocess.run(
            words, capture_output=True, text=True, cwd=RECORDS.parent
        ).stdout.strip()
        or "unknown"
    )
