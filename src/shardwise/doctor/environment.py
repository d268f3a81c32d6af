"""Environment variables that change what JAX, XLA or shardwise do, and those that are meant to and do nothing."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.doctor.finding import Finding, State, has_gpu, has_tpu, others_can_write, version_of
from shardwise.text import did_you_mean

JAX_MATTERS: dict[str, tuple[State, str, str]] = {
    "JAX_DISABLE_JIT": (
        "warning",
        "every operation runs by itself: steps take many times as long",
        "unset JAX_DISABLE_JIT",
    ),
    "JAX_DEBUG_NANS": (
        "warning",
        "raises in place of shardwise's own answer to bad steps, and slows all down",
        "unset JAX_DEBUG_NANS",
    ),
    "JAX_ENABLE_X64": (
        "warning",
        "float64 where nothing else is said: twice the memory, far slower on accelerators",
        "unset JAX_ENABLE_X64",
    ),
    "JAX_LOG_COMPILES": ("ok", "each compilation is told", ""),
    "JAX_CHECK_TRACER_LEAKS": (
        "warning",
        "slows tracing, and finds leaks that are none",
        "unset JAX_CHECK_TRACER_LEAKS",
    ),
    "JAX_ENABLE_COMPILATION_CACHE": ("ok", "whether compiled programs are kept", ""),
    "JAX_DEFAULT_MATMUL_PRECISION": (
        "ok",
        "the precision of products where a model says nothing",
        "",
    ),
    "JAX_DEFAULT_PRNG_IMPL": ("ok", "the kind of random numbers", ""),
    "JAX_COMPILATION_CACHE_DIR": (
        "ok",
        "compiled programs are kept there, and shardwise's own folder is not used",
        "",
    ),
}
JAX_OTHERS = {  # that JAX reads, and that are no settings of jax.config
    "JAX_PLATFORM_NAME",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_COORDINATOR_PORT",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_SLICE_INDEX",
    "JAX_PARTITION_INDEX",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JAX_FORCE_TPU_INIT",
    "JAX_PALLAS_VERBOSE_ERRORS",
    "JAX_DUMP_IR_MODES",
}
SHARDWISE_OWN = {
    "SHARDWISE_FAILPOINT",
    "SHARDWISE_JOB",
    "SHARDWISE_STARTED",
    "SHARDWISE_PROGRESS",
    "SHARDWISE_SOURCE",
}


def environment_findings(
    settings: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Variables that change what JAX, XLA or shardwise do, and those that are meant to and do nothing. `settings`: of jax.config."""
    known = {name.upper() for name in settings or {}} | JAX_OTHERS | set(JAX_MATTERS)
    for name, value in sorted(environment.items()):
        if name in JAX_MATTERS and value.strip().lower() not in ("", "0", "false", "no", "off"):
            state, text, remedy = JAX_MATTERS[name]
            yield _variable(name, value, state, text, remedy)
        elif name == "JAX_COMPILATION_CACHE_DIR":
            yield from others_can_write(name, Path(value))
        elif name == "JAX_PLATFORMS" and value:
            yield from _platforms(value)
        elif name.startswith("JAX_") and name not in known:
            if settings is not None:
                yield _variable(
                    name,
                    value,
                    "warning",
                    f"JAX knows no such variable.{did_you_mean(name, known)}",
                    f"unset {name}",
                )
        elif name == "SHARDWISE_FAILPOINT":
            yield _variable(name, value, "warning", "makes runs fail, for tests", f"unset {name}")
        elif name.startswith("SHARDWISE_") and name not in SHARDWISE_OWN:
            yield _variable(
                name,
                value,
                "warning",
                f"shardwise knows no such variable.{did_you_mean(name, SHARDWISE_OWN)}",
                f"unset {name}",
            )
    yield from _xla_variables(environment)
    libraries = [
        part
        for part in environment.get("LD_LIBRARY_PATH", "").split(":")
        if re.search(r"cuda|cudnn|nccl|nvidia", part, re.I)
    ]
    if libraries and (version_of("nvidia-cudnn-cu12") or version_of("nvidia-cudnn-cu13")):
        text = f"{libraries[0]} comes before the CUDA libraries that pip has installed for JAX"
        yield _variable(
            "LD_LIBRARY_PATH", ":".join(libraries), "warning", text, "unset LD_LIBRARY_PATH"
        )


