"""Estimate how long a compiled program takes: a roofline model over its instructions in order.

An instruction takes as long as its arithmetic or its memory traffic, whichever is longer. A
collective that starts early runs in parallel with the instructions after it. If it has not finished
when its result is needed, the step waits for the rest. TPU compilers estimate the cycles of an
instruction themselves, and these replace both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np
from jax.sharding import Mesh

from shardwise.hardware import Chip
from shardwise.plan.hlo import Collective, Computation, Op, Program, Work, cycles
from shardwise.plan.plan import Traffic

# Sequence length at which fused attention on GPUs reaches half of its speed on very long sequences.
SHORT = 1240
# Minimum seconds of one step of a collective.
HOP = 1e-6
# Share of the bandwidth of a GPU's links to the switch that collectives reach.
SWITCH_SHARE = 0.8

CONTROL_FLOW = ("while", "conditional", "call")


class Device(Protocol):
    """The fields of a JAX device that this module reads. TPUs also have `coords` and `slice_index`.

    Attributes:
        id: number of the device.
    """

    id: int


@dataclass
class Estimate:
    """Time and work of a program, or of a part of it, on one device.

    Attributes:
        seconds: total time: `arithmetic`, `memory` and the waiting times in `network`.
        arithmetic: seconds in instructions that are bound by arithmetic.
        memory: seconds in instructions that are bound by memory bandwidth.
        network: seconds of waiting for collectives, by mesh axes.
        flops: floating point operations.
        bytes: bytes to and from the device's main memory.
        traffic: the collectives, by kind, axes and link.
        unknown_kernels: number of calls of each custom kernel whose FLOP are unknown.
    """

    seconds: float = 0.0
    arithmetic: float = 0.0
    memory: float = 0.0
    network: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    bytes: float = 0.0
    traffic: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)
    unknown_kernels: dict[str, int] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """The part that takes longest: "arithmetic", "memory" or "network on <axes>"."""
        parts = {"arithmetic": self.arithmetic, "memory": self.memory}
        for axes, seconds in self.network.items():
            parts[f"network on {axes}"] = seconds
        return max(parts, key=lambda name: parts[name])

    def add(self, other: "Estimate", times: int) -> None:
        """Add a part of the program that runs `times` times."""
        self.seconds += other.seconds * times
        self.arithmetic += other.arithmetic * times
        self.memory += other.memory * times
        self.flops += other.flops * times
        self.bytes += other.bytes * times
        for axes, seconds in other.network.items():
            self.network[axes] = self.network.get(axes, 0.0) + seconds * times
        for kernel, calls in other.unknown_kernels.items():
            self.unknown_kernels[kernel] = (
                self.unknown_kernels.get(kernel, 0) + calls * times
            )
        for traffic in other.traffic.values():
            self.add_traffic(
                replace(
                    traffic,
                    count=traffic.count * times,
                    bytes=traffic.bytes * times,
                    seconds=traffic.seconds * times,
                    waited=traffic.waited * times,
                )
            )

    def add_traffic(self, traffic: Traffic) -> None:
        """Add collectives to those of the same kind, axes and link."""
        key = (traffic.kind, traffic.axes, traffic.link)
        if (known := self.traffic.get(key)) is not None:
            traffic = replace(
                known,
                count=known.count + traffic.count,
                bytes=known.bytes + traffic.bytes,
                seconds=known.seconds + traffic.seconds,
                waited=known.waited + traffic.waited,
            )
        self.traffic[key] = traffic

    def add_wait(self, traffic: Traffic, seconds: float) -> None:
        """Add time in which the device waits for a collective that was counted already."""
        self.seconds += seconds
        self.network[traffic.axes] = self.network.get(traffic.axes, 0.0) + seconds
        waited = replace(traffic, count=0, bytes=0.0, seconds=0.0, waited=seconds)
        self.add_traffic(waited)

    def add_work(self, work: Work, op: Op, chip: Chip) -> None:
        """Add one instruction that has the device for itself."""
        # These run in parallel with the arithmetic and only use memory bandwidth.
        runs_in_background = chip.clock and op.opcode.endswith("-start")
        if op.opcode == "fusion-start" or runs_in_background:
            self.bytes += work.bytes
            return
        arithmetic = work.flops / _flop_rate(work, chip)
        memory = work.bytes / (chip.bandwidth * chip.copies)
        counted = cycles(op) / chip.clock if chip.clock else 0.0
        seconds = counted or max(arithmetic, memory)
        if work.flops or work.bytes:
            seconds += chip.launch
        if work.kernel and not work.is_known:
            self.unknown_kernels[work.kernel] = (
                self.unknown_kernels.get(work.kernel, 0) + 1
            )
        self.seconds += seconds
        self.flops += work.flops
        self.bytes += work.bytes
        if arithmetic > memory:
            self.arithmetic += seconds
        else:
            self.memory += seconds


def estimate(program: Program, chip: Chip, mesh: Mesh) -> Estimate:
    """Return the estimate of a program on one device of `mesh`.

    Args:
        program: the compiled program, the same for all devices.
        chip: the hardware of a device.
        mesh: the mesh, whose devices know where they are (TPU coordinates, GPU numbers).
    """
    return _Walk(program, chip, _Links(mesh, chip)).run(program.entry)


def axis_rate(mesh: Mesh, chip: Chip, axis: str) -> float:
    """Return the bytes per second, one way, at which one device communicates along a mesh axis."""
    index = tuple(mesh.axis_names).index(axis)
    groups = np.moveaxis(mesh.devices, index, -1).reshape(-1, mesh.devices.shape[index])
    return _Links(mesh, chip).rate(list(groups[0]))[1]


def _flop_rate(work: Work, chip: Chip) -> float:
    """Return the FLOP per second that an instruction reaches."""
    share = chip.attention if work.kernel or work.attends else chip.products
    if work.attends:
        share *= work.attends / (work.attends + SHORT)
    if work.operands.startswith("f8"):
        share *= chip.narrow
    elif work.operands == "f32":
        share *= chip.exact if work.is_exact else chip.wide
    return chip.flops * share


@dataclass(frozen=True)
class _Pending:
    """A collective that has started: the second at which it finishes, and what it is."""

    finish: float
    traffic: Traffic


@dataclass(frozen=True)
class _Walk:
    """Walks through the instructions of a program and adds up their times."""

    program: Program
    chip: Chip
    links: "_Links"

    def run(self, computation: Computation) -> Estimate:
        """Return the estimate of one run of a computation."""
        total = Estimate()
        # Collectives along the same axes share links and run one after the other. This is the
        # second at which the links of each set of axes are free again.
        free: dict[str, float] = {}
        pending: dict[str, _Pending] = {}
        ends = self._last_uses(computation)

        def wait_for(key: str) -> None:
            collective = pending.pop(key)
            if collective.finish > total.seconds:
                total.add_wait(collective.traffic, collective.finish - total.seconds)

        for op in computation.ops:
            if op.opcode in CONTROL_FLOW:
                self._add_control_flow(total, op)
            elif (collective := self.program.collective(op, computation)) is not None:
                key = _key(collective)
                if key not in pending:
                    traffic = self.links.traffic(collective)
                    begin = max(total.seconds, free.get(traffic.axes, 0.0))
                    free[traffic.axes] = begin + traffic.seconds
                    pending[key] = _Pending(begin + traffic.seconds, traffic)
                    total.add_traffic(traffic)
                if op.opcode == "fusion":
                    # A fusion may compute while it communicates.
                    work = self.program.work(computation, op)
                    if work.flops:
                        total.add_work(work, op, self.chip)
                if ends[key] == op.name:
                    wait_for(key)
            elif _is_done(op):
                start = computation.by_name.get(op.operands[0].partition("#")[0])
                started = (
                    None
                    if start is None
                    else self.program.collective(start, computation)
                )
                if started is not None and _key(started) in pending:
                    wait_for(_key(started))
            else:
                total.add_work(self.program.work(computation, op), op, self.chip)
        for key in list(pending):
            wait_for(key)
        return total

    def _add_control_flow(self, total: Estimate, op: Op) -> None:
        """Add a loop, a call, or the slowest branch of a conditional."""
        computations = self.program.computations
        if op.opcode == "while":
            body = self.run(computations[op.called("body") or ""])
            total.add(body, self.program.trips(op))
        elif op.opcode == "conditional":
            names = [name for name in _branches(op) if name in computations]
            branches = [self.run(computations[name]) for name in names]
            if branches:
                total.add(max(branches, key=lambda branch: branch.seconds), 1)
        else:
            for inner in self.program.inner(op):
                total.add(self.run(inner), 1)

    def _last_uses(self, computation: Computation) -> dict[str, str]:
        """Return the name of the last instruction of each collective, by key.

        TPU programs may run one collective in pieces inside several fusions. It ends with the last
        of them. A collective with an explicit `-done` instruction has "" here.
        """
        last: dict[str, str] = {}
        for op in computation.ops:
            if op.opcode in CONTROL_FLOW:
                continue
            collective = self.program.collective(op, computation)
            if collective is not None:
                has_done = op.opcode.endswith("-start") or op.opcode in ("send", "recv")
                last[_key(collective)] = "" if has_done else op.name
        return last


def _is_done(op: Op) -> bool:
    """Return whether an instruction waits for the result of a collective."""
    return (
        op.opcode.endswith("-done") and op.opcode != "send-done" and bool(op.operands)
    )


def _key(collective: Collective) -> str:
    return f"{collective.kind} {collective.channel} {collective.bytes}"


def _branches(op: Op) -> list[str]:
    """Return the names of the computations of a conditional, in either of XLA's notations."""
    listed = op.attributes.partition("branch_computations={")[2].partition("}")[0]
    if listed:
        return [name.strip().lstrip("%") for name in listed.split(",")]
    names = (op.called(key) for key in ("true_computation", "false_computation"))
    return [name for name in names if name]


