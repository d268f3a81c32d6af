"""What to plan for: the devices of this process, or those of hardware that is not here.

cpu:8            8 virtual devices of this machine's CPU
gpu, gpu:8       the GPUs of this machine, or 8 GPUs of the same kind
h200, h200:8     H200 GPUs that need not be here. Also a100, h100 and b200
v5e:4x4          16 TPU v5e chips. Also v4, v5p, v6e and tpu7x, for example v5p:8x8x8
2*v5e:16x16      2 slices of 256 chips each, connected by the data center network
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from shardwise.errors import ConfigError
from shardwise.hardware import GPU_NAMES, TPU_NAMES, Chip, find_chip
from shardwise.runtime import (
    QUIET_GPU,
    has_gpu_compiler,
    quiet_without_gpu,
    set_quiet_tpu,
)
from shardwise.text import did_you_mean

# The CUDA of absent GPUs. XLA uses matmuls of 8 bits since 12.0.
CUDA_VERSION = "12.8.0"
INSTALL_GPU_COMPILER = "pip install 'shardwise[gpu-plan]'"
# What XLA and JAX say if one of NVIDIA's packages, or JAX's own plugin for CUDA, is missing.
MISSING_PACKAGES = (
    "cuDNN not found",
    "cuDNN is not detected",
    "No PTX compilation provider",
    "libdevice not found",
    "mosaic_gpu_build_kernel_spec",
)
# The share of the memory of a GPU that JAX uses, unless one of these variables says otherwise.
MEMORY_FRACTION = 0.75
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# TPUs whose chips are connected in three dimensions. The others have two.
TORUS_3D = ("v4", "v5p", "tpu7x")
CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True)
class Target:
    """Devices to compile for. `find_target` returns one.

    Attributes:
        name: the target as the user wrote it.
        devices: its devices, which may only be descriptions.
        chip: the hardware of a device, or None if its speed is unknown.
        limit: bytes that a program may use on one device.
        kind: JAX's name for the kind of device.
        is_attached: whether the devices are here, or others of the same kind.
    """

    name: str
    devices: tuple[jax.Device, ...]
    chip: Chip | None
    limit: float
    kind: str
    is_attached: bool = True

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return str(self.devices[0].platform)


def local_target() -> Target:
    """Return all devices of the run that this process belongs to."""
    devices = tuple(jax.devices())
    kind = devices[0].device_kind
    return Target(
        name=devices[0].platform,
        devices=devices,
        chip=find_chip(kind),
        limit=_memory_limit(devices),
        kind=kind,
    )


def find_target(text: str) -> Target:
    """Return the devices that a text names. Nothing is allocated on them.

    Args:
        text: such as "cpu:8", "gpu:8", "h200:8", "v5e:4x4" or "2*v5e:16x16".

    Raises:
        ConfigError: the target does not exist, or JAX cannot compile for it here.

    Example:
        >>> len(find_target("v5e:4x4").devices)
        16
    """
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z]\w*)(?::([\dx]+))?", text.strip())
    if match is None:
        raise ConfigError(
            f"target '{text}': write it like cpu:8, gpu, gpu:8, h200:8, v5e:4x4, v5p:8x8x8 or "
            "2*v5e:16x16."
        )
    num_slices = int(match[1] or 1)
    name = match[2]
    size = match[3] or ""
    if name in ("cpu", "gpu", *GPU_NAMES):
        if num_slices > 1 or "x" in size:
            raise ConfigError(f"target '{text}': write {name}:8 for 8 devices.")
        if name == "cpu":
            return _cpu(text, size)
        return _gpu(text, size) if name == "gpu" else _named_gpu(text, name, size)
    if name not in TPU_NAMES:
        hint = did_you_mean(name, ["cpu", "gpu", *GPU_NAMES, *TPU_NAMES])
        raise ConfigError(f"target '{text}': there is no chip '{name}'.{hint}")
    return _tpu(text, name, size, num_slices)


@contextmanager
def missing_packages_named(target: Target) -> Iterator[None]:
    """Say how to install the packages for CUDA that XLA and JAX report as missing.

    Args:
        target: the devices that the code inside compiles for.

    Raises:
        ConfigError: a package is missing.
    """
    try:
        yield
    except (RuntimeError, ConfigError) as error:
        if target.is_attached or not any(m in str(error) for m in MISSING_PACKAGES):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"target '{target.name}' needs packages for CUDA that are not installed: "
            f"{INSTALL_GPU_COMPILER}. The compiler says: {reason}"
        ) from error


def cpu_devices_of(text: str) -> int | None:
    """Return the number of virtual devices that a target such as "cpu:8" needs, or None.

    JAX must be configured with it before it starts.
    """
    match = re.fullmatch(r"cpu:(\d+)", text.strip())
    return int(match[1]) if match else None


def _cpu(text: str, size: str) -> Target:
    devices = jax.devices("cpu")
    count = int(size or len(devices))
    if count > len(devices):
        raise ConfigError(
            f"target '{text}' needs {count} virtual devices, but JAX has started with "
            f"{len(devices)}. Use --cpu-devices {count}, or in Python call "
            f"shardwise.use_cpu_devices({count}) first."
        )
    return Target(
        name=text,
        devices=tuple(devices[:count]),
        chip=None,
        limit=_host_memory() / count,
        kind="cpu",
    )


def _gpu(text: str, size: str) -> Target:
    try:
        devices = jax.devices("gpu")
    except RuntimeError as error:
        raise ConfigError(
            f"target '{text}': there is no GPU here, or JAX was installed without GPU support. For "
            "a GPU that is not attached, write its name, such as h200:8."
        ) from error
    kind = devices[0].device_kind
    count = int(size or len(devices))
    limit = _memory_limit(devices)
    if count > len(devices):
        devices = list(_absent_gpus(text, count))
    return Target(
        name=text,
        devices=tuple(devices[:count]),
        chip=find_chip(kind),
        limit=limit,
        kind=kind,
    )


def _absent_gpus(text: str, count: int) -> tuple[jax.Device, ...]:
    """Return descriptions of more GPUs like the one that is here.

    XLA needs a description of the GPU. It writes one itself when it compiles for the GPU that is
    here with a dump.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
        }
        jax.jit(lambda x: x + 1).lower(jnp.zeros(())).compile(compiler_options=options)
        dumped = next(iter(Path(folder).glob("*gpu_target_config.pbtxt")), None)
        config = dumped.read_text() if dumped is not None else ""
    return _described_gpus(text, config, count)


