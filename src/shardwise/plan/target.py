"""What to plan for: the devices at hand, or those of hardware that is not here.

cpu:8            eight virtual devices of this machine's processor
gpu, gpu:8       the GPU at hand, or so many of its kind
v5e:4x4          sixteen TPU v5e chips; v4, v5p, v6e and tpu7x likewise: v5p:8x8x8
2*v5e:16x16      two slices of 256, connected by the data centre's network
"""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.errors import ConfigError
from shardwise.hardware import TPU_NAMES, Chip, find_chip
from shardwise.text import did_you_mean

# Without these libtpu asks the network what machine this is, and complains when nobody answers.
QUIET_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Target:
    name: str  # as it was asked for
    devices: tuple[Any, ...]
    chip: Chip | None  # None: the table of hardware does not know it, and times cannot be told
    limit: float  # bytes that a program may use on one device
    kind: str  # JAX's name for the device

    @property
    def platform(self) -> str:
        return str(self.devices[0].platform)


def local_target() -> Target:
    """All devices of this process."""
    devices = tuple(jax.devices())
    kind = devices[0].device_kind
    return Target(devices[0].platform, devices, find_chip(kind), _memory(devices), kind)


def find_target(text: str) -> Target:
    """The devices that `text` names; nothing is allocated on them."""
    found = re.fullmatch(r"(?:(\d+)\*)?([a-z]\w*)(?::([\dx]+))?", text.strip())
    if found is None:
        raise ConfigError(
            f"target '{text}': write it like cpu:8, gpu, gpu:8, v5e:4x4, v5p:8x8x8 or 2*v5e:16x16."
        )
    slices, name, size = int(found[1] or 1), found[2], found[3] or ""
    if name in ("cpu", "gpu"):
        if slices > 1 or "x" in size:
            raise ConfigError(f"target '{text}': write {name}:8 for eight devices.")
        return _cpu(text, size) if name == "cpu" else _gpu(text, size)
    if name not in TPU_NAMES:
        raise ConfigError(
            f"target '{text}': there is no chip '{name}'.{did_you_mean(name, ['cpu', 'gpu', *TPU_NAMES])}"
        )
    return _tpu(text, name, size, slices)


def cpu_devices_of(text: str) -> int | None:
    """How many virtual devices a target asks for, to be said before JAX starts; None where it asks for none."""
    found = re.fullmatch(r"cpu:(\d+)", text.strip())
    return int(found[1]) if found else None


def _cpu(text: str, size: str) -> Target:
    devices = jax.devices("cpu")
    count = int(size or len(devices))
    if count > len(devices):
        raise ConfigError(
            f"target '{text}' needs {count} virtual devices, and JAX has started with {len(devices)}: use --cpu-devices {count} "
            f"(in Python: shardwise.use_cpu_devices({count}) before all else)."
        )
    return Target(text, tuple(devices[:count]), None, _host_memory() / count, "cpu")


def _gpu(text: str, size: str) -> Target:
    try:
        devices = jax.devices("gpu")
    except RuntimeError as error:
        raise ConfigError(
            f"target '{text}': there is no GPU here, or JAX was installed without support for it."
        ) from error
    kind, count = devices[0].device_kind, int(size or len(devices))
    limit = _memory(devices)
    if count > len(devices):
        devices = _gpus_of_this_kind(text, count)
    return Target(text, tuple(devices[:count]), find_chip(kind), limit, kind)


def _gpus_of_this_kind(text: str, count: int) -> list[Any]:
    """More GPUs like the one at hand, to compile for: XLA is told what it is by the description that it writes itself."""
    from jax.experimental import topologies

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        jax.jit(lambda x: x + 1).lower(jnp.zeros(())).compile(compiler_options=options)
        described = next(iter(Path(folder).glob("*gpu_target_config.pbtxt")), None)
        config = described.read_text() if described is not None else ""
    try:
        found = topologies.get_topology_desc(
            "", platform="cuda", topology=f"1x1x{count}", target_config=config
        ).devices
    except Exception as error:
        raise ConfigError(
            f"target '{text}': this JAX ({jax.__version__}) cannot compile for GPUs that are not here: {error}"
        ) from error
    if len(found) < count:
        raise ConfigError(
            f"target '{text}': this JAX ({jax.__version__}) compiles for the {len(found)} GPU that is here, and no others."
        )
    return list(found)


def _tpu(text: str, name: str, size: str, slices: int) -> Target:
    from jax.experimental import topologies

    if not size:
        raise ConfigError(
            f"target '{text}': how many chips? For example {name}:{'2x2x1' if name in ('v4', 'v5p', 'tpu7x') else '2x2'}."
        )
    for variable, value in QUIET_TPU.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name == "v4":
        options["chip_config_name"] = "megacore"  # two cores that act as one device
    try:
        devices: list[Any] = list(
            topologies.get_topology_desc(f"{name}:{size}", platform="tpu", **options).devices
        )
    except Exception as error:
        if "libtpu" in str(error).lower() and "topology" not in str(error).lower():
            raise ConfigError(
                f"target '{text}' needs the TPU compiler: pip install libtpu. (It compiles on any machine.)"
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"target '{text}': there is no such arrangement of {name} chips ({reason}). v5e and v6e have two dims, such as 2x4 or 16x16; "
            "v4, v5p and tpu7x three, such as 2x2x1 or 8x8x8."
        ) from error
    chip = find_chip(TPU_NAMES[name])
    assert chip is not None
    return Target(text, tuple(devices), chip, chip.memory - chip.reserved, devices[0].device_kind)


def _memory(devices: Any) -> float:
    """What JAX lets a program use on a device."""
    here = next(
        (device for device in devices if device.process_index == jax.process_index()), devices[0]
    )
    stats: Mapping[str, float] = here.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    chip = find_chip(devices[0].device_kind)
    return chip.memory - chip.reserved if chip is not None else _host_memory() / len(devices)


def _host_memory() -> float:
    """Of this machine, or of the part of it that this process may use."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, float(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total