@dataclass(frozen=True)
class _Route:
    """How a collective travels: its axes, devices per group, kind of link, bytes per second."""

    axes: str
    size: int
    link: str
    rate: float


_RouteKey: TypeAlias = tuple[str, tuple[tuple[int, ...], ...], bool]


class _Links:
    """The links between the devices of a mesh."""

    def __init__(self, mesh: Mesh, chip: Chip):
        self.chip = chip
        self.axis_names = tuple(mesh.axis_names)
        self.axis_sizes = tuple(mesh.shape.values())
        self.devices: list[Device] = list(mesh.devices.flat)
        self.extent: list[int] = []
        if hasattr(self.devices[0], "coords"):
            self.extent = [
                len(set(column)) for column in _coords(self.devices).T.tolist()
            ]
        self.routes: dict[_RouteKey, _Route] = {}

    def traffic(self, collective: Collective) -> Traffic:
        """Return a collective with its estimated time, as if nothing else used its links."""
        key = (collective.kind, collective.groups, collective.across_slices)
        if key not in self.routes:
            self.routes[key] = self._route(collective)
        route = self.routes[key]
        # A ring algorithm sends (size - 1) / size of the complete array, an all-reduce twice that.
        share = (route.size - 1) / route.size
        factors = {"all-reduce": 2 * share, "collective-permute": 1.0}
        seconds = 0.0
        if route.size > 1:
            hops = max(1, math.ceil(math.log2(route.size)))
            sent = factors.get(collective.kind, share) * collective.bytes
            seconds = sent / route.rate + HOP * hops
        return Traffic(
            kind=collective.kind,
            axes=route.axes,
            link=route.link,
            count=1,
            bytes=collective.bytes,
            seconds=seconds,
            waited=0.0,
        )

    def _route(self, collective: Collective) -> _Route:
        groups = collective.groups or (tuple(range(len(self.devices))),)
        members = groups[0]
        if collective.across_slices:
            members = self._one_of_each_slice()
        if collective.kind == "collective-permute":
            members = max(groups, key=lambda pair: abs(pair[0] - pair[-1]))
        places = np.array(np.unravel_index(members, self.axis_sizes)).T
        spanned = [
            name
            for i, name in enumerate(self.axis_names)
            if len(set(places[:, i].tolist())) > 1
        ]
        link, rate = self.rate([self.devices[member] for member in members])
        return _Route("*".join(spanned) or "none", len(members), link, rate)

    def _one_of_each_slice(self) -> tuple[int, ...]:
        """Return the index of the first device of each TPU slice."""
        first: dict[int, int] = {}
        for index, device in reversed(list(enumerate(self.devices))):
            first[_slice_of(device)] = index
        return tuple(first.values())[::-1]

    def rate(self, devices: Sequence[Device]) -> tuple[str, float]:
        """Return what carries a collective between devices, and its bytes per second, one way."""
        chip = self.chip
        if chip.link == 0.0:
            return "memory", chip.bandwidth
        if len({_slice_of(device) for device in devices}) > 1:
            return "network", chip.network
        if chip.group:
            machines = {device.id // chip.group for device in devices}
            if len(machines) > 1:
                return "network", chip.network
            return "switch", chip.link * SWITCH_SHARE
        coords = _coords(devices)
        ways = 0
        for dim in range(coords.shape[1]):
            length = len(set(coords[:, dim].tolist()))
            if length > 1:
                ways += 2 if self._is_ring(length, dim) else 1
        return "links", chip.link * max(1, ways)

    def _is_ring(self, length: int, dim: int) -> bool:
        """Return whether `length` devices go all the way around the torus along a dimension."""
        extent, wrap = self.extent[dim], self.chip.wrap
        return length == extent and wrap > 0 and extent % wrap == 0


def _slice_of(device: Device) -> int:
    return getattr(device, "slice_index", 0)


def _coords(devices: Sequence[Device]) -> np.ndarray:
    """Return the coordinates of TPU devices in their torus: an array of shape (devices, dims)."""
    return np.array([device.coords for device in devices])  # type: ignore[attr-defined]
