"""From "data=4,model=2" to a mesh of devices."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shardwise.axes import BATCH
from shardwise.cluster.group import current_group
from shardwise.errors import ConfigError


def parse_mesh(text: str, num_devices: int) -> dict[str, int]:
    """Axis names and sizes, in order; one size may be -1 and takes the devices that are left.

    The product must be the number of devices: a mesh that leaves devices idle is a mistake more often than a wish.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (s.strip() for s in part.partition("="))
        if not (name.isidentifier() and equals and size.lstrip("-").isdigit()):
            raise ConfigError(
                f"mesh '{text}': cannot read '{part.strip()}'. Write axes as name=size, such as 'data=4,model=2'."
            )
        if name in sizes:
            raise ConfigError(f"mesh '{text}': axis '{name}' is given twice.")
        sizes[name] = int(size)
        if sizes[name] < 1 and sizes[name] != -1:
            raise ConfigError(
                f"mesh '{text}': axis '{name}' has size {sizes[name]}; sizes are positive, or -1 to fill."
            )
    to_fill = [name for name, size in sizes.items() if size == -1]
    if len(to_fill) > 1:
        raise ConfigError(
            f"mesh '{text}': only one axis can be -1, here are {len(to_fill)}: {', '.join(to_fill)}."
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    if to_fill and num_devices % known == 0:
        sizes[to_fill[0]] = num_devices // known
    elif to_fill or known != num_devices:
        fits = _nearest_mesh(sizes, num_devices)
        raise ConfigError(
            f"mesh '{text}' needs {'a multiple of ' if to_fill else ''}{known} devices, and there are {num_devices}. "
            f"'{fits}' would use them all; on the CPU, --cpu-devices {known} "
            f"(in Python: shardwise.use_cpu_devices({known}) before all else) gives {known} virtual devices."
        )
    return sizes


def _nearest_mesh(sizes: dict[str, int], num_devices: int) -> str:
    """The same axes with sizes that divide the devices that are left, the first axis taking the rest."""
    first, *others = sizes
    left, fitted = num_devices, {}
    for name in others:
        fitted[name] = math.gcd(left, max(sizes[name], 1))
        left //= fitted[name]
    return show_sizes({first: left, **fitted})


def make_mesh(mesh: str | Mesh, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (all of them by default), ordered so that neighbours on an axis are close on the network.
    A mesh that is one already is returned as it is.

    The axes are of type Auto: ordinary model code runs under any of them, and creation never holds a whole weight.
    """
    if isinstance(mesh, Mesh):
        return mesh
    devices = list(jax.devices() if devices is None else devices)
    sizes = parse_mesh(mesh, len(devices))
    islands = _islands(devices)
    outer = _across(mesh, sizes, len(islands))
    inner = [size // outer[name] for name, size in sizes.items()]
    blocks = np.empty(tuple(outer.values()), object)
    for at, island in zip(np.ndindex(blocks.shape), islands, strict=True):
        blocks[at] = mesh_utils.create_device_mesh(inner, island, allow_split_physical_axes=True)
    return Mesh(np.block(blocks.tolist()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _islands(devices: list[Any]) -> list[list[Any]]:
    """Devices with fast links to each other: those of one slice of TPUs, or of one machine."""
    group = current_group()
    machines = (
        group.machines
        if group.count > 1
        and {device.process_index for device in devices} <= set(range(group.count))
        else ()
    )
    found: dict[Any, list[Any]] = {}
    for device in devices:
        machine = (
            machines[device.process_index] if machines and device.platform != "tpu" else 0
        )  # TPUs have links between machines
        found.setdefault((getattr(device, "slice_index", None) or 0, machine), []).append(device)
    islands = [found[key] for key in sorted(found)]
    if len({len(island) for island in islands}) > 1:
        sizes = ", ".join(str(len(island)) for island in islands)
        raise ConfigError(
            f"the machines or slices have different numbers of devices ({sizes}); a mesh needs as many of each."
        )
    return islands


def _across(text: str, sizes: dict[str, int], slices: int) -> dict[str, int]:
    """How much of each axis crosses the slow network between islands: axes that split the batch first, for they exchange least."""
    outer = dict.fromkeys(sizes, 1)
    for name in (*(n for n in BATCH if n in sizes), *(n for n in sizes if n not in BATCH)):
        outer[name] = math.gcd(sizes[name], slices)
        slices //= outer[name]
    if slices > 1:
        raise ConfigError(
            f"mesh '{text}' lies on several machines or slices, and its axes leave a factor of {slices} of their number over."
        )
    return outer


def use_cpu_devices(count: int) -> None:
    """Makes the CPU act as `count` devices. Call it before JAX first looks for devices.

    JAX's own switch for this gives the devices as many threads as there are, and XLA's collectives on the CPU block
    theirs while they wait: two collectives that do not depend on each other, begun in another order by another device,
    then wait for ever. More threads than can be blocked at once avoid that.
    """
    if count < 1:
        raise ConfigError(f"{count} CPU devices; there must be at least 1.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(8 * count))


def mesh_text(mesh: Mesh) -> str:
    """The text that `make_mesh` would take."""
    return show_sizes(mesh.shape)


def show_sizes(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
