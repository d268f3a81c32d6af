"""What a run will take on each device, known by compiling its very step without allocating anything.

Memory, arithmetic, bytes and exchanges come from the compiled program; times come from a model of the hardware
(`roofline.py`, `hardware.py`).
"""

import dataclasses
import json
import math
import os
import re
import resource
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from shardwise.errors import ConfigError
from shardwise.files.cache import cache_folder
from shardwise.files.durable import text_digest, write_atomically
from shardwise.flops import count_kernels
from shardwise.hardware import Chip
from shardwise.mesh import make_mesh, mesh_text
from shardwise.plan.hlo import Program, parse
from shardwise.plan.roofline import Estimate, Traffic, estimate
from shardwise.plan.target import Target, find_target, local_target
from shardwise.run import Prepared, Run, package_version, prepare
from shardwise.sharding import show_spec
from shardwise.text import show_bytes
from shardwise.tree import named_leaves, num_bytes

NO_CHIP = Chip("unknown", math.inf, math.inf, math.inf)  # counts without telling times
KINDS = {
    "state.params": "parameters",
    "state.opt_state": "optimizer",
    "state.other": "other",
    "state.step": "other",
    "rows": "batch",
}
KINDS |= {"state.frozen": "parameters"}
VALUE = re.compile(
    r" value: <\d+ ([\w.\-]+)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)"
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, from the compiler."""

    parameters: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0  # batch statistics and the like, and the program itself
    batch: float = 0.0
    temporaries: float = 0.0  # activations kept for the backward pass, gradients, scratch

    @property
    def state(self) -> float:
        """What does not grow with the batch."""
        return self.parameters + self.optimizer + self.other

    @property
    def peak(self) -> float:
        return self.state + self.batch + self.temporaries


@dataclass(frozen=True)
class Buffer:
    """One of the largest pieces of temporary memory."""

    name: str  # the operation that makes it
    shape: str
    bytes: float


@dataclass(frozen=True)
class PlannedLeaf:
    """A parameter, and how it is cut."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]  # the mesh axes that cut each dim
    layout: str
    bytes: float  # on one device
    why: str


@dataclass(frozen=True)
class Times:
    """Seconds of a step, from the model of the hardware."""

    total: float
    arithmetic: float  # in instructions bound by arithmetic
    memory: float  # in instructions bound by the memory's bandwidth
    network: dict[str, float]  # waited for exchanges, by mesh axes
    bound: str


@dataclass(frozen=True)
class Plan:
    """What one step takes on each device of a mesh."""

    target: str
    chip: str
    mesh: dict[str, int]
    options: dict[str, Any]  # what the plan varies: accumulate, remat ...
    batch: dict[str, tuple[int, ...]]  # shapes of the global batch
    items: int  # of the loss in a step: tokens, images
    unit: str
    num_params: int
    memory: Memory
    limit: float  # bytes that a program may use on one device
    fits: bool
    buffers: list[Buffer]
    flops: float  # of one device in a step, as compiled: with rematerialization
    model_flops: float  # of all devices: forward, and twice as much backward
    bytes: float  # to and from the memory of one device in a step
    traffic: list[Traffic]
    times: Times | None  # None where the hardware is not known
    peak_flops: float | None  # of all devices, a second
    leaves: list[PlannedLeaf]
    unknown_kernels: dict[str, int] = field(default_factory=dict)
    compile_seconds: float = 0.0
    compile_memory: float = 0.0  # largest memory of the planning process, bytes

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def items_per_second(self) -> float | None:
        return self.items / self.times.total if self.times else None

    @property
    def mfu(self) -> float | None:
        """Share of the peak that the arithmetic of the model, without what is computed twice, makes up."""
        return (
            self.model_flops / self.times.total / self.peak_flops
            if self.times and self.peak_flops
            else None
        )

    def line(self) -> str:
        """The plan in a few words."""
        time = f"{self.times.total * 1e3:.1f} ms a step, " if self.times else ""
        return f"{time}{show_bytes(self.memory.peak)} of {show_bytes(self.limit)} on each device"

    def as_json(self) -> dict[str, Any]:
        derived = {
            "num_devices": self.num_devices,
            "peak": self.memory.peak,
            "seconds": self.times.total if self.times else None,
            "items_per_second": self.items_per_second,
            "mfu": self.mfu,
            "sources": {
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
                "trace": ["model_flops", "leaves", "items"],
            },
        }
        return {**dataclasses.asdict(self), **derived}


def plan_run(
    run: Run,
    target: Target | str | None = None,
    options: dict[str, Any] | None = None,
    cache: Path | None = None,
) -> Plan:
    """Compiles the step of `run` for `target`, such as "v5e:4x4" (the devices at hand by default). Too large is an answer: `fits` is False.

    options: what the plan shall say of the run besides. cache: a folder in which answers are kept and found again.
    """
    target = (
        local_target()
        if target is None
        else find_target(target)
        if isinstance(target, str)
        else target
    )
    if isinstance(run.mesh, Mesh) and list(run.mesh.devices.flat) != list(target.devices):
        run = replace(run, mesh=mesh_text(run.mesh))
    run = replace(run, mesh=make_mesh(run.mesh, target.devices))
    prepared = prepare(run)
    begun = time.perf_counter()
    traced = prepared.step.trace()
    lowered = traced.lower()
    file = (
        cache
        / f"{_digest(lowered, target, run.unit, _batch_shapes(prepared), _leaves(prepared))}.json"
        if cache is not None
        else None
    )
    if file is not None and (known := _load(file)) is not None:
        return replace(known, options={"accumulate": run.accumulate, **(options or {})})
    compiled = compile_and_read(lowered, count_kernels(traced.jaxpr.jaxpr))
    plan = make_plan(run, prepared, target, compiled, options or {}, time.perf_counter() - begun)
    if file is not None:
        with suppress(OSError):  # an answer that cannot be kept is still an answer
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(dataclasses.asdict(plan)))
    return plan


