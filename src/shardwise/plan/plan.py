"""`Plan`: what one training step needs on each device of a mesh, and how it is written as JSON.

This module is the only one that knows the schema. It needs no JAX, so that a report can read the
plan of a finished run anywhere. `plan/compile.py` makes plans.
"""

import dataclasses
import functools
import math
import reprlib
import types
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from shardwise.text import Json, show_bytes

# The value of an option that a plan varies, such as `accumulate` or `remat`.
OptionValue: TypeAlias = str | int | float | bool | None

# A plan is also read from run directories that were damaged or made by strangers, and ends up on a
# page. Longer texts are truncated, and larger structures are rejected.
MAX_TEXT = 2000
MAX_COUNT = 2**53
MAX_NUMBER = 1e300
MAX_AXES = 12
MAX_DIMS = 32

# Where each field of `Plan.as_json` comes from.
SOURCES = {
    "compiler": [
        "memory",
        "buffers",
        "flops",
        "bytes",
        "traffic.kind",
        "traffic.axes",
        "traffic.count",
        "traffic.bytes",
    ],
    "model of the hardware": [
        "times",
        "traffic.seconds",
        "traffic.waited",
        "items_per_second",
        "mfu",
        "limit",
    ],
    "trace": [
        "model_flops",
        "step_flops",
        "matmul_flops",
        "matmul_lines",
        "matmul_choices",
        "leaves",
        "items",
        "inactive_params",
        "microbatches",
        "bubble",
    ],
}


@dataclass(frozen=True)
class Memory:
    """Peak memory of one device in bytes, by kind, as the compiler reports it.

    Attributes:
        parameters: model parameters, frozen ones included.
        optimizer: optimizer state.
        other: other variables of the model (batch statistics), the step counter and the program.
        batch: the device's shard of the batch.
        temporaries: activations kept for the backward pass, gradients and scratch space.
    """

    parameters: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    batch: float = 0.0
    temporaries: float = 0.0

    @property
    def state(self) -> float:
        """Bytes that do not depend on the batch size."""
        return self.parameters + self.optimizer + self.other

    @property
    def peak(self) -> float:
        """Bytes of all kinds together."""
        return self.state + self.batch + self.temporaries


@dataclass(frozen=True)
class Buffer:
    """One of the largest temporary buffers.

    Attributes:
        name: the operation that writes it, such as "jit(step)/jvp()/dot_general".
        shape: dtype and shape as XLA prints them, such as "bf16[8192,768]".
        bytes: size on one device.
    """

    name: str
    shape: str
    bytes: float


@dataclass(frozen=True)
class PlannedMatmul:
    """Matmuls of one size in the forward pass, and whether they use 8 bits.

    Attributes:
        rows: the size of the left operand, usually the number of tokens.
        depth: the size of the dimension that is contracted.
        columns: the size of the right operand.
        why_not: why they do not use 8 bits; "" if they do.
        count: how many there are.
    """

    rows: int
    depth: int
    columns: int
    why_not: str
    count: int


@dataclass(frozen=True)
class PlannedLeaf:
    """One parameter and its sharding.

    Attributes:
        path: name of the parameter, such as "blocks/0/up/kernel".
        shape: global shape.
        dtype: dtype, such as "float32".
        axes: for each dim, the mesh axes that it is sharded over.
        layout: the same as text, such as "(-, model)".
        bytes: size of one device's shard.
        why: the rule that decided the sharding.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]
    layout: str
    bytes: float
    why: str


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind along the same mesh axes, in one step.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter" ...
        axes: mesh axes that the collectives span, such as "fsdp" or "data*model".
        link: what carries them: "links" (TPU), "switch" (GPUs of one machine), "network", "memory".
        count: number of collectives.
        bytes: bytes of the complete arrays, summed over the collectives.
        seconds: estimated time of the collectives.
        waited: the part of `seconds` that no computation hides.
    """

    kind: str
    axes: str
    link: str
    count: int
    bytes: float
    seconds: float
    waited: float


@dataclass(frozen=True)
class Times:
    """Estimated seconds of one step.

    Attributes:
        total: seconds of the step.
        arithmetic: seconds in instructions that are bound by arithmetic.
        memory: seconds in instructions that are bound by memory bandwidth.
        network: seconds of waiting for collectives, by mesh axes.
        bound: the largest part: "arithmetic", "memory" or "network on <axes>".
    """

    total: float
    arithmetic: float
    memory: float
    network: dict[str, float]
    bound: str


