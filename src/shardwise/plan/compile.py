"""Compile the step of a run without allocating anything, and read what the compiler wrote.

Memory, FLOP, bytes and collectives are read from the compiled program. Times come from a model of
the hardware (`roofline.py`, `hardware.py`). See README.md in this folder.
"""

import dataclasses
import inspect
import json
import math
import os
import re
import resource
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypedDict

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh
from jax.stages import Lowered

from shardwise.data.layout import num_tokens
from shardwise.errors import ConfigError
from shardwise.files.cache import cache_folder, make_private
from shardwise.files.durable import text_digest, write_atomically
from shardwise.files.paths import AnyPath, local_path
from shardwise.findings import Finding
from shardwise.flops import count_kernels, count_step_flops
from shardwise.hardware import Chip
from shardwise.mesh import make_mesh, mesh_text
from shardwise.models.stack import bubble
from shardwise.plan.hlo import Program, parse
from shardwise.plan.plan import (
    Buffer,
    Memory,
    OptionValue,
    Plan,
    PlannedLeaf,
    PlannedMatmul,
    Times,
)
from shardwise.plan.roofline import Estimate, estimate
from shardwise.plan.target import (
    Target,
    find_target,
    local_target,
    missing_packages_named,
)
from shardwise.run import Prepared, Run, package_version, prepare
from shardwise.sharding import (
    Placement,
    Rules,
    axes_of_entry,
    context_axes,
    num_stages,
    show_spec,
)
from shardwise.step import TrainStep
from shardwise.text import show_bytes
from shardwise.tree import named_leaves, num_bytes

# Infinitely fast: counts FLOP, bytes and collectives of a program without estimating times.
NO_CHIP = Chip("unknown", math.inf, math.inf, math.inf)

# The kind of memory of an argument of the step, by the first part of its name. The compiler names
# an argument after the parameter of the Python function: `step(state, batch)`.
MEMORY_KINDS = {
    "state.params": "parameters",
    "state.frozen": "parameters",
    "state.opt_state": "optimizer",
    "state.other": "other",
    "state.step": "other",
    "batch": "batch",
}

# A context axis is idle if the devices repeat the arithmetic of the traced step at least this
# often, times its size.
IDLE = 0.9

# With a GPU, XLA measures whether cuBLAS or Triton multiplies faster, and it is cuBLAS for the
# large matrices of training. Without one it would take Triton for all, with more temporaries.
ABSENT_GPU = {"xla_gpu_enable_triton_gemm": False}

# The packages with compilers.
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")

# Units whose items are entries of a sequence, not complete examples.
SEQUENCE_UNITS = ("tokens", "bytes", "characters")


def plan_run(
    run: Run,
    target: Target | str | None = None,
    options: Mapping[str, OptionValue] | None = None,
    cache: AnyPath | None = None,
) -> Plan:
    """Return the plan of a run: compile its step for a target, allocating nothing.

    A step that is too large for the target is not an error: the plan says so in `fits`.

    Args:
        run: the run. Its mesh is laid over the devices of the target.
        target: devices to compile for, such as "v5e:4x4". The devices of this process by default.
        options: options that the plan mentions in addition to `accumulate`, such as `remat`.
        cache: a folder in which plans are stored and looked up.

    Raises:
        ConfigError: the target does not exist, or the step cannot be compiled for it.

    Example:
        >>> plan = shardwise.plan_run(run, "v5e:4x4")  # doctest: +SKIP
        >>> print(plan.line())  # doctest: +SKIP
        119.0 ms per step, 8.0 GiB of 15.8 GiB per device
    """
    folder = None if cache is None else local_path(cache)
    if target is None:
        target = local_target()
    elif isinstance(target, str):
        target = find_target(target)
    if isinstance(run.mesh, Mesh) and list(run.mesh.devices.flat) != list(
        target.devices
    ):
        run = replace(run, mesh=mesh_text(run.mesh))
    run = replace(run, mesh=make_mesh(run.mesh, target.devices))
    all_options = {"accumulate": run.accumulate, **(options or {})}
    prepared = prepare(run)
    start = time.perf_counter()
    with missing_packages_named(target):
        traced = prepared.step.trace()
        lowered = prepared.step.lower(traced)
    file = None
    if folder is not None:
        file = folder / f"{_digest(lowered, target, _known_fields(run, prepared))}.json"
        known = _load(file)
        if known is not None:
            return replace(known, options=all_options)
    with missing_packages_named(target):
        compiled = compile_and_read(
            lowered,
            count_kernels(traced.jaxpr.jaxpr),
            {} if target.is_attached else ABSENT_GPU,
        )
    seconds = time.perf_counter() - start
    plan = replace(
        make_plan(run, prepared, target, compiled, seconds),
        options=all_options,
        step_flops=count_step_flops(traced.jaxpr.jaxpr),
    )
    if file is not None:
        # A plan that cannot be stored is still a plan.
        with suppress(OSError):
            make_private(file.parent)
            write_atomically(file, json.dumps(plan.as_json()))
    return plan