def _digest(lowered: Any, target: Target, *about: Any) -> str:
    """Of all that the answer depends on: the program, the target, the compiler, and what shardwise makes of its words."""
    ours = (
        (Path(__file__).parents[1] / f"{name}.py").read_text()
        for name in ("plan/hlo", "hardware", "plan/roofline", "plan/plan", "flops", "run", "step")
    )
    compilers = [package_version(name) for name in ("jax", "jaxlib", "libtpu")]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    devices = [
        target.name,
        target.kind,
        str(target.limit),
        *(str(device) for device in target.devices),
    ]
    return text_digest(
        "\n".join([lowered.as_text(), *devices, *compilers, *flags, *map(str, about), *ours])
    )[:32]


def _load(file: Path) -> Plan | None:
    """A plan that was kept; None where there is none, or it cannot be read."""
    try:
        d = json.loads(file.read_text())
        parts: dict[str, Any] = {
            "memory": Memory(**d["memory"]),
            "buffers": [Buffer(**b) for b in d["buffers"]],
            "traffic": [Traffic(**t) for t in d["traffic"]],
            "times": Times(**d["times"]) if d["times"] else None,
            "leaves": [
                PlannedLeaf(
                    **{**x, "shape": tuple(x["shape"]), "axes": tuple(tuple(a) for a in x["axes"])}
                )
                for x in d["leaves"]
            ],
            "batch": {name: tuple(shape) for name, shape in d["batch"].items()},
        }
        return Plan(**{**d, **parts})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def plan_cache() -> Path | None:
    """Where plans are kept by default; None for a user without a home."""
    return cache_folder("plans")


