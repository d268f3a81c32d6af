"""The result of one check of `shardwise doctor`, and what several checks share.

A check is a function that yields results. It reads and never writes. To add one, write the function
and add it to the list of its module's group.
"""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "warning", "problem"]
Check: TypeAlias = Callable[[], Iterator["CheckResult"]]


@dataclass(frozen=True)
class CheckResult:
    """One line of the table.

    Attributes:
        name: the thing that was checked.
        state: "problem" prevents training; "warning" makes it slower or riskier.
        text: what was found.
        remedy: what to do; empty only if the state is "ok".
        group: the part of the table, set by `run_check`.
    """

    name: str
    state: State
    text: str
    remedy: str = ""
    group: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the fields by name."""
        return asdict(self)


def ok(name: str, text: str) -> CheckResult:
    """Return a result without objections."""
    return CheckResult(name, "ok", text)


def warning(name: str, text: str, remedy: str) -> CheckResult:
    """Return a result that slows down or endangers training."""
    return CheckResult(name, "warning", text, remedy)


def problem(name: str, text: str, remedy: str) -> CheckResult:
    """Return a result that prevents training."""
    return CheckResult(name, "problem", text, remedy)


def run_check(group: str, check: Check) -> list[CheckResult]:
    """Return the results of a check; if it raises, the last one is a warning that says so."""
    results: list[CheckResult] = []
    try:
        for result in check():
            results.append(replace(result, group=group))
    except Exception as error:
        text = f"the check failed: {type(error).__name__}: {error}"
        remedy = "Ignore this if shardwise works; otherwise reinstall it."
        results.append(
            CheckResult(
                name=group, state="warning", text=text, remedy=remedy, group=group
            )
        )
    return results


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU with a driver."""
    return os.path.exists("/dev/nvidiactl")


def has_tpu() -> bool:
    """Return whether this machine has a TPU."""
    return any(os.path.exists(f"/dev/{name}") for name in ("accel0", "vfio/0"))


def version_of(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError):
        return None


def check_private(name: str, folder: Path) -> Iterator[CheckResult]:
    """Check that only this user can write to a folder of compiled programs, which JAX runs."""
    try:
        info = folder.stat()
    except OSError as error:
        yield ok(name, f"{folder}: {error.strerror}; it is created when needed")
        return
    if info.st_uid not in (os.getuid(), 0) or stat.S_IMODE(info.st_mode) & 0o022:
        text = f"other users can write to {folder}, and JAX runs the programs in it"
        yield warning(
            name, text, f"chmod 700 {folder}, or remove it if it is not yours."
        )
    else:
        yield ok(name, str(folder))