def _platforms(value: str) -> Iterator[Finding]:
    names = [part.strip() for part in value.split(",") if part.strip()]
    known = ("cpu", "cuda", "gpu", "tpu", "rocm")
    if wrong := [
        name for name in names if name not in known and name not in ("METAL", "axon", "proxy")
    ]:
        text = f"JAX has no platform '{wrong[0]}'; there are {', '.join(known)}.{did_you_mean(wrong[0], known)}"
        yield _variable(
            "JAX_PLATFORMS",
            value,
            "warning",
            text,
            "export JAX_PLATFORMS=cuda, cpu or tpu; or unset it",
        )
    elif names == ["cpu"] and (has_gpu() or has_tpu()):
        text = "the accelerator of this machine is left alone"
        yield _variable(
            "JAX_PLATFORMS", value, "warning", text, "unset JAX_PLATFORMS, if training is to use it"
        )
    else:
        yield _variable("JAX_PLATFORMS", value, "ok", "the devices to look for", "")


def _xla_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    flags = environment.get("XLA_FLAGS", "").split()
    if wrong := [flag for flag in flags if not flag.startswith("--")]:
        yield _variable(
            "XLA_FLAGS",
            wrong[0],
            "problem",
            "XLA ends the process at a word that is no flag",
            "Write --xla_name=value.",
        )
    for flag in flags:
        name, _, value = flag.partition("=")
        if name == "--xla_force_host_platform_device_count":
            text = "devices without threads of their own: two exchanges at once may wait for ever"
            yield _variable(
                "XLA_FLAGS",
                flag,
                "warning",
                text,
                f"Leave it out and say --cpu-devices {value or 'N'}.",
            )
        elif name == "--xla_gpu_deterministic_ops" and value.lower() != "false":
            yield _variable(
                "XLA_FLAGS",
                flag,
                "warning",
                "slower kernels, also where nothing asks for them",
                "Leave it out, unless it is meant.",
            )
        elif name.startswith("--xla_dump"):
            yield _variable(
                "XLA_FLAGS",
                flag,
                "warning",
                "every program is written to the disk",
                "Leave it out when done looking.",
            )
        elif name.startswith("--"):
            yield _variable("XLA_FLAGS", flag, "ok", "passed to the compiler", "")
    if "JAX_NUM_CPU_DEVICES" in environment and any("device_count" in flag for flag in flags):
        text = "JAX refuses both it and --xla_force_host_platform_device_count"
        yield _variable(
            "JAX_NUM_CPU_DEVICES",
            environment["JAX_NUM_CPU_DEVICES"],
            "problem",
            text,
            "Set one of them, or say --cpu-devices.",
        )
    fraction = environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if fraction is not None and not re.fullmatch(r"0?\.\d+|1(\.0*)?", fraction):
        text = "it is the part of a GPU's memory that is taken at the start, above 0 and up to 1"
        yield _variable(
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            fraction,
            "problem",
            text,
            "export XLA_PYTHON_CLIENT_MEM_FRACTION=.9, or unset it",
        )
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        text = "each array is taken from the driver by itself: slow"
        yield _variable(
            "XLA_PYTHON_CLIENT_ALLOCATOR",
            "platform",
            "warning",
            text,
            "unset XLA_PYTHON_CLIENT_ALLOCATOR",
        )
    if (
        "CUDA_VISIBLE_DEVICES" in environment
        and environment["CUDA_VISIBLE_DEVICES"].strip() in ("", "-1")
        and has_gpu()
    ):
        text = "no GPU can be seen"
        yield _variable(
            "CUDA_VISIBLE_DEVICES",
            environment["CUDA_VISIBLE_DEVICES"],
            "warning",
            text,
            "unset CUDA_VISIBLE_DEVICES",
        )


def _variable(name: str, value: str, state: State, text: str, remedy: str) -> Finding:
    shown = value if len(value) <= 60 else value[:57] + "..."
    return Finding("environment", name, state, f"{shown!r}: {text}", remedy)