def compile_run(run: Run, prepared: Prepared) -> tuple[Plan, Prepared]:
    """The plan of a run on the devices at hand, and the run with its step compiled: what was planned is what runs."""
    target, begun = local_target(), time.perf_counter()
    traced = prepared.step.trace()
    kernels, lowered, jitted = (
        count_kernels(traced.jaxpr.jaxpr),
        traced.lower(),
        prepared.step.function,
    )
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:  # TPU compilers refuse what does not fit
        if not _is_too_large(error):
            raise
        return make_plan(
            run,
            prepared,
            target,
            compile_and_read(lowered, kernels),
            {},
            time.perf_counter() - begun,
        ), prepared
    m, spec = program.memory_analysis(), prepared.spec
    parts = ({**spec.params, **spec.frozen}, spec.opt_state, spec.other)
    params, optimizer, other = (
        float(sum(p.bytes_per_device for p in part.values())) for part in parts
    )
    rows = prepared.step.layout.sharding
    batch = float(
        sum(
            num_bytes(rows.shard_shape(x.shape), x.dtype)
            for x in jax.tree.leaves(prepared.step.batch)
        )
    )
    peak = (
        m.argument_size_in_bytes
        + m.temp_size_in_bytes
        + m.output_size_in_bytes
        - m.alias_size_in_bytes
        + m.generated_code_size_in_bytes
    )
    memory = Memory(
        params, optimizer, other, batch, max(0.0, peak - params - optimizer - other - batch)
    )
    is_readable = (
        target.chip is not None and target.platform == "gpu"
    )  # TPU programs only from what the compiler writes on the way
    compiled = Compiled(parse(program.as_text(), kernels) if is_readable else None, memory, [])
    plan = make_plan(run, prepared, target, compiled, {}, time.perf_counter() - begun)

    def function(state: Any, batch: Any) -> Any:
        try:
            return program(state, batch)
        except TypeError:  # a batch of another shape than the first: compiled when it comes
            return jitted(state, batch)

    return plan, replace(prepared, step=replace(prepared.step, function=function))


def check_fits(plan: Plan) -> None:
    """Refuses a plan that needs more memory than there is."""
    if plan.fits:
        return
    parts = ", ".join(
        f"{show_bytes(value)} {name}" for name, value in dataclasses.asdict(plan.memory).items()
    )
    raise ConfigError(
        f"the step needs {show_bytes(plan.memory.peak)} on each device ({parts}), and there are {show_bytes(plan.limit)} ({plan.chip}).\n"
        "`shardwise plan` with the same arguments shows the largest buffers and what would make it fit; --no-plan tries it all the same."
    )


@dataclass(frozen=True)
class Compiled:
    """What a compiler said of a program."""

    program: Program | None  # None where it was not read: then there is nothing to count
    memory: Memory
    buffers: list[Buffer]


def compile_and_read(lowered: Any, kernels: dict[str, float]) -> Compiled:
    """Compiles, and reads what the compiler wrote on the way: of a program that is too large for its device, too."""
    with tempfile.TemporaryDirectory(prefix="shardwise-plan-") as name:
        folder = Path(name)
        code = 0.0
        cached = bool(jax.config.jax_enable_compilation_cache)  # type: ignore[attr-defined]
        _use_cache(False)  # a program from JAX's own cache comes without a word about it
        try:
            compiled = lowered.compile(
                compiler_options={"xla_dump_to": name, "xla_dump_hlo_as_text": True}
            )
            code = float(compiled.memory_analysis().generated_code_size_in_bytes)
        except jax.errors.JaxRuntimeError as error:
            if not _is_too_large(error):
                raise ConfigError(
                    f"the step cannot be compiled for this target: {str(error).strip().splitlines()[0]}"
                ) from error
        finally:
            _use_cache(cached)
        text = _dumped(folder, ".after_codegen.txt") or _dumped(folder, "after_optimizations.txt")
        allocations = _dumped(folder, "after_optimizations-buffer-assignment.txt")
        if not allocations:
            raise ConfigError(
                f"the compiler of this target wrote no list of buffers (jax {jax.__version__}): its memory cannot be told."
            )
        program = parse(text, kernels)
        memory, buffers = read_allocations(allocations, program)
    return Compiled(program, replace(memory, other=memory.other + code), buffers)