@dataclass(frozen=True)
class Plan:
    """What one training step needs on each device of a mesh. `shardwise.plan_run` makes one.

    Attributes:
        target: the target that was planned for, such as "v5e:4x4".
        chip: name of the chip.
        mesh: size of each mesh axis.
        options: the options that were varied, such as `{"accumulate": 2, "remat": "block"}`.
        batch: global shape of each array of the batch.
        items: number of items that the loss averages over in one step: tokens, images ...
        unit: name of an item.
        num_params: number of model parameters.
        inactive_params: those of experts that a token does not pass through.
        memory: peak memory of one device, by kind.
        limit: bytes that a program may use on one device.
        fits: whether the peak is within the limit.
        buffers: the largest temporary buffers, largest first.
        flops: FLOP of one device in one step as compiled, with rematerialization.
        model_flops: FLOP of all devices: the forward pass, and twice as much for the backward pass.
        bytes: bytes that one device reads from and writes to its memory in one step.
        traffic: the collectives of one step, largest first.
        times: estimated times, or None if the speed of the hardware is unknown.
        peak_flops: peak FLOP per second of all devices, or None if it is unknown.
        leaves: the parameters and their shardings.
        unknown_kernels: number of calls of each custom kernel whose FLOP are unknown.
        matmul_flops: FLOP of the forward pass by the dtype of the operands, largest first.
        matmul_lines: the line of the user's code with the most of them, by dtype.
        matmul_choices: with `Run.matmul_dtype`, the matmuls of the forward pass by size, and which
            of them use 8 bits.
        step_flops: FLOP of all devices in the step as traced: those of the model, and those of
            recomputed activations, masked scores and the padding of kernels.
        microbatches: number of microbatches in a pipeline; 0 on a mesh without a stage axis.
        bubble: share of the time of a pipeline in which a stage has no microbatch to work on.
        compile_seconds: seconds that tracing and compiling took.
        compile_memory: largest memory of the planning process so far, in bytes.
    """

    target: str
    chip: str
    mesh: dict[str, int]
    options: dict[str, OptionValue]
    batch: dict[str, tuple[int, ...]]
    items: int
    unit: str
    num_params: int
    memory: Memory
    limit: float
    fits: bool
    buffers: list[Buffer]
    flops: float
    model_flops: float
    bytes: float
    traffic: list[Traffic]
    times: Times | None
    peak_flops: float | None
    leaves: list[PlannedLeaf]
    unknown_kernels: dict[str, int] = field(default_factory=dict)
    matmul_flops: dict[str, float] = field(default_factory=dict)
    matmul_lines: dict[str, str] = field(default_factory=dict)
    matmul_choices: list[PlannedMatmul] = field(default_factory=list)
    step_flops: float = 0.0
    inactive_params: int = 0
    microbatches: int = 0
    bubble: float = 0.0
    compile_seconds: float = 0.0
    compile_memory: float = 0.0

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def items_per_second(self) -> float | None:
        """Throughput of all devices, or None if the speed of the hardware is unknown."""
        return self.items / self.times.total if self.times else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization: the share of the peak that `model_flops` make up.

        Recomputed activations do not count, as is usual.
        """
        if self.times is None or not self.peak_flops:
            return None
        return self.model_flops / self.times.total / self.peak_flops

    def line(self) -> str:
        """Return the plan in one line: step time and memory of a device."""
        memory = (
            f"{show_bytes(self.memory.peak)} of {show_bytes(self.limit)} per device"
        )
        return (
            f"{self.times.total * 1e3:.1f} ms per step, {memory}"
            if self.times
            else memory
        )

    def as_json(self) -> Json:
        """Return the plan as a JSON object, with the figures that follow from its fields.

        `plan.json` of a run directory, `shardwise plan --json` and the plan cache contain it.
        """
        derived = {
            "num_devices": self.num_devices,
            "peak": self.memory.peak,
            "seconds": self.times.total if self.times else None,
            "items_per_second": self.items_per_second,
            "mfu": self.mfu,
            "sources": SOURCES,
        }
        return {**dataclasses.asdict(self), **derived}

    @classmethod
    def from_json(cls, obj: object) -> "Plan":
        """Return the plan that `as_json` wrote.

        The types of the dataclasses above are the schema. Derived figures are computed again.

        Args:
            obj: what `json.loads` returned. It may come from a damaged or hostile file.

        Raises:
            ValueError: a field is missing or has a wrong type or range. The message names it.

        Example:
            >>> record = json.loads(Path("runs/a/plan.json").read_text())  # doctest: +SKIP
            >>> Plan.from_json(record["plan"]).fits  # doctest: +SKIP
            True
        """
        plan = _decode_fields(cls, obj, "plan")
        if not 0 < len(plan.mesh) <= MAX_AXES or 0 in plan.mesh.values():
            raise ValueError(f"plan.mesh: {plan.mesh} is not a mesh.")
        for leaf in plan.leaves:
            if len(leaf.axes) > len(leaf.shape) or len(leaf.shape) > MAX_DIMS:
                raise ValueError(
                    f"plan.leaves: '{leaf.path}' has a shape that cannot be sharded."
                )
        if plan.times is not None and not plan.times.total:
            raise ValueError("plan.times.total: 0 seconds per step.")
        for name, expected in (
            ("num_devices", plan.num_devices),
            ("peak", plan.memory.peak),
        ):
            written = _checked(obj, dict, "an object", "plan").get(name, expected)
            if written != expected:
                raise ValueError(
                    f"plan.{name}: {reprlib.repr(written)} instead of {expected}."
                )
        return plan


T = TypeVar("T")


def _decode_fields(kind: type[T], value: object, where: str) -> T:
    """Return a dataclass from a JSON object. Fields with a default may be missing."""
    entries = _checked(value, dict, "an object", where)
    decoded: dict[str, object] = {}
    for name, (annotation, is_required) in _schema(kind).items():  # type: ignore[arg-type]
        if name in entries:
            decoded[name] = _decode(annotation, entries[name], f"{where}.{name}")
        elif is_required:
            raise ValueError(f"{where}.{name}: missing.")
    return kind(**decoded)


@functools.cache
def _schema(kind: Hashable) -> dict[str, tuple[object, bool]]:
    """Return, for each field of a dataclass, its type and whether it has no default."""
    assert isinstance(kind, type)
    hints = get_type_hints(kind)
    schema: dict[str, tuple[object, bool]] = {}
    for f in dataclasses.fields(kind):
        has_default = f.default is not dataclasses.MISSING
        has_factory = f.default_factory is not dataclasses.MISSING
        schema[f.name] = (hints[f.name], not (has_default or has_factory))
    return schema


def _decode(annotation: object, value: object, where: str) -> object:
    """Return `value` as the type that a field is annotated with."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _decode_fields(annotation, value, where)
    if annotation == OptionValue:
        return _decode_option(value, where)
    if origin is types.UnionType:
        # Only `X | None` occurs.
        return None if value is None else _decode(args[0], value, where)
    if origin is dict:
        decoded: dict[str, object] = {}
        for name, entry in _checked(value, dict, "an object", where).items():
            key = str(name)[:MAX_TEXT]
            decoded[key] = _decode(args[1], entry, f"{where}.{key}")
        return decoded
    if origin is list or origin is tuple:
        items = _checked(value, (list, tuple), "a list", where)
        return origin(
            _decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(items)
        )
    return _decode_scalar(annotation, value, where)


def _decode_option(value: object, where: str) -> object:
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if value is None:
        return None
    return _checked(value, (bool, int, float), "a string or a number", where)


def _decode_scalar(annotation: object, value: object, where: str) -> object:
    if annotation is str:
        return _checked(value, str, "a string", where)[:MAX_TEXT]
    if annotation is bool:
        return _checked(value, bool, "true or false", where)
    # `bool` is a subclass of `int` in Python.
    if isinstance(value, bool):
        raise ValueError(f"{where}: {value} is not a number.")
    if annotation is int:
        count = _checked(value, int, "an integer", where)
        if 0 <= count < MAX_COUNT:
            return count
    elif (number := _checked(value, (int, float), "a number", where)) >= 0:
        # Infinity is valid: the memory limit of unknown hardware. NaN is not.
        return float(number) if number < MAX_NUMBER else math.inf
    raise ValueError(f"{where}: {reprlib.repr(value)} is out of range.")


def _checked(
    value: object, kind: type[T] | tuple[type[T], ...], expected: str, where: str
) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {reprlib.repr(value)} is not {expected}.")
    return value
