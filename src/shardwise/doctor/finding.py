"""A line of what `shardwise doctor` says, and what several of its checks ask."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the table. What is not ok has a remedy."""

    group: str
    name: str
    state: State
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return {
            "group": self.group,
            "name": self.name,
            "state": self.state,
            "text": self.text,
            "remedy": self.remedy,
        }


def has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")


def has_tpu() -> bool:
    return any(os.path.exists(f"/dev/{name}") for name in ("accel0", "vfio/0"))


def version_of(name: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError):
        return None


def others_can_write(name: str, folder: Path) -> Iterator[Finding]:
    """Compiled programs are run by whoever finds them."""
    group = "disk" if name == "program cache" else "environment"
    try:
        found = folder.stat()
    except OSError as error:
        if "://" not in str(folder):
            yield Finding(group, name, "ok", f"{folder}: {error.strerror}; it is made when needed")
        return
    if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o022:
        text = f"others may write to {folder}, and what is in there would be run"
        yield Finding(
            group, name, "warning", text, f"chmod 700 {folder}, or remove it if it is not yours"
        )
    else:
        yield Finding(group, name, "ok", f"{folder}")