def compile_run(run: Run, prepared: Prepared) -> tuple[Plan, Prepared]:
    """Return the plan of a run on the devices of this process, and the run with its step compiled.

    The step that was planned is the step that trains, so planning costs a run no second
    compilation.

    Args:
        run: the run.
        prepared: `prepare(run)`.

    Returns:
        The plan, and `prepared` with the compiled step. If a TPU compiler rejects the step because
        it is too large, the step stays uncompiled and the plan does not fit.
    """
    target = local_target()
    start = time.perf_counter()
    traced = prepared.step.trace()
    kernels = count_kernels(traced.jaxpr.jaxpr)
    lowered = prepared.step.lower(traced)
    try:
        step = prepared.step.compile(lowered)
    except jax.errors.JaxRuntimeError as error:
        if not _is_too_large(error):
            raise
        compiled = compile_and_read(lowered, kernels)
        return make_plan(
            run, prepared, target, compiled, time.perf_counter() - start
        ), prepared
    # A TPU program can only be read from the dump of its compilation, which a run does without. For
    # CPUs nothing but `find_idle_axes` needs it.
    is_readable = (target.chip is not None and target.platform == "gpu") or (
        target.platform == "cpu" and any(context_axes(prepared.spec.mesh, run.rules))
    )
    assert step.program is not None
    program = parse(step.program.as_text() or "", kernels) if is_readable else None
    compiled = Compiled(program, _reported_memory(step.program, prepared), [])
    plan = make_plan(run, prepared, target, compiled, time.perf_counter() - start)
    plan = replace(plan, step_flops=count_step_flops(traced.jaxpr.jaxpr))
    return plan, replace(prepared, step=step)


def check_fits(plan: Plan) -> None:
    """Raise if a plan needs more memory than a device has.

    Raises:
        ConfigError: the plan does not fit. The message lists the memory by kind.
    """
    if plan.fits:
        return
    kinds = dataclasses.asdict(plan.memory).items()
    parts = ", ".join(f"{show_bytes(value)} {name}" for name, value in kinds)
    raise ConfigError(
        f"the step needs {show_bytes(plan.memory.peak)} per device ({parts}), but {plan.chip} "
        f"has {show_bytes(plan.limit)}.\n`shardwise plan` with the same arguments shows the "
        "largest buffers and what would make it fit. --no-plan skips this check."
    )


def find_idle_axes(plan: Plan, rules: Rules) -> tuple[Finding, ...]:
    """Return the context axes of a plan whose devices all do the same work.

    Arithmetic that an axis of size n does not divide is done n times. It is compared with the step
    as traced, which computes the same activations again and pads the same kernels.
    """
    traced = max(plan.model_flops, plan.step_flops)
    if not traced:
        return ()
    repeated = plan.flops * plan.num_devices / traced
    return tuple(
        Finding(
            "idle-axis",
            f"the devices of mesh axis '{axis}' (size {size}) repeat each other's work: together "
            f"the devices compute {repeated:.1f} times the arithmetic of the step",
            "An operation of the model cannot stay sharded over tokens, for example "
            "x.reshape(-1, width) of sequences (B, T, width). Keep the dimensions B and T, or "
            f"use a mesh without '{axis}'.",
        )
        for axis, size in plan.mesh.items()
        if axis in rules.context and size > 1 and repeated > IDLE * size
    )


