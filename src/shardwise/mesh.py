"""From a text such as "data=4,model=2" to a mesh of devices."""

import math
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shardwise.axes import BATCH
from shardwise.cluster.group import current_group
from shardwise.errors import ConfigError

# Threads per virtual CPU device, see `use_cpu_devices`.
THREADS_PER_DEVICE = 8
MAX_CPU_DEVICES = 4096


def parse_mesh(text: str, num_devices: int) -> dict[str, int]:
    """Return axis names and sizes, in order.

    The product of the sizes must be the number of devices: a mesh that leaves devices idle is
    usually a mistake.

    Args:
        text: axes as `name=size`, separated by commas. One size may be -1, for all remaining
            devices.
        num_devices: the number of devices.

    Raises:
        ConfigError: if the text cannot be parsed or does not fit the number of devices.

    Example:
        >>> parse_mesh("data=-1,model=2", 8)
        {'data': 4, 'model': 2}
    """
    sizes = parse_sizes(text)
    to_fill = [name for name, size in sizes.items() if size == -1]
    if len(to_fill) > 1:
        raise ConfigError(
            f"mesh '{text}': only one axis can be -1, but {len(to_fill)} are: {', '.join(to_fill)}."
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    if to_fill and num_devices % known == 0:
        sizes[to_fill[0]] = num_devices // known
    elif to_fill or known != num_devices:
        needed = f"a multiple of {known}" if to_fill else f"{known}"
        raise ConfigError(
            f"mesh '{text}' needs {needed} devices, and there are {num_devices}. "
            f"'{_nearest_mesh(sizes, num_devices)}' would use them all. On a CPU, "
            f"--cpu-devices {known} creates {known} virtual devices "
            f"(in Python: shardwise.use_cpu_devices({known}) before anything else)."
        )
    return sizes


def parse_sizes(text: str) -> dict[str, int]:
    """Return the sizes of a mesh by axis name, as written: "data=-1" is {"data": -1}.

    Raises:
        ConfigError: if the text cannot be read.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (s.strip() for s in part.partition("="))
        if not (name.isidentifier() and equals and size.lstrip("-").isdigit()):
            raise ConfigError(
                f"mesh '{text}': cannot read '{part.strip()}'. "
                "Write axes as name=size, for example 'data=4,model=2'."
            )
        if name in sizes:
            raise ConfigError(f"mesh '{text}': axis '{name}' is given twice.")
        sizes[name] = int(size)
        if sizes[name] < 1 and sizes[name] != -1:
            raise ConfigError(
                f"mesh '{text}': axis '{name}' has size {sizes[name]}. "
                "Use a positive size, or -1 for all remaining devices."
            )
    return sizes


def _nearest_mesh(sizes: Mapping[str, int], num_devices: int) -> str:
    """Return a mesh with the same axes that uses all devices; the first axis takes the rest."""
    first, *others = sizes
    remaining, fitted = num_devices, {}
    for name in others:
        fitted[name] = math.gcd(remaining, max(sizes[name], 1))
        remaining //= fitted[name]
    return show_sizes({first: remaining, **fitted})


def make_mesh(mesh: str | Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh over devices, ordered so that neighbors along an axis are close on the network.

    All axes have type `Auto`: ordinary model code runs on any mesh, and arrays are created sharded.
    `jax.make_mesh` creates axes of type `Explicit`, on which `nnx.Embed` and row-parallel layers
    raise `ShardingTypeError`. A mesh with such axes is replaced by one of type `Auto` that has the
    same devices and names.

    Args:
        mesh: a text for `parse_mesh`, or a `Mesh`, whose devices and axes are kept.
        devices: the devices to use; all devices if None.

    Raises:
        ConfigError: if the text does not fit the devices, or if `jax.set_mesh` has set a mesh with
            `Explicit` axes.

    Example:
        >>> mesh = make_mesh("data=4,model=2")
        >>> mesh = make_mesh(jax.make_mesh((4, 2), ("data", "model")))
    """
    _check_current_mesh()
    if isinstance(mesh, Mesh):
        return _with_auto_axes(mesh)
    devices = list(jax.devices() if devices is None else devices)
    sizes = parse_mesh(mesh, len(devices))
    islands = _islands(devices)
    outer = _split_between_islands(mesh, sizes, len(islands))
    inner = [size // outer[name] for name, size in sizes.items()]
    blocks = np.empty(tuple(outer.values()), object)
    for position, island in zip(np.ndindex(blocks.shape), islands, strict=True):
        blocks[position] = mesh_utils.create_device_mesh(
            inner, island, allow_split_physical_axes=True
        )
    axis_types = (AxisType.Auto,) * len(sizes)
    return Mesh(np.block(blocks.tolist()), tuple(sizes), axis_types=axis_types)


def _check_current_mesh() -> None:
    """Raise if arrays that the model creates would have axes of type `Explicit`."""
    current = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in current.axis_types:
        raise ConfigError(
            f"jax.set_mesh has set the mesh '{show_sizes(current.shape)}' with axes of type "
            "Explicit, and shardwise computes on axes of type Auto. Remove jax.set_mesh: the mesh "
            "of the run is enough."
        )


def _with_auto_axes(mesh: Mesh) -> Mesh:
    if mesh.are_all_axes_auto:
        return mesh
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)


def _islands(devices: list[jax.Device]) -> list[list[jax.Device]]:
    """Group devices that have fast links to each other: those of one TPU slice or one machine."""
    group = current_group()
    is_own_group = {device.process_index for device in devices} <= set(
        range(group.count)
    )
    machines = group.machines if group.count > 1 and is_own_group else ()
    by_place: dict[tuple[int, int], list[jax.Device]] = {}
    for device in devices:
        # TPUs have fast links between machines too.
        spans_machines = device.platform == "tpu" or not machines
        machine = 0 if spans_machines else machines[device.process_index]
        slice_index = getattr(device, "slice_index", None) or 0
        by_place.setdefault((slice_index, machine), []).append(device)
    islands = [by_place[place] for place in sorted(by_place)]
    if len({len(island) for island in islands}) > 1:
        sizes = ", ".join(str(len(island)) for island in islands)
        raise ConfigError(
            f"the machines or slices have different numbers of devices ({sizes}). "
            "A mesh needs the same number on each."
        )
    return islands


def _split_between_islands(
    text: str, sizes: Mapping[str, int], num_islands: int
) -> dict[str, int]:
    """Return the part of each axis that crosses the slow network between islands.

    Batch axes cross first, because they communicate least.
    """
    outer = dict.fromkeys(sizes, 1)
    batch_axes = [name for name in BATCH if name in sizes]
    other_axes = [name for name in sizes if name not in BATCH]
    remaining = num_islands
    for name in (*batch_axes, *other_axes):
        outer[name] = math.gcd(sizes[name], remaining)
        remaining //= outer[name]
    if remaining > 1:
        raise ConfigError(
            f"mesh '{text}' cannot span {num_islands} machines or slices: its axis sizes leave a "
            f"factor of {remaining}. Use a batch axis whose size is divisible by {num_islands}."
        )
    return outer


def use_cpu_devices(count: int) -> None:
    """Split the CPU into `count` virtual devices. Call it before JAX initializes its devices.

    XLA's collectives on CPUs block a thread while they wait. With JAX's default of one thread per
    device, two independent collectives deadlock if devices start them in a different order. More
    threads than can be blocked at the same time prevent this.

    Args:
        count: the number of devices, at least 1.

    Example:
        >>> use_cpu_devices(8)
        >>> mesh = make_mesh("data=4,model=2")
    """
    if not 1 <= count <= MAX_CPU_DEVICES:
        raise ConfigError(
            f"cannot create {count} CPU devices. Use at least 1 and at most {MAX_CPU_DEVICES}."
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * count))


def mesh_text(mesh: Mesh) -> str:
    """Return the text from which `make_mesh` makes a mesh of this shape.

    Args:
        mesh: the mesh, of which only names and sizes of the axes are read.
    """
    return show_sizes(mesh.shape)


def show_sizes(sizes: Mapping[str, int]) -> str:
    """Return axis sizes as text: `data=4,model=2`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())
