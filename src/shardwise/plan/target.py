"""What to plan for: the devices of this process, or those of hardware that is not here.

cpu:8            8 virtual devices of this machine's CPU
gpu, gpu:8       the GPUs of this machine, or 8 GPUs of the same kind
v5e:4x4          16 TPU v5e chips. Also v4, v5p, v6e and tpu7x, for example v5p:8x8x8
2*v5e:16x16      2 slices of 256 chips each, connected by the data center network
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from shardwise.errors import ConfigError
from shardwise.hardware import TPU_NAMES, Chip, find_chip
from shardwise.runtime import set_quiet_tpu
from shardwise.text import did_you_mean

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
    """

    name: str
    devices: tuple[jax.Device, ...]
    chip: Chip | None
    limit: float
    kind: str

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
        text: such as "cpu:8", "gpu:8", "v5e:4x4" or "2*v5e:16x16".

    Raises:
        ConfigError: the target does not exist, or JAX cannot compile for it here.

    Example:
        >>> len(find_target("v5e:4x4").devices)
        16
    """
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z]\w*)(?::([\dx]+))?", text.strip())
    if match is None:
        raise ConfigError(
            f"target '{text}': write it like cpu:8, gpu, gpu:8, v5e:4x4, v5p:8x8x8 or 2*v5e:16x16."
        )
    num_slices = int(match[1] or 1)
    name = match[2]
    size = match[3] or ""
    if name in ("cpu", "gpu"):
        if num_slices > 1 or "x" in size:
            raise ConfigError(f"target '{text}': write {name}:8 for 8 devices.")
        return _cpu(text, size) if name == "cpu" else _gpu(text, size)
    if name not in TPU_NAMES:
        hint = did_you_mean(name, ["cpu", "gpu", *TPU_NAMES])
        raise ConfigError(f"target '{text}': there is no chip '{name}'.{hint}")
    return _tpu(text, name, size, num_slices)


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
            f"target '{text}': there is no GPU here, or JAX was installed without GPU support."
        ) from error
    kind = devices[0].device_kind
    count = int(size or len(devices))
    limit = _memory_limit(devices)
    if count > len(devices):
        devices = _absent_gpus(text, count)
    return Target(
        name=text,
        devices=tuple(devices[:count]),
        chip=find_chip(kind),
        limit=limit,
        kind=kind,
    )


def _absent_gpus(text: str, count: int) -> list[jax.Device]:
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
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", topology=f"1x1x{count}", target_config=config
        )
    except Exception as error:
        raise ConfigError(
            f"target '{text}': jax {jax.__version__} cannot compile for absent GPUs: {error}"
        ) from error
    devices = list(topology.devices)
    if len(devices) < count:
        raise ConfigError(
            f"target '{text}': jax {jax.__version__} can only compile for {len(devices)} GPU."
        )
    return devices


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