def check_divided(plan: Plan, rules: Rules) -> None:
    """Raise if a context axis of the mesh divides no arithmetic.

    Raises:
        ConfigError: the finding of `find_idle_axes`.
    """
    findings = find_idle_axes(plan, rules)
    if findings:
        raise ConfigError("\n".join(finding.line() for finding in findings))


def plan_cache() -> Path | None:
    """Return the default folder of the plan cache, or None for a user without a home directory."""
    return cache_folder("plans")


def _digest(lowered: Lowered, target: Target, known: Mapping[str, object]) -> str:
    """Return a digest of everything that a plan depends on, as the name of its cache file.

    These are the program, the target, the fields that are known before compiling, the compiler with
    its flags, and the code of shardwise that builds the step and reads what the compiler wrote.
    """
    folder = Path(__file__).parent
    # Named by an object in each file, so that a module may move.
    others = (Chip, count_kernels, Run, TrainStep)
    sources = [
        *sorted(folder.glob("*.py")),
        *(Path(inspect.getfile(o)) for o in others),
    ]
    compilers = [package_version(name) for name in COMPILERS]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    devices = [target.name, target.kind, str(target.limit), *map(str, target.devices)]
    parts = [lowered.as_text(), *devices, *compilers, *flags, str(known)]
    parts += [source.read_text() for source in sources]
    return text_digest("\n".join(parts))[:32]


def _load(file: Path) -> Plan | None:
    """Return a plan from the cache, or None if it is not there or damaged."""
    try:
        return Plan.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Compiled:
    """What a compiler reported about a program.

    Attributes:
        program: the compiled program, or None if it was not read.
        memory: peak memory of one device, by kind.
        buffers: the largest temporary buffers.
    """

    program: Program | None
    memory: Memory
    buffers: list[Buffer]


def compile_and_read(
    lowered: Lowered,
    kernels: Mapping[str, float],
    options: Mapping[str, bool] = MappingProxyType({}),
) -> Compiled:
    """Compile a step and read the program and the buffers that the compiler dumps on the way.

    The compiler writes its dump even if it then rejects the program as too large for the device.

    Args:
        lowered: the lowered step.
        kernels: FLOP of one call of each custom kernel.
        options: options of the compiler.

    Raises:
        ConfigError: the step cannot be compiled, or the compiler wrote no list of buffers.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-plan-") as name:
        folder = Path(name)
        code_bytes = 0.0
        cached = bool(jax.config.jax_enable_compilation_cache)  # type: ignore[attr-defined]
        # A program from JAX's own compilation cache comes without a dump.
        _use_compilation_cache(False)
        try:
            compiled = lowered.compile(
                compiler_options={
                    "xla_dump_to": name,
                    "xla_dump_hlo_as_text": True,
                    **options,
                }
            )
            code_bytes = float(_analysis(compiled).generated_code_size_in_bytes)
        except jax.errors.JaxRuntimeError as error:
            if not _is_too_large(error):
                reason = str(error).strip().splitlines()[0]
                raise ConfigError(
                    f"the step cannot be compiled for this target: {reason}"
                ) from error
        finally:
            _use_compilation_cache(cached)
        text = _dumped(folder, ".after_codegen.txt") or _dumped(
            folder, "after_optimizations.txt"
        )
        allocations = _dumped(folder, "after_optimizations-buffer-assignment.txt")
        if not allocations:
            raise ConfigError(
                "the compiler of this target wrote no list of buffers, so the memory of the step "
                f"is unknown (jax {jax.__version__}). Use a jax version that shardwise supports."
            )
        program = parse(text, kernels)
        memory, buffers = read_allocations(allocations, program)
    return Compiled(program, replace(memory, other=memory.other + code_bytes), buffers)


def _use_compilation_cache(value: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", value)
    # Without this, JAX keeps the setting of the first compilation of the process.
    reset_cache()


def _is_too_large(error: Exception) -> bool:
    """Return whether a compiler rejected a program as too large. TPU compilers do that."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _dumped(folder: Path, ending: str) -> str:
    """Return the text of the largest dump with this ending. Smaller ones are helper programs."""
    files = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    return files[-1].read_text(errors="replace") if files else ""


@dataclass(frozen=True, order=True)
class _Allocated:
    """A value inside the preallocated memory of temporaries, from XLA's buffer assignment."""

    size: int
    offset: int
    name: str
    shape: str


