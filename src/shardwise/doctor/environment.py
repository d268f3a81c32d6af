"""Environment variables that change what JAX, XLA or shardwise do, and misspelt ones."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.doctor.check import (
    CheckResult,
    State,
    check_private,
    has_gpu,
    has_tpu,
    ok,
    version_of,
)
from shardwise.text import did_you_mean

# What a variable does when it is switched on, and whether that is meant to be warned about.
SWITCHES: dict[str, tuple[State, str]] = {
    "JAX_DISABLE_JIT": (
        "warning",
        "nothing is compiled, so steps take many times as long",
    ),
    "JAX_DEBUG_NANS": (
        "warning",
        "raises before shardwise can handle a bad step, and is slow",
    ),
    "JAX_ENABLE_X64": (
        "warning",
        "float64 by default: twice the memory, slow on accelerators",
    ),
    "JAX_CHECK_TRACER_LEAKS": (
        "warning",
        "slows down tracing and reports leaks that are none",
    ),
    "JAX_LOG_COMPILES": ("ok", "logs each compilation"),
    "JAX_ENABLE_COMPILATION_CACHE": (
        "ok",
        "turns the cache of compiled programs on or off",
    ),
    "JAX_DEFAULT_MATMUL_PRECISION": (
        "ok",
        "precision of matmuls where a model sets none",
    ),
    "JAX_DEFAULT_PRNG_IMPL": ("ok", "the random number generator"),
}
OFF = ("", "0", "false", "no", "off")
# Variables that JAX reads and that are not settings of jax.config.
OTHER_JAX = {
    f"JAX_{name}"
    for name in (
        *(
            "PLATFORM_NAME",
            "COORDINATOR_ADDRESS",
            "COORDINATOR_BIND_ADDRESS",
            "COORDINATOR_PORT",
        ),
        *(
            "LOCAL_DEVICE_IDS",
            "SLICE_INDEX",
            "PARTITION_INDEX",
            "NUM_PROCESSES",
            "PROCESS_ID",
        ),
        *("FORCE_TPU_INIT", "PALLAS_VERBOSE_ERRORS", "DUMP_IR_MODES"),
    )
}
SHARDWISE = {
    f"SHARDWISE_{name}"
    for name in ("FAILPOINT", "JOB", "STARTED", "PROGRESS", "SOURCE")
}
PLATFORMS = ("cpu", "cuda", "gpu", "tpu", "rocm")
CACHE = "JAX_COMPILATION_CACHE_DIR"


def check_environment(
    settings: Mapping[str, object] | None, environment: Mapping[str, str]
) -> Iterator[CheckResult]:
    """Check all environment variables.

    Args:
        settings: jax.config as the device check has read it; None if it has not run. Without it
            misspelt JAX variables are not recognized.
        environment: the variables, by name.
    """
    results = [
        *_switches(settings, environment),
        *_shardwise(environment),
        *_platforms(environment.get("JAX_PLATFORMS", "")),
        *_xla_flags(environment),
        *_memory(environment),
        *_cuda(environment),
        *_cache(environment.get(CACHE, "")),
    ]
    yield from results or [
        ok("variables", "none that changes what JAX or shardwise do")
    ]


def _variable(
    name: str, value: str, state: State, text: str, remedy: str = ""
) -> CheckResult:
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    if state != "ok":
        remedy = remedy or f"unset {name}"
    return CheckResult(name, state, f"{shown!r}: {text}", remedy)


def _switches(
    settings: Mapping[str, object] | None, environment: Mapping[str, str]
) -> Iterator[CheckResult]:
    """Check JAX variables that are switched on, and those that JAX does not know."""
    known = (
        {name.upper() for name in settings or {}} | OTHER_JAX | set(SWITCHES) | {CACHE}
    )
    for name, value in sorted(environment.items()):
        if name in SWITCHES and value.strip().lower() not in OFF:
            yield _variable(name, value, *SWITCHES[name])
        elif name.startswith("JAX_") and name not in known and settings is not None:
            text = f"JAX does not know this variable.{did_you_mean(name, known)}"
            yield _variable(name, value, "warning", text)


def _shardwise(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check variables of shardwise."""
    for name, value in sorted(environment.items()):
        if name == "SHARDWISE_FAILPOINT":
            yield _variable(name, value, "warning", "makes runs fail, for tests")
        elif name.startswith("SHARDWISE_") and name not in SHARDWISE:
            text = (
                f"shardwise does not know this variable.{did_you_mean(name, SHARDWISE)}"
            )
            yield _variable(name, value, "warning", text)


