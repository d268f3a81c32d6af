"""How long a compiled program should take: its instructions in their order, each by what bounds it.

An instruction takes as long as its arithmetic or its bytes need, whichever is longer; an exchange begun early runs beside the
instructions that follow, and what it is not done by when its result is needed is waited for. TPU compilers estimate the
cycles of an instruction themselves, which then stand for arithmetic and bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardwise.hardware import Chip
from shardwise.plan.hlo import Collective, Computation, Op, Program, Work, cycles

SHORT = 1240  # tokens at which fused attention on GPUs reaches half of what it reaches for very long rows
HOP = 1e-6  # seconds that one step of an exchange takes at least


@dataclass(frozen=True)
class Traffic:
    """All exchanges of one kind along the same axes of the mesh, in one step."""

    kind: str
    axes: str  # "fsdp", "data*model"
    link: str  # "links", "switch", "network"
    count: int
    bytes: float  # whole arrays, as one device has them before or after
    seconds: float
    waited: float  # of them, what no computation covers


@dataclass
class Estimate:
    """Of one step on one device. Times add up to `seconds`; of `network`, only what is waited for counts."""

    seconds: float = 0.0
    arithmetic: float = 0.0  # seconds of instructions that arithmetic bounds
    memory: float = 0.0  # seconds of instructions that bytes bound
    network: dict[str, float] = field(default_factory=dict)  # seconds waited, by axes
    flops: float = 0.0
    bytes: float = 0.0
    traffic: dict[tuple[str, str, str], Traffic] = field(default_factory=dict)
    unknown: dict[str, int] = field(
        default_factory=dict
    )  # kernels whose arithmetic is not known, and their calls

    @property
    def bound(self) -> str:
        parts = {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            **{f"network on {axes}": s for axes, s in self.network.items()},
        }
        return max(parts, key=lambda name: parts[name])

    def add(self, other: "Estimate", times: int) -> None:
        self.seconds += other.seconds * times
        self.arithmetic += other.arithmetic * times
        self.memory += other.memory * times
        self.flops += other.flops * times
        self.bytes += other.bytes * times
        for axes, seconds in other.network.items():
            self.network[axes] = self.network.get(axes, 0.0) + seconds * times
        for kernel, calls in other.unknown.items():
            self.unknown[kernel] = self.unknown.get(kernel, 0) + calls * times
        for t in other.traffic.values():
            self.count(
                Traffic(
                    t.kind,
                    t.axes,
                    t.link,
                    t.count * times,
                    t.bytes * times,
                    t.seconds * times,
                    t.waited * times,
                )
            )

    def count(self, t: Traffic) -> None:
        key = (t.kind, t.axes, t.link)
        if (old := self.traffic.get(key)) is not None:
            t = Traffic(
                *key,
                old.count + t.count,
                old.bytes + t.bytes,
                old.seconds + t.seconds,
                old.waited + t.waited,
            )
        self.traffic[key] = t

    def wait(self, t: Traffic, seconds: float) -> None:
        self.seconds += seconds
        self.network[t.axes] = self.network.get(t.axes, 0.0) + seconds
        self.count(Traffic(t.kind, t.axes, t.link, 0, 0.0, 0.0, seconds))


def estimate(program: Program, chip: Chip, mesh: Mesh) -> Estimate:
    """Of the program on one device of `mesh`."""
    return _run(program, program.entry, chip, _Wires(mesh, chip))


def axis_rate(mesh: Mesh, chip: Chip, axis: str) -> float:
    """Bytes a second, one way, that one device exchanges along an axis of the mesh."""
    index = tuple(mesh.axis_names).index(axis)
    along = np.moveaxis(mesh.devices, index, -1).reshape(-1, mesh.devices.shape[index])[0]
    return _Wires(mesh, chip).rate(list(along))[1]


def _run(program: Program, computation: Computation, chip: Chip, wires: "_Wires") -> Estimate:
    total = Estimate()
    free: dict[str, float] = {}  # when each set of axes has carried what it was given
    pending: dict[str, tuple[float, Traffic]] = {}  # by channel: when the exchange is done
    ends = _last_mentions(program, computation)

    def finish(channel: str) -> None:
        done, traffic = pending.pop(channel)
        if done > total.seconds:
            total.wait(traffic, done - total.seconds)

    for op in computation.ops:
        if op.opcode == "while":
            total.add(
                _run(program, program.computations[op.called("body") or ""], chip, wires),
                program.trips(op),
            )
        elif op.opcode == "conditional":
            branches = [
                _run(program, program.computations[name], chip, wires)
                for name in _branches(op)
                if name in program.computations
            ]
            if branches:
                total.add(max(branches, key=lambda branch: branch.seconds), 1)
        elif op.opcode == "call":
            for inner in program.inner(op):
                total.add(_run(program, inner, chip, wires), 1)
        elif (collective := program.collective(op, computation)) is not None:
            key = _key(collective)
            if key not in pending:
                traffic = wires.traffic(collective)
                begin = max(total.seconds, free.get(traffic.axes, 0.0))
                free[traffic.axes] = begin + traffic.seconds
                pending[key] = (begin + traffic.seconds, traffic)
                total.count(traffic)
            if (
                op.opcode == "fusion" and (work := program.work(computation, op)).flops
            ):  # it computes while it exchanges
                _take(total, work, op, chip)
            if ends[key] == op.name:
                finish(key)
        elif op.opcode.endswith("-done") and op.opcode != "send-done" and op.operands:
            begun = computation.by_name.get(op.operands[0].partition("#")[0])
            found = program.collective(begun, computation) if begun is not None else None
            if found is not None and _key(found) in pending:
                finish(_key(found))
        else:
            _take(total, program.work(computation, op), op, chip)
    for channel in list(pending):
        finish(channel)
    return total


def _take(total: Estimate, work: Work, op: Op, chip: Chip) -> None:
    """One instruction, alone on the device."""
    if op.opcode == "fusion-start" or (
        chip.clock and op.opcode.endswith("-start")
    ):  # runs beside the arithmetic
        total.bytes += work.bytes
        return
    share = chip.attention if work.kernel or work.attends else chip.products
    if work.attends:
        share *= work.attends / (work.attends + SHORT)
    rate = chip.flops * share * (chip.exact if _is_exact(op) else 1.0)
    arithmetic, memory = work.flops / rate, work.bytes / (chip.bandwidth * chip.copies)
    counted = cycles(op) / chip.clock if chip.clock else 0.0
    seconds = counted or max(arithmetic, memory)
    if work.flops or work.bytes:
        seconds += chip.launch
    if work.kernel and not work.is_known:
        total.unknown[work.kernel] = total.unknown.get(work.kernel, 0) + 1
    total.seconds += seconds
    total.flops += work.flops
    total.bytes += work.bytes
    if arithmetic > memory:
        total.arithmetic += seconds
    else:
        total.memory += seconds


def _is_exact(op: Op) -> bool:
    return "operand_precision={highest" in op.attributes


def _last_mentions(program: Program, computation: Computation) -> dict[str, str]:
    """The instruction that ends each exchange: the last in which it stands, for one without a `-done` of its own."""
    found: dict[str, str] = {}
    for op in computation.ops:
        collective = (
            None
            if op.opcode in ("while", "conditional", "call")
            else program.collective(op, computation)
        )
        if collective is not None:
            found[_key(collective)] = (
                "" if op.opcode.endswith("-start") or op.opcode in ("send", "recv") else op.name
            )
    return found


def _key(collective: Collective) -> str:
    return f"{collective.kind} {collective.channel} {collective.bytes}"


def _branches(op: Op) -> list[str]:
    inside = op.attributes.partition("branch_computations={")[2].partition("}")[0]
    names = [name.strip().lstrip("%") for name in inside.split(",")] if inside else []
    return names or [
        name for key in ("true_computation", "false_computation") if (name := op.called(key))
    ]


class _Wires:
    """The links between the devices of a mesh, seen from its axes."""

    def __init__(self, mesh: Mesh, chip: Chip):
        self.chip = chip
        self.names = tuple(mesh.axis_names)
        self.sizes = tuple(mesh.shape.values())
        self.devices = list(mesh.devices.flat)
        self.extent = _extent(self.devices)
        self.seen: dict[tuple[str, Any, bool], tuple[str, int, str, float]] = {}

    def traffic(self, collective: Collective) -> Traffic:
        key = (collective.kind, collective.groups, collective.across_slices)
        if key not in self.seen:
            self.seen[key] = self._wire(collective)
        axes, size, link, rate = self.seen[key]
        share = (size - 1) / size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(collective.kind, share)
        seconds = (
            factor * collective.bytes / rate + HOP * max(1, math.ceil(math.log2(size)))
            if size > 1
            else 0.0
        )
        return Traffic(collective.kind, axes, link, 1, collective.bytes, seconds, 0.0)

    def _wire(self, collective: Collective) -> tuple[str, int, str, float]:
        """Axes, devices in a group, kind of link, bytes a second."""
        groups = collective.groups or (tuple(range(len(self.devices))),)
        members = groups[0]
        if collective.across_slices:  # one device of each slice
            members = tuple(
                {
                    getattr(d, "slice_index", 0): i
                    for i, d in reversed(list(enumerate(self.devices)))
                }.values()
            )[::-1]
        if collective.kind == "collective-permute":
            members = max(groups, key=lambda pair: abs(pair[0] - pair[-1]))
        places = np.array(np.unravel_index(members, self.sizes)).T
        varying = [name for i, name in enumerate(self.names) if len(set(places[:, i])) > 1]
        link, rate = self.rate([self.devices[m] for m in members])
        return "*".join(varying) or "none", len(members), link, rate

    def rate(self, devices: list[object]) -> tuple[str, float]:
        chip = self.chip
        if chip.link == 0.0:
            return "memory", chip.bandwidth
        if len({getattr(d, "slice_index", 0) for d in devices}) > 1:
            return "network", chip.network
        if chip.group:
            return (
                ("switch", chip.link * 0.8)
                if self._in_one_machine(devices)
                else ("network", chip.network)
            )
        coords = np.array([d.coords for d in devices])  # type: ignore[attr-defined]
        spanned = [dim for dim in range(coords.shape[1]) if len(set(coords[:, dim])) > 1]
        ways = sum(2 if self._closes(coords[:, dim], dim) else 1 for dim in spanned)
        return "links", chip.link * max(1, ways)

    def _in_one_machine(self, devices: list[object]) -> bool:
        ids = [d.id // self.chip.group for d in devices]  # type: ignore[attr-defined]
        return len(set(ids)) == 1

    def _closes(self, coords: np.ndarray, dim: int) -> bool:
        """Whether the devices go all the way around the torus along a dimension."""
        return (
            len(set(coords)) == self.extent[dim]
            and self.chip.wrap > 0
            and self.extent[dim] % self.chip.wrap == 0
        )


def _extent(devices: list[object]) -> Mapping[int, int]:
    if not hasattr(devices[0], "coords"):
        return {}
    coords = np.array([d.coords for d in devices])  # type: ignore[attr-defined]
    return {dim: len(set(coords[:, dim])) for dim in range(coords.shape[1])}