# " value: <123 fusion.7 @0> (size=4096,offset=128): f32[32,32]{1,0}"
_VALUE = re.compile(
    r" value: <\d+ ([\w.\-]+)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)"
)


def read_allocations(
    text: str, program: Program, top: int = 12
) -> tuple[Memory, list[Buffer]]:
    """Return the memory by kind and the largest temporary buffers from XLA's buffer assignment.

    Args:
        text: the dumped buffer assignment.
        program: the program that it belongs to.
        top: maximum number of buffers.
    """
    parameters = {number: op.op_name for number, op in program.entry.parameters.items()}
    names: dict[str, str] = {}
    for computation in program.computations.values():
        names.update((op.name, op.op_name) for op in computation.ops)
    sums = dict.fromkeys((f.name for f in dataclasses.fields(Memory)), 0.0)
    values: set[_Allocated] = set()
    in_temporaries = False
    for line in text.splitlines():
        if match := re.match(r"allocation \d+: size (\d+), (.*)", line):
            size, about = float(match[1]), match[2]
            # A color marks on-chip memory. Thread-local allocations are registers.
            on_chip = about.startswith("color")
            in_temporaries = "preallocated-temp" in about and not on_chip
            if not on_chip and "thread-local" not in about:
                sums[_memory_kind(about, parameters)] += size
        elif in_temporaries and (match := _VALUE.match(line)):
            shape = match[4].partition("{")[0]
            values.add(_Allocated(int(match[2]), int(match[3]), match[1], shape))
        elif line.startswith(("Used values", "Total bytes")):
            break
    return Memory(**sums), _largest_buffers(values, names, top)


def _memory_kind(about: str, parameters: Mapping[int, str]) -> str:
    """Return the kind of memory of an allocation: a field of `Memory`."""
    match = re.search(r"parameter (\d+)", about)
    if match is None:
        return "temporaries"
    argument = parameters.get(int(match[1]), "")
    for prefix, kind in MEMORY_KINDS.items():
        if argument.startswith(prefix):
            return kind
    return "other"


def _largest_buffers(
    values: Iterable[_Allocated], names: Mapping[str, str], top: int
) -> list[Buffer]:
    """Return the largest values that do not overlap.

    XLA reuses memory: values that are not alive at the same time share an offset. Of those that
    overlap, only the largest is listed, so that the sizes can be added up.
    """
    taken: list[tuple[int, int]] = []
    buffers: list[Buffer] = []
    for value in sorted(values, reverse=True):
        begin, end = value.offset, value.offset + value.size
        if all(
            begin >= other_end or end <= other_begin for other_begin, other_end in taken
        ):
            taken.append((begin, end))
            name = names.get(value.name) or value.name
            buffers.append(Buffer(name, value.shape, float(value.size)))
            if len(buffers) == top:
                break
    return buffers


def _reported_memory(program: jax.stages.Compiled, prepared: Prepared) -> Memory:
    """Return the memory by kind from `memory_analysis` alone: the state is known exactly."""
    spec, step = prepared.spec, prepared.step
    analysis = _analysis(program)
    peak = (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.generated_code_size_in_bytes
    )
    parameters = _stored_bytes(spec.params.values()) + _stored_bytes(
        spec.frozen.values()
    )
    optimizer = _stored_bytes(spec.opt_state.values())
    other = _stored_bytes(spec.other.values())
    batch = 0.0
    for leaf in jax.tree.leaves(step.batch):
        batch += num_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    temporaries = max(0.0, peak - parameters - optimizer - other - batch)
    return Memory(parameters, optimizer, other, batch, temporaries)


