"""Installed packages and what they require of each other, and JAX's plugins for accelerators."""

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from shardwise.doctor.check import (
    Check,
    CheckResult,
    has_gpu,
    has_tpu,
    ok,
    problem,
    version_of,
    warning,
)

PLUGINS = re.compile(
    r"^jax[-_](cuda1\d|rocm\d+)[-_](plugin|pjrt)$|^jax-metal$|^libtpu(-nightly)?$",
    re.IGNORECASE,
)


def check_python() -> Iterator[CheckResult]:
    """Report the Python that runs shardwise."""
    implementation = platform.python_implementation()
    yield ok("Python", f"{platform.python_version()}, {implementation} in {sys.prefix}")


def check_requirements() -> Iterator[CheckResult]:
    """Check the versions that shardwise requires, and those that its packages require."""
    requirements = _requirements("shardwise")
    if not requirements:
        text = "not installed as a package, so no versions are checked"
        yield warning("shardwise", text, "pip install -e .")
    core = {need.name: need for need in requirements if _applies(need)}
    if "jax" in core:
        core.setdefault("jaxlib", Requirement("jaxlib"))
    for name, need in core.items():
        version = version_of(name)
        if version is None:
            text = f"not installed; shardwise needs {need}"
            yield problem(name, text, f'pip install "{need}"')
        elif not _fits(need, version):
            text = f"{version}; shardwise needs {need.specifier}"
            yield problem(name, text, f'pip install -U "{need}"')
        elif conflicts := _conflicts(name):
            text = f"{version} is not compatible with {'; '.join(conflicts.values())}"
            report = problem if {"jax", "jaxlib"} & conflicts.keys() else warning
            yield report(
                name, text, f"pip install -U {name} {' '.join(sorted(conflicts))}"
            )
        else:
            yield ok(name, version)


def check_plugins() -> Iterator[CheckResult]:
    """Check the plugins for accelerators against jaxlib and against each other."""
    plugins = installed_plugins()
    cuda = sorted(
        {name.split("-")[1] for name in plugins if name.startswith("jax-cuda")}
    )
    if len(cuda) > 1:
        text = f"plugins for {' and '.join(cuda)} are both installed, and both register as 'cuda'"
        remedy = f"pip uninstall jax-{cuda[0]}-plugin jax-{cuda[0]}-pjrt, unless the driver is too"
        yield warning("plugins", text, f"{remedy} old for {cuda[1]}.")
    if has_gpu() and not any(name.endswith("-plugin") for name in plugins):
        text = "there is a GPU but no plugin for it, so JAX uses the CPU"
        remedy = 'pip install -U "jax[cuda13]", or cuda12 for a driver before 580.'
        yield warning("plugins", text, remedy)
    for name, version in plugins.items():
        yield _plugin_result(name, version)


def _plugin_result(name: str, version: str) -> CheckResult:
    jaxlib = version_of("jaxlib")
    if name == "jax-metal":
        text = f"{version} is for much older releases of JAX and breaks newer ones"
        return problem(name, text, "pip uninstall jax-metal")
    if name.startswith("libtpu"):
        conflict = _conflicts("jax", "tpu").get(name) if version_of("jax") else None
        if conflict and has_tpu():
            text = f"jax is not compatible with {conflict}"
            return warning(name, text, 'pip install -U "jax[tpu]"')
        return ok(name, version if has_tpu() else f"{version}; used for plans")
    if jaxlib is not None and version != jaxlib:
        text = (
            f"{version} with jaxlib {jaxlib}: JAX ignores such a plugin with a warning, "
            "or crashes"
        )
        report = problem if has_gpu() else warning
        kind = name.split("-")[1]
        return report(name, text, f'pip install -U "jax[{kind}]", or {name}=={jaxlib}.')
    return ok(name, version)


def check_extras() -> Iterator[CheckResult]:
    """Report the optional packages; only a version that shardwise cannot use is a warning."""
    extras: dict[str, list[Requirement]] = {}
    for need in _requirements("shardwise"):
        for extra in re.findall(
            r"extra == ['\"]([^'\"]+)['\"]", str(need.marker or "")
        ):
            extras.setdefault(extra, []).append(need)
    versions = {
        need.name: version_of(need.name) for needs in extras.values() for need in needs
    }
    installed: list[str] = []
    missing: list[str] = []
    outdated = {}
    for extra, needs in sorted(extras.items()):
        is_complete = all(versions[need.name] for need in needs)
        (installed if is_complete else missing).append(extra)
        for need in needs:
            version = versions[need.name]
            if version and not _fits(need, version):
                outdated[f"{need.name}{need.specifier}"] = (
                    f"{need.name} {version} is too old"
                )
    text = f"installed: {', '.join(installed) or 'none'}"
    if missing:
        text += f'; not installed: {", ".join(missing)} (pip install "shardwise[{missing[0]}]")'
    if outdated:
        remedy = "pip install -U " + " ".join(f'"{need}"' for need in outdated)
        yield warning("extras", "; ".join([text, *outdated.values()]), remedy)
    else:
        yield ok("extras", text)


CHECKS: tuple[Check, ...] = (
    check_python,
    check_requirements,
    check_plugins,
    check_extras,
)


def installed_plugins() -> dict[str, str]:
    """Return the versions of JAX's plugins for accelerators, by normalized name."""
    names = {dist.metadata["Name"] for dist in metadata.distributions()}
    plugins = sorted(name for name in names if name and PLUGINS.match(name))
    return {name.lower().replace("_", "-"): version_of(name) or "?" for name in plugins}


def _requirements(name: str) -> list[Requirement]:
    """Return what a package requires; nothing if it is not installed."""
    try:
        return [Requirement(line) for line in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return []


def _applies(need: Requirement, extra: str = "") -> bool:
    return need.marker is None or need.marker.evaluate({"extra": extra})


def _fits(need: Requirement, version: str) -> bool:
    try:
        return need.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _conflicts(name: str, extra: str = "") -> dict[str, str]:
    """Return the packages that do not meet the requirements of a package, with the reason."""
    conflicts = {}
    for need in _requirements(name):
        if not _applies(need, extra):
            continue
        version = version_of(need.name)
        wanted = f"(it needs {need.specifier or 'any version'})"
        if version is None:
            conflicts[need.name] = f"{need.name}, which is not installed {wanted}"
        elif not _fits(need, version):
            conflicts[need.name] = f"{need.name} {version} {wanted}"
    return conflicts