def _use_cache(value: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", value)
    reset_cache()  # or it goes on as at the first compilation of the process


def _is_too_large(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _dumped(folder: Path, ending: str) -> str:
    """The text of the largest file with this ending: smaller ones belong to helper programs."""
    files = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    return files[-1].read_text(errors="replace") if files else ""


def read_allocations(text: str, program: Program, top: int = 12) -> tuple[Memory, list[Buffer]]:
    """Memory by kind, and the largest temporaries, from XLA's list of what it puts where."""
    parameters = {number: op.op_name for number, op in program.entry.parameters.items()}
    names = {
        op.name: op.op_name
        for computation in program.computations.values()
        for op in computation.ops
    }
    sums = dict.fromkeys((f.name for f in dataclasses.fields(Memory)), 0.0)
    values: list[tuple[int, int, str, str]] = []
    in_temporaries = False
    for line in text.splitlines():
        if found := re.match(r"allocation \d+: size (\d+), (.*)", line):
            size, about = float(found[1]), found[2]
            in_temporaries = "preallocated-temp" in about and not about.startswith("color")
            if about.startswith("color") or "thread-local" in about:  # on-chip memory; registers
                continue
            parameter = re.search(r"parameter (\d+)", about)
            origin = parameters.get(int(parameter[1]), "") if parameter else ""
            kind = next(
                (kind for prefix, kind in KINDS.items() if origin.startswith(prefix)),
                "other" if parameter else "temporaries",
            )
            sums[kind] += size
        elif in_temporaries and (found := VALUE.match(line)):
            values.append((int(found[2]), int(found[3]), found[1], found[4].partition("{")[0]))
        elif line.startswith(("Used values", "Total bytes")):
            break
    return Memory(**sums), _largest(values, names, top)


def _largest(
    values: list[tuple[int, int, str, str]], names: dict[str, str], top: int
) -> list[Buffer]:
    """The largest values that lie beside each other; what shares its place with a larger one is left out."""
    taken: list[tuple[int, int]] = []
    buffers: list[Buffer] = []
    for size, offset, name, shape in sorted(set(values), reverse=True):
        if all(offset >= end or offset + size <= start for start, end in taken):
            taken.append((offset, offset + size))
            buffers.append(Buffer(names.get(name) or name, shape, float(size)))
            if len(buffers) == top:
                break
    return buffers


def make_plan(
    run: Run,
    prepared: Prepared,
    target: Target,
    compiled: Compiled,
    options: dict[str, Any],
    seconds: float,
) -> Plan:
    spec, program = prepared.spec, compiled.program
    counted = (
        estimate(program, target.chip or NO_CHIP, spec.mesh) if program is not None else Estimate()
    )
    batch = {name: tuple(shape) for name, shape in _batch_shapes(prepared).items()}
    return Plan(
        target=target.name,
        chip=target.chip.name if target.chip else target.kind,
        mesh=dict(spec.mesh.shape),
        options={"accumulate": run.accumulate, **options},
        batch=batch,
        items=_items(run, prepared),
        unit=run.unit,
        num_params=spec.num_params,
        memory=compiled.memory,
        limit=target.limit,
        fits=compiled.memory.peak <= target.limit,
        buffers=compiled.buffers,
        flops=counted.flops,
        model_flops=prepared.flops,
        bytes=counted.bytes,
        traffic=sorted(counted.traffic.values(), key=lambda t: -t.bytes),
        times=_times(counted) if program is not None and target.chip is not None else None,
        peak_flops=prepared.peak_flops,
        leaves=_leaves(prepared),
        unknown_kernels=counted.unknown,
        compile_seconds=seconds,
        compile_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    )


def _times(found: Estimate) -> Times:
    return Times(found.seconds, found.arithmetic, found.memory, found.network, found.bound)


def _batch_shapes(prepared: Prepared) -> dict[str, Any]:
    rows = prepared.step.layout.rows
    return {
        name: (rows, *leaf.shape[1:]) for name, leaf in named_leaves(prepared.step.batch).items()
    }


def _items(run: Run, prepared: Prepared) -> int:
    """What the loss counts in a step. Where only computing tells: rows, or of tokens as many as the longest matrix of whole numbers has."""
    if (items := prepared.step.traced.items) is not None:
        return items
    leaves = jax.tree.leaves(prepared.step.batch)
    lengths = [
        leaf.shape[1]
        for leaf in leaves
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    return prepared.step.layout.rows * (
        max(lengths, default=1) if run.unit in ("tokens", "bytes", "characters") else 1
    )


def _leaves(prepared: Prepared) -> list[PlannedLeaf]:
    found = []
    for p in prepared.spec.params.values():
        entries = [*p.spec, *([None] * (len(p.shape) - len(p.spec)))]
        axes = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
        found.append(
            PlannedLeaf(
                p.path,
                p.shape,
                str(p.dtype),
                axes,
                show_spec(p.spec),
                float(p.bytes_per_device),
                p.reason,
            )
        )
    return found