class _MemoryAnalysis(Protocol):
    """The part of XLA's `CompiledMemoryStats` that is read here. All fields are bytes."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    generated_code_size_in_bytes: int


def _analysis(program: jax.stages.Compiled) -> _MemoryAnalysis:
    analysis: _MemoryAnalysis | None = program.memory_analysis()
    assert analysis is not None, "this backend reports no memory"
    return analysis


def _stored_bytes(placements: Iterable[Placement]) -> float:
    return float(sum(placement.bytes_per_device for placement in placements))


def make_plan(
    run: Run, prepared: Prepared, target: Target, compiled: Compiled, seconds: float
) -> Plan:
    """Return the plan of a run from what the compiler reported.

    Args:
        run: the run.
        prepared: `prepare(run)`.
        target: the devices that the step was compiled for.
        compiled: what the compiler reported.
        seconds: seconds that tracing and compiling took.
    """
    spec, program = prepared.spec, compiled.program
    if program is None:
        counted = Estimate()
    else:
        counted = estimate(program, target.chip or NO_CHIP, spec.mesh)
    return Plan(
        target=target.name,
        chip=target.chip.name if target.chip else target.kind,
        mesh=dict(spec.mesh.shape),
        options={"accumulate": run.accumulate},
        memory=compiled.memory,
        limit=target.limit,
        fits=compiled.memory.peak <= target.limit,
        buffers=compiled.buffers,
        flops=counted.flops,
        bytes=counted.bytes,
        traffic=sorted(counted.traffic.values(), key=lambda traffic: -traffic.bytes),
        times=_times(counted)
        if program is not None and target.chip is not None
        else None,
        unknown_kernels=counted.unknown_kernels,
        compile_seconds=seconds,
        # Linux reports KiB.
        compile_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        **_known_fields(run, prepared),
    )


class _KnownFields(TypedDict):
    """The fields of a plan that are known before the step is compiled."""

    batch: dict[str, tuple[int, ...]]
    items: int
    unit: str
    num_params: int
    inactive_params: int
    model_flops: float
    matmul_flops: dict[str, float]
    matmul_lines: dict[str, str]
    matmul_choices: list[PlannedMatmul]
    peak_flops: float | None
    leaves: list[PlannedLeaf]
    microbatches: int
    bubble: float


def _known_fields(run: Run, prepared: Prepared) -> _KnownFields:
    pipeline = prepared.step.spec.pipeline
    stages = num_stages(prepared.spec.mesh, run.rules)
    return {
        "batch": _batch_shapes(prepared.step),
        "items": _num_items(run, prepared.step),
        "unit": run.unit,
        "num_params": prepared.spec.num_params,
        "inactive_params": prepared.step.traced.inactive,
        "model_flops": prepared.flops,
        "matmul_flops": dict(prepared.step.traced.matmuls.flops),
        "matmul_lines": dict(prepared.step.traced.matmuls.lines),
        "matmul_choices": [
            PlannedMatmul(**asdict(choice))
            for choice in prepared.step.traced.matmuls.choices
        ],
        "peak_flops": prepared.peak_flops,
        "leaves": [
            _planned_leaf(placement) for placement in prepared.spec.params.values()
        ],
        "microbatches": 0 if pipeline is None else pipeline.microbatches,
        "bubble": 0.0 if pipeline is None else bubble(stages, pipeline),
    }


def _times(counted: Estimate) -> Times:
    return Times(
        total=counted.seconds,
        arithmetic=counted.arithmetic,
        memory=counted.memory,
        network=counted.network,
        bound=counted.bound,
    )


def _batch_shapes(step: TrainStep) -> dict[str, tuple[int, ...]]:
    """Return the global shape of each array of a batch, without padding."""
    leaves = named_leaves(step.batch)
    rows = step.layout.rows
    return {
        name: (rows, *leaf.shape[1:]) if leaf.ndim else ()
        for name, leaf in leaves.items()
    }


def _num_items(run: Run, step: TrainStep) -> int:
    """Return the number of items that the loss averages over in one step.

    If the loss weights its items by values that only a real batch has, this counts the examples, or
    for a unit such as tokens the entries of the longest integer matrix of the batch.
    """
    if step.traced.items is not None:
        return step.traced.items
    if run.unit not in SEQUENCE_UNITS:
        return step.layout.rows
    return step.layout.rows * (num_tokens(step.batch) or 1)


def _planned_leaf(placement: Placement) -> PlannedLeaf:
    axes = [axes_of_entry(entry) for entry in placement.spec]
    # A PartitionSpec may be shorter than the shape: the remaining dims are not sharded.
    axes += [()] * (len(placement.shape) - len(axes))
    return PlannedLeaf(
        path=placement.path,
        shape=placement.shape,
        dtype=str(placement.dtype),
        axes=tuple(axes),
        layout=show_spec(placement.spec),
        bytes=float(placement.bytes_per_device),
        why=placement.reason,
    )
