"""Installed packages against what they ask of each other, plugins for accelerators, and GPUs as their driver sees them."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwise.doctor.finding import Finding, State, has_gpu, has_tpu, version_of

DRIVERS = {
    "cuda12": 525,
    "cuda13": 580,
}  # the oldest driver of NVIDIA's that runs programs of this CUDA


def package_findings() -> Iterator[Finding]:
    """Versions against the ranges of shardwise, and of each other as their own metadata has it."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    where = f"{platform.python_implementation()} in {sys.prefix}"
    is_right = sys.version_info >= (3, 11)
    text = (
        f"{platform.python_version()}, {where}"
        if is_right
        else f"{platform.python_version()}: shardwise needs 3.11 or newer"
    )
    yield Finding(
        "packages",
        "Python",
        "ok" if is_right else "problem",
        text,
        "" if is_right else "Make the environment with Python 3.11.",
    )
    try:
        wanted = [Requirement(line) for line in metadata.requires("shardwise") or []]
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages",
            "shardwise",
            "warning",
            "it is not installed as a package, so no versions are checked",
            "pip install -e .",
        )
        return
    core = {
        need.name: need
        for need in wanted
        if need.marker is None or need.marker.evaluate({"extra": ""})
    }
    if "jax" in core:
        core.setdefault("jaxlib", Requirement("jaxlib"))
    for name, need in core.items():
        found = version_of(name)
        if found is None:
            yield Finding(
                "packages",
                name,
                "problem",
                f"not installed; shardwise needs {need}",
                f'pip install "{need}"',
            )
            continue
        try:
            fits = need.specifier.contains(found, prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            yield Finding(
                "packages",
                name,
                "problem",
                f"{found}; shardwise needs {need.specifier}",
                f'pip install -U "{need}"',
            )
            continue
        if clashes := list(_clashes(name)):
            state: State = (
                "problem" if any(other in ("jax", "jaxlib") for other, _ in clashes) else "warning"
            )
            text = f"{found} does not go with " + "; ".join(text for _, text in clashes)
            yield Finding(
                "packages",
                name,
                state,
                text,
                f"pip install -U {name} " + " ".join(sorted({other for other, _ in clashes})),
            )
        else:
            yield Finding("packages", name, "ok", found)
    yield from _plugins()
    yield _extras(wanted)


def _clashes(name: str, extra: str = "") -> Iterator[tuple[str, str]]:
    """What this package asks of others that it does not get: (the other's name, in words)."""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in metadata.requires(name) or []:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        if (
            need.marker is not None
            and (not need.marker.evaluate({"extra": extra}) or need.marker.evaluate({"extra": ""}))
            and extra
        ):
            continue
        if not extra and need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = version_of(need.name)
        if found is None:
            if not extra:
                yield (
                    need.name,
                    f"{need.name}, which is not installed (it needs {need.specifier or 'any'})",
                )
        elif not need.specifier.contains(found, prereleases=True):
            yield need.name, f"{need.name} {found} (it needs {need.specifier})"


def installed_plugins() -> dict[str, str]:
    """Plugins of JAX for accelerators: name and version."""
    names = {dist.metadata["Name"] for dist in metadata.distributions() if dist.metadata["Name"]}
    kinds = re.compile(
        r"^jax[-_](cuda1\d|rocm\d+)[-_](plugin|pjrt)$|^jax-metal$|^libtpu(-nightly)?$",
        re.IGNORECASE,
    )
    return {
        name.lower().replace("_", "-"): version_of(name) or "?"
        for name in sorted(names)
        if kinds.match(name)
    }


def _plugins() -> Iterator[Finding]:
    plugins, jaxlib = installed_plugins(), version_of("jaxlib")
    cuda = sorted({name.split("-")[1] for name in plugins if name.startswith("jax-cuda")})
    if len(cuda) > 1:
        yield Finding(
            "packages",
            "plugins",
            "warning",
            f"plugins for {' and '.join(cuda)} are both installed, and both call themselves 'cuda'",
            f"pip uninstall jax-{cuda[0]}-plugin jax-{cuda[0]}-pjrt, unless the driver is too old for {cuda[1]}.",
        )
    for name, found in plugins.items():
        if name == "jax-metal":
            yield Finding(
                "packages",
                name,
                "problem",
                f"{found} is for much older releases of JAX and breaks newer ones",
                "pip uninstall jax-metal",
            )
        elif name.startswith("libtpu"):
            clashes = (
                [text for other, text in _clashes("jax", "tpu") if other == "libtpu"]
                if version_of("jax")
                else []
            )
            if clashes and has_tpu():
                yield Finding(
                    "packages",
                    name,
                    "warning",
                    f"jax does not go with {clashes[0]}",
                    'pip install -U "jax[tpu]"',
                )
            else:
                note = f"{found}; for planning" if not has_tpu() else found
                yield Finding(
                    "packages",
                    name,
                    "ok",
                    f"{note} (jax would pair with another one on a TPU: {clashes[0]})"
                    if clashes
                    else note,
                )
        elif jaxlib is not None and found != jaxlib:
            kind = name.split("-")[1]
            yield Finding(
                "packages",
                name,
                "problem" if has_gpu() else "warning",
                f"{found} beside jaxlib {jaxlib}: such a pair is left unused with a warning, or crashes",
                f'pip install -U "jax[{kind}]"'
                + ("" if kind != "rocm7" else ", or the plugin of the same version"),
            )
        else:
            yield Finding("packages", name, "ok", found)
    if has_gpu() and not any(name.endswith("-plugin") for name in plugins):
        yield Finding(
            "packages",
            "plugins",
            "warning",
            "there is a GPU and no plugin for it, so JAX uses the CPU",
            'pip install -U "jax[cuda13]", or cuda12 for a driver before 580.',
        )


def _extras(wanted: list[Any]) -> Finding:
    """What is optional: said, never a fault, unless it is there in a version that shardwise cannot use."""
    extras: dict[str, list[Any]] = {}
    for need in wanted:
        for extra in re.findall(r"extra == ['\"]([^'\"]+)['\"]", str(need.marker or "")):
            extras.setdefault(extra, []).append(need)
    there: list[str] = []
    lacking: list[str] = []
    old: list[Any] = []
    for extra, needs in sorted(extras.items()):
        versions = {need.name: version_of(need.name) for need in needs}
        (there if all(versions.values()) else lacking).append(extra)
        old += [
            need
            for need in needs
            if (found := versions[need.name])
            and not need.specifier.contains(found, prereleases=True)
        ]
    parts = [f"installed: {', '.join(there) or 'none'}"]
    if lacking:
        parts.append(f'not installed: {", ".join(lacking)} (pip install "shardwise[{lacking[0]}]")')
    if old:
        text = "; ".join(
            [
                *parts,
                *(
                    f"{need.name} is {version_of(need.name)}, {need.specifier} is needed"
                    for need in old
                ),
            ]
        )
        return Finding(
            "packages",
            "extras",
            "warning",
            text,
            "pip install -U " + " ".join(f'"{need.name}{need.specifier}"' for need in old),
        )
    return Finding("packages", "extras", "ok", "; ".join(parts))


# GPUs, as the system sees them


def gpu_findings(patience: float = 10.0) -> Iterator[Finding]:
    """What nvidia-smi says: driver, memory, and who else uses the GPUs."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if has_gpu():
            yield Finding(
                "devices",
                "nvidia-smi",
                "warning",
                "not found, though there is a GPU",
                "Install NVIDIA's utilities (nvidia-utils).",
            )
        return
    try:
        gpus = _ask(
            tool,
            "--query-gpu=index,name,driver_version,memory.total,memory.used,utilization.gpu",
            patience,
        )
    except subprocess.TimeoutExpired:
        text = f"nvidia-smi has not answered for {patience:.0f} s: the driver hangs"
        yield Finding(
            "devices",
            "NVIDIA driver",
            "problem",
            text,
            "Look at `dmesg` for Xid errors; reset the GPU, or restart the machine.",
        )
        return
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "output", "") or str(error)
        text = f"nvidia-smi fails: {said.strip().splitlines()[0] if said.strip() else error}"
        state: State = "problem" if has_gpu() else "warning"
        yield Finding(
            "devices",
            "NVIDIA driver",
            state,
            text,
            "Install or restart the driver; in a container, start it with --gpus all.",
        )
        return
    yield from _driver(gpus)
    for index, name, _, total, used, busy in (gpu for gpu in gpus if len(gpu) == 6):
        text = f"{name}, {used} of {total} MiB in use, {busy} % busy"
        is_taken = used.isdigit() and total.isdigit() and int(used) > 0.1 * int(total)
        yield Finding(
            "devices",
            f"GPU {index}",
            "warning" if is_taken else "ok",
            text,
            "Others use it (below): wait, end them, or choose another GPU with CUDA_VISIBLE_DEVICES."
            if is_taken
            else "",
        )
    try:
        apps = [
            app
            for app in _ask(tool, "--query-compute-apps=pid,process_name,used_memory", patience)
            if len(app) == 3
        ]
    except (OSError, subprocess.SubprocessError):
        return
    for pid, name, used in apps:
        mine = " (this user's)" if _owner_of(pid) == os.getuid() else ""
        yield Finding(
            "devices", f"process {pid}", "ok", f"{Path(name).name}{mine} holds {used} MiB of a GPU"
        )


def _driver(gpus: list[list[str]]) -> Iterator[Finding]:
    drivers = {gpu[2] for gpu in gpus if len(gpu) > 2}
    for driver in sorted(drivers):
        major = int(driver.split(".")[0]) if driver.split(".")[0].isdigit() else 0
        kinds = [kind for kind in DRIVERS if f"jax-{kind}-plugin" in installed_plugins()]
        if old := [kind for kind in kinds if major < DRIVERS[kind]]:
            text = f"{driver} is too old for {old[0]}, which needs {DRIVERS[old[0]]} or newer"
            remedy = "Renew the driver" + (
                ', or pip install "jax[cuda12]" in place of cuda13.'
                if old == ["cuda13"] and major >= 525
                else "."
            )
            yield Finding("devices", "NVIDIA driver", "problem", text, remedy)
        else:
            yield Finding("devices", "NVIDIA driver", "ok", driver)


def _ask(tool: str, query: str, patience: float) -> list[list[str]]:
    done = subprocess.run(
        [tool, query, "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience,
        check=True,
    )
    return [
        [part.strip() for part in line.split(",")]
        for line in done.stdout.splitlines()
        if line.strip()
    ]


def _owner_of(pid: str) -> int | None:
    try:
        return os.stat(f"/proc/{int(pid)}").st_uid
    except (OSError, ValueError):
        return None