def _platforms(value: str) -> Iterator[CheckResult]:
    """Check the platforms that JAX may use."""
    name = "JAX_PLATFORMS"
    platforms = [part.strip() for part in value.split(",") if part.strip()]
    unknown = [
        part for part in platforms if part not in (*PLATFORMS, "METAL", "axon", "proxy")
    ]
    if unknown:
        text = (
            f"JAX has no platform '{unknown[0]}'; the platforms are {', '.join(PLATFORMS)}."
            f"{did_you_mean(unknown[0], PLATFORMS)}"
        )
        yield _variable(name, value, "warning", text)
    elif platforms == ["cpu"] and (has_gpu() or has_tpu()):
        yield _variable(
            name, value, "warning", "the accelerator of this machine is not used"
        )
    elif platforms:
        yield _variable(name, value, "ok", "the platforms that JAX may use")


def _xla_flags(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check the flags that are passed to XLA."""
    name = "XLA_FLAGS"
    flags = environment.get(name, "").split()
    for flag in flags:
        option, _, value = flag.partition("=")
        if not flag.startswith("--"):
            text = "XLA ends the process because this is not a flag"
            yield _variable(
                name, flag, "problem", text, "Write it as --xla_name=value."
            )
        elif option == "--xla_force_host_platform_device_count":
            text = (
                "these devices share too few threads: two collectives may wait forever"
            )
            yield _variable(
                name, flag, "warning", text, f"Use --cpu-devices {value or 'N'}."
            )
        elif option == "--xla_gpu_deterministic_ops" and value.lower() != "false":
            text = "slower kernels, also where nothing needs them"
            yield _variable(
                name, flag, "warning", text, "Remove it, unless it is intended."
            )
        elif option.startswith("--xla_dump"):
            text = "every program is written to disk"
            yield _variable(name, flag, "warning", text, "Remove it when you are done.")
        else:
            yield _variable(name, flag, "ok", "passed to the compiler")
    count = environment.get("JAX_NUM_CPU_DEVICES")
    if count is not None and any("device_count" in flag for flag in flags):
        text = "JAX refuses this together with --xla_force_host_platform_device_count"
        yield _variable(
            "JAX_NUM_CPU_DEVICES",
            count,
            "problem",
            text,
            "Set neither; use --cpu-devices.",
        )


def _memory(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check how JAX allocates GPU memory."""
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        fraction = environment.get(name)
        if fraction is not None and not re.fullmatch(r"0?\.\d+|1(\.0*)?", fraction):
            text = "must be a fraction of the GPU memory, above 0 and up to 1"
            yield _variable(
                name, fraction, "problem", text, f"export {name}=.9, or unset it."
            )
    name = "XLA_PYTHON_CLIENT_ALLOCATOR"
    if environment.get(name) == "platform":
        yield _variable(
            name, "platform", "warning", "asks the driver for each array: slow"
        )


def _cuda(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check what hides GPUs or replaces the CUDA libraries of JAX."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1") and has_gpu():
        yield _variable("CUDA_VISIBLE_DEVICES", visible, "warning", "hides all GPUs")
    parts = environment.get("LD_LIBRARY_PATH", "").split(":")
    libraries = [
        part for part in parts if re.search(r"cuda|cudnn|nccl|nvidia", part, re.I)
    ]
    has_wheels = version_of("nvidia-cudnn-cu12") or version_of("nvidia-cudnn-cu13")
    if libraries and has_wheels:
        text = (
            f"{libraries[0]} takes precedence over the CUDA libraries that JAX was "
            "installed with"
        )
        yield _variable("LD_LIBRARY_PATH", ":".join(libraries), "warning", text)


def _cache(folder: str) -> Iterator[CheckResult]:
    """Check the cache of compiled programs that replaces shardwise's own."""
    if "://" in folder:
        yield ok(CACHE, f"{folder} replaces shardwise's own cache")
    elif folder:
        yield from check_private(CACHE, Path(folder))