def _described_gpus(text: str, config: str, count: int) -> tuple[jax.Device, ...]:
    """Return GPUs of a kind that XLA's `GpuTargetConfigProto` describes."""
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", topology=f"1x1x{count}", target_config=config
        )
    except Exception as error:
        reason = str(error)
        if "topology not implemented" in reason:
            variables = " ".join(f"{name}={value}" for name, value in QUIET_GPU.items())
            reason = f"it has started without its compiler. Set {variables} before that"
        raise ConfigError(
            f"target '{text}': jax {jax.__version__} cannot compile for absent GPUs: {reason}"
        ) from error
    devices = tuple(topology.devices)
    if len(devices) < count:
        raise ConfigError(
            f"target '{text}': jax {jax.__version__} can only compile for {len(devices)} GPU."
        )
    return devices


def _named_gpu(text: str, name: str, size: str) -> Target:
    """Return GPUs of a kind that need not be here."""
    if not has_gpu_compiler():
        raise ConfigError(
            f"target '{text}' needs XLA's compiler for GPUs, which runs on any machine: "
            f"{INSTALL_GPU_COMPILER}."
        )
    # Without this, JAX refuses to load the compiler where it finds no CUDA driver.
    quiet_without_gpu()
    kind = GPU_NAMES[name]
    chip = find_chip(kind)
    assert chip is not None
    return Target(
        name=text,
        devices=_described_gpus(text, _describe(kind, chip), int(size or 1)),
        chip=chip,
        limit=chip.memory * _memory_fraction(),
        kind=kind,
        is_attached=False,
    )


def _memory_fraction() -> float:
    """Return the share of the memory of a GPU that JAX lets programs use."""
    for name in MEMORY_VARIABLES:
        try:
            return float(os.environ[name])
        except (KeyError, ValueError):
            continue
    return MEMORY_FRACTION


def _describe(kind: str, chip: Chip) -> str:
    """Return the description of a GPU that XLA needs in order to compile for it.

    It is the text form of XLA's `GpuTargetConfigProto`. What all GPUs since Ampere have in common
    is written here, and the rest comes from the table of chips.
    """
    found = chip.architecture
    assert found is not None
    major, minor = found.capability.split(".")
    # CUDA keeps 1 KiB of shared memory per block for itself.
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          shared_memory_per_block: {48 * 1024}
          shared_memory_per_core: {found.shared_memory}
          shared_memory_per_block_optin: {found.shared_memory - 1024}
          core_count: {found.multiprocessors}
          fpus_per_core: {found.lanes}
          l2_cache_size: {found.cache}
          clock_rate_ghz: {found.clock / 1e9}
          memory_bandwidth: {chip.bandwidth:.0f}
          device_memory_size: {chip.memory:.0f}
          driver_version: "{CUDA_VERSION}"
          runtime_version: "{CUDA_VERSION}"
          compile_time_toolkit_version: "{CUDA_VERSION}"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{kind}"
    """


def _tpu(text: str, name: str, size: str, num_slices: int) -> Target:
    if not size:
        example = "2x2x1" if name in TORUS_3D else "2x2"
        raise ConfigError(
            f"target '{text}': how many chips? For example {name}:{example}."
        )
    if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError(
            f"target '{text}' needs the TPU compiler, which runs on any machine: "
            "pip install 'shardwise[tpu-plan]'."
        )
    set_quiet_tpu()
    options: dict[str, str | int] = {"num_slices": num_slices} if num_slices > 1 else {}
    if name == "v4":
        # The two cores of a chip act as one device.
        options["chip_config_name"] = "megacore"
    try:
        topology = topologies.get_topology_desc(
            f"{name}:{size}", platform="tpu", **options
        )
    except Exception as error:
        message = str(error).strip()
        raise ConfigError(
            f"target '{text}': there is no such arrangement of {name} chips "
            f"({message.splitlines()[0]}). v5e and v6e have two dimensions, such as 2x4 or 16x16. "
            "v4, v5p and tpu7x have three, such as 2x2x1 or 8x8x8."
        ) from error
    devices: tuple[jax.Device, ...] = tuple(topology.devices)
    chip = find_chip(TPU_NAMES[name])
    assert chip is not None
    return Target(
        name=text,
        devices=devices,
        chip=chip,
        limit=chip.memory - chip.reserved,
        kind=devices[0].device_kind,
    )


def _memory_limit(devices: Sequence[jax.Device]) -> float:
    """Return the bytes that JAX lets a program use on one of the devices."""
    # Only the process that a device belongs to can ask it.
    own = [device for device in devices if device.process_index == jax.process_index()]
    stats: Mapping[str, float] = (own or devices)[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    chip = find_chip(devices[0].device_kind)
    return (
        chip.memory - chip.reserved
        if chip is not None
        else _host_memory() / len(devices)
    )


def _host_memory() -> float:
    """Return the bytes of main memory that this process may use."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in CGROUP_LIMITS:
        try:
            total = min(total, float(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total
